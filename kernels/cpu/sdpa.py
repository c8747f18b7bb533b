"""Attention by PyTorch's flash attention for the CPU, the kernel of ``scaled_dot_product_attention``.

One call of it attends for a request, or for successive requests of equal sizes if it needs no mask. Lengths and page
numbers are read from the plan on the host, so these functions run eager calls alone. It computes in float32: in other
dtypes the kernel's exponential is less exact. Pages that lie in order are read in place, others are gathered.

The kernel hides a key by a logit of -inf, and so multiplies its value by 0. Where such a key or value is NaN or
infinite, the LSE or the output may be: then the reference computes the call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from attn_ops.kernels import reference
from attn_ops.kernels.reference.append import as_nhd, bits
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

CONVERTED_ELEMENTS = 1 << 19
"""Elements of the keys that are converted to float32 at a time, unless one KV head has more."""

Result = tuple[Tensor, Tensor]
Keys = Callable[[int, int], tuple[Tensor, Tensor]]
"""``keys(begin, end)``: the keys and values at these positions of ``N`` requests, ``[N, num_kv_heads, L, dim]``."""


class Rows(NamedTuple):
    """Successive query rows: of one request, or as many of each of several requests of equal lengths.

    first     the first row in the batch
    q         float32 ``[rows, num_qo_heads, dim]``
    requests  their number
    position  of each request's first row
    length    tokens of each request
    """

    first: int
    q: Tensor
    requests: int
    position: int
    length: int


class RowBlock(NamedTuple):
    """Attention of successive query rows from ``first`` on.

    out  float32 ``[rows, num_qo_heads, dim]``
    lse  natural, ``[rows, num_qo_heads]``, or with heads as ``[num_kv_heads, group]``
    """

    first: int
    out: Tensor
    lse: Tensor


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

    def seen(self, position: int, rows: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The keys of the first and of the last of ``rows`` rows from ``position`` on."""
        return self.keys(position), self.keys(position + rows - 1)

    def is_triangle(self, position: int, rows: int) -> bool:
        """Whether ``rows`` rows from ``position`` on see the keys up to their own: the kernel can hide the others."""
        return rows > 1 and position == 0 and self.seen(0, rows) == ((0, 1), (0, self.length))

    def mask(self, rows: int, keys: int, ahead: int) -> Tensor:
        """``[rows, keys]``: 0 for a key that a row sees, else -inf. The first row is ``ahead`` of the first key."""
        hidden = torch.full((rows, keys), -math.inf, dtype=torch.float32, device="cpu")
        return hidden.triu(ahead + self.right + 1) + hidden.tril(ahead - self.left - 1)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False) -> Result:
    """Output and LSE of a :class:`RowBlock`: ``q [rows, num_qo_heads, dim]`` over the keys of ``N`` requests."""
    (requests, num_kv_heads, _, dim), (rows, num_qo_heads, _) = k.shape, q.shape
    if num_qo_heads == num_kv_heads or causal or mask is not None:
        if requests == 1:
            out, lse = FLASH(q.transpose(0, 1)[None], k, v, is_causal=causal, attn_mask=mask, scale=scale)
            return out[0].transpose(0, 1), lse[0].transpose(0, 1)
        q = q.view(requests, -1, num_qo_heads, dim).transpose(1, 2)
        out, lse = FLASH(q, k, v, is_causal=causal, attn_mask=mask, scale=scale)
        return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
    # the query heads of a KV head become rows, since all rows see the same keys: they are read once
    group = num_qo_heads // num_kv_heads
    if rows == requests:
        out, lse = FLASH(q.view(requests, num_kv_heads, group, dim), k, v, scale=scale)
        return out.flatten(1, 2), lse
    q = q.view(requests, -1, num_kv_heads, group, dim).transpose(1, 2).flatten(2, 3)
    out, lse = FLASH(q, k, v, scale=scale)
    heads = requests, num_kv_heads, rows // requests, group
    out, lse = out.view(*heads, -1).transpose(1, 2), lse.view(heads).transpose(1, 2)
    return out.reshape(rows, num_qo_heads, -1), lse.reshape(rows, num_qo_heads)


def _flash_in_float32(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Result:
    """:func:`_flash` of keys and values of any dtype. Those of some KV heads are converted at a time: they stay in the
    cache of the CPU.
    """
    (requests, num_kv_heads, length, dim), group = k.shape, q.shape[1] // k.shape[1]
    step = max(1, CONVERTED_ELEMENTS // (requests * length * dim))
    if k.dtype == torch.float32 or step >= num_kv_heads:
        return _flash(q, *_in_float32(k, v), scale, None, causal)
    parts = []
    for head in range(0, num_kv_heads, step):
        keys = k[:, head : head + step]
        of_heads = _in_float32(keys, keys if k is v else v[:, head : head + step])
        queries = q[:, head * group : (head + step) * group].contiguous()
        out, lse = _flash(queries, *of_heads, scale, None, causal)
        parts.append((out, lse.flatten(1)))
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def _in_float32(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    keys = k.float()
    return keys, keys if k is v else v.float()


def _attend(r: Rows, keys: Keys, scale: float, o: AttentionOptions) -> Iterable[RowBlock]:
    """Attention of ``r``. Rows that see no key are in no block."""
    first, q, requests, position, length = r
    rows = q.shape[0] // requests
    if rows == 1 and o.window_left < 0 and position == length - 1:  # as most do: it sees every key
        return (RowBlock(first, *_flash_in_float32(q, *keys(0, length), scale, False)),)
    window = Window.of(o, max(0, -position) + rows, length)
    without_keys = min(rows, max(0, -position - window.right))
    if without_keys:
        rows, first, position = rows - without_keys, first + without_keys, position + without_keys
        q = q[without_keys:]
    if not rows:
        return ()
    (kv_begin, _), (_, kv_end) = whole = window.seen(position, rows)
    k, v = keys(kv_begin, kv_end)
    causal = window.is_triangle(position, rows)
    if causal or whole[0] == whole[1]:
        return (RowBlock(first, *_flash_in_float32(q, k, v, scale, causal)),)
    k, v = _in_float32(k, v)
    return _attend_masked(first, q, k, v, window, position, (kv_begin, kv_end), scale)


def _attend_masked(
    first: int, q: Tensor, k: Tensor, v: Tensor, window: Window, position: int, seen: tuple[int, int], scale: float
) -> Iterator[RowBlock]:
    """Attention of rows that see different keys, of the half-open range ``seen``. ``k`` and ``v`` are these keys."""
    rows, (kv_begin, kv_end) = q.shape[0], seen
    most_keys = min(kv_end - kv_begin, window.left + window.right + MASK_ROWS)  # that a block of MASK_ROWS rows sees
    step = max(1, min(MASK_ROWS, MASK_ELEMENTS // most_keys))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        (key, _), (_, last) = window.seen(position + begin, end - begin)
        tokens = slice(key - kv_begin, last - kv_begin)
        mask = window.mask(end - begin, last - key, position + begin - key)
        yield RowBlock(first + begin, *_flash(q[begin:end], k[:, :, tokens], v[:, :, tokens], scale, mask))


def _collect(blocks: Iterable[RowBlock], q: Tensor, head_dim_vo: int) -> Result:
    """Output and LSE of all rows of ``q``, as of one :class:`RowBlock`: 0 and -inf in rows of no block."""
    (rows, num_qo_heads, _), result = q.shape, None
    for first, out, lse in blocks:
        if out.shape[-1] != head_dim_vo:
            out = out[..., :head_dim_vo]
        if out.shape[0] == rows:
            return out, lse
        if result is None:
            result = _without_keys(rows, num_qo_heads, head_dim_vo)
        block = slice(first, first + out.shape[0])
        result[0][block], result[1][block] = out, lse.flatten(1)
    return _without_keys(rows, num_qo_heads, head_dim_vo) if result is None else result


def _without_keys(rows: int, num_qo_heads: int, head_dim_vo: int) -> Result:
    out = torch.zeros((rows, num_qo_heads, head_dim_vo), dtype=torch.float32, device="cpu")
    return out, out.new_full(out.shape[:-1], -math.inf)


def _attend_together(o: AttentionOptions, rows: int, length: int) -> bool:
    """Whether one call attends for several requests of ``rows`` rows and ``length`` tokens, as it needs no mask.

    It needs none for requests of one row.
    """
    window = Window.of(o, rows, length)
    first, last = window.seen(length - rows, rows)
    return first == last or window.is_triangle(length - rows, rows)


def _groups(
    rows: Sequence[int], lengths: Sequence[int], num_rows: int, most_tokens: int, o: AttentionOptions
) -> Iterator[range]:
    """Requests that attend together. Those without query rows or keys are left out.

    Several requests have all their rows among ``num_rows``, and ``most_tokens`` tokens at most.
    """
    first = 0
    while first < len(lengths):
        end, count, length = first + 1, rows[first + 1] - rows[first], lengths[first]
        if count > 0 <= rows[first] and length > 0:
            if count == 1 or _attend_together(o, count, length):
                limit = min(len(lengths), first + most_tokens // length)
                while end < limit and rows[end + 1] == rows[end] + count <= num_rows and lengths[end] == length:
                    end += 1
            yield range(first, end)
        first = end


class Pages(NamedTuple):
    """Pages of several requests, as many of each.

    per_request  their number
    numbers      of all; None of ragged KV, whose tokens are in order
    first        if those of each request are in order: they are ``first + request * step + page``. Else None
    """

    per_request: int
    numbers: Tensor | None
    first: int | None = None
    step: int = 1


def _take(cache: Tensor, requests: int, pages: Pages, skipped: int, number: int) -> Tensor:
    """``[requests, num_kv_heads, number, dim]``: tokens of these pages, without those that are ``skipped``.

    A view if the pages of each request are in a row.
    """
    count, numbers, first, step = pages
    page_size, heads, dim = cache.shape[1:]
    page, token, *strides = cache.stride()
    if page_size == 1:
        token = page
    if first is not None and (count == 1 or page == page_size * token):
        sizes, begin = (requests, heads, number, dim), first * page + skipped * token
        return cache.as_strided(sizes, (step * page, strides[0], token, strides[1]), cache.storage_offset() + begin)
    tokens = slice(skipped, skipped + number)
    if count == 1:  # of a single page no more than its tokens are copied
        cache, page_size, tokens = cache[:, tokens], number, slice(0, number)
    if first is not None and step == count:
        taken = bits(cache[first : first + requests * count])
    else:
        assert numbers is not None
        taken = bits(cache).index_select(0, numbers)
    taken = taken.reshape(requests, count * page_size, heads, dim)
    taken = taken if taken.dtype == cache.dtype else taken.view(cache.dtype)
    return (taken if number == taken.shape[1] else taken[:, tokens]).transpose(1, 2)


class PlannedKeys:
    """Keys and values of a plan's requests, from ``caches [pages, page_size, num_kv_heads, dim]``.

    A plan may contain anything: places and pages are clamped, as in the reference. Ragged KV is a cache of pages of
    one token, in order.
    """

    def __init__(self, plan: DecodePlan | PrefillPlan, page_size: int, caches: tuple[Tensor, Tensor]) -> None:
        self.page_size, self.caches, self.kv_indices = page_size, caches, plan.kv_indices
        self.starts = plan.kv_indptr.tolist()

    def of(self, requests: range) -> Keys:
        return functools.partial(self._read, requests)

    def _pages(self, requests: range, page: int, count: int) -> Pages:
        """The numbers of ``count`` pages of each request, from its ``page`` on."""
        places, num_pages = self.kv_indices.shape[0], self.caches[0].shape[0]
        begins = [start + page for start in self.starts[requests.start : requests.stop]]
        begin, end = begins[0], begins[0] + count * len(begins)
        in_row = len(begins) == 1 or begins == list(range(begin, end, count))
        if not in_row or not 0 <= begin < end <= (places or num_pages):
            index = (torch.tensor(begins, device="cpu")[:, None] + torch.arange(count, device="cpu")).flatten()
            index = self.kv_indices[index.clamp_(0, places - 1)] if places else index
            return Pages(count, index.clamp(0, num_pages - 1))
        if not places:
            return Pages(count, None, begin, count)
        index = self.kv_indices if end - begin == places else self.kv_indices[begin:end]
        numbers = index.tolist()
        if min(numbers) < 0 or max(numbers) >= num_pages:
            return Pages(count, index.clamp(0, num_pages - 1))
        first, step = numbers[0], count if len(begins) == 1 else numbers[count] - numbers[0]
        in_order = step > 0 and numbers == [
            number for at in range(first, first + step * len(requests), step) for number in range(at, at + count)
        ]
        return Pages(count, index, first if in_order else None, step)

    def _read(self, requests: range, token: int, token_end: int) -> tuple[Tensor, Tensor]:
        page, skipped = divmod(token, self.page_size)
        pages = self._pages(requests, page, -(-token_end // self.page_size) - page)
        (keys, values), of = self.caches, (len(requests), pages, skipped, token_end - token)
        return _take(keys, *of), _take(values, *of)


class LatentKeys(PlannedKeys):
    """Keys ``[ckv, kpe]`` of MLA, which are the values too: columns past ``ckv`` of the output are dropped."""

    def _read(self, requests: range, token: int, token_end: int) -> tuple[Tensor, Tensor]:
        keys = torch.cat([bits(part) for part in super()._read(requests, token, token_end)], -1)
        keys = keys.view(self.caches[0].dtype)
        return keys, keys


def _attend_batch(
    q: Tensor,
    plan: DecodePlan | PrefillPlan,
    keys_of: type[PlannedKeys],
    caches: tuple[Tensor, Tensor],
    o: AttentionOptions,
    return_lse: bool,
) -> Result | None:
    """``out [rows, num_qo_heads, head_dim_vo]`` and ``lse [rows, num_qo_heads]``; None if a number is not finite."""
    num_rows, num_places = q.shape[0], plan.kv_indices.shape[0]
    is_decode = isinstance(plan, DecodePlan)
    if num_rows == 0 or caches[0].shape[0] == 0 or (is_decode and not num_places):  # no keys, and no ragged KV
        return None
    problem = PlanProblem.of(plan.problem)
    most = min(problem.max_kv_len, num_places * problem.page_size or problem.max_kv_len)
    rows: Sequence[int] = range(num_rows + 1) if is_decode else plan.qo_indptr.tolist()  # type: ignore[union-attr]
    lengths = [min(length, most) for length in plan.kv_len.tolist()[: len(rows) - 1]]
    keys, factors = keys_of(plan, problem.page_size, caches), _kv_scale(o)
    scale, queries = _scale(q, o, factors), q.float()
    most_tokens = MAX_ELEMENTS // (problem.num_kv_heads * problem.head_dim_qk)

    def blocks() -> Iterator[RowBlock]:
        for group in _groups(rows, lengths, num_rows, most_tokens, o):
            first, end, length = rows[group.start], rows[group.stop], lengths[group.start]
            if first < num_rows:  # a plan may have more rows than the query
                of_group = queries if end - first == num_rows else queries[first:end]
                position = length - (rows[group.start + 1] - first)
                yield from _attend(Rows(first, of_group, len(group), position, length), keys.of(group), scale, o)

    return _finalize(*_collect(blocks(), q, problem.head_dim_vo), q, factors, o, return_lse)


def _kv_scale(o: AttentionOptions) -> Sequence[float]:
    return (1.0, 1.0) if o.kv_scale is None else o.kv_scale.tolist()


def _scale(q: Tensor, o: AttentionOptions, factors: Sequence[float]) -> float:
    return (1 / math.sqrt(q.shape[2]) if o.sm_scale is None else o.sm_scale) * factors[0]


def _finalize(
    out: Tensor, lse: Tensor, q: Tensor, factors: Sequence[float], o: AttentionOptions, return_lse: bool
) -> Result | None:
    """The output, with its sink and in its dtype, and the base-2 LSE; None if the reference may differ.

    It may if a number is not finite, but for the LSE of a row that sees no key. Where every logit that a row sees is
    -inf, the kernel gives an LSE of 0.
    """
    if int(lse.count_nonzero()) < lse.numel():
        return None
    if factors[1] != 1.0:
        out *= factors[1]
    if o.sinks is not None:
        lse = lse.flatten(1)
        with_sink = torch.logaddexp(lse, o.sinks)
        out *= torch.where(lse == -math.inf, 0.0, (lse - with_sink).exp())[..., None]
        lse = with_sink
    if not (math.isfinite(float(out.sum())) and float(lse.amax()) < math.inf):
        return None
    lse = (lse.flatten(1) * LOG2E).contiguous() if return_lse else lse.new_empty(0)
    dtype = o.out_dtype or q.dtype
    return (out if dtype == torch.float32 else saturate(out, dtype)).contiguous(), lse


def _or_reference(run: Callable[..., Result | None]) -> Callable[..., Result]:
    """The op that ``run`` computes, unless it returns None: then the reference does."""

    @functools.wraps(run)
    def op(*args: Any, **kwargs: Any) -> Result:
        result = run(*args, **kwargs)
        return getattr(reference, run.__name__)(*args, **kwargs) if result is None else result

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
    return_lse: bool = False,
    **options: Any,
) -> Result | None:
    caches = as_nhd(k_cache, kv_layout), as_nhd(v_cache, kv_layout)
    return _attend_batch(q, DecodePlan(*plan), PlannedKeys, caches, AttentionOptions(**options), return_lse)


@_or_reference
def batch_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: list[Tensor],
    workspace: Tensor,
    *,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    **options: Any,
) -> Result | None:
    caches = as_nhd(k_cache, kv_layout), as_nhd(v_cache, kv_layout)
    return _attend_batch(q, PrefillPlan(*plan), PlannedKeys, caches, AttentionOptions(**options), return_lse)


@_or_reference
def ragged_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: list[Tensor],
    workspace: Tensor,
    *,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    **options: Any,
) -> Result | None:
    keys, values = (t[:, None] if kv_layout == "NHD" else t.transpose(0, 1)[:, None] for t in (k, v))
    return _attend_batch(q, PrefillPlan(*plan), PlannedKeys, (keys, values), AttentionOptions(**options), return_lse)


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
    return_lse: bool = False,
    **options: Any,
) -> Result | None:
    o = AttentionOptions(sm_scale=MLA_SM_SCALE if sm_scale is None else sm_scale, **options)
    caches = ckv_cache[:, :, None], kpe_cache[:, :, None]
    return _attend_batch(torch.cat((q_nope, q_pe), -1), PrefillPlan(*plan), LatentKeys, caches, o, return_lse)


@_or_reference
def single_prefill(
    q: Tensor, k: Tensor, v: Tensor, *, kv_layout: str = "NHD", return_lse: bool = False, **options: Any
) -> Result | None:
    k, v = (t.transpose(0, 1)[None] if kv_layout == "NHD" else t[None] for t in (k, v))
    (rows, length), o = (q.shape[0], k.shape[2]), AttentionOptions(**options)
    if rows == 0 or length == 0:
        return None
    factors = _kv_scale(o)

    def keys(begin: int, end: int) -> tuple[Tensor, Tensor]:
        return (k, v) if end - begin == length else (k[:, :, begin:end], v[:, :, begin:end])

    blocks = _attend(Rows(0, q.float(), 1, length - rows, length), keys, _scale(q, o, factors), o)
    return _finalize(*_collect(blocks, q, v.shape[-1]), q, factors, o, return_lse)
