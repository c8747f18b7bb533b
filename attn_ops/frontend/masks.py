"""Custom masks, packed as the ops read them (docs/guide/masks.md): little-endian bits, whole bytes per request."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.errors import CapacityError, DTypeError, ShapeError
from attn_ops.frontend.arguments import fail
from attn_ops.plan.page_table import real
from attn_ops.plan.state import PrefillPlan

PACKED = (torch.uint8,), "a byte for every 8 pairs of query row and key, each request's padded to a whole byte"
BOOLS = (torch.bool, torch.uint8), "one for every pair of query row and key"


def packed(
    where: str,
    custom_mask: Tensor | None,
    packed_custom_mask: Tensor | None,
    qo_len: Tensor,
    kv_len: Tensor,
    device: torch.device,
    exact: bool = True,
) -> Tensor | None:
    """uint8 ``[bytes]`` of a batch with the given host lengths, or None. A packed mask is taken before a bool one.

    A bool one may hold more than the batch needs if not ``exact``.
    """
    bits = qo_len * kv_len
    if packed_custom_mask is not None:
        _check_packed(where, packed_custom_mask, int(((bits + 7) // 8).sum()))
        return packed_custom_mask.to(device)
    if custom_mask is None:
        return None
    if not exact and custom_mask.dim() == 1:
        custom_mask = custom_mask[: int(bits.sum())]
    _check_bools(where, custom_mask, int(bits.sum()))
    return pack(where, custom_mask.to(device), bits)


def packed_by_plan(
    where: str, custom_mask: Tensor | None, packed_custom_mask: Tensor | None, plan: PrefillPlan, device: torch.device
) -> Tensor | None:
    """:func:`packed` for the requests of a plan, whose lengths are not looked at while tracing or capturing."""
    qo_len, kv_len = plan.qo_indptr.diff(), plan.kv_len
    if real(kv_len) and not (kv_len.is_cuda and torch.cuda.is_current_stream_capturing()):
        return packed(where, custom_mask, packed_custom_mask, qo_len.cpu().long(), kv_len.cpu().long(), device)
    if packed_custom_mask is not None:
        _check(where, "packed_custom_mask", packed_custom_mask, PACKED)
        return packed_custom_mask.to(device)
    if custom_mask is None:
        return None
    _check(where, "custom_mask", custom_mask, BOOLS)
    most = (custom_mask.shape[0] + 7) // 8 + kv_len.shape[0]
    return pack(where, custom_mask.to(device), qo_len.long() * kv_len, most)


def packed_single(
    where: str,
    custom_mask: Tensor | None,
    packed_custom_mask: Tensor | None,
    qo_len: int,
    kv_len: int,
    device: torch.device,
) -> Tensor | None:
    """:func:`packed` for one request, whose lengths may be symbols."""
    if packed_custom_mask is not None:
        _check_packed(where, packed_custom_mask, (qo_len * kv_len + 7) // 8)
        return packed_custom_mask.to(device)
    if custom_mask is None:
        return None
    custom_mask = custom_mask.flatten()
    _check_bools(where, custom_mask, qo_len * kv_len)
    return torch.ops.attn.packbits(custom_mask.to(device).bool(), bitorder="little")


def pack(where: str, mask: Tensor, bits: Tensor, size: int | None = None) -> Tensor:
    """``mask [sum(bits)]`` packed by request, in ``size`` bytes, or as many as it takes if ``bits`` are on the host."""
    if mask.shape[0] >= 1 << 31:
        fail(
            CapacityError,
            where,
            f"custom_mask has {mask.shape[0]} elements",
            "fewer than 2^31, which int32 counts",
            "pack it by request, and pass packed_custom_mask",
        )
    if size is None:
        size = int(((bits + 7) // 8).sum())
    indptr = torch.cat((bits.new_zeros(1), bits.cumsum(0)))
    return torch.ops.attn.segment_packbits(mask.bool(), indptr.to(mask.device, torch.int32), size, bitorder="little")[0]


def _check_packed(where: str, mask: Tensor, length: int) -> None:
    _check(where, "packed_custom_mask", mask, PACKED, length)


def _check_bools(where: str, mask: Tensor, length: int) -> None:
    _check(where, "custom_mask", mask, BOOLS, length)


def _check(
    where: str, name: str, mask: Tensor, form: tuple[tuple[torch.dtype, ...], str], length: int | None = None
) -> None:
    """``length`` None: not known yet."""
    dtypes, meaning = form
    if mask.dtype not in dtypes:
        fail(
            DTypeError,
            where,
            f"{name} is {str(mask.dtype).removeprefix('torch.')}",
            str(dtypes[0]).removeprefix("torch."),
            "convert it",
        )
    if mask.dim() != 1 or (length is not None and mask.shape[0] != length):
        expected = f"{'one dimension' if length is None else [length]}, {meaning}"
        fail(ShapeError, where, f"{name} is {list(mask.shape)}", expected, "make it of that length")
