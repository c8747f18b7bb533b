"""FLOP formulas for ``torch.utils.flop_counter``; importing this module registers them.

Attention counts ``2 * (head_dim_qk + head_dim_vo)`` per query head and visible pair of query row and
key, from the lengths that the plan holds, so the counted call must have real tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .plan import DecodePlan, PrefillPlan


def visible_pairs(qo_len: Tensor, kv_len: Tensor, causal: bool, window_left: int) -> int:
    """Pairs of query row and key that a mask leaves, over all requests, from int64 lengths ``[batch]``."""
    total = 0
    for rows, keys in zip(qo_len.tolist(), kv_len.tolist(), strict=True):
        position = torch.arange(keys - rows, keys)
        last = position.clamp(-1, keys - 1) if causal else torch.full_like(position, keys - 1)
        first = (position - window_left).clamp(0) if window_left >= 0 else torch.zeros_like(position)
        total += int((last - first + 1).clamp(0).sum())
    return total


def _attention(q: Tensor, v: Tensor, pairs: int) -> int:
    return 2 * q.shape[1] * (q.shape[2] + v.shape[-1]) * pairs


@register_flop_formula(torch.ops.attn.batch_decode, get_raw=True)
def batch_decode(q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor], *_: Any, window_left: int = -1, **__: Any) -> int:
    kv_len = DecodePlan(*plan).kv_len[: q.shape[0]].long().cpu()
    return _attention(q, v, visible_pairs((kv_len > 0).long(), kv_len, True, window_left))


@register_flop_formula([torch.ops.attn.batch_prefill, torch.ops.attn.ragged_prefill], get_raw=True)
def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: list[Tensor],
    *_: Any,
    causal: bool = False,
    window_left: int = -1,
    **__: Any,
) -> int:
    typed = PrefillPlan(*plan)
    qo_len, kv_len = typed.qo_indptr.long().cpu().diff(), typed.kv_len.long().cpu()
    return _attention(q, v, visible_pairs(qo_len, kv_len, causal, window_left))


@register_flop_formula(torch.ops.attn.merge_state, get_raw=True)
def merge_state(v_a: Tensor, *_: Any, **__: Any) -> int:
    return 4 * v_a.numel()


@register_flop_formula(torch.ops.attn.merge_states, get_raw=True)
def merge_states(v: Tensor, *_: Any, **__: Any) -> int:
    return 2 * v.numel()


@register_flop_formula(
    [torch.ops.attn.append_kv, torch.ops.attn.plan_decode, torch.ops.attn.plan_prefill], get_raw=True
)
def nothing(*_: Any, **__: Any) -> int:
    return 0
