"""Cache keys of the contents of small tensors on the host."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from attn_ops.eager.extension import extension

_NATIVE: Any = getattr(extension, "contents", None)
NO_LIMIT = 1 << 62
"""More bytes than any tensors have."""


def contents(tensors: tuple[Tensor, ...], max_bytes: int = NO_LIMIT, of_table: bool = False) -> Hashable:
    """A key of the contents of integer tensors; None if the tensors have more than ``max_bytes`` together.

    Keys may be compared if the tensors have equal dtypes and sizes.

    Args:
        tensors: the tensors, on the host.
        max_bytes: limit of the bytes of all tensors.
        of_table: the first tensor has the offsets of a page table and the last one its pages, both int32. Pages past
            the last offset, if it is positive, are left out of the key.
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
