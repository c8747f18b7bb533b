"""Attention by PyTorch's flash attention for the CPU, the kernel of ``scaled_dot_product_attention``.

Which calls of it a batch needs follows from numbers of the plan, which are read on the host
(:mod:`attn_ops.kernels.cpu.schedule`), so these functions run eager calls alone. What follows from sizes, strides and
options is computed once for the calls of a key (``for_key``). Pages that lie in order are read in place, others are
gathered.

It computes in float32. In other dtypes the kernel's exponential is less exact, which shows in the LSE: calls of a few
rows in bfloat16 that do not need it are computed in bfloat16. Their output is within the tolerance of any kernel's.

The kernel hides a key by a logit of -inf, and so multiplies its value by 0. Where such a key or value is NaN or
infinite, the LSE or the output may be: then the reference computes the call.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from attn_ops.kernels import reference
from attn_ops.kernels.cpu import schedule
from attn_ops.kernels.cpu.schedule import Batch, KernelCall, Pages, Sees
from attn_ops.kernels.reference.append import as_nhd, bits
from attn_ops.kernels.reference.attention import saturate
from torch import Tensor

from attn_ops.eager.captured_call import _C
from attn_ops.ops.options import MLA_SM_SCALE, AttentionOptions
from attn_ops.plan.state import DecodePlan, PrefillPlan

FLASH = torch._scaled_dot_product_flash_attention_for_cpu
LOG2E = math.log2(math.e)

MASK_ROWS = 512
"""Query rows of a call with a mask, which has an element for each row and key, at most."""

MASK_ELEMENTS = 1 << 24
"""Elements of a mask of more than one row."""

CONVERTED_ELEMENTS = 1 << 19
"""Elements of the keys that are converted to float32 at a time, unless one KV head has more."""

BFLOAT16_ROWS = 32 if torch.cpu._is_avx512_bf16_supported() else 0
"""Query rows of a KV head for which the kernel reads bfloat16, by instructions that the CPU must have. For more, it is
faster to convert to float32.
"""

IS_REGULAR = getattr(_C, "is_regular", lambda out, lse: None)

MAX_READ = 1 << 16
"""Numbers of an output that one thread reads. For more, PyTorch's reductions take several threads."""

MIN_KEPT_BYTES, MAX_KEPT_BYTES = 1 << 17, 1 << 24
"""Of memory that a thread keeps for keys, or for values, that are not in a row."""

NO_LSE = torch.empty(0, dtype=torch.float32, device="cpu")
"""Of calls that do not ask for it."""

Result = tuple[Tensor, Tensor]
"""Output ``[rows, num_qo_heads, dim]`` and LSE ``[rows, num_qo_heads]``, or with heads as ``[num_kv_heads, group]``."""

Keys = Callable[[KernelCall], tuple[Tensor, Tensor]]
"""The keys and values of a kernel call's ``N`` requests, ``[N, num_kv_heads, L, dim]``."""


def _flash(
    q: Tensor, k: Tensor, v: Tensor, requests: int, scale: float, mask: Tensor | None = None, causal: bool = False
) -> Result:
    """Output and natural LSE of ``q [rows, num_qo_heads, dim]`` over the keys of ``requests``."""
    (rows, num_qo_heads, dim), num_kv_heads = q.shape, k.shape[1]
    group = num_qo_heads // num_kv_heads
    if rows == requests and not causal and mask is None:
        # the query heads of a KV head become rows, since all rows see the same keys: they are read once
        out, lse = FLASH(q.view(requests, num_kv_heads, group, dim), k, v, scale=scale)
        return out.flatten(1, 2), lse
    if group == 1 or causal or mask is not None:
        if requests == 1:
            out, lse = FLASH(q.transpose(0, 1).unsqueeze(0), k, v, is_causal=causal, attn_mask=mask, scale=scale)
            return out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)
        q = q.view(requests, -1, num_qo_heads, dim).transpose(1, 2)
        out, lse = FLASH(q, k, v, is_causal=causal, attn_mask=mask, scale=scale)
        return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
    q = q.view(requests, -1, num_kv_heads, group, dim).transpose(1, 2).flatten(2, 3)
    out, lse = FLASH(q, k, v, scale=scale)
    heads = requests, num_kv_heads, rows // requests, group
    out, lse = out.view(*heads, -1).transpose(1, 2), lse.view(heads).transpose(1, 2)
    return out.reshape(rows, num_qo_heads, -1), lse.reshape(rows, num_qo_heads)


def _flash_in_float32(q: Tensor, k: Tensor, v: Tensor, requests: int, scale: float, causal: bool) -> Result:
    """:func:`_flash` of a query in float32, and keys and values of any dtype. Those of some KV heads are converted at a
    time: they stay in the cache of the CPU.
    """
    (_, num_kv_heads, length, dim), group = k.shape, q.shape[1] // k.shape[1]
    step = max(1, CONVERTED_ELEMENTS // (requests * length * dim))
    if step >= num_kv_heads:
        return _flash(q, *_in_float32(k, v), requests, scale, None, causal)
    parts = []
    for head in range(0, num_kv_heads, step):
        keys = k[:, head : head + step]
        of_heads = _in_float32(keys, keys if k is v else v[:, head : head + step])
        queries = q[:, head * group : (head + step) * group].contiguous()
        out, lse = _flash(queries, *of_heads, requests, scale, None, causal)
        parts.append((out, lse.flatten(1)))
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def _in_float32(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    keys = k.float()
    return keys, keys if k is v else v.float()


def _unmasked(q: Tensor, call: KernelCall, keys: Keys, scale: float, exact: bool) -> Result:
    """Output and LSE of the rows ``q [rows, num_qo_heads, dim]`` of a call. The output is float32, or unless ``exact``
    bfloat16.
    """
    k, v = keys(call)
    as_bfloat16 = not exact and q.shape[0] * q.shape[1] <= BFLOAT16_ROWS * call.requests * k.shape[1]
    if q.dtype == k.dtype == v.dtype == (torch.bfloat16 if as_bfloat16 else torch.float32):
        return _flash(q, k, v, call.requests, scale, None, call.causal)
    return _flash_in_float32(q.float(), k, v, call.requests, scale, call.causal)


def _masked(q: Tensor, call: KernelCall, keys: Keys, scale: float) -> Iterator[tuple[int, Tensor, Tensor]]:
    """``(row, out, lse)`` of blocks of the rows of a call, which see different keys. ``row`` is the first of each."""
    window, rows, begin = call.window, call.rows, call.begin
    assert window is not None
    q, (k, v) = q.float(), _in_float32(*keys(call))
    most_keys = min(call.end - begin, window.left + window.right + MASK_ROWS)  # that a block of MASK_ROWS rows sees
    of_block = max(1, min(MASK_ROWS, MASK_ELEMENTS // most_keys))
    for row in range(0, rows, of_block):
        end, position = min(row + of_block, rows), call.position + row
        (key, _), (_, last) = window.seen(position, end - row)
        tokens = slice(key - begin, last - begin)
        mask = window.mask(end - row, last - key, position - key)
        yield row, *_flash(q[row:end], k[:, :, tokens], v[:, :, tokens], 1, scale, mask)


def _collect(q: Tensor, calls: Sequence[KernelCall], keys: Keys, scale: float, head_dim_vo: int, exact: bool) -> Result:
    """Output and LSE of all rows of ``q``, as :func:`_unmasked` of one call: 0 and -inf in rows of none."""
    out = torch.zeros((*q.shape[:2], head_dim_vo), dtype=torch.float32, device="cpu")
    lse = out.new_full(out.shape[:2], -math.inf)
    for call in calls:
        queries = q[call.first : call.first + call.rows]
        if call.window is None:
            blocks: Iterable[tuple[int, Tensor, Tensor]] = ((0, *_unmasked(queries, call, keys, scale, exact)),)
        else:
            blocks = _masked(queries, call, keys, scale)
        for row, of_block, lse_of_block in blocks:
            block = slice(call.first + row, call.first + row + of_block.shape[0])
            out[block], lse[block] = of_block[..., :head_dim_vo], lse_of_block.flatten(1)
    return out, lse


class Form(NamedTuple):
    """What the calls of a key have in common.

    rows         of the query
    sees         which keys a row sees
    scale        of the logits, but for that of ``kv_scale``
    dtype        of the output
    head_dim_vo  of the output. Values of MLA have more columns
    return_lse   the call asks for the LSE
    exact        the kernel computes in float32. It may compute a call of bfloat16 alone in bfloat16, with weights as
                 other kernels round them, but the LSE is then less exact
    """

    rows: int
    sees: Sees
    scale: float
    dtype: torch.dtype
    head_dim_vo: int
    return_lse: bool
    exact: bool

    @classmethod
    def of(cls, q: Tensor, head_dim: int, head_dim_vo: int, return_lse: bool, o: AttentionOptions) -> Form:
        scale, dtype = 1 / math.sqrt(head_dim) if o.sm_scale is None else o.sm_scale, o.out_dtype or q.dtype
        rescaled = o.sinks is not None or o.kv_scale is not None
        exact = return_lse or rescaled or not q.dtype == dtype == torch.bfloat16
        sees = Sees(o.causal, o.window_left, o.window_right)
        return cls(q.shape[0], sees, scale, dtype, head_dim_vo, return_lse, exact)


def _attend(
    form: Form, q: Tensor, calls: Sequence[KernelCall], keys: Keys, sinks: Tensor | None, kv_scale: Tensor | None
) -> Result | None:
    """``out [rows, num_qo_heads, head_dim_vo]`` and ``lse [rows, num_qo_heads]``; None if the reference may differ."""
    rows, _, scale, dtype, head_dim_vo, return_lse, exact = form
    factor = 1.0
    if kv_scale is not None:
        of_keys, factor = kv_scale.tolist()
        scale *= of_keys
    call = calls[0] if len(calls) == 1 else None
    if call is not None and call.rows == rows and call.window is None:
        out, lse = _unmasked(q, call, keys, scale, exact)
        if out.shape[-1] != head_dim_vo:
            out = out[..., :head_dim_vo]
    else:
        out, lse = _collect(q, calls, keys, scale, head_dim_vo, exact)
    if factor != 1.0:
        out *= factor
    if not _is_regular(out, lse):
        return None
    if sinks is not None:
        lse = lse.flatten(1)
        with_sink = torch.logaddexp(lse, sinks)
        out *= torch.where(lse == -math.inf, 0.0, (lse - with_sink).exp())[..., None]
        lse = with_sink
        if not float(lse.amax()) < math.inf:
            return None
    lse = (lse.flatten(1) * LOG2E).contiguous() if return_lse else NO_LSE
    return (out if out.dtype == dtype else saturate(out, dtype)).contiguous(), lse


def _is_regular(out: Tensor, lse: Tensor) -> bool:
    """Whether the reference gives the same: outputs are finite, and LSEs those of rows that see a finite logit, or no
    key.

    Where every logit that a row sees is -inf, the kernel gives an LSE of 0.
    """
    found = IS_REGULAR(out, lse) if out.numel() <= MAX_READ else None
    if found is not None:
        return bool(found)
    return int(lse.count_nonzero()) == lse.numel() and float(lse.amax()) < math.inf and math.isfinite(float(out.sum()))


class Gathered(threading.local):
    """Memory of a thread for the keys, and the values, that a kernel call gathers, until the next.

    New memory of their size would be new pages of the operating system in every call.
    """

    def __init__(self) -> None:
        self.kept = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2

    def index_select(self, cache: Tensor, numbers: Tensor, place: int) -> Tensor:
        """``cache.index_select(0, numbers)`` in the memory of the keys, ``place`` 0, or of the values, 1."""
        shape, dtype = (numbers.shape[0], *cache.shape[1:]), cache.dtype
        size = math.prod(shape) * dtype.itemsize
        if not MIN_KEPT_BYTES <= size <= MAX_KEPT_BYTES:
            return cache.index_select(0, numbers)
        if self.kept[place].shape[0] < size:
            with torch.inference_mode(False):  # other calls take it too
                self.kept[place] = torch.empty(size, dtype=torch.uint8, device="cpu")
        out = self.kept[place][:size].view(dtype).view(shape)
        return torch.index_select(cache, 0, numbers, out=out)


GATHERED = Gathered()


class Reader:
    """Reads the tokens of kernel calls from caches of one form, which ``as_pages`` takes as ``[pages, page_size,
    num_kv_heads, dim]``. Those of keys have ``place`` 0, of values 1.
    """

    def __init__(self, cache: Tensor, as_pages: Callable[[Tensor], Tensor], place: int) -> None:
        pages = as_pages(cache)
        self.as_pages, self.place, self.num_pages = as_pages, place, pages.shape[0]
        self.page_size, self.heads, self.dim = pages.shape[1:]
        self.page, token, self.head, self.element = pages.stride()
        self.token = self.page if self.page_size == 1 else token
        self.is_row = self.page == self.page_size * self.token

    def __call__(self, cache: Tensor, call: KernelCall) -> Tensor:
        """``[requests, num_kv_heads, L, dim]``: a view if the pages of each request are in a row."""
        requests, pages, number, skipped = call.requests, call.pages, call.end - call.begin, call.begin % self.page_size
        if pages.first is not None and (self.is_row or pages.per_request == 1):
            offset = cache.storage_offset() + pages.first * self.page + skipped * self.token
            strides = pages.stride * self.page, self.head, self.token, self.element
            return cache.as_strided((requests, self.heads, number, self.dim), strides, offset)
        return self._gather(self.as_pages(cache), requests, pages, slice(skipped, skipped + number))

    def _gather(self, cache: Tensor, requests: int, pages: Pages, tokens: slice) -> Tensor:
        count, numbers, first, stride = pages
        if count == 1:  # of a single page no more than its tokens are copied
            cache, tokens = cache[:, tokens], slice(None)
        if first is not None and stride == count:
            taken = bits(cache[first : first + requests * count])
        else:
            assert numbers is not None
            taken = GATHERED.index_select(bits(cache), numbers, self.place)
        taken = taken.reshape(requests, -1, self.heads, self.dim)
        taken = taken if taken.dtype == cache.dtype else taken.view(cache.dtype)
        return taken[:, tokens].transpose(1, 2)


Run = Callable[..., Result | None]
"""Makes the calls of a key; None if the reference may give another result."""


def _by_key(make: Callable[..., Run]) -> Callable[..., Result]:
    """The op whose calls of the key of a call ``make`` returns. ``for_key`` returns them too, by the reference if need
    be.
    """
    name = make.__name__

    def for_key(*args: Any, **kwargs: Any) -> Callable[..., Result]:
        run = make(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Result:
            return run(*args, **kwargs) or getattr(reference, name)(*args, **kwargs)

        return call

    @functools.wraps(make)
    def op(*args: Any, **kwargs: Any) -> Result:
        return for_key(*args, **kwargs)(*args, **kwargs)

    op.for_key = for_key  # type: ignore[attr-defined]
    return op


def _left_to_reference(*_: Any, **__: Any) -> None:
    """Calls without keys."""


def _has_keys(plan: DecodePlan | PrefillPlan, q: Tensor, num_pages: int) -> bool:
    """Whether a plan may have rows that see a key. One for decode has no ragged KV."""
    return q.shape[0] > 0 and num_pages > 0 and (isinstance(plan, PrefillPlan) or plan.kv_indices.shape[0] > 0)


def _planned(
    planned: DecodePlan | PrefillPlan,
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    as_pages: Callable[[Tensor], Tensor],
    return_lse: bool,
    options: dict[str, Any],
) -> Run:
    """By a plan, over caches that ``as_pages`` takes as ``[pages, page_size, num_kv_heads, dim]``."""
    form = Form.of(q, q.shape[2], caches[1].shape[-1], return_lse, AttentionOptions(**options))
    read_keys, read_values = (Reader(cache, as_pages, i) for i, cache in enumerate(caches))
    if not _has_keys(planned, q, read_keys.num_pages):
        return _left_to_reference
    kind = type(planned)
    batch = Batch.of(planned.problem, form.rows, read_keys.num_pages, form.sees)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: list[Tensor],
        workspace: Tensor,
        *,
        sinks: Tensor | None = None,
        kv_scale: Tensor | None = None,
        **_: Any,
    ) -> Result | None:
        calls = schedule.of_plan(kind(*plan), batch)
        return _attend(form, q, calls, lambda call: (read_keys(k, call), read_values(v, call)), sinks, kv_scale)

    return run


@_by_key
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
) -> Run:
    as_pages = functools.partial(as_nhd, kv_layout=kv_layout)
    return _planned(DecodePlan(*plan), q, (k_cache, v_cache), as_pages, return_lse, options)


@_by_key
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
) -> Run:
    as_pages = functools.partial(as_nhd, kv_layout=kv_layout)
    return _planned(PrefillPlan(*plan), q, (k_cache, v_cache), as_pages, return_lse, options)


def _tokens(t: Tensor, kv_layout: str) -> Tensor:
    return t if kv_layout == "NHD" else t.transpose(0, 1)


@_by_key
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
) -> Run:
    def as_pages(t: Tensor) -> Tensor:
        return _tokens(t, kv_layout).unsqueeze(1)

    return _planned(PrefillPlan(*plan), q, (k, v), as_pages, return_lse, options)


@_by_key
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
) -> Run:
    """The keys ``[ckv, kpe]`` are the values too: columns past ``ckv`` of the output are dropped."""
    o = AttentionOptions(sm_scale=MLA_SM_SCALE if sm_scale is None else sm_scale, **options)
    form = Form.of(q_nope, 0, ckv_cache.shape[-1], return_lse, o)
    readers = [Reader(cache, lambda t: t.unsqueeze(2), i) for i, cache in enumerate((ckv_cache, kpe_cache))]
    num_pages = readers[0].num_pages
    if not _has_keys(PrefillPlan(*plan), q_nope, num_pages):
        return _left_to_reference
    batch = Batch.of(PrefillPlan(*plan).problem, form.rows, num_pages, form.sees)

    def run(
        q_nope: Tensor,
        q_pe: Tensor,
        ckv: Tensor,
        kpe: Tensor,
        plan: list[Tensor],
        workspace: Tensor,
        *,
        sinks: Tensor | None = None,
        kv_scale: Tensor | None = None,
        **_: Any,
    ) -> Result | None:
        def keys_of(call: KernelCall) -> tuple[Tensor, Tensor]:
            parts = (bits(read(cache, call)) for read, cache in zip(readers, (ckv, kpe), strict=True))
            keys = torch.cat(tuple(parts), -1).view(ckv.dtype)
            return keys, keys

        calls = schedule.of_plan(PrefillPlan(*plan), batch)
        return _attend(form, torch.cat((q_nope, q_pe), -1), calls, keys_of, sinks, kv_scale)

    return run


@_by_key
def single_prefill(
    q: Tensor, k: Tensor, v: Tensor, *, kv_layout: str = "NHD", return_lse: bool = False, **options: Any
) -> Run:
    def as_pages(t: Tensor) -> Tensor:
        return _tokens(t, kv_layout).unsqueeze(0)

    form = Form.of(q, q.shape[2], v.shape[-1], return_lse, AttentionOptions(**options))
    read_keys, read_values = Reader(k, as_pages, 0), Reader(v, as_pages, 1)
    if q.shape[0] == 0 or read_keys.page_size == 0:
        return _left_to_reference
    call = schedule.of_request(form.rows, read_keys.page_size, form.sees)
    calls = () if call is None else (call,)

    def run(
        q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, kv_scale: Tensor | None = None, **_: Any
    ) -> Result | None:
        return _attend(form, q, calls, lambda call: (read_keys(k, call), read_values(v, call)), sinks, kv_scale)

    return run
