"""Attention in four steps: gather keys and values, mask the logits, softmax, scatter the rows.

A query tile is computed as a whole: its query rows, and the keys and values of its request, gathered into one dense
block of the longest KV length, so that no online softmax is needed. In decode a tile is one query row; in prefill it is
the tile of a work item. The work items of a tile that is split all compute the whole tile and write the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.kernels.reference.cache_views import as_nhd, bits, block_pages, gather, with_spare_row
from attn_ops.kernels.reference.masks import byte_offsets, unpack
from attn_ops.kernels.reference.rope_alibi import alibi_slopes, rotate_half
from attn_ops.meta.outputs import attention as allocate
from attn_ops.ops.options import LOG2E, AttentionOptions, saturate, softmax_scale
from attn_ops.plan.context import ContextShard
from attn_ops.plan.state import WORK_FIELDS, DecodePlan, PlanProblem, PrefillPlan
from attn_ops.symbolic_sizes import any_zero, at_least, guard_or_true, may_be_one
from attn_ops.tracing import is_compiling

MAX_ELEMENTS = 1 << 26
"""Logits, or elements of gathered keys, that prefill holds at a time."""
MAX_GROUPS = 64
"""Largest number of groups of work items in a graph with symbolic sizes."""


class Tiles(NamedTuple):
    """``N`` query tiles of ``R`` rows, each of one request.

    q         ``[N, R, num_qo_heads, head_dim_qk]``
    row       ``[N, R]``: index of the row among the request's query rows
    position  ``[N, R]``: position of the row in the request's KV sequence
    kv_len    ``[N]``: KV tokens of the request
    shard     the part of the request's tokens that these are; None for all
    custom_mask
              bool ``[N, R, L]``: True for a key that the row sees; or None
    """

    q: Tensor
    row: Tensor
    position: Tensor
    kv_len: Tensor
    shard: ContextShard | None = None
    custom_mask: Tensor | None = None

    def key_positions(self, length: int) -> Tensor:
        """``[length]``: positions of the keys in the request's KV sequence."""
        token = torch.arange(length, device=self.q.device)
        return token if self.shard is None else self.shard.positions(token)


def _mask(t: Tiles, length: int, opts: AttentionOptions) -> Tensor:
    """bool ``[N, R, length]``: which keys a row sees."""
    exists = torch.arange(length, device=t.q.device) < t.kv_len[:, None]
    mask = exists[:, None, :].expand(*t.position.shape, length)
    token = t.key_positions(length)
    if t.custom_mask is not None:
        mask = mask & t.custom_mask
    elif opts.causal:
        mask = mask & (token <= t.position[..., None])
    if opts.window_right >= 0:
        mask = mask & (token - opts.window_right <= t.position[..., None])
    if opts.window_left >= 0:
        mask = mask & (token + opts.window_left >= t.position[..., None])
    return mask


def _logits(t: Tiles, keys: Tensor, opts: AttentionOptions) -> Tensor:
    """float32 ``[N, num_kv_heads, R, group, L]``: ``q @ k``, scaled, biased and soft-capped, for ``exp`` in base e."""
    q, k = t.q.float(), keys.float()
    num_qo_heads, dim = q.shape[2:]
    length, num_kv_heads = k.shape[1:3]
    heads = (num_kv_heads, num_qo_heads // num_kv_heads)
    token = t.key_positions(length)
    if opts.pos_encoding == "ROPE_LLAMA":
        q = rotate_half(q, t.position, opts.rope_scale, opts.rope_theta)
        k = rotate_half(k, token, opts.rope_scale, opts.rope_theta)
    # Packed rows (PackGQA): [N, Hkv, R * group, D] @ [N, Hkv, D, L]
    packed_q = q.unflatten(2, heads).permute(0, 2, 1, 3, 4).flatten(2, 3)
    logits = (packed_q @ k.permute(0, 2, 3, 1)).unflatten(2, (q.shape[1], heads[1]))
    logits = logits * softmax_scale(opts.sm_scale, dim)
    if opts.kv_scale is not None:
        logits = logits * opts.kv_scale[0]
    if opts.pos_encoding == "ALIBI":
        slopes = alibi_slopes(num_qo_heads, q.device).view(1, heads[0], 1, heads[1], 1)
        logits = logits + slopes * (token - t.row[..., None]).float()[:, None, :, None, :]
    if opts.logits_soft_cap > 0:
        logits = opts.logits_soft_cap * torch.tanh(logits / opts.logits_soft_cap)
    return logits


def _attend(t: Tiles, keys: Tensor, values: Tensor, opts: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Attention of query tiles over ``keys [N, L, num_kv_heads, head_dim_qk]``, ``values [..., head_dim_vo]``.

    Returns float32 ``out [N, R, num_qo_heads, head_dim_vo]`` and base-2 ``lse [N, R, num_qo_heads]``: 0 and -inf for a
    row that sees no key. A sink adds its logit to the softmax denominator of every other row.
    """
    rows, num_qo_heads = t.q.shape[1:3]
    length, num_kv_heads = keys.shape[1:3]
    group = num_qo_heads // num_kv_heads
    mask = _mask(t, length, opts)
    logits = torch.where(mask[:, None, :, None, :], _logits(t, keys, opts) * LOG2E, -torch.inf)

    row_max = logits.amax(-1, keepdim=True)
    if opts.sinks is not None:
        sink = (opts.sinks * LOG2E).view(1, num_kv_heads, 1, group, 1)
        row_max = torch.maximum(row_max, sink)
    empty = row_max == -torch.inf  # neither a key nor a sink
    anchor = torch.where(empty, 0.0, row_max)
    p = torch.exp2(logits - anchor)
    row_sum = p.sum(-1, keepdim=True)
    if opts.sinks is not None:
        row_sum = row_sum + torch.exp2(sink - anchor)
    row_sum = torch.where(empty, 1.0, row_sum)
    lse = torch.where(empty, -torch.inf, row_max + torch.log2(row_sum))

    # A value that no row sees may be NaN: it is replaced, since 0 * NaN is NaN.
    seen = mask.any(1)[:, :, None, None]
    used_values = torch.where(seen, values.float(), 0.0).permute(0, 2, 1, 3)
    out = (p / row_sum).flatten(2, 3) @ used_values
    if opts.kv_scale is not None:
        out = out * opts.kv_scale[1]
    out = out.unflatten(2, (rows, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    return out, lse.squeeze(-1).permute(0, 2, 1, 3).flatten(2, 3)


def _max_kv_len(plan: DecodePlan | PrefillPlan) -> int:
    """At least the KV length of the longest request: the plan's bound where lengths are on a GPU or being traced."""
    problem, pages, kv_len = PlanProblem.of(plan.problem), plan.kv_indices.shape[0], plan.kv_len
    bound = problem.max_kv_len
    if type(pages) is int and pages:  # a symbolic number of pages would make the bound symbolic
        tokens = pages * problem.page_size
        bound = min(bound, tokens) if type(bound) is int else torch.sym_min(bound, tokens)
    known = type(kv_len) is Tensor and kv_len.device.type == "cpu" and not is_compiling()
    if known and kv_len.numel():
        return max(1, min(bound, int(kv_len.amax())))
    return at_least(bound, 2) if may_be_one(bound) else bound  # Inductor's matrix products depend on it


def _gather_pages(cache: Tensor, plan: DecodePlan | PrefillPlan, request: Tensor, length: int) -> Tensor:
    """``[N, L, heads, dim]``: the tokens of each request in ``request [N]``, ``L`` at least ``length``, in whole pages.

    Ragged KV is a cache of one-token pages in order. Tokens past a request's end are arbitrary.
    """
    num_pages = -(-length // PlanProblem.of(plan.problem).page_size)
    entry = plan.kv_indptr[request][:, None] + torch.arange(num_pages, device=cache.device)
    paged = plan.kv_indices.shape[0] > 0
    page = plan.kv_indices[entry.clamp(0, plan.kv_indices.shape[0] - 1)] if paged else entry
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
    p, opts = DecodePlan(*plan), AttentionOptions(**options)
    batch = q.shape[0]
    if any_zero(k_cache.shape[0], p.kv_indices.shape[0]):
        return _without_keys(q, k_cache, v_cache, return_lse, opts)
    request = torch.arange(batch, device=q.device)
    kv_len, length = p.kv_len[:batch], _max_kv_len(p)
    shard = ContextShard.of_problem(PlanProblem.of(p.problem))
    position = (kv_len - 1 if shard is None else _positions(p)[:batch])[:, None]
    out, lse = _attend(
        Tiles(q[:, None], torch.zeros_like(position), position, kv_len, shard),
        _gather_pages(as_nhd(k_cache, kv_layout), p, request, length),
        _gather_pages(as_nhd(v_cache, kv_layout), p, request, length),
        opts,
    )
    return saturate(out[:, 0], opts.out_dtype or q.dtype), lse[:, 0] if return_lse else lse.new_empty(0)


def _positions(plan: DecodePlan) -> Tensor:
    """``[max_batch]``: the position of each request's row. All of its work items have it."""
    position, request = (plan.work[:, WORK_FIELDS.index(name)].long() for name in ("position", "request"))
    zeros = torch.zeros_like(plan.kv_len, dtype=torch.int64)
    return zeros.scatter_reduce(0, request.clamp(0, zeros.shape[0] - 1), position, "amax")


def _without_keys(q: Tensor, k: Tensor, v: Tensor, return_lse: bool, opts: AttentionOptions) -> tuple[Tensor, Tensor]:
    """The result where no row sees a key: zeros, and an LSE of -inf or that of the sink."""
    out, lse = allocate(q, k, v, return_lse=return_lse, out_dtype=opts.out_dtype)
    sinks = opts.sinks if return_lse else None
    return out.zero_(), lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks * LOG2E)


def _groups(work: Tensor, elements: int) -> Sequence[Tensor]:
    """Work items, of ``elements`` each, in groups of at most ``MAX_ELEMENTS``.

    Where sizes are symbolic, a graph has a number of groups that suffices for sizes in a range, up to ``MAX_GROUPS``.
    """
    items = work.shape[0]
    if type(items) is int and type(elements) is int:
        return work.split(max(1, MAX_ELEMENTS // elements))
    groups = 1
    while groups < MAX_GROUPS and not guard_or_true(items * elements <= groups * MAX_ELEMENTS):
        groups *= 4
    if groups == 1:
        return [work]
    size = torch.sym_max(2, (items + groups - 1) // groups)  # a size that may be 1 would be taken as 1
    index = torch.arange(size, device=work.device)
    return [work[(index + i * size).clamp(max=items - 1)] for i in range(groups)]  # the last item may come again


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: PrefillPlan,
    mask: Tensor | None,
    opts: AttentionOptions,
    return_lse: bool,
    ragged: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention over ``k, v [pages, page_size, heads, dim]``, a few of the plan's work items at a time.

    Rows that no work item covers get ``out`` 0, and an LSE of -inf or that of the sink. So do all rows of a plan
    without pages, unless the keys are ``ragged``.
    """
    out, lse = _without_keys(q, k, v, True, opts)
    sizes = (q.shape[0], k.shape[0])
    if not any_zero(*sizes if ragged else (*sizes, plan.kv_indices.shape[0])):
        problem, length = PlanProblem.of(plan.problem), _max_kv_len(plan)
        shard = ContextShard.of_problem(problem)
        logits, key_elements = problem.tile_rows * problem.num_qo_heads, problem.num_kv_heads * problem.head_dim_qk
        elements = max(logits, key_elements) * length
        offsets = None if mask is None else byte_offsets(plan)
        # Rows past the end of a tile are scattered to one row past the last, which is dropped.
        out = torch.cat((out, out.new_zeros((1, *out.shape[1:]))))
        lse = torch.cat((lse, lse.new_zeros((1, lse.shape[1]))))
        rows_of_q = with_spare_row(q)
        for work in _groups(plan.work, elements):
            first, rows, _, _, position, _, _, request = work.unbind(1)
            offset = torch.arange(problem.tile_rows, device=q.device)
            source = first[:, None] + offset
            inside = (offset < rows[:, None]) & (source >= 0) & (source < q.shape[0])
            request = request.clamp(0, plan.kv_len.shape[0] - 1)  # a plan may contain anything
            row = source - plan.qo_indptr[request][:, None]
            kv_len = plan.kv_len[request]
            keys = _gather_pages(k, plan, request, length)
            custom_mask = None
            if mask is not None and offsets is not None:
                custom_mask = unpack(mask, offsets[request], torch.where(inside, row, 0), kv_len, keys.shape[1])
            queries = rows_of_q[torch.where(inside, source, 0)]
            tiles = Tiles(queries, row, position[:, None] + offset, kv_len, shard, custom_mask)
            tile_out, tile_lse = _attend(tiles, keys, _gather_pages(v, plan, request, length), opts)
            target = torch.where(inside, source, q.shape[0])
            out = out.index_put((target,), saturate(tile_out, out.dtype))
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
    tokens = (t if kv_layout == "NHD" else t.transpose(0, 1) for t in (k, v))
    keys, values = (with_spare_row(t)[:, None] for t in tokens)
    return prefill(q, keys, values, PrefillPlan(*plan), mask, AttentionOptions(**options), return_lse, ragged=True)


def block_sparse_prefill(
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
    p = PrefillPlan(*plan)
    page_size = PlanProblem.of(p.problem).page_size
    keys, values = (as_nhd(block_pages(t, page_size, kv_layout), kv_layout) for t in (k, v))
    return prefill(q, keys, values, p, mask, AttentionOptions(**options), return_lse)


def _row_ranges(rows: int, logits_per_row: int) -> list[tuple[int, int]]:
    """Half-open ranges of rows with at most ``MAX_ELEMENTS`` logits each; a single one where a size is symbolic."""
    if not (type(rows) is int and type(logits_per_row) is int):
        return [(0, rows)]
    step = max(1, MAX_ELEMENTS // logits_per_row)
    return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def _not_one_row(t: Tensor) -> Tensor:
    """``t [requests, rows, ...]``, with two rows of zeros after each request's last if contents of tensors decide
    whether it has one row.

    Inductor's matrix products on the CPU depend on that.
    """
    if not may_be_one(t.shape[1]):
        return t
    return torch.cat((bits(t), bits(t).new_zeros((t.shape[0], 2, *t.shape[2:]))), 1).view(t.dtype)


def single_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch_size: int = 1,
    *,
    mask: Tensor | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    keys, values = (t if kv_layout == "NHD" else t.transpose(0, 1) for t in (k, v))
    rows, length, opts = q.shape[0] // batch_size, keys.shape[0] // batch_size, AttentionOptions(**options)
    if any_zero(rows, length):
        return _without_keys(q, k, v, return_lse, opts)
    kv_len = torch.full((batch_size,), length, device=q.device)
    first_row = torch.arange(batch_size, device=q.device)[:, None] * rows
    queries, keys, values = (_not_one_row(t.unflatten(0, (batch_size, -1))) for t in (q, keys, values))
    outs, lses = [], []
    for begin, end in _row_ranges(queries.shape[1], batch_size * length * q.shape[1]):
        row = torch.arange(begin, end, device=q.device).expand(batch_size, -1)
        custom_mask = None if mask is None else unpack(mask, kv_len * 0, first_row + row, kv_len, keys.shape[1])
        tiles = Tiles(queries[:, begin:end], row, row + length - rows, kv_len, custom_mask=custom_mask)
        out, lse = _attend(tiles, keys, values, opts)
        outs.append(saturate(out, opts.out_dtype or q.dtype))
        lses.append(lse)
    out, lse = (torch.cat(parts, 1)[:, :rows].flatten(0, 1) for parts in (outs, lses))
    return out, lse if return_lse else lse.new_empty(0)
