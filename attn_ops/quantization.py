"""Pack booleans into bytes. The default bit order is big-endian, as in NumPy; custom masks are little-endian."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.errors import ShapeError, fail
from attn_ops.plan.page_table import index
from attn_ops.plan.page_table_checks import check_indptr
from attn_ops.tracing import is_compiling
from attn_ops.typed import typed

__all__ = ["packbits", "segment_packbits"]


@typed
def packbits(x: Tensor, bitorder: str = "big") -> Tensor:
    """uint8 ``[ceil(n / 8)]`` of bool ``x [n]``, the last byte filled with zeros; ``bitorder`` big or little."""
    return torch.ops.attn.packbits(x.contiguous(), bitorder=bitorder)


@typed
def segment_packbits(x: Tensor, indptr: Tensor, bitorder: str = "big") -> tuple[Tensor, Tensor]:
    """Pack each segment ``x[indptr[i]:indptr[i + 1]]`` from a byte of its own.

    Returns:
        ``packed`` uint8 ``[bytes]`` and ``byte_indptr`` int32 ``[segments + 1]``. The number of bytes depends on the
        contents of ``indptr``, which is copied to the host, also in compiled code, where its values are not checked.
        ``torch.ops.attn.segment_packbits`` takes the number of bytes instead.
    """
    where = "segment_packbits"
    indptr = index(where, "indptr", indptr)
    host = indptr.cpu().long()
    if not is_compiling():
        check_indptr("indptr", host, where, later=True)
        if int(host[-1]) > x.shape[0]:
            what = f"indptr ends at {int(host[-1])} and x has {x.shape[0]}"
            fail(ShapeError, where, what, f"at most {x.shape[0]}", "correct it")
    size = int(((host.diff() + 7) // 8).sum())
    torch._check(size >= 0)
    return torch.ops.attn.segment_packbits(x.contiguous(), indptr.to(x.device), size, bitorder=bitorder)
