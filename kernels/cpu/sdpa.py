"""Attention by PyTorch's flash attention for the CPU, the kernel of ``scaled_dot_product_attention``.

The kernel calls of a batch follow from the numbers of the plan, which are read on the host
(:mod:`attn_ops.kernels.cpu.schedule`), so these functions run only eager calls. What follows from sizes, strides and
options is computed once for the calls of a key (``for_key``). Pages that are in order are read in place, other pages
are gathered.

The kernel computes in float32. In other dtypes its exponential is less exact, which shows in the LSE. So bfloat16 calls
of a few rows are computed in bfloat16 only if they do not need the LSE. Their output is within the tolerance of every
kernel.

The kernel hides a key by a logit of -inf, and so multiplies its value by 0. If such a key or value is NaN or infinite,
the LSE or the output may be too: then the reference computes the call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.eager.captured_call import View
from attn_ops.eager.checked_call import Bases
from attn_ops.eager.extension import extension
from attn_ops.kernels import reference
from attn_ops.kernels.cpu import schedule
from attn_ops.kernels.cpu.readers import Reader
from attn_ops.kernels.cpu.schedule import BatchSizes, KernelCall, KeyBounds, Steps
from attn_ops.kernels.cpu.step import Inputs, Step
from attn_ops.kernels.reference.cache_views import as_nhd
from attn_ops.ops.options import LOG2E, AttentionOptions, mla_scale, saturate, softmax_scale
from attn_ops.plan.state import DecodePlan, PrefillPlan

FLASH = torch._scaled_dot_product_flash_attention_for_cpu

MASK_ROWS = 512
"""Most query rows of a call with a mask, which has an element for each row and key."""

MASK_ELEMENTS = 1 << 24
"""Most elements of a mask of more than one row."""

CONVERTED_ELEMENTS = 1 << 19
"""Most elements of the keys that are converted to float32 at a time, unless one KV head has more."""

BFLOAT16_ROWS = 32 if getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)() else 0
"""Most query rows of a KV head that are computed in bfloat16; 0 if the CPU lacks the instructions. For more rows it is
faster to convert to float32.
"""

IS_REGULAR = getattr(extension, "is_regular", lambda out, lse: None)

MAX_READ = 1 << 16
"""Most elements of an output that one thread reads. For more elements PyTorch's reductions use several threads."""

Result = tuple[Tensor, Tensor]
"""Output and natural LSE. The kernel returns them as ``[requests, heads, rows, ...]``."""


def _flash_in_float32(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Result:
    """The kernel in float32 on tensors of any dtype. It converts a few KV heads at a time, to stay in the CPU cache."""
    requests, num_kv_heads, length, dim = k.shape
    step, group = max(1, CONVERTED_ELEMENTS // (requests * length * dim)), q.shape[1] // num_kv_heads
    if step >= num_kv_heads:
        return FLASH(q.float(), *_in_float32(k, v), is_causal=causal, scale=scale)
    parts = []
    for head in range(0, num_kv_heads, step):
        keys = k[:, head : head + step]
        of_heads = _in_float32(keys, keys if k is v else v[:, head : head + step])
        queries = q[:, head * group : (head + step) * group].float()
        parts.append(FLASH(queries, *of_heads, is_causal=causal, scale=scale))
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 1)


def _in_float32(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    keys = k.float()
    return keys, keys if k is v else v.float()


def _unmasked(x: Inputs, step: Step, scale: float, exact: bool) -> Result:
    """The kernel's results for a step without a mask. The output is float32, or unless ``exact`` maybe bfloat16."""
    q, k, v = step.take(x)
    as_bfloat16 = not exact and step.layout.rows_of_kv_head <= BFLOAT16_ROWS
    if q.dtype == k.dtype == v.dtype == (torch.bfloat16 if as_bfloat16 else torch.float32):
        return FLASH(q, k, v, 0.0, step.call.causal, scale=scale)
    return _flash_in_float32(q, k, v, scale, step.call.causal)


def _masked(x: Inputs, step: Step, scale: float) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The kernel's results for blocks of a step's rows: ``(row, out, lse)``, where ``row`` is a block's first row."""
    call = step.call
    window, rows, begin = call.window, call.rows, call.begin
    assert window is not None
    query, k, v = step.take(x)
    query, (k, v) = query.float(), _in_float32(k, v)
    most_keys = min(call.end - begin, window.left + window.right + MASK_ROWS)  # keys that MASK_ROWS rows see
    of_block = max(1, min(MASK_ROWS, MASK_ELEMENTS // most_keys))
    for row in range(0, rows, of_block):
        end, position = min(row + of_block, rows), call.position + row
        (key, _), (_, last) = window.seen(position, end - row)
        tokens = slice(key - begin, last - begin)
        mask = window.mask(end - row, last - key, position - key)
        yield row, *FLASH(query[:, :, row:end], k[:, :, tokens], v[:, :, tokens], attn_mask=mask, scale=scale)


def _collect(x: Inputs, steps: Sequence[Step], form: Form, scale: float) -> Result:
    """Output and LSE of all rows of a query, ``[rows, num_qo_heads, ...]``: 0 and -inf in rows that are in no step."""
    out = torch.zeros((form.rows, form.num_qo_heads, form.head_dim_vo), dtype=torch.float32, device="cpu")
    lse = out.new_full(out.shape[:2], -math.inf)
    for step in steps:
        if step.rows:
            blocks: Iterable[tuple[int, Tensor, Tensor]] = ((0, *_unmasked(x, step, scale, form.exact)),)
        else:
            blocks = _masked(x, step, scale)
        for row, of_block, lse_of_block in blocks:
            rows = step.layout.rows(of_block, (-1, form.num_qo_heads, of_block.shape[-1]))
            block = slice(step.call.first + row, step.call.first + row + rows.shape[0])
            out[block], lse[block] = rows[..., : form.head_dim_vo], step.layout.lse_rows(lse_of_block)
    return out, lse


class Form(NamedTuple):
    """Sizes and options that the calls of a key have in common.

    rows          query rows
    num_qo_heads  query heads
    bounds        bounds of the keys that a row sees
    scale         factor of the logits, without ``kv_scale``
    dtype         dtype of the output
    head_dim_vo   columns of the output. Values of MLA have more columns
    return_lse    whether the call asks for the LSE
    exact         whether the kernel must compute in float32. It may compute a call that is bfloat16 throughout in
                  bfloat16, with probabilities rounded as by other kernels, but the LSE is then less exact
    shape         shape of the output of one step that has all rows
    last_shape    shape of the result's output, if it is another
    """

    rows: int
    num_qo_heads: int
    bounds: KeyBounds
    scale: float
    dtype: torch.dtype
    head_dim_vo: int
    return_lse: bool
    exact: bool
    shape: tuple[int, ...]
    last_shape: tuple[int, ...] | None

    @classmethod
    def of(
        cls,
        q: Tensor,
        head_dim: int,
        head_dim_vo: int,
        return_lse: bool,
        o: AttentionOptions,
        shape: tuple[int, ...] | None,
    ) -> Form:
        scale, dtype = softmax_scale(o.sm_scale, head_dim), o.out_dtype or q.dtype
        rescaled = o.sinks is not None or o.kv_scale is not None
        exact = return_lse or rescaled or not q.dtype == dtype == torch.bfloat16
        bounds = KeyBounds(o.causal, o.window_left, o.window_right)
        rows, heads = q.shape[:2]
        if shape is not None and o.sinks is None and head_dim == head_dim_vo:
            of_step, shape = shape, None
        else:
            of_step = rows, heads, -1
        return cls(rows, heads, bounds, scale, dtype, head_dim_vo, return_lse, exact, of_step, shape)


def _attend(
    form: Form, x: Inputs, steps: Sequence[Step], sinks: Tensor | None, kv_scale: Tensor | None
) -> Result | None:
    """The op's output and LSE; None if the reference may give another result."""
    rows, _, _, scale, dtype, head_dim_vo, return_lse, exact, shape, last_shape = form
    factor, layout = 1.0, None
    if kv_scale is not None:
        of_keys, factor = kv_scale.tolist()
        scale *= of_keys
    if len(steps) == 1 and steps[0].rows == rows:
        layout = steps[0].layout
        out, lse = _unmasked(x, steps[0], scale, exact)
    else:
        out, lse = _collect(x, steps, form, scale)
    if factor != 1.0:
        out *= factor
    if not _is_regular(out, lse):
        return None
    if layout is None:
        out = out.view(shape)
    else:
        out = layout.rows(out if x[2] is not None else out[..., :head_dim_vo], shape)
    if return_lse or sinks is not None:
        lse = lse if layout is None else layout.lse_rows(lse)
        if sinks is not None:
            with_sink = torch.logaddexp(lse, sinks)
            out *= torch.where(lse == -math.inf, 0.0, (lse - with_sink).exp())[..., None]
            lse = with_sink
            if not float(lse.amax()) < math.inf:
                return None
    if last_shape is not None:
        out = out.view(last_shape)
    lse = (lse * LOG2E).contiguous() if return_lse else out.new_empty(0, dtype=torch.float32)
    return (out if out.dtype == dtype else saturate(out, dtype)).contiguous(), lse


def _is_regular(out: Tensor, lse: Tensor) -> bool:
    """Whether the reference gives the same result: outputs are finite, and LSEs are neither infinite nor 0.

    The kernel gives an LSE of 0 for a row whose logits are all -inf. A row without keys has an LSE of -inf, which is
    regular.
    """
    found = IS_REGULAR(out, lse) if out.numel() <= MAX_READ else None
    if found is not None:
        return bool(found)
    return int(lse.count_nonzero()) == lse.numel() and float(lse.amax()) < math.inf and math.isfinite(float(out.sum()))


Run = Callable[..., Result | None]
"""A function for the calls of a key. It returns None if the reference may give another result."""


def _by_key(make: Callable[..., Run]) -> Callable[..., Result]:
    """The op, made of ``make``, which takes the first call of a key and returns the function for the calls of the key.

    ``make`` takes :class:`Bases` before the arguments of the call, and its result takes the tensors of the bases. The
    op's attribute ``for_key`` calls ``make``. With ``bases`` it returns that result, else a function of the op's own
    arguments, which calls the reference if the result is None.
    """
    name = make.__name__

    def for_key(*args: Any, bases: Bases | None = None, **kwargs: Any) -> Run:
        run = make(bases or Bases(args), *args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Result:
            return run(*args, **kwargs) or getattr(reference, name)(*args, **kwargs)

        return call if bases is None else run

    @functools.wraps(make)
    def op(*args: Any, **kwargs: Any) -> Any:
        return for_key(*args, **kwargs)(*args, **kwargs)

    op.for_key = for_key  # type: ignore[attr-defined]
    return op


def _left_to_reference(*_: Any, **__: Any) -> None:
    """The run of calls without keys: the reference computes them."""


def _has_keys(plan: DecodePlan | PrefillPlan, q: Tensor, num_pages: int, ragged: bool = False) -> bool:
    """Whether a plan may have rows that see a key: it has query rows, and pages or ragged KV."""
    return q.shape[0] > 0 and num_pages > 0 and (ragged or plan.kv_indices.shape[0] > 0)


def _planned(
    kind: type[DecodePlan | PrefillPlan],
    bases: Bases,
    plan: Sequence[Tensor],
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    as_pages: Callable[[Tensor], Tensor],
    return_lse: bool,
    options: dict[str, Any],
    ragged: bool = False,
) -> Run:
    """The run of a planned op, over caches that ``as_pages`` views as ``[pages, page_size, num_kv_heads, dim]``."""
    form = Form.of(q, q.shape[2], caches[1].shape[-1], return_lse, AttentionOptions(**options), bases.shape)
    (of_q, *of_caches), planned = bases.tensors[:3], kind(*plan)
    query = View.of(q, of_q)
    readers = [Reader(cache, base, as_pages, i) for i, (cache, base) in enumerate(zip(caches, of_caches, strict=True))]
    if not _has_keys(planned, q, readers[0].num_pages, ragged):
        return _left_to_reference
    steps = _steps(planned, form, readers, functools.partial(Step.of, query, readers))

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Sequence[Tensor],
        workspace: Tensor,
        *,
        sinks: Tensor | None = None,
        kv_scale: Tensor | None = None,
        **_: Any,
    ) -> Result | None:
        return _attend(form, (q, k, v), steps.of(plan), sinks, kv_scale)

    return run


def _steps(
    plan: DecodePlan | PrefillPlan, form: Form, readers: Sequence[Reader], make: Callable[[KernelCall], Step]
) -> Steps[Step]:
    batch = BatchSizes.of(plan.problem, form.rows, readers[0].num_pages, form.bounds)
    return Steps(type(plan), batch, make)


@_by_key
def batch_decode(
    bases: Bases,
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
    return _planned(DecodePlan, bases, plan, q, (k_cache, v_cache), as_pages, return_lse, options)


@_by_key
def batch_prefill(
    bases: Bases,
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
    return _planned(PrefillPlan, bases, plan, q, (k_cache, v_cache), as_pages, return_lse, options)


def _tokens(t: Tensor, kv_layout: str) -> Tensor:
    return t if kv_layout == "NHD" else t.transpose(0, 1)


@_by_key
def ragged_prefill(
    bases: Bases,
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

    return _planned(PrefillPlan, bases, plan, q, (k, v), as_pages, return_lse, options, ragged=True)


@_by_key
def batch_mla(
    bases: Bases,
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
    o = AttentionOptions(sm_scale=mla_scale(sm_scale), **options)
    form = Form.of(q_nope, 0, ckv_cache.shape[-1], return_lse, o, bases.shape)
    given = list(zip((q_nope, q_pe, ckv_cache, kpe_cache), bases.tensors, strict=False))
    take_nope, take_pe = (View.of(t, base).taker() for t, base in given[:2])
    readers = [Reader(cache, base, lambda t: t.unsqueeze(2), i) for i, (cache, base) in enumerate(given[2:])]
    planned = PrefillPlan(*plan)
    if not _has_keys(planned, q_nope, readers[0].num_pages):
        return _left_to_reference
    rows, heads, dim = *q_nope.shape[:2], q_nope.shape[2] + q_pe.shape[2]
    query = View((rows, heads, dim), (heads * dim, dim, 1), 0)  # of both parts, which each call concatenates
    steps = _steps(planned, form, readers, functools.partial(Step.of_latents, query, readers))

    def run(
        q_nope: Tensor,
        q_pe: Tensor,
        ckv: Tensor,
        kpe: Tensor,
        plan: Sequence[Tensor],
        workspace: Tensor,
        *,
        sinks: Tensor | None = None,
        kv_scale: Tensor | None = None,
        **_: Any,
    ) -> Result | None:
        if torch.is_autocast_enabled("cpu"):  # it changes torch.cat
            return None
        q = torch.cat((take_nope(q_nope), take_pe(q_pe)), -1)
        return _attend(form, (q, (ckv, kpe), None), steps.of(plan), sinks, kv_scale)

    return run


@_by_key
def single_prefill(
    bases: Bases,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch_size: int = 1,
    *,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    **options: Any,
) -> Run:
    def as_pages(t: Tensor) -> Tensor:
        tokens = _tokens(t, kv_layout)
        return tokens.unflatten(0, (batch_size, tokens.shape[0] // batch_size))

    form = Form.of(q, q.shape[2], v.shape[-1], return_lse, AttentionOptions(**options), bases.shape)
    of_q, *of_kv = bases.tensors[:3]
    query = View.of(q, of_q)
    readers = [Reader(t, base, as_pages, i) for i, (t, base) in enumerate(zip((k, v), of_kv, strict=True))]
    length = readers[0].page_size
    if q.shape[0] == 0 or length == 0:
        return _left_to_reference
    most_tokens = schedule.MAX_ELEMENTS // (readers[0].heads * q.shape[2])
    calls = schedule.of_requests(batch_size, form.rows // batch_size, length, most_tokens, form.bounds)
    steps = tuple(Step.of(query, readers, call) for call in calls)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch_size: int = 1,
        *,
        sinks: Tensor | None = None,
        kv_scale: Tensor | None = None,
        **_: Any,
    ) -> Result | None:
        return _attend(form, (q, k, v), steps, sinks, kv_scale)

    return run
