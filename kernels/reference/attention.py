"""Attention over dense tiles gathered from the cache: gather, mask, softmax, scatter.

A tile is a few query rows of one request beside all KV tokens that the request may have. For decode a
tile is one row; for prefill the tiles are the plan's work items.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...meta.outputs import attention as allocate
from ...plan import DecodePlan, PlanProblem, PrefillPlan
from .page import as_nhd

LOG2E = math.log2(math.e)
SCORES_AT_ONCE = 1 << 26


class Options(NamedTuple):
    sm_scale: float | None
    logits_soft_cap: float
    window_left: int
    sinks: Tensor | None
    causal: bool


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, position: Tensor, kv_len: Tensor, opts: Options
) -> tuple[Tensor, Tensor]:
    """``q [N, R, Hq, Dqk]`` at ``position [N, R]`` on ``keys [N, L, Hkv, Dqk]``, of which ``kv_len [N]`` exist.

    Returns float32 ``out [N, R, Hq, Dvo]`` and base-2 ``lse [N, R, Hq]``.
    """
    n, rows, num_qo_heads, dim = q.shape
    length, num_kv_heads = keys.shape[1:3]
    group = num_qo_heads // num_kv_heads
    token = torch.arange(length, device=q.device)
    visible = (token < kv_len[:, None])[:, None, :].expand(n, rows, length)
    if opts.causal:
        visible = visible & (token <= position[..., None])
    if opts.window_left >= 0:
        visible = visible & (token + opts.window_left >= position[..., None])

    # [N, Hkv, R * group, D] x [N, Hkv, D, L]
    folded = q.float().unflatten(2, (num_kv_heads, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    logits = folded @ keys.float().permute(0, 2, 3, 1)
    logits = logits.unflatten(2, (rows, group)) * (opts.sm_scale or 1 / math.sqrt(dim))
    if opts.logits_soft_cap > 0:
        logits = opts.logits_soft_cap * torch.tanh(logits / opts.logits_soft_cap)
    logits = torch.where(visible[:, None, :, None, :], logits * LOG2E, -torch.inf)

    top = logits.amax(-1, keepdim=True)
    empty = top == -torch.inf
    if opts.sinks is not None:
        sink = (opts.sinks * LOG2E).view(1, num_kv_heads, 1, group, 1)
        top = torch.maximum(top, sink)
    weight = torch.exp2(logits - torch.where(empty, 0.0, top))
    total = weight.sum(-1, keepdim=True)
    if opts.sinks is not None:
        total = total + torch.exp2(sink - top)
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, top + torch.log2(total))
    seen = visible.any(1)[:, :, None, None]
    used = torch.where(seen, values.float(), 0.0).permute(0, 2, 1, 3)
    out = (weight / total).flatten(2, 3) @ used
    out = out.unflatten(2, (rows, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    return out, lse.squeeze(-1).permute(0, 2, 1, 3).flatten(2, 3)


def _gather_pages(cache: Tensor, plan: DecodePlan | PrefillPlan, request: Tensor) -> Tensor:
    """``[N, L, heads, dim]``: the tokens of each request in ``request [N]``, ``L`` the plan's max_kv_len.

    Ragged KV is a cache of one-token pages in order. Places past a request's end hold any token.
    """
    problem = PlanProblem.of(plan.problem)
    num_pages = -(-problem.max_kv_len // problem.page_size)
    place = plan.kv_indptr[request][:, None] + torch.arange(num_pages, device=cache.device)
    paged = plan.kv_indices.shape[0] > 0
    page = plan.kv_indices[place.clamp(0, plan.kv_indices.shape[0] - 1)] if paged else place
    return cache[page.clamp(0, cache.shape[0] - 1)].flatten(1, 2)


def batch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: list[Tensor],
    workspace: Tensor,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    p = DecodePlan(*plan)
    batch = q.shape[0]
    if k_cache.shape[0] == 0 or p.kv_indices.shape[0] == 0:
        return _nothing_seen(q, k_cache, v_cache, return_lse)
    request = torch.arange(batch, device=q.device)
    kv_len = p.kv_len[:batch]
    keys = _gather_pages(as_nhd(k_cache, kv_layout), p, request)
    values = _gather_pages(as_nhd(v_cache, kv_layout), p, request)
    opts = Options(sm_scale, logits_soft_cap, window_left, sinks, causal=False)
    out, lse = _attend(q[:, None], keys, values, (kv_len - 1)[:, None], kv_len, opts)
    return out[:, 0].to(q.dtype), lse[:, 0] if return_lse else lse.new_empty(0)


def _nothing_seen(q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    out, lse = allocate(q, k, v, return_lse=return_lse)
    return out.zero_(), lse.fill_(-torch.inf)


def _prefill(
    q: Tensor, k: Tensor, v: Tensor, plan: PrefillPlan, opts: Options, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """``k, v [pages, page_size, heads, dim]``; the plan's tiles a few at a time."""
    out, lse = _nothing_seen(q, k, v, return_lse=True)
    if 0 not in (q.shape[0], k.shape[0]):
        problem = PlanProblem.of(plan.problem)
        tile_scores = problem.tile_rows * problem.num_qo_heads * problem.max_kv_len
        step = max(1, SCORES_AT_ONCE // tile_scores)
        # Rows past the end are written to a spare row, which is cut off again.
        out = torch.cat((out, out.new_zeros((1, *out.shape[1:]))))
        lse = torch.cat((lse, lse.new_zeros((1, lse.shape[1]))))
        for work in plan.work.split(step):
            row, rows, _, _, position, _, _, request = work.unbind(1)
            offset = torch.arange(problem.tile_rows, device=q.device)
            source = row[:, None] + offset
            inside = (offset < rows[:, None]) & (source < q.shape[0])
            tile_out, tile_lse = _attend(
                q[torch.where(inside, source, 0)],
                _gather_pages(k, plan, request),
                _gather_pages(v, plan, request),
                position[:, None] + offset,
                plan.kv_len[request],
                opts,
            )
            target = torch.where(inside, source, q.shape[0])
            out = out.index_put((target,), tile_out.to(out.dtype))
            lse = lse.index_put((target,), tile_lse)
        out, lse = out[:-1], lse[:-1]
    return out.contiguous(), lse.contiguous() if return_lse else lse.new_empty(0)


def batch_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: list[Tensor],
    workspace: Tensor,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    opts = Options(sm_scale, logits_soft_cap, window_left, sinks, causal)
    k, v = as_nhd(k_cache, kv_layout), as_nhd(v_cache, kv_layout)
    return _prefill(q, k, v, PrefillPlan(*plan), opts, return_lse)


def ragged_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: list[Tensor],
    workspace: Tensor,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    opts = Options(sm_scale, logits_soft_cap, window_left, sinks, causal)
    pages = [t[:, None] if kv_layout == "NHD" else t.transpose(0, 1)[:, None] for t in (k, v)]
    return _prefill(q, *pages, PrefillPlan(*plan), opts, return_lse)
