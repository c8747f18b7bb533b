"""The contents of small tensors on the host, by which what was made for equal ones is found again."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from attn_ops.eager.captured_call import _C

_NATIVE: Any = getattr(_C, "contents", None)
EVERY = 1 << 62
"""No limit of bytes."""


def contents(tensors: tuple[Tensor, ...], most: int = EVERY, of_table: bool = False) -> Hashable:
    """A key of the numbers of integer tensors, of ``most`` bytes at most; None if they have more.

    Args:
        tensors: keys of tensors of equal dtypes and sizes may be compared.
        most: bytes.
        of_table: the first are the offsets of a page table and the last its pages, all int32. Pages past the last
            offset, if that is positive, are left out.
    """
    found: Hashable = _NATIVE(tensors, most, of_table) if _NATIVE is not None else None
    return _numbers(tensors, most, of_table) if found is None else found


def _numbers(tensors: tuple[Tensor, ...], most: int, of_table: bool) -> Hashable:
    """:func:`contents` without the extension module, or of tensors that are not contiguous."""
    if of_table and tensors[0].numel():
        used = int(tensors[0][-1])
        tensors = (*tensors[:-1], tensors[-1][:used] if used > 0 else tensors[-1])
    if sum(t.numel() * t.element_size() for t in tensors) > most:
        return None
    return tuple([tuple(t.flatten().tolist()) for t in tensors])
