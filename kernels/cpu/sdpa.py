"""Attention by PyTorch's flash attention for the CPU, the kernel of ``scaled_dot_product_attention``.

One call of it attends for a request, or for successive requests with one query row and equal lengths. Lengths and page
numbers are read from the plan on the host, so these functions run eager calls alone. It computes in float32: in other
dtypes the kernel's exponential is less exact.

The kernel hides a key by a logit of -inf, and so multiplies its value by 0. Where such a key or value is NaN or
infinite, the LSE or the output may be: then the reference computes the call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from attn_ops.kernels import reference
from attn_ops.kernels.reference.append import as_nhd, bits, gather
from attn_ops.kernels.reference.attention import MAX_ELEMENTS, saturate
from torch import Tensor

from attn_ops.ops.options import MLA_SM_SCALE, AttentionOptions
from attn_ops.plan.state import DecodePlan, PlanProblem, PrefillPlan

FLASH = torch._scaled_dot_product_flash_attention_for_cpu
LOG2E = math.log2(math.e)

MASK_ROWS = 512
"""Query rows of a call with a mask, which has an element for each row and key, at most."""

MASK_ELEMENTS = 1 << 24
"""Elements of a mask of more than one row."""

Result = tuple[Tensor, Tensor]
Keys = Callable[[int, int], tuple[Tensor, Tensor]]
"""``keys(begin, end)``: the keys and values at these positions, ``[N, L, num_kv_heads, dim]``."""


class Window(NamedTuple):
    """The keys that a row sees: ``position - left`` to ``position + right``, of ``length`` tokens."""

    length: int
    left: int
    right: int

    @classmethod
    def of(cls, o: AttentionOptions, rows: int, length: int) -> Window:
        every = rows + length
        right = 0 if o.causal else every if o.window_right < 0 else o.window_right
        return cls(length, every if o.window_left < 0 else o.window_left, right)

    def keys(self, position: int) -> tuple[int, int]:
        """Half-open range of the keys that the row at ``position`` sees."""
        return max(0, position - self.left), min(self.length, position + self.right + 1)

    def mask(self, rows: int, keys: int, ahead: int) -> Tensor:
        """``[rows, keys]``: 0 for a key that a row sees, else -inf. The first row is ``ahead`` of the first key."""
        hidden = torch.full((rows, keys), -math.inf, dtype=torch.float32)
        return hidden.triu(ahead + self.right + 1) + hidden.tril(ahead - self.left - 1)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool, out: Tensor, lse: Tensor
) -> None:
    """Query heads of a KV head become rows if all rows see the same keys, else a batch, and ``N`` is 1."""
    requests, rows, num_qo_heads, _ = q.shape
    num_kv_heads = k.shape[2]
    group = num_qo_heads // num_kv_heads
    k, v, heads = k.transpose(1, 2), v.transpose(1, 2), (requests, rows, num_kv_heads, group)
    q = q.view(*heads, -1)
    if mask is None and not causal:
        found, found_lse = FLASH(q.transpose(1, 2).flatten(2, 3), k, v, scale=scale)
        packed = (requests, num_kv_heads, rows, group)
        found, found_lse = found.view(*packed, -1).transpose(1, 2), found_lse.view(packed).transpose(1, 2)
    else:
        if group > 1:
            k, v = k.expand(group, -1, -1, -1), v.expand(group, -1, -1, -1)
        found, found_lse = FLASH(q[0].permute(2, 1, 0, 3), k, v, is_causal=causal, attn_mask=mask, scale=scale)
        found, found_lse = found.permute(2, 1, 0, 3), found_lse.permute(2, 1, 0)
    width = out.shape[-1]
    out.view(*heads, width).copy_(found if found.shape[-1] == width else found[..., :width])
    lse.view(heads).copy_(found_lse)


def _kv_scale(o: AttentionOptions) -> Sequence[float]:
    return (1.0, 1.0) if o.kv_scale is None else o.kv_scale.tolist()


def _attend(q: Tensor, keys: Keys, position: int, length: int, o: AttentionOptions, out: Tensor, lse: Tensor) -> None:
    """Attention of rows from ``position`` on in requests of ``length`` tokens.

    ``q [N, R, num_qo_heads, dim]``, where ``N`` or R is 1. Writes ``out [N * R, num_qo_heads, head_dim_vo]`` and the
    natural ``lse [N * R, num_qo_heads]``, but not to rows that see no key.
    """
    scale = (1 / math.sqrt(q.shape[3]) if o.sm_scale is None else o.sm_scale) * _kv_scale(o)[0]
    window = Window.of(o, max(0, -position) + q.shape[1], length)
    without_keys = max(0, -position - window.right)
    if without_keys:
        q, out, lse = q[:, without_keys:], out[without_keys:], lse[without_keys:]
    rows, position = q.shape[1], position + without_keys
    if not rows:
        return

    def seen(begin: int, end: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The keys of the first and of the last of these rows."""
        return window.keys(position + begin), window.keys(position + end - 1)

    (kv_begin, _), (_, kv_end) = whole = seen(0, rows)
    k, v = keys(kv_begin, kv_end)
    k, v = (k.float(), v.float()) if k is not v else (k.float(),) * 2
    causal = rows > 1 and position == 0 and whole == ((0, 1), (0, length))  # the triangle that the kernel can hide
    if causal or whole[0] == whole[1]:
        _flash(q, k, v, scale, None, causal, out, lse)
        return
    most_keys = min(kv_end - kv_begin, window.left + window.right + MASK_ROWS)  # that a block of MASK_ROWS rows sees
    step = max(1, min(MASK_ROWS, MASK_ELEMENTS // most_keys))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        (key, _), (_, last) = seen(begin, end)
        tokens = slice(key - kv_begin, last - kv_begin)
        mask = window.mask(end - begin, last - key, position + begin - key)
        block = slice(begin, end)
        _flash(q[:, block], k[:, tokens], v[:, tokens], scale, mask, False, out[block], lse[block])


def _groups(rows: Sequence[int], lengths: Sequence[int], token_elements: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of requests that attend together. Requests without query rows or keys are left out.

    The keys of several requests, of ``token_elements`` elements for each token, have at most ``MAX_ELEMENTS``.
    """
    first = 0
    while first < len(lengths):
        end = first + 1
        if rows[end] - rows[first] == 1:
            limit = min(len(lengths), first + MAX_ELEMENTS // max(1, lengths[first] * token_elements))
            while end < limit and rows[end + 1] - rows[end] == 1 and lengths[end] == lengths[first]:
                end += 1
        if rows[end] > rows[first] >= 0 and lengths[first] > 0:
            yield first, end
        first = end


class PlannedKeys:
    """Keys and values of a plan's requests, from ``caches [pages, page_size, num_kv_heads, dim]``.

    A plan may contain anything: places and pages are clamped, as in the reference. Ragged KV is a cache of pages of
    one token, in order.
    """

    def __init__(self, plan: DecodePlan | PrefillPlan, caches: tuple[Tensor, Tensor]) -> None:
        self.page_size, self.caches, self.kv_indices = PlanProblem.of(plan.problem).page_size, caches, plan.kv_indices
        self.starts = plan.kv_indptr.tolist()

    def of(self, first: int, end: int) -> Keys:
        """Those of requests ``first`` to ``end``."""
        return functools.partial(self._gather, first, end)

    def _gather(self, first: int, end: int, token: int, token_end: int) -> tuple[Tensor, Tensor]:
        (page, skipped), page_end = divmod(token, self.page_size), -(-token_end // self.page_size)
        num_pages, places, start = self.caches[0].shape[0], self.kv_indices.shape[0], self.starts[first]
        if end - first == 1 and not places and 0 <= start <= num_pages - token_end:  # ragged KV of one request: views
            k, v = (cache[start + token : start + token_end, 0][None] for cache in self.caches)
            return k, v
        pages = torch.tensor(self.starts[first:end])[:, None] + torch.arange(page, page_end)
        if places:
            pages = self.kv_indices[pages.clamp_(0, places - 1)]
        pages = pages.clamp_(0, num_pages - 1)
        tokens = slice(skipped, skipped + token_end - token)
        k, v = (gather(cache, pages).flatten(1, 2)[:, tokens] for cache in self.caches)
        return k, v


class LatentKeys(PlannedKeys):
    """Keys ``[ckv, kpe]`` of MLA, which are the values too: columns past ``ckv`` of the output are dropped."""

    def _gather(self, first: int, end: int, token: int, token_end: int) -> tuple[Tensor, Tensor]:
        keys = torch.cat([bits(part) for part in super()._gather(first, end, token, token_end)], -1)
        keys = keys.view(self.caches[0].dtype)
        return keys, keys


def _attend_batch(
    q: Tensor,
    plan: DecodePlan | PrefillPlan,
    keys_of: type[PlannedKeys],
    caches: tuple[Tensor, Tensor],
    o: AttentionOptions,
) -> Result | None:
    """``out [rows, num_qo_heads, head_dim_vo]`` and ``lse [rows, num_qo_heads]``; None if a number is not finite."""
    if q.shape[0] == 0 or caches[0].shape[0] == 0:
        return None
    problem, places = PlanProblem.of(plan.problem), plan.kv_indices.shape[0]
    if problem.world > 1:  # rows have other positions than the last of the tokens
        return None
    if isinstance(plan, DecodePlan) and not places:  # no keys, and no ragged KV
        return None
    most = min(problem.max_kv_len, places * problem.page_size or problem.max_kv_len)
    rows: Sequence[int] = range(q.shape[0] + 1)
    if isinstance(plan, PrefillPlan):
        rows = plan.qo_indptr.tolist()
    lengths = [min(length, most) for length in plan.kv_len.tolist()[: len(rows) - 1]]
    out, lse, q32 = *_empty(q, problem.head_dim_vo), q.float()
    keys = keys_of(plan, caches)
    for first, end in _groups(rows, lengths, problem.num_kv_heads * problem.head_dim_qk):
        target = slice(rows[first], rows[end])
        queries = q32[target]  # a plan may have more rows than the query
        alone = end - first == 1
        end, queries = (end, queries[None]) if alone else (first + queries.shape[0], queries[:, None])
        position = lengths[first] - (rows[end] - rows[first] if alone else 1)
        if queries.numel():
            _attend(queries, keys.of(first, end), position, lengths[first], o, out[target], lse[target])
    return _finalize(out, lse, q, o)


def _empty(q: Tensor, head_dim_vo: int) -> Result:
    """float32 output and natural LSE of rows that see no key."""
    out = torch.zeros((*q.shape[:2], head_dim_vo), dtype=torch.float32)
    return out, torch.full(q.shape[:2], -math.inf, dtype=torch.float32)


def _finalize(out: Tensor, lse: Tensor, q: Tensor, o: AttentionOptions) -> Result | None:
    """The output, with its sink and in its dtype, and the base-2 LSE; None if the reference may differ.

    It may if a number is not finite, but for the LSE of a row that sees no key. Where every logit that a row sees is
    -inf, the kernel gives an LSE of 0.
    """
    if (lse == 0).any():
        return None
    if o.kv_scale is not None:
        out *= _kv_scale(o)[1]
    if o.sinks is not None:
        with_sink = torch.logaddexp(lse, o.sinks)
        out *= torch.where(lse == -math.inf, 0.0, (lse - with_sink).exp())[..., None]
        lse = with_sink
    if not (math.isfinite(float(out.sum())) and float(lse.amax()) < math.inf):
        return None
    return saturate(out, o.out_dtype or q.dtype), lse * LOG2E


def _or_reference(run: Callable[..., Result | None]) -> Callable[..., Result]:
    """The op that ``run`` computes, unless it returns None: then the reference does."""

    @functools.wraps(run)
    def op(*args: Any, return_lse: bool = False, **kwargs: Any) -> Result:
        result = run(*args, **kwargs)
        if result is None:
            return getattr(reference, run.__name__)(*args, return_lse=return_lse, **kwargs)
        return result if return_lse else (result[0], result[1].new_empty(0))

    return op


@_or_reference
def batch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: list[Tensor],
    workspace: Tensor,
    *,
    kv_layout: str = "NHD",
    **options: Any,
) -> Result | None:
    caches = as_nhd(k_cache, kv_layout), as_nhd(v_cache, kv_layout)
    return _attend_batch(q, DecodePlan(*plan), PlannedKeys, caches, AttentionOptions(**options))


@_or_reference
def batch_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: list[Tensor],
    workspace: Tensor,
    *,
    kv_layout: str = "NHD",
    **options: Any,
) -> Result | None:
    caches = as_nhd(k_cache, kv_layout), as_nhd(v_cache, kv_layout)
    return _attend_batch(q, PrefillPlan(*plan), PlannedKeys, caches, AttentionOptions(**options))


@_or_reference
def ragged_prefill(
    q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor], workspace: Tensor, *, kv_layout: str = "NHD", **options: Any
) -> Result | None:
    keys, values = (t[:, None] if kv_layout == "NHD" else t.transpose(0, 1)[:, None] for t in (k, v))
    return _attend_batch(q, PrefillPlan(*plan), PlannedKeys, (keys, values), AttentionOptions(**options))


@_or_reference
def batch_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    plan: list[Tensor],
    workspace: Tensor,
    *,
    sm_scale: float | None = None,
    **options: Any,
) -> Result | None:
    o = AttentionOptions(sm_scale=MLA_SM_SCALE if sm_scale is None else sm_scale, **options)
    caches = ckv_cache[:, :, None], kpe_cache[:, :, None]
    return _attend_batch(torch.cat((q_nope, q_pe), -1), PrefillPlan(*plan), LatentKeys, caches, o)


@_or_reference
def single_prefill(q: Tensor, k: Tensor, v: Tensor, *, kv_layout: str = "NHD", **options: Any) -> Result | None:
    k, v = (t[None] if kv_layout == "NHD" else t.transpose(0, 1)[None] for t in (k, v))
    if q.shape[0] == 0 or k.shape[1] == 0:
        return None
    (out, lse), o = _empty(q, v.shape[-1]), AttentionOptions(**options)

    def keys(begin: int, end: int) -> tuple[Tensor, Tensor]:
        return k[:, begin:end], v[:, begin:end]

    _attend(q.float()[None], keys, k.shape[1] - q.shape[0], k.shape[1], o, out, lse)
    return _finalize(out, lse, q, o)
