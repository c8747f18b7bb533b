"""The checks that the ops share, each naming its op in the message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from attn_ops.argument_checks import check_no_overlap
from attn_ops.eager.interposition import check_no_grad
from attn_ops.errors import (
    ArgumentTypeError,
    AttnOpsError,
    CapacityError,
    DeviceError,
    DTypeError,
    OptionError,
    PlanError,
    ShapeError,
    dtype_name,
    fail,
)
from attn_ops.gpu import ALIGNMENT
from attn_ops.ops import size_guards
from attn_ops.ops.backends import MemoryLayout
from attn_ops.ops.options import FLOATS, FP8, LAYOUTS, PAGED_DIMS, AttentionOptions, bounded
from attn_ops.plan.plan_checks import check_groups, check_plan
from attn_ops.plan.state import DecodePlan, PlanProblem, PrefillPlan, keys_ahead
from attn_ops.symbolic_sizes import guard_or_false, holds
from attn_ops.tracing import is_compiling

Plan = TypeVar("Plan", bound=DecodePlan | PrefillPlan)

PLAN_RANKS = {"problem": len(PlanProblem._fields) + 1, "work": 2, "split_tiles": 2, "split_counters": 2}
"""Ranks of the fields of a plan that are not vectors."""


class OpChecker:
    """The checks of a call of the op ``name``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def fail(self, error: type[AttnOpsError], what: str, expected: str, fix: str) -> NoReturn:
        fail(error, self.name, what, expected, fix)

    def tensor(self, name: str, t: Tensor, dims: str, dtypes: Sequence[torch.dtype], like: Tensor | None) -> None:
        """Check rank (counted from ``dims``, such as ``"[batch, heads, head_dim]"``), dtype, device and last stride."""
        if t is None:  # PyTorch's schemas let it through
            self.fail(ArgumentTypeError, f"{name} is None", f"a tensor {dims}", f"pass {name}")
        rank = dims.count(",") + 1
        if t.dim() != rank:
            self.fail(ShapeError, f"{name} has rank {t.dim()}", f"{rank}, {dims}", f"reshape {name}")
        if t.dtype not in dtypes:
            names = " or ".join(map(dtype_name, dtypes))
            self.fail(DTypeError, f"{name} is {dtype_name(t.dtype)}", names, f"convert it with {name}.to(...)")
        if like is not None and t.device != like.device:
            self.fail(
                DeviceError,
                f"{name} is on {t.device}",
                f"{like.device}, where the other tensors are",
                "move it",
            )
        if t.dim() and t.stride(-1) != 1 and t.shape[-1] > 1 and t.numel():
            self.fail(
                ShapeError,
                f"{name} has stride {t.stride(-1)} in its last dimension",
                "1",
                f"use {name}.contiguous()",
            )

    def indptr(self, name: str, t: Tensor, dims: str, like: Tensor | None) -> None:
        """Check cumulative lengths: there is an element even without requests."""
        self.tensor(name, t, dims, (torch.int32,), like)
        if not holds(t.shape[0] > 0):
            self.fail(ShapeError, f"{name} is [0]", f"{dims}, which is [1] where there are none", "pass one 0")

    def per_request(self, name: str, t: Tensor, indptr_name: str, indptr: Tensor) -> None:
        """Check numbers of requests: int32, one for each request of ``indptr``, which has been checked."""
        self.tensor(name, t, "[batch]", (torch.int32,), indptr)
        self.size(name, "length", t.shape[0], indptr.shape[0] - 1, f"{indptr_name} less 1")

    def size(self, name: str, dim: str, actual: int, expected: int, source: str) -> None:
        if not holds(actual == expected):
            self.fail(ShapeError, f"{name} has {dim} {actual}", f"{expected} as in {source}", "make the two agree")

    def capacity(self, needed: int, capacity: int, what: str, expected: str, fix: str) -> None:
        """Raise if ``needed`` exceeds ``capacity``. The texts have ``{needed}`` and ``{capacity}`` in their place."""
        if not holds(needed <= capacity):
            texts = (text.format(needed=needed, capacity=capacity) for text in (what, expected, fix))
            self.fail(CapacityError, *texts)
        size_guards.note_capacity(needed, capacity, f"{self.name}: {what}; expected {expected}; {fix}")

    def limit(self, name: str, dim: str, size: Any, most: int) -> None:
        """Raise if ``size`` exceeds ``most``. An export has no guard for a dynamic size; its package checks it."""
        guarded = type(size) is int or (is_compiling() and not torch.compiler.is_exporting())
        seen = size if guarded else size.node.hint
        what, expected, fix = f"{name} has {{needed}} {dim}", "at most {capacity}", "pass fewer at a time"
        if seen is not None and not holds(seen <= most):
            self.fail(CapacityError, what.format(needed=size), expected.format(capacity=most), fix)
        size_guards.note_capacity(size, most, f"{self.name}: {what}; expected {expected}; {fix}")

    def no_overlap(self, name: str, t: Tensor) -> None:
        """Raise if elements of ``t``, which is written, share memory."""
        check_no_overlap(self.name, name, t, "not an expanded tensor")

    def no_grad(self, **tensors: Tensor | None) -> None:
        check_no_grad(self.name, **tensors)

    def layout(self, kv_layout: str) -> None:
        if kv_layout not in LAYOUTS:
            self.fail(OptionError, f"kv_layout is {kv_layout}", "NHD or HND", "pass one of the two")

    def heads(self, num_qo_heads: int, num_kv_heads: int) -> None:
        check_groups(self.name, num_qo_heads, num_kv_heads, "repeat or regroup the heads, or name the other kv_layout")

    def options(self, q: Tensor, o: AttentionOptions) -> None:
        bounded(self.name, o)
        if o.sinks is not None:
            self.tensor("sinks", o.sinks, "[num_qo_heads]", (torch.float32,), q)
            self.size("sinks", "length", o.sinks.shape[0], q.shape[-2], "the query heads of q")
        if o.kv_scale is not None:
            self.tensor("kv_scale", o.kv_scale, "[2]", (torch.float32,), q)
            self.size("kv_scale", "length", o.kv_scale.shape[0], 2, "the scales of K and V")
        if o.mask is not None:
            self.tensor("mask", o.mask, "[bytes]", (torch.uint8,), q)

    def kv_dtype(self, **tensors: Tensor) -> None:
        """Check the dtypes of the query, the keys and the values, in this order and by name."""
        (query, q), (first, k), (second, v) = tensors.items()
        if k.dtype != v.dtype:
            self.fail(
                DTypeError,
                f"{first} is {dtype_name(k.dtype)} and {second} {dtype_name(v.dtype)}",
                "one dtype",
                "convert one",
            )
        if q.dtype in FP8 and k.dtype != q.dtype:
            self.fail(
                DTypeError,
                f"{first} is {dtype_name(k.dtype)} and {query} {dtype_name(q.dtype)}",
                f"the dtype of {query}, if that is FP8",
                f"convert {query} to float16, which has every FP8 number",
            )
        if k.dtype not in (q.dtype, *FP8):
            self.fail(
                DTypeError,
                f"{first} is {dtype_name(k.dtype)} and {query} {dtype_name(q.dtype)}",
                f"the dtype of {query}, or float8_e4m3fn or float8_e5m2",
                f"convert {query}, or {first} and {second}",
            )

    def plan(self, plan: Sequence[Tensor], kind: type[Plan], like: Tensor | None) -> Plan:
        """The plan as its NamedTuple, its fields checked for number, rank, dtype, device and size."""
        if len(plan) != len(kind._fields):
            self.fail(
                PlanError,
                f"plan has {len(plan)} tensors",
                f"the {len(kind._fields)} of {kind.__name__} ({', '.join(kind._fields)})",
                f"pass what {kind.__name__.removesuffix('Plan')}Planner.plan() returned",
            )
        typed = kind(*plan)
        device = None if like is None else like.device
        for field, t in zip(kind._fields, typed, strict=True):
            if t.dtype != torch.int32 or t.dim() != PLAN_RANKS.get(field, 1) or not t.is_contiguous():
                self.fail(
                    PlanError,
                    f"plan.{field} is {dtype_name(t.dtype)} of rank {t.dim()}",
                    f"contiguous int32 of rank {PLAN_RANKS.get(field, 1)}",
                    "pass the plan as the planner made it",
                )
            if device is not None and t.device != device:
                self.fail(
                    DeviceError,
                    f"plan.{field} is on {t.device}",
                    f"{device}, where the other tensors are",
                    "make the planner with that device",
                )
        check_plan(self.name, typed)
        return typed

    def planned_for(self, plan: DecodePlan | PrefillPlan, **actual: int) -> None:
        planned = PlanProblem.of(plan.problem)
        for field, value in actual.items():
            if getattr(planned, field) != value:
                self.fail(
                    PlanError,
                    f"the plan was made for {field} {getattr(planned, field)}",
                    f"a plan for {field} {value}, which the tensors have",
                    "make a planner for this problem",
                )

    def covered(self, plan: DecodePlan | PrefillPlan, o: AttentionOptions) -> None:
        """Raise if the plan leaves out keys that the call may see."""
        planned = PlanProblem.of(plan.problem)
        if planned.window and not 0 <= o.window_left < planned.window:
            self.fail(
                PlanError,
                f"window_left is {o.window_left} and the plan was made for window_left {planned.window - 1}",
                "a window no wider than the planned one",
                "make a planner for the widest window, or without one",
            )
        ahead = keys_ahead(o.causal and o.mask is None, o.window_right)
        if not planned.ahead or 0 < ahead <= planned.ahead:
            return
        if planned.ahead > 1:
            self.fail(
                PlanError,
                f"window_right is {o.window_right} and the plan was made for window_right {planned.ahead - 1}",
                "a window no wider than the planned one",
                "make a planner for the widest window, or without one",
            )
        if o.mask is not None:
            self.fail(
                PlanError,
                "the plan was made for causal attention and a mask takes its place",
                "no mask",
                "make the planner with causal=False",
            )
        self.fail(
            PlanError,
            "the plan was made for causal attention and causal is False",
            "causal=True",
            "make the planner with causal=False",
        )

    def without_sinks(self, plan: DecodePlan | PrefillPlan, o: AttentionOptions) -> None:
        """Raise if a call over the keys of one of several ranks has sinks."""
        world = PlanProblem.of(plan.problem).world
        if world > 1 and o.sinks is not None:
            self.fail(
                PlanError,
                f"sinks is given and the plan has the keys of one of {world} ranks",
                "no sinks, which count once for all ranks",
                "pass them to merge_context",
            )

    def workspace(self, workspace: Tensor, needed: int, like: Tensor) -> None:
        self.tensor("workspace", workspace, "[elements]", (torch.float32,), like)
        self.capacity(
            needed,
            workspace.shape[0],
            "workspace has {capacity} elements",
            "at least {needed} for this plan",
            "pass the workspace of the planner that made it",
        )


MAX_COORDINATE = 1 << 31
"""Exclusive bound on the coordinates of a tensor map."""

MAX_STRIDE_BYTES = 1 << 40
"""Exclusive bound on the strides of a tensor map."""

MAX_JOINED_ELEMENTS = ALIGNMENT // 2 * MAX_COORDINATE
"""Exclusive bound on the 16-bit elements that one coordinate reaches in steps of 16 bytes, the smallest steps."""


def memory_layout(queries: Sequence[Tensor], caches: Sequence[Tensor]) -> MemoryLayout:
    """The memory layout of a call on CUDA.

    What is not known, such as the address of a fake tensor or a condition on symbolic sizes, is taken to hold.
    """
    if not queries[0].is_cuda:
        return MemoryLayout()

    def misaligned(t: Tensor) -> bool:
        address = 0 if isinstance(t, FakeTensor) else t.data_ptr()
        return bool(address % ALIGNMENT) or any(
            guard_or_false(s * t.itemsize % ALIGNMENT != 0) for s in t.stride()[:-1]
        )

    def unmappable(t: Tensor) -> bool:
        sizes = any(guard_or_false(n <= 0) or guard_or_false(n >= MAX_COORDINATE) for n in t.shape)
        return sizes or any(
            guard_or_false(s <= 0) or guard_or_false(s * t.itemsize >= MAX_STRIDE_BYTES) for s in t.stride()
        )

    def unjoinable(t: Tensor) -> bool:
        # A step is the common divisor of both strides: usually the columns of a head.
        elements = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
        return guard_or_false(elements >= MAX_JOINED_ELEMENTS)

    return MemoryLayout(
        aligned=not any(map(misaligned, (*queries, *caches))),
        mappable=not any(map(unmappable, caches)),
        joinable=not any(map(unjoinable, caches)),
    )


def caches(op: OpChecker, q: Tensor, k: Tensor, v: Tensor, kv_layout: str) -> tuple[int, int]:
    """Check a pair of paged caches. Returns ``(page_size, num_kv_heads)``."""
    op.layout(kv_layout)
    for name, cache in (("k_cache", k), ("v_cache", v)):
        op.tensor(name, cache, LAYOUTS[kv_layout], FLOATS + FP8, q)
        op.size(name, "pages", cache.shape[0], k.shape[0], "k_cache")
        op.size(name, "dimension 1", cache.shape[1], k.shape[1], "k_cache")
        op.size(name, "dimension 2", cache.shape[2], k.shape[2], "k_cache")
    token, head = PAGED_DIMS[kv_layout]
    return int(k.shape[token]), int(k.shape[head])
