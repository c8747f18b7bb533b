"""Masks of draft tokens: which of a request's last tokens each of its rows sees, beside all tokens before them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_ops.errors import DTypeError, ShapeError
from attn_ops.frontend.arguments import fail
from attn_ops.plan.state import PrefillPlan

WORDS = (torch.uint16, torch.int16, torch.uint32, torch.int32)


def check_draft(where: str, mask: Tensor, rows: int, q_len: int = 1) -> None:
    """``mask [..., words]`` has a line for each of ``rows``, of at least ``q_len`` bits."""
    if mask.dtype not in WORDS:
        fail(
            DTypeError,
            where,
            f"mask is {str(mask.dtype).removeprefix('torch.')}",
            "uint16 or uint32, whose bits are the draft's tokens",
            "pack it: bit j of a row's words is token j",
        )
    bits = 8 * mask.dtype.itemsize * mask.shape[-1] if mask.dim() else 0
    if mask.dim() < 2 or math.prod(mask.shape[:-1]) != rows or bits < q_len:
        fail(
            ShapeError,
            where,
            f"mask is {list(mask.shape)}, of {bits} bits a row",
            f"[{rows}, words] or [batch, rows of a request, words], with a bit for each row of a request",
            "make it of that shape",
        )


def draft_mask(mask: Tensor, plan: PrefillPlan, capacity: int) -> Tensor:
    """The packed custom mask of the planned batch, whose requests are no longer than ``capacity``; uint8.

    It is made on the device from what the plan says there: nothing waits for it, and it traces. Every bit is set but
    those of draft tokens that ``mask`` hides.
    """
    device, batch = plan.kv_len.device, plan.kv_len.shape[0]
    words = mask.to(device)
    words = words if words.stride(-1) == 1 else words.contiguous()
    octets = words.view(torch.uint8).flatten(0, -2)
    rows, columns = octets.shape[0], 8 * octets.shape[1]
    row, column = torch.arange(rows, device=device), torch.arange(columns, device=device)
    indptr, kv_lens = plan.qo_indptr.long(), plan.kv_len.long()
    qo_lens = indptr.diff()
    sizes = (qo_lens * kv_lens + 7) // 8
    request = torch.searchsorted(indptr[1:].contiguous(), row, right=True).clamp(max=batch - 1)
    qo_len, kv_len = qo_lens[request][:, None], kv_lens[request][:, None]
    token = kv_len - qo_len + column
    first_bit = 8 * (sizes.cumsum(0) - sizes)[request][:, None]
    bit = first_bit + (row - indptr[request])[:, None] * kv_len + token
    seen = (octets[:, column // 8] >> (column % 8)) & 1
    hidden = (seen == 0) & (column < qo_len) & (token >= 0) & (row < indptr[-1])[:, None]
    size = rows * capacity // 8 + batch
    octet = torch.where(hidden, bit // 8, 0).clamp(0, size - 1).flatten()  # rows that do not ascend stay inside
    lost = (hidden.int() << (bit % 8).int()).flatten()
    return torch.full((size,), 255, dtype=torch.int32, device=device).index_add(0, octet, -lost).to(torch.uint8)
