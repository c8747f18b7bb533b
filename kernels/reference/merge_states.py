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


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    merged, lse = merge_state(v, s, v_other, s_other)
    if mask is not None:
        keep = mask.bool()[:, None]
        merged, lse = torch.where(keep[..., None], merged, v), torch.where(keep, lse, s)
    v.copy_(merged)
    s.copy_(lse)


def merge_states_varlen(v: Tensor, s: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
    """Merge states ``indptr[r]:indptr[r + 1]`` of ``v [states, heads, dim]`` into row r."""
    rows, states = indptr.shape[0] - 1, v.shape[0]
    state = torch.arange(states, device=v.device)
    row = torch.searchsorted(indptr.contiguous(), state, right=True) - 1
    row = torch.where((row >= 0) & (row < rows), row, rows)[:, None].expand(states, v.shape[1])
    top = s.new_full((rows + 1, v.shape[1]), -torch.inf).scatter_reduce(0, row, s, "amax")
    weight = torch.where(s > -torch.inf, torch.exp2(s - top.gather(0, row)), 0.0)
    total = s.new_zeros(top.shape).scatter_add(0, row, weight)
    weighted = torch.where(weight[..., None] > 0, v.float() * weight[..., None], 0.0)
    summed = weighted.new_zeros((rows + 1, *v.shape[1:]))
    summed = summed.scatter_add(0, row[..., None].expand(v.shape), weighted)
    out = summed / torch.where(total > 0, total, 1.0)[..., None]
    return out[:-1].to(v.dtype), (top + torch.log2(total))[:-1]
