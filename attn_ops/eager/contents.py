"""The contents of small tensors on the host, by which what was made for equal ones is found again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from attn_ops.eager.captured_call import _C

_NATIVE: Any = getattr(_C, "contents", None)
NO_LIMIT = 1 << 62
"""Bytes that no tensors have."""


def contents(tensors: tuple[Tensor, ...], max_bytes: int = NO_LIMIT, of_table: bool = False) -> Hashable:
    """A key of the numbers of integer tensors; None if these have more than ``max_bytes`` together.

    Args:
        tensors: keys of tensors of equal dtypes and sizes may be compared.
        max_bytes: of larger tensors no key is made.
        of_table: the first are the offsets of a page table and the last its pages, all int32. Pages past the last
            offset, if that is positive, are left out.
    """
    found: Hashable = _NATIVE(tensors, max_bytes, of_table) if _NATIVE is not None else None
    return _numbers(tensors, max_bytes, of_table) if found is None else found


def _numbers(tensors: tuple[Tensor, ...], max_bytes: int, of_table: bool) -> Hashable:
    """:func:`contents` without the extension module, or of tensors that are not contiguous."""
    if of_table and tensors[0].numel():
        used = int(tensors[0][-1])
        tensors = (*tensors[:-1], tensors[-1][:used] if used > 0 else tensors[-1])
    if sum(t.numel() * t.element_size() for t in tensors) > max_bytes:
        return None
    return tuple([tuple(t.flatten().tolist()) for t in tensors])
