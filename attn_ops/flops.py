"""FLOP formulas of the ops for ``torch.utils.flop_counter``. Importing this module registers them.

Attention is counted as ``2 * (head_dim_qk + head_dim_vo)`` FLOPs per query head and per query row and key that it sees.
Lengths are read from the plan, so the counted call needs real tensors. A custom mask is not read; every row counts as
seeing all keys. Under context parallelism, positions are those of the rank's own tokens, so causal bounds and windows
are counted approximately.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from attn_ops.ops.options import DENSE_DIMS
from attn_ops.plan.state import DecodePlan, PrefillPlan


def visible_pairs(qo_len: Tensor, kv_len: Tensor, causal: bool, window_left: int, window_right: int = -1) -> int:
    """The number of pairs of a query row and a key that it sees, over all requests.

    Args:
        qo_len: int64 ``[batch]``, query rows of each request. The last one is at the last key.
        kv_len: int64 ``[batch]``, keys of each request.
        causal: a row sees no key after its own position.
        window_left, window_right: a row sees at most this many keys before and after its own position; -1 for all.
    """
    total = 0
    for rows, keys in zip(qo_len.tolist(), kv_len.tolist(), strict=True):
        position = torch.arange(keys - rows, keys, device="cpu")
        ahead = 0 if causal else window_right if window_right >= 0 else rows
        last = (position + ahead).clamp(-1, keys - 1)
        first = (position - window_left).clamp(0) if window_left >= 0 else torch.zeros_like(position)
        total += int((last - first + 1).clamp(0).sum())
    return total


def _planned_pairs(plan: list[Tensor], causal: bool, window_left: int, window_right: int = -1) -> int:
    typed = PrefillPlan(*plan)
    qo_len, kv_len = typed.qo_indptr.long().cpu().diff(), typed.kv_len.long().cpu()
    return visible_pairs(qo_len, kv_len, causal, window_left, window_right)


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
    window_right: int = -1,
    mask: Tensor | None = None,
    **__: Any,
) -> int:
    return _attention(q, v, _planned_pairs(plan, causal and mask is None, window_left, window_right))


@register_flop_formula(torch.ops.attn.block_sparse_prefill, get_raw=True)
def block_sparse_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: list[Tensor],
    *_: Any,
    causal: bool = False,
    mask: Tensor | None = None,
    **__: Any,
) -> int:
    rows, begin, end, position = PrefillPlan(*plan).work.long().cpu().unbind(1)[1:5]
    row = torch.arange(int(rows.amax()), device="cpu")
    seen = end[:, None].expand(-1, row.shape[0])
    if causal and mask is None:
        seen = torch.minimum(seen, position[:, None] + row + 1)
    pairs = torch.where(row < rows[:, None], (seen - begin[:, None]).clamp(min=0), 0)
    return _attention(q, v, int(pairs.sum()))


@register_flop_formula(torch.ops.attn.single_prefill, get_raw=True)
def single_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch_size: int = 1,
    *,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    mask: Tensor | None = None,
    kv_layout: str = "NHD",
    **_: Any,
) -> int:
    sizes = q.shape[0], k.shape[DENSE_DIMS[kv_layout].token]
    rows, keys = (torch.tensor([n // batch_size], device="cpu") for n in sizes)
    pairs = visible_pairs(rows, keys, causal and mask is None, window_left, window_right)
    return _attention(q, v, batch_size * pairs)


@register_flop_formula(torch.ops.attn.batch_mla, get_raw=True)
def batch_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    plan: list[Tensor],
    *_: Any,
    causal: bool = False,
    window_left: int = -1,
    **__: Any,
) -> int:
    pairs = _planned_pairs(plan, causal, window_left)
    return 2 * q_nope.shape[1] * (2 * q_nope.shape[2] + q_pe.shape[2]) * pairs


@register_flop_formula([torch.ops.attn.merge_state, torch.ops.attn.merge_state_in_place], get_raw=True)
def merge_state(v_a: Tensor, *_: Any, **__: Any) -> int:
    return 4 * v_a.numel()


@register_flop_formula([torch.ops.attn.merge_states, torch.ops.attn.merge_states_varlen], get_raw=True)
def merge_states(v: Tensor, *_: Any, **__: Any) -> int:
    return 2 * v.numel()


UNCOUNTED_OPS = (
    "append_kv",
    "append_mla_kv",
    "batch_indices_positions",
    "block_sparse_table",
    "packbits",
    "page_table",
    "plan_decode",
    "plan_prefill",
    "segment_packbits",
    "seq_lens",
    "shard_page_table",
)
"""Ops without floating-point arithmetic: they copy, plan or pack bits."""


@register_flop_formula([getattr(torch.ops.attn, op) for op in UNCOUNTED_OPS], get_raw=True)
def no_flops(*_: Any, **__: Any) -> int:
    return 0
