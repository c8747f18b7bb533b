"""Attention over dense tiles gathered from the cache: gather, mask, softmax, scatter.

A tile is a few query rows of one request beside all KV tokens that the request may have. For decode a
tile is one row; for prefill the tiles are the plan's work items.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from attn_ops.kernels.reference.append import as_nhd, gather
from attn_ops.kernels.reference.masks import byte_offsets, unpack
from attn_ops.kernels.reference.rope_alibi import alibi_slopes, rotate_half
from attn_ops.kernels.reference.sizes import any_zero
from attn_ops.meta.outputs import attention as allocate
from torch import Tensor

from attn_ops.ops.options import AttentionOptions
from attn_ops.plan.state import DecodePlan, PlanProblem, PrefillPlan

LOG2E = math.log2(math.e)
ELEMENTS_AT_ONCE = 1 << 26
"""Of scores, or of gathered keys, in prefill."""


class Tiles(NamedTuple):
    """Query rows and where they stand: ``N`` tiles of ``R`` rows, each of one request.

    q         ``[N, R, num_qo_heads, head_dim_qk]``
    row       ``[N, R]``: index among the request's query rows
    position  ``[N, R]``: position in the request's KV sequence
    kv_len    ``[N]``
    keep      ``[N, R, L]`` custom mask, or None
    """

    q: Tensor
    row: Tensor
    position: Tensor
    kv_len: Tensor
    keep: Tensor | None = None


def _visible(t: Tiles, length: int, opts: AttentionOptions) -> Tensor:
    """bool ``[N, R, length]``: which keys a row sees."""
    token = torch.arange(length, device=t.q.device)
    visible = (token < t.kv_len[:, None])[:, None, :].expand(*t.position.shape, length)
    if t.keep is not None:
        visible = visible & t.keep
    elif opts.causal:
        visible = visible & (token <= t.position[..., None])
    if opts.window_left >= 0:
        visible = visible & (token + opts.window_left >= t.position[..., None])
    return visible


def _logits(t: Tiles, keys: Tensor, opts: AttentionOptions) -> Tensor:
    """float32 ``[N, num_kv_heads, R, group, L]``: scaled, biased and capped, natural base."""
    q, k = t.q.float(), keys.float()
    num_qo_heads, dim = q.shape[2:]
    length, num_kv_heads = k.shape[1:3]
    heads = (num_kv_heads, num_qo_heads // num_kv_heads)
    token = torch.arange(length, device=q.device)
    if opts.pos_encoding == "ROPE_LLAMA":
        q = rotate_half(q, t.position, opts.rope_scale, opts.rope_theta)
        k = rotate_half(k, token, opts.rope_scale, opts.rope_theta)
    # [N, Hkv, R * group, D] x [N, Hkv, D, L]
    folded = q.unflatten(2, heads).permute(0, 2, 1, 3, 4).flatten(2, 3)
    logits = (folded @ k.permute(0, 2, 3, 1)).unflatten(2, (q.shape[1], heads[1]))
    logits = logits * (1 / math.sqrt(dim) if opts.sm_scale is None else opts.sm_scale)
    if opts.kv_scale is not None:
        logits = logits * opts.kv_scale[0]
    if opts.pos_encoding == "ALIBI":
        slopes = alibi_slopes(num_qo_heads, q.device).view(1, heads[0], 1, heads[1], 1)
        logits = logits + slopes * (token - t.row[..., None]).float()[:, None, :, None, :]
    if opts.logits_soft_cap > 0:
        logits = opts.logits_soft_cap * torch.tanh(logits / opts.logits_soft_cap)
    return logits


def _attend(t: Tiles, keys: Tensor, values: Tensor, opts: AttentionOptions) -> tuple[Tensor, Tensor]:
    """``keys [N, L, num_kv_heads, head_dim_qk]``, ``values [..., head_dim_vo]``, of which ``kv_len`` exist.

    Returns float32 ``out [N, R, num_qo_heads, head_dim_vo]`` and base-2 ``lse [N, R, num_qo_heads]``.
    """
    rows, num_qo_heads = t.q.shape[1:3]
    length, num_kv_heads = keys.shape[1:3]
    group = num_qo_heads // num_kv_heads
    visible = _visible(t, length, opts)
    logits = torch.where(visible[:, None, :, None, :], _logits(t, keys, opts) * LOG2E, -torch.inf)

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
    if opts.kv_scale is not None:
        out = out * opts.kv_scale[1]
    out = out.unflatten(2, (rows, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    return out, lse.squeeze(-1).permute(0, 2, 1, 3).flatten(2, 3)


def _longest(plan: DecodePlan | PrefillPlan) -> int:
    """KV tokens of the longest request; of any that the plan allows where lengths are on a GPU or not known yet."""
    most, kv_len = PlanProblem.of(plan.problem).max_kv_len, plan.kv_len
    known = type(kv_len) is Tensor and kv_len.device.type == "cpu" and not torch.compiler.is_compiling()
    return max(1, min(most, int(kv_len.amax()))) if known and kv_len.numel() else most


def _gather_pages(cache: Tensor, plan: DecodePlan | PrefillPlan, request: Tensor, length: int) -> Tensor:
    """``[N, L, heads, dim]``: the tokens of each request in ``request [N]``, ``L`` at least ``length``, in whole pages.

    Ragged KV is a cache of one-token pages in order. Places past a request's end hold any token.
    """
    num_pages = -(-length // PlanProblem.of(plan.problem).page_size)
    place = plan.kv_indptr[request][:, None] + torch.arange(num_pages, device=cache.device)
    paged = plan.kv_indices.shape[0] > 0
    page = plan.kv_indices[place.clamp(0, plan.kv_indices.shape[0] - 1)] if paged else place
    return gather(cache, page.clamp(0, cache.shape[0] - 1)).flatten(1, 2)


def batch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: list[Tensor],
    workspace: Tensor,
    *,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    p = DecodePlan(*plan)
    batch = q.shape[0]
    if k_cache.shape[0] == 0 or p.kv_indices.shape[0] == 0:
        return _nothing_seen(q, k_cache, v_cache, return_lse)
    request = torch.arange(batch, device=q.device)
    kv_len = p.kv_len[:batch]
    position, length = (kv_len - 1)[:, None], _longest(p)
    out, lse = _attend(
        Tiles(q[:, None], torch.zeros_like(position), position, kv_len),
        _gather_pages(as_nhd(k_cache, kv_layout), p, request, length),
        _gather_pages(as_nhd(v_cache, kv_layout), p, request, length),
        AttentionOptions(**options),
    )
    return out[:, 0].to(q.dtype), lse[:, 0] if return_lse else lse.new_empty(0)


def _nothing_seen(q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> tuple[Tensor, Tensor]:
    out, lse = allocate(q, k, v, return_lse=return_lse)
    return out.zero_(), lse.fill_(-torch.inf)


def prefill(
    q: Tensor, k: Tensor, v: Tensor, plan: PrefillPlan, mask: Tensor | None, opts: AttentionOptions, return_lse: bool
) -> tuple[Tensor, Tensor]:
    """``k, v [pages, page_size, heads, dim]``; the plan's tiles a few at a time."""
    out, lse = _nothing_seen(q, k, v, return_lse=True)
    if not any_zero(q.shape[0], k.shape[0]):
        problem, length = PlanProblem.of(plan.problem), _longest(plan)
        scores, kv = problem.tile_rows * problem.num_qo_heads, problem.num_kv_heads * problem.head_dim_qk
        step = max(1, ELEMENTS_AT_ONCE // (max(scores, kv) * length))
        offsets = None if mask is None else byte_offsets(plan)
        # Rows past the end are written to a spare row, which is cut off again.
        out = torch.cat((out, out.new_zeros((1, *out.shape[1:]))))
        lse = torch.cat((lse, lse.new_zeros((1, lse.shape[1]))))
        for work in plan.work.split(step):
            first, rows, _, _, position, _, _, request = work.unbind(1)
            offset = torch.arange(problem.tile_rows, device=q.device)
            source = first[:, None] + offset
            inside = (offset < rows[:, None]) & (source < q.shape[0])
            row = source - plan.qo_indptr[request][:, None]
            kv_len = plan.kv_len[request]
            keys = _gather_pages(k, plan, request, length)
            keep = None
            if mask is not None and offsets is not None:
                keep = unpack(mask, offsets[request], torch.where(inside, row, 0), kv_len, keys.shape[1])
            tiles = Tiles(q[torch.where(inside, source, 0)], row, position[:, None] + offset, kv_len, keep)
            tile_out, tile_lse = _attend(tiles, keys, _gather_pages(v, plan, request, length), opts)
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
    mask: Tensor | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    k, v = as_nhd(k_cache, kv_layout), as_nhd(v_cache, kv_layout)
    return prefill(q, k, v, PrefillPlan(*plan), mask, AttentionOptions(**options), return_lse)


def ragged_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: list[Tensor],
    workspace: Tensor,
    *,
    mask: Tensor | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    keys, values = (t[:, None] if kv_layout == "NHD" else t.transpose(0, 1)[:, None] for t in (k, v))
    return prefill(q, keys, values, PrefillPlan(*plan), mask, AttentionOptions(**options), return_lse)


def _parts(rows: int, scores: int) -> list[tuple[int, int]]:
    """Half-open ranges of rows with so many scores each; one of all where a number is a symbol."""
    if not (type(rows) is int and type(scores) is int):
        return [(0, rows)]
    step = max(1, ELEMENTS_AT_ONCE // scores)
    return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def single_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    keys, values = (t[None] if kv_layout == "NHD" else t.transpose(0, 1)[None] for t in (k, v))
    rows, length = q.shape[0], keys.shape[1]
    if any_zero(rows, length):
        return _nothing_seen(q, k, v, return_lse)
    kv_len = torch.full((1,), length, device=q.device)
    outs, lses = [], []
    for begin, end in _parts(rows, length * q.shape[1]):
        row = torch.arange(begin, end, device=q.device)[None]
        keep = None if mask is None else unpack(mask, kv_len * 0, row, kv_len, length)
        tiles = Tiles(q[None, begin:end], row, row + length - rows, kv_len, keep)
        out, lse = _attend(tiles, keys, values, AttentionOptions(**options))
        outs.append(out[0].to(q.dtype))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses) if return_lse else lses[0].new_empty(0)
