"""Packed custom masks: little-endian bits, each request padded to whole bytes (docs/guide/masks.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.plan.state import PrefillPlan


def byte_offsets(plan: PrefillPlan) -> Tensor:
    """int64 ``[max_batch]``: the byte at which each request's bits begin."""
    size = (plan.qo_indptr.long().diff() * plan.kv_len + 7) // 8
    return size.cumsum(0) - size


def unpack(mask: Tensor, offset: Tensor, row: Tensor, kv_len: Tensor, length: int) -> Tensor:
    """bool ``[N, R, length]``: the bits of rows ``row [N, R]`` of requests whose bits begin at byte ``offset [N]``.

    Bits past the end of the mask are False.
    """
    bit = row.long()[..., None] * kv_len.long()[:, None, None] + torch.arange(length, device=mask.device)
    byte = (offset[:, None, None] + bit // 8).clamp(-1, mask.shape[0])  # both index the zero byte that is appended
    return (torch.cat((mask, mask.new_zeros(1)))[byte] >> (bit % 8).to(torch.uint8)) & 1 > 0
