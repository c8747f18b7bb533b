"""Merge attention states ``(v, s)``: ``v`` is the output over a set of keys, ``s`` its base-2 LSE.

The output over the union of disjoint key sets is the average of the outputs, weighted by the softmax of the LSEs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(v: Tensor, s: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Merge float32 states along ``dim`` of ``s [...]`` and ``v [..., head_dim]``; a state of no keys adds nothing.

    An LSE of NaN or infinity makes the result NaN.
    """
    row_max = s.amax(dim, keepdim=True)
    p = torch.where(s == -torch.inf, 0.0, torch.exp2(s - row_max))
    row_sum = p.sum(dim, keepdim=True)
    lse = (row_max + torch.log2(row_sum)).squeeze(dim)
    weight = (p / torch.where(row_sum == 0, 1.0, row_sum)).unsqueeze(-1)
    return torch.where(weight == 0, 0.0, v * weight).sum(dim), lse


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    return merge_states(torch.stack((v_a, v_b), 1), torch.stack((s_a, s_b), 1))


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    if v.shape[1] == 0:
        rows, _, heads, dim = v.shape
        return v.new_zeros((rows, heads, dim)), s.new_full((rows, heads), -torch.inf)
    merged, lse = merge(v.float(), s, 1)
    return merged.to(v.dtype), lse


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """Replace ``(v, s)`` by the merged state, in rows where ``mask [rows]`` is true or in all."""
    merged, lse = merge_state(v, s, v_other, s_other)
    if mask is not None:
        rows = mask.bool()[:, None]
        merged, lse = torch.where(rows[..., None], merged, v), torch.where(rows, lse, s)
    v.copy_(merged)
    s.copy_(lse)


def merge_states_varlen(v: Tensor, s: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the states ``indptr[r]:indptr[r + 1]`` of ``v [states, heads, dim]`` into row ``r``, by scatter-reductions.

    States of no row are scattered to one row past the last, which is dropped.
    """
    rows, states = indptr.shape[0] - 1, v.shape[0]
    state = torch.arange(states, device=v.device)
    # The conversion copies: Inductor's searchsorted loses the offset of a view, or does not lower it (PyTorch 2.11).
    row = torch.searchsorted(indptr.long(), state, right=True) - 1
    row = torch.where((row >= 0) & (row < rows), row, rows)[:, None].expand(states, v.shape[1])
    row_max = s.new_full((rows + 1, v.shape[1]), -torch.inf).scatter_reduce(0, row, s, "amax")
    p = torch.where(s == -torch.inf, 0.0, torch.exp2(s - row_max.gather(0, row)))
    row_sum = s.new_zeros(row_max.shape).scatter_add(0, row, p)
    weighted = torch.where(p[..., None] == 0, 0.0, v.float() * p[..., None])
    acc = weighted.new_zeros((rows + 1, *v.shape[1:]))
    acc = acc.scatter_add(0, row[..., None].expand(v.shape), weighted)
    out = acc / torch.where(row_sum == 0, 1.0, row_sum)[..., None]
    return out[:-1].to(v.dtype), (row_max + torch.log2(row_sum))[:-1]
