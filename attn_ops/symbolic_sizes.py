"""Conditions on sizes, which may be symbolic in traced calls: PyTorch's guards, without SymPy for plain integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from attn_ops.tracing import is_compiling


def _guards() -> Any:
    from torch.fx.experimental import symbolic_shapes  # imports SymPy

    return symbolic_shapes


def _is_plain(condition: Any) -> bool:
    """Whether ``condition`` is on plain integers, Python's or NumPy's.

    In code that Dynamo traces, conditions on symbols are bools too. Elsewhere in a trace they are of ``SymBool``.
    """
    return not isinstance(condition, torch.SymBool) and not is_dynamo_compiling()


def guard_or_false(condition: Any) -> bool:
    """Whether ``condition`` holds, with a guard on symbols; False if contents of tensors decide it."""
    return bool(condition) if _is_plain(condition) else _guards().guard_or_false(condition)


def guard_or_true(condition: Any) -> bool:
    """Whether ``condition`` holds, with a guard on symbols; True if contents of tensors decide it."""
    return bool(condition) if _is_plain(condition) else _guards().guard_or_true(condition)


def holds(condition: Any) -> bool:
    """Whether a condition that a call requires holds, with a guard on symbols.

    If contents of tensors decide it, it becomes an assertion of the graph.
    """
    if _is_plain(condition):
        return bool(condition)
    if not _guards().guard_or_true(condition):
        return False
    torch._check(condition)
    return True


def agree(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes that a call requires to be equal are; see :func:`holds`."""
    return len(shape) == len(other) and all(holds(a == b) for a, b in zip(shape, other, strict=True))


def statically_known_true(condition: Any) -> bool:
    """Whether ``condition`` holds for all symbolic sizes of the graph, without a guard."""
    if _is_plain(condition):
        return bool(condition)
    known: bool = _guards().statically_known_true(condition)
    return known


def has_static_value(size: Any) -> bool:
    """Whether ``size`` is a constant of the graph, without a guard."""
    static: bool = _guards().has_static_value(size)
    return static


def at_most(size: int, most: int) -> int:
    """``min(size, most)``, without a guard on symbols. Dynamo of torch 2.11 traces no ``torch.sym_min`` of integers."""
    return min(size, most) if type(size) is int and type(most) is int else torch.sym_min(size, most)


def at_least(size: int, least: int) -> int:
    """``max(size, least)``, without a guard on symbols."""
    return max(size, least) if type(size) is int and type(least) is int else torch.sym_max(size, least)


def quotient(n: int, divisor: int) -> int:
    """``n // divisor`` of ``n`` below 2^16, for a ``divisor`` that may be 0, with a result of ``n`` or more.

    Graphs take symbolic sizes for positive and drop a maximum with 1, so that a package would divide by 0.
    """
    scale = 1 << 16
    return (scale + 1) * n // (scale * divisor + 1)


def may_be_one(size: int) -> bool:
    """Whether contents of tensors decide if ``size``, of a graph that is being lowered, is 1. No guard is added."""
    unbacked = isinstance(size, torch.SymInt) and _guards().has_free_unbacked_symbols(size)
    return unbacked and not statically_known_true(size != 1)


def any_zero(*sizes: int) -> bool:
    """Whether one of the sizes is 0. A symbolic size that is not known to be 0 counts as nonzero."""
    return any(guard_or_false(size == 0) for size in sizes)


def overlapping_dim(t: torch.Tensor) -> int | None:
    """A dimension of ``t`` whose stride is at most the span of the dimensions with smaller strides; None without one.

    Elements of such a tensor share memory, except with strides that no view of a tensor has. What symbolic sizes leave
    open counts as no overlap. No guard is added on a number of rows.
    """
    if not is_compiling() and type(t) is torch.Tensor and t.is_contiguous():
        return None
    if any_zero(*t.shape):
        return None
    dims = list(enumerate(zip(t.shape, t.stride(), strict=True)))
    for dim, (size, stride) in dims:
        if statically_known_true(size <= 1):
            continue
        span = sum([(n - 1) * step for other, (n, step) in dims if other != dim and guard_or_false(step <= stride)])
        if guard_or_false(stride <= span) and guard_or_false(size > 1):
            return dim
    return None


def same_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether ``a`` and ``b`` are one tensor, or views of the same elements. No guard is added."""
    if a is b:
        return True
    if type(a) is type(b) is torch.Tensor:
        return 0 != a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
    # A fake tensor has no address.
    if a.dim() != b.dim() or StorageWeakRef(a.untyped_storage()) != StorageWeakRef(b.untyped_storage()):
        return False
    pairs = zip((a.storage_offset(), *a.shape, *a.stride()), (b.storage_offset(), *b.shape, *b.stride()), strict=True)
    return all(statically_known_true(x == y) for x, y in pairs)


def decide(condition: bool) -> bool:
    """Whether a condition on sizes holds, for a choice that is right either way.

    On symbolic sizes it becomes a guard, so that other sizes compile a graph with the other choice. An exported program
    is for all sizes in their range, and the condition must hold for the whole range.
    """
    if not is_compiling():
        return condition
    # torch.compiler.is_exporting() is always true in what Dynamo of torch 2.11 traces.
    exporting = torch.compiler._is_exporting_flag
    return _guards().statically_known_true(condition) if exporting else _guards().guard_or_false(condition)
