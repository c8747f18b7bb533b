"""Merging attention states ``(v, s)``, where ``s`` is the base-2 LSE of the keys that ``v`` averages."""

from __future__ import annotations

import torch
from torch import Tensor


def combine(v: Tensor, s: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Merge float32 states along ``dim`` of ``s [...]`` and ``v [..., head_dim]``; empty states weigh nothing."""
    top = s.amax(dim, keepdim=True)
    weight = torch.where(s > -torch.inf, torch.exp2(s - top), 0.0)
    total = weight.sum(dim, keepdim=True)
    lse = (top + torch.log2(total)).squeeze(dim)
    seen = (total > 0).unsqueeze(-1)
    share = (weight / torch.where(total > 0, total, 1.0)).unsqueeze(-1)
    merged = torch.where(share > 0, v * share, 0.0).sum(dim)
    return torch.where(seen.squeeze(dim), merged, 0.0), lse


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    return merge_states(torch.stack((v_a, v_b), 1), torch.stack((s_a, s_b), 1))


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    if v.shape[1] == 0:
        rows, _, heads, dim = v.shape
        return v.new_zeros((rows, heads, dim)), s.new_full((rows, heads), -torch.inf)
    merged, lse = combine(v.float(), s, 1)
    return merged.to(v.dtype), lse
