"""Random valid calls of the public functions and wrappers of FlashInfer's API."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import attn_ops as flashinfer
from helpers.fuzz.batch import Batch, Shape, draw_options, tolerance
from helpers.fuzz.draw import Call, Draw
from helpers.fuzz.ops import append_call, latent_values, merge_call
from helpers.fuzz.oracle import Options, Request, attend_all, scaled
from helpers.oracle import Expected

Arguments = dict[str, Any]


def _tensors(*found: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, Tensor)]


def _workspace(d: Draw, *, fixed_split: bool = False) -> Tensor:
    offset, size = d.pick(0, 0, 1), 1 << 20
    if d.device == "cuda":
        size = 1 << 27
    elif fixed_split:
        size = 1 << 25
    return torch.full((size + offset,), 255, dtype=torch.uint8, device=d.device)[offset:]


def _cache(d: Draw, batch: Batch, kv_layout: str | None = None) -> Any:
    """A tuple, a list, or one tensor of 5 dimensions."""
    form = d.pick("tuple", "list", "stacked")
    if form == "stacked" and batch.shape.dims[0] == batch.shape.dims[1]:
        return batch.stacked(kv_layout)
    return batch.caches(kv_layout) if form == "tuple" else list(batch.caches(kv_layout))


def _common(o: Options) -> Arguments:
    """Options under the names of the wrappers and single functions."""
    given: Arguments = {"pos_encoding_mode": o.pos_encoding, "window_left": o.window_left, "sm_scale": o.sm_scale}
    given["logits_soft_cap"] = o.soft_cap or None
    if o.pos_encoding == "ROPE_LLAMA":
        given |= {"rope_scale": o.rope_scale, "rope_theta": o.rope_theta}
    return given


def _scales(d: Draw, shape: Shape, *names: str) -> Arguments:
    if d.chance(0.7) and not shape.is_fp8:
        return {}
    return {name: d.pick(0.5, 1.0, 2.0) for name in names}


def _call(
    d: Draw,
    name: str,
    shape: Shape,
    o: Options,
    expected: Callable[[], Expected],
    run: Callable[[], Any],
    arguments: Any,
    text: str,
    *,
    lse: bool,
    outputs: tuple[Tensor, ...] = (),
    returns: bool = True,
    natural: bool = False,
    dtype: torch.dtype | None = None,
    prepare: Callable[[], Any] | None = None,
    workspace: Tensor | None = None,
    traceable: bool = True,
    rounded: int = 1,
) -> Call:
    """``outputs`` are the caller's buffers; ``rounded`` counts how often the output is rounded to its dtype."""
    tolerated, exact = tolerance(d, shape, o), expected()
    exact.spread *= rounded

    def check(result: Any) -> None:
        out, sums = result if lse else (result, None)
        if not returns:
            assert out is None
            (out,) = outputs
        for buffer, got in zip(outputs, (out, sums), strict=False):
            if returns and not torch.compiler.is_compiling():
                assert got.data_ptr() == buffer.data_ptr() or not buffer.numel()
        assert out.dtype == (dtype or shape.dtype)
        flat = out.reshape(exact.out.shape)
        base_2 = None if sums is None else (sums / math.log(2) if natural else sums).reshape(exact.lse.shape)
        exact.check(flat, base_2, **tolerated)

    writes = [*outputs, *_tensors(workspace)]
    return Call(name, text, run, check, _tensors(arguments), writes, prepare, traceable)


# Wrappers


def _buffers(d: Draw, batch: Batch, lse: bool) -> Arguments:
    """``out=`` and, if an LSE is returned, ``lse=``."""
    if d.chance(0.6):
        return {}
    return {"out": batch.out(), **({"lse": batch.lse()} if lse else {})}


def _earlier(d: Draw, plan: Callable[[Batch], Any], shape: Shape, **options: Any) -> Callable[[], None]:
    """Plans of other batches on the same wrapper, before the one that counts."""
    batches = [Batch(d, shape, **options) for _ in range(d.pick(0, 0, 1, 2))]

    def prepare() -> None:
        for batch in batches:
            plan(batch)

    return prepare


def decode_wrapper(d: Draw) -> Call:
    shape = Shape.draw(d, same_dims=True)
    o = draw_options(d, shape, "causal", "k_scale", "v_scale")
    rows = d.pick(1, 1, 1, 2, 4)
    drawn: Arguments = {"rows": rows, "decode": False}
    split: Arguments = d.pick({}, {}, {"disable_split_kv": True}, {"fixed_split_size": 4})
    workspace = _workspace(d, fixed_split="fixed_split_size" in split)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, shape.kv_layout, use_tensor_cores=d.chance(0.5), backend=d.pick("auto", "fa2")
    )
    sizes = (*shape.heads, shape.dims[0], shape.page_size)
    dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.kv_dtype}

    def plan(batch: Batch) -> None:
        wrapper.plan(*batch.page_table(host=True), *sizes, **_common(o), **dtypes, **split, q_len_per_req=rows)

    earlier = _earlier(d, plan, shape, **drawn)
    batch = Batch(d, shape, **drawn)
    q, cache, lse = batch.q, _cache(d, batch), d.chance(0.7)
    scales = _scales(d, shape, "q_scale", "k_scale", "v_scale")
    run = {**scales, **_buffers(d, batch, lse), "return_lse": lse, "sinks": o.sinks}

    def prepare() -> None:
        earlier()
        plan(batch)

    exact = replace(scaled(o, **scales), causal=True)
    return _call(
        d, "decode wrapper", shape, o, lambda: batch.expected(exact), lambda: wrapper.run(q, cache, **run),
        (q, cache, run), f"{batch}, {o}, {scales}, {split}", lse=lse, prepare=prepare, workspace=workspace,
        outputs=tuple(run[k] for k in ("out", "lse") if k in run), rounded=2,
    )  # fmt: skip


def _prefill_run(d: Draw, batch: Batch, lse: bool) -> tuple[Arguments, bool]:
    run = {"return_lse": lse, **_buffers(d, batch, lse)}
    natural = lse and d.chance(0.3)
    if natural:
        run["lse_base"] = "ln"
    return run, natural


def _mask(d: Draw, batch: Batch) -> Arguments:
    if d.chance(0.7):
        return {}
    flat = batch.draw_masks()
    return {"custom_mask": flat} if d.chance(0.5) else {"packed_custom_mask": batch.packed_masks()}


def prefill_wrapper(d: Draw) -> Call:
    shape = Shape.draw(d)
    o = draw_options(d, shape, "k_scale", "v_scale")
    split: Arguments = d.pick({}, {}, {"disable_split_kv": True}, {"fixed_split_size": 64})
    if d.size == "large":
        split = {}  # it would take a large workspace
    workspace = _workspace(d, fixed_split="fixed_split_size" in split)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, shape.kv_layout)
    sizes = (*shape.heads, shape.dims[0], shape.page_size, shape.dims[1])
    dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.kv_dtype}

    def plan(batch: Batch, mask: Arguments) -> None:
        table = batch.page_table()
        where, dtype = str(table[0].device), table[0].dtype
        qo_indptr = batch.qo_indptr(dtype, where)
        wrapper.plan(qo_indptr, *table, *sizes, causal=o.causal, **mask, **_common(o), **dtypes, **split)

    earlier = _earlier(d, lambda batch: plan(batch, _mask(d, batch)), shape, decode=False, nonempty=False)
    batch = Batch(d, shape, decode=False)
    assert batch.pages is not None
    mask, lse = _mask(d, batch), d.chance(0.7)
    q, cache = batch.q, _cache(d, batch)
    scales = _scales(d, shape, "q_scale", "k_scale", "v_scale")
    run, natural = _prefill_run(d, batch, lse)
    run |= {**scales, "sinks": o.sinks}

    def prepare() -> None:
        earlier()
        plan(batch, mask)

    return _call(
        d, "prefill wrapper", shape, o, lambda: batch.expected(scaled(o, **scales)),
        lambda: wrapper.run(q, cache, **run), (q, cache, run, mask),
        f"{batch}, {o}, {scales}, {split}, {list(mask)}", lse=lse, natural=natural, prepare=prepare,
        workspace=workspace, outputs=tuple(run[k] for k in ("out", "lse") if k in run), rounded=2,
    )  # fmt: skip


def ragged_wrapper(d: Draw) -> Call:
    shape = Shape.draw(d)
    o = draw_options(d, shape, "k_scale", "v_scale")
    workspace = _workspace(d)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, shape.kv_layout)
    sizes = (*shape.heads, *shape.dims)
    dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.kv_dtype}

    def plan(batch: Batch, mask: Arguments) -> None:
        indptr = batch.qo_indptr(), batch.kv_indptr()
        wrapper.plan(*indptr, *sizes, causal=o.causal, **mask, **_common(o), **dtypes)

    earlier = _earlier(d, lambda batch: plan(batch, _mask(d, batch)), shape, decode=False)
    batch = Batch(d, shape, decode=False)
    mask, lse = _mask(d, batch), d.chance(0.7)
    q, kv = batch.q, batch.ragged()
    scales = _scales(d, shape, "q_scale", "k_scale", "v_scale")
    run, natural = _prefill_run(d, batch, lse)
    run |= {**scales, "sinks": o.sinks}

    def prepare() -> None:
        earlier()
        plan(batch, mask)

    return _call(
        d, "ragged wrapper", shape, o, lambda: attend_all(batch.requests(), scaled(o, **scales)),
        lambda: wrapper.run(q, *kv, **run), (q, kv, run, mask), f"{batch}, {o}, {scales}, {list(mask)}",
        lse=lse, natural=natural, prepare=prepare, workspace=workspace,
        outputs=tuple(run[k] for k in ("out", "lse") if k in run), rounded=2,
    )  # fmt: skip


def batch_attention(d: Draw) -> Call:
    shape = Shape.draw(d, fp8=False)
    o = draw_options(d, shape, "window_left", "sinks", "pos_encoding", "rope_scale", "rope_theta")
    wrapper = flashinfer.BatchAttention(shape.kv_layout, d.device)
    dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.kv_dtype}

    def plan(batch: Batch) -> None:
        indptr, indices, _ = batch.page_table(wide=False)
        sizes = (*shape.heads, *shape.dims, shape.page_size)
        options = {"causal": o.causal, "sm_scale": o.sm_scale, "logits_soft_cap": o.soft_cap or None}
        wrapper.plan(batch.qo_indptr(), indptr, indices, batch.seq_lens, *sizes, **options, **dtypes)

    earlier = _earlier(d, plan, shape, decode=False)
    batch = Batch(d, shape, decode=False)
    q, cache = batch.q, _cache(d, batch)
    scales = _scales(d, shape, "k_scale", "v_scale")
    run = {**scales, **_buffers(d, batch, True)}

    def prepare() -> None:
        earlier()
        plan(batch)

    return _call(
        d, "BatchAttention", shape, o, lambda: batch.expected(scaled(o, **scales)),
        lambda: wrapper.run(q, cache, **run), (q, cache, run), f"{batch}, {o}, {scales}", lse=True,
        prepare=prepare, outputs=tuple(run[k] for k in ("out", "lse") if k in run), rounded=2,
    )  # fmt: skip


def sink_wrapper(d: Draw) -> Call:
    shape = Shape.draw(d, fp8=False)
    o = draw_options(d, shape, "soft_cap", "pos_encoding", "rope_scale", "rope_theta")
    sinks = d.normal(shape.heads[0]).to(d.device)
    o = replace(o, sinks=sinks, sm_scale=o.sm_scale or 0.2)
    workspace = _workspace(d)
    wrapper = flashinfer.BatchAttentionWithAttentionSinkWrapper(
        workspace,
        shape.kv_layout,
        q_data_type=shape.dtype,
        kv_data_type=shape.kv_dtype,
        head_dim_qk=shape.dims[0],
        head_dim_vo=shape.dims[1],
        window_left=o.window_left,
    )
    batch = Batch(d, shape, decode=False)
    assert batch.pages is not None
    q, cache, lse = batch.q, _cache(d, batch), d.chance(0.5)
    table = batch.page_table(wide=False)
    return _call(
        d, "sink wrapper", shape, o, lambda: batch.expected(o),
        lambda: wrapper.run(q, cache, sinks, o.sm_scale, return_lse=lse), (q, cache, sinks, table),
        f"{batch}, {o}", lse=lse, workspace=workspace,
        prepare=lambda: wrapper.plan(
            batch.qo_indptr(), *table, *shape.heads, shape.dims[0], shape.page_size, causal=o.causal
        ),
    )  # fmt: skip


def mla_wrapper(d: Draw) -> Call:
    shape = Shape.draw(d, mla=True, fp8=False)
    o = draw_options(d, shape, "window_left", "soft_cap", "pos_encoding", "rope_scale", "rope_theta")
    o = replace(o, sm_scale=o.sm_scale or 0.1)
    (width, ckv), (heads, _) = shape.dims, shape.heads
    workspace = _workspace(d)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace)
    drawn: Arguments = {"decode": d.chance(0.5), "max_rows": 8, "longest": d.by_size(40, 150, 700)}
    dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.kv_dtype}

    def plan(batch: Batch) -> None:
        indptr, indices, _ = batch.page_table(wide=False)
        sizes = (heads, ckv, width - ckv, shape.page_size)
        wrapper.plan(batch.qo_indptr(), indptr, indices, batch.seq_lens, *sizes, o.causal, o.sm_scale, **dtypes)

    earlier = _earlier(d, plan, shape, **drawn)
    batch = Batch(d, shape, **drawn)
    assert batch.pages is not None
    latent_values(batch)
    q, cache = batch.q, d.place(batch.both[0][:, :, 0])
    parts: Arguments = {"q_nope": q[..., :ckv], "q_pe": q[..., ckv:]} if d.chance(0.5) else {"query": q}
    if d.chance(0.5):
        parts |= {"ckv_cache": cache[..., :ckv], "kpe_cache": cache[..., ckv:]}
    else:
        parts |= {"kv_cache": cache}
    lse, natural = d.chance(0.7), d.chance(0.3)
    run = {**_buffers(d, batch, lse), "return_lse": lse, "sinks": o.sinks, "return_lse_base_on_e": natural}

    def prepare() -> None:
        earlier()
        plan(batch)

    return _call(
        d, "MLA wrapper", shape, o, lambda: batch.expected(o), lambda: wrapper.run(**parts, **run),
        (parts, run), f"{batch}, {o}", lse=lse, natural=natural, prepare=prepare, workspace=workspace,
        outputs=tuple(run[k] for k in ("out", "lse") if k in run),
    )  # fmt: skip


def cascade_wrapper(d: Draw) -> Call:
    """Levels over one cache: a part of the requests' keys in each, for the same query rows."""
    shape = Shape.draw(d, same_dims=True, fp8=False)
    o = draw_options(d, shape, "window_left", "sinks", "pos_encoding", "rope_scale", "rope_theta", "causal")
    workspace, levels = _workspace(d), d.pick(1, 2, 3)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(levels, workspace, shape.kv_layout)
    last = Batch(d, shape, decode=d.chance(0.5), requests=d.pick(1, 2, 4))
    count = len(last.kv_lens)
    # One batch of all levels' requests has the cache; a request of an upper level is seen by all rows.
    every = Batch(d, shape, requests=count + levels - 1)
    assert every.pages is not None
    size = shape.page_size

    def level(requests: range, rows: list[int]) -> tuple[Tensor, ...]:
        pages = [every.pages[b] for b in requests]
        lens = [every.kv_lens[b] for b in requests]
        flat = [page for mine in pages for page in mine]
        ends = [sum(map(len, pages[:b])) for b in range(len(pages) + 1)]
        starts = [sum(rows[:b]) for b in range(len(rows) + 1)]
        columns = starts, ends, flat, [(n - 1) % size + 1 if n else 0 for n in lens]
        return tuple(torch.tensor(c, dtype=torch.int32, device=d.device) for c in columns)

    tables = [level(range(count + i, count + i + 1), [last.rows]) for i in range(levels - 1)]
    tables.append(level(range(count), last.qo_lens))
    shared = range(count, count + levels - 1)

    def expected() -> Expected:
        requests = [
            Request(rows, *(torch.cat([t[x].float() for x in (*shared, b)]) for t in (every.keys, every.values)))
            for b, rows in enumerate(last.q_rows)
        ]
        return attend_all(requests, o)

    q, cache = last.q, _cache(d, every)
    arguments = [[table[i] for table in tables] for i in range(4)]
    options = {"sm_scale": o.sm_scale, "logits_soft_cap": o.soft_cap or None}
    return _call(
        d, "cascade wrapper", shape, o, expected, lambda: wrapper.run(q, cache), (q, cache, tables),
        f"{last}, levels={levels}, lengths={every.kv_lens}, {o}", lse=False, workspace=workspace, rounded=3,
        prepare=lambda: wrapper.plan(
            *arguments, *shape.heads, shape.dims[0], size, q_data_type=shape.dtype, **options
        ),
    )  # fmt: skip


def shared_prefix(d: Draw) -> Call:
    shape = Shape.draw(d, same_dims=True, fp8=False)
    decode = d.chance(0.5)
    workspace = _workspace(d)
    batch = Batch(d, shape, decode=decode)
    assert batch.pages is not None
    prefix = Batch(d, shape, requests=1)
    kv, q, cache = prefix.ragged(), batch.q, _cache(d, batch)
    table = batch.page_table(wide=False)
    o = Options() if decode else Options(sm_scale=d.pick(None, 0.2))

    def expected() -> Expected:
        whole = zip(batch.q_rows, batch.keys, batch.values, strict=True)
        requests = [
            Request(
                rows, torch.cat((prefix.keys[0].float(), k.float())), torch.cat((prefix.values[0].float(), v.float()))
            )
            for rows, k, v in whole
        ]
        return attend_all(requests, o)

    sizes = (*shape.heads, shape.dims[0], shape.page_size)
    wrapper: Any
    if decode:
        wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace, shape.kv_layout)
        prepare = lambda: wrapper.begin_forward(*table, *sizes, data_type=shape.dtype)  # noqa: E731
        run = lambda: wrapper.forward(q, *kv, cache)  # noqa: E731
    else:
        wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace, shape.kv_layout)
        prepare = lambda: wrapper.begin_forward(batch.qo_indptr(), *table, *sizes)  # noqa: E731
        run = lambda: wrapper.forward(q, *kv, cache, causal=False, sm_scale=o.sm_scale)  # noqa: E731
    return _call(
        d, "shared prefix", shape, o, expected, run, (q, kv, cache, table), f"{batch}, prefix={prefix.kv_lens}",
        lse=False, workspace=workspace, prepare=prepare, rounded=3,
    )  # fmt: skip


def _both(a: Call, b: Call, run: Callable[[], tuple[Any, Any]], name: str, prepare: Callable[[], Any]) -> Call:
    def check(result: tuple[Any, Any]) -> None:
        a.check(result[0])
        b.check(result[1])

    text = f"{a.text}; {b.text}"
    return Call(name, text, run, check, [*a.reads, *b.reads], [*a.writes, *b.writes], prepare)


def pod_wrapper(d: Draw) -> Call:
    shape = Shape.draw(d, same_dims=True, fp8=False)
    op, od = (draw_options(d, shape, "sinks", "soft_cap", *more) for more in ((), ("causal",)))
    workspace = _workspace(d)
    p, batch = Batch(d, shape, decode=False, requests=1), Batch(d, shape)
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace, shape.kv_layout)
    layout_p = d.pick("NHD", "HND")
    q_p, kv_p, q_d, cache = p.q, p.ragged(layout_p), batch.q, _cache(d, batch)
    mask = {f"{k}_p": v for k, v in _mask(d, p).items()}
    lse_p, lse_d = d.chance(0.5), d.chance(0.5)
    options = {f"{k}_p": v for k, v in _common(op).items() if k != "logits_soft_cap"}
    planned = {k: v for k, v in _common(od).items() if k != "logits_soft_cap"}
    layouts = {"kv_layout_p": layout_p, "kv_layout_d": shape.kv_layout}
    scales = _scales(d, shape, "q_scale", "k_scale", "v_scale")
    more = {**options, **mask, **layouts, **scales, "causal_p": op.causal, "return_lse_p": lse_p, "return_lse_d": lse_d}
    table = batch.page_table(host=True)
    a = _call(
        d, "", shape, op, lambda: attend_all(p.requests(), op), lambda: None, (q_p, kv_p, mask), f"{p}, {op}", lse=lse_p
    )  # fmt: skip
    b = _call(
        d, "", shape, od, lambda: batch.expected(scaled(od, **scales)), lambda: None, (q_d, cache, table),
        f"{batch}, {od}, {scales}", lse=lse_d, workspace=workspace, rounded=2,
    )  # fmt: skip
    sizes = (*shape.heads, shape.dims[0], shape.page_size)
    return _both(
        a, b, lambda: wrapper.run(q_p, *kv_p, q_d, cache, **more), "POD wrapper",
        lambda: wrapper.plan(*table, *sizes, q_data_type=shape.dtype, **planned),
    )  # fmt: skip


def batch_pod_wrapper(d: Draw) -> Call:
    shape = Shape.draw(d, same_dims=True, fp8=False)
    o = draw_options(d, shape, "sinks", "soft_cap")
    workspace = _workspace(d)
    p, batch = Batch(d, shape, decode=False), Batch(d, shape)
    assert p.pages is not None
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace, shape.kv_layout)
    q_p, cache_p, q_d, cache_d = p.q, _cache(d, p), batch.q, _cache(d, batch)
    mask, lse = {f"{k}_p": v for k, v in _mask(d, p).items()}, d.chance(0.5)
    planned = {k: v for k, v in _common(o).items() if k != "logits_soft_cap"}
    tables = p.page_table(wide=False), batch.page_table(wide=False)
    a = _call(d, "", shape, o, lambda: p.expected(o), lambda: None, (q_p, cache_p, mask), f"{p}, {o}", lse=lse)
    free = replace(o, causal=False)
    b = _call(
        d, "", shape, free, lambda: batch.expected(free), lambda: None, (q_d, cache_d, tables), f"{batch}", lse=lse,
        workspace=workspace,
    )  # fmt: skip
    sizes = (*shape.heads, shape.dims[0], shape.page_size)

    def prepare() -> None:
        wrapper.plan(
            p.qo_indptr(), *tables[0], batch.qo_indptr(), *tables[1], *sizes, q_data_type=shape.dtype, **planned
        )

    return _both(
        a, b, lambda: wrapper.run(q_p, cache_p, q_d, cache_d, **mask, causal_p=o.causal, return_lse=lse),
        "batch POD wrapper", prepare,
    )  # fmt: skip


# Functions


def single_decode(d: Draw) -> Call:
    shape = Shape.draw(d)
    o = draw_options(d, shape, "causal", "sinks", "k_scale", "v_scale")
    batch = Batch(d, shape, requests=1)
    kv, q, lse = batch.ragged(), d.place(batch.q_rows[0][0]), d.chance(0.5)
    scales = _scales(d, shape, "q_scale", "k_scale", "v_scale")
    arguments = {**_common(o), **scales, "kv_layout": shape.kv_layout, "return_lse": lse}
    return _call(
        d, "single_decode", shape, o, lambda: attend_all(batch.requests(), scaled(o, **scales)),
        lambda: flashinfer.single_decode_with_kv_cache(q, *kv, **arguments), (q, kv), f"{batch}, {o}, {scales}",
        lse=lse, rounded=2,
    )  # fmt: skip


def single_prefill(d: Draw) -> Call:
    shape = Shape.draw(d)
    o = draw_options(d, shape, "sinks", "k_scale", "v_scale")
    batch = Batch(d, shape, decode=False, requests=1)
    kv, lse = batch.ragged(), d.chance(0.5)
    mask = _mask(d, batch)
    if "custom_mask" in mask and d.chance(0.5):
        mask["custom_mask"] = mask["custom_mask"].view(batch.rows, batch.kv_lens[0])
    scales = _scales(d, shape, "k_scale", "v_scale")
    arguments = {**_common(o), **mask, **scales, "causal": o.causal, "kv_layout": shape.kv_layout, "return_lse": lse}
    q = batch.q
    return _call(
        d, "single_prefill", shape, o, lambda: attend_all(batch.requests(), scaled(o, **scales)),
        lambda: flashinfer.single_prefill_with_kv_cache(q, *kv, **arguments), (q, kv, mask),
        f"{batch}, {o}, {scales}, {list(mask)}", lse=lse, rounded=2,
    )  # fmt: skip


_NO_POSITIONS = ("soft_cap", "pos_encoding", "rope_scale", "rope_theta", "k_scale", "v_scale", "sm_scale", "causal")


def _number(d: Draw, value: float) -> Any:
    """A scale as a float or as a tensor."""
    return torch.tensor(value, device=d.device) if d.chance(0.3) else value


def _tables(batch: Batch) -> Arguments:
    longest = max(batch.kv_lens, default=0)
    return {"block_tables": batch.block_tables(), "seq_lens": batch.seq_lens, "max_seq_len": max(1, longest)}


def _table_decode(d: Draw, name: str, function: Callable[..., Any], *, lse: bool, indptr: str) -> Call:
    shape = Shape.draw(d, same_dims=True)
    o = replace(draw_options(d, shape, *_NO_POSITIONS), causal=True)
    rows = d.pick(1, 1, 2, 5, None)
    batch = Batch(d, shape, decode=False, rows=rows, max_rows=9)
    bmm1, bmm2 = d.pick(0.05, 0.2, 1.0), d.pick(0.5, 1.0, 2.0)
    arguments = {
        "query": batch.q,
        "kv_cache": _cache(d, batch),
        "workspace_buffer": d.pick(None, _workspace(d)),
        **_tables(batch),
        "bmm1_scale": _number(d, bmm1),
        "bmm2_scale": _number(d, bmm2),
        "window_left": o.window_left,
        "kv_layout": shape.kv_layout,
        "sinks": o.sinks if o.sinks is None or d.chance(0.5) or name.startswith("xqa") else [o.sinks],
    }
    if rows is None:
        arguments[indptr] = batch.qo_indptr()
        if indptr == "cum_seq_lens_q":
            arguments["max_q_len"] = max(1, *batch.qo_lens)
    else:
        arguments["q_len_per_req"] = rows
    if d.chance(0.4):
        arguments["out"] = batch.out()
    lse = lse and d.chance(0.5)
    if lse:
        arguments["return_lse"] = True
    exact = replace(o, sm_scale=bmm1, v_scale=bmm2)
    return _call(
        d, name, shape, o, lambda: batch.expected(exact), lambda: function(**arguments), arguments, f"{batch}, {o}",
        lse=lse, outputs=tuple(_tensors(arguments.get("out"))), workspace=arguments["workspace_buffer"], rounded=2,
    )  # fmt: skip


def trtllm_decode(d: Draw) -> Call:
    return _table_decode(
        d, "trtllm decode", flashinfer.trtllm_batch_decode_with_kv_cache, lse=True, indptr="cum_seq_lens_q"
    )


def xqa_batch_decode(d: Draw) -> Call:
    return _table_decode(
        d, "xqa_batch_decode", flashinfer.xqa_batch_decode_with_kv_cache, lse=False, indptr="q_cu_seq_lens"
    )


def trtllm_context(d: Draw) -> Call:
    shape = Shape.draw(d, same_dims=True)
    o = replace(draw_options(d, shape, *_NO_POSITIONS), causal=d.chance(0.7))
    batch = Batch(d, shape, decode=False)
    assert batch.pages is not None
    bmm1, bmm2, lse = d.pick(0.05, 0.2, 1.0), d.pick(0.5, 1.0, 2.0), d.chance(0.5)
    workspace = _workspace(d)
    arguments = {
        "query": batch.q,
        "kv_cache": _cache(d, batch),
        "workspace_buffer": workspace,
        "block_tables": batch.block_tables(),
        "seq_lens": batch.seq_lens,
        "max_q_len": max(1, *batch.qo_lens),
        "max_kv_len": max(1, *batch.kv_lens),
        "bmm1_scale": _number(d, bmm1),
        "bmm2_scale": _number(d, bmm2),
        "batch_size": len(batch.kv_lens),
        "cum_seq_lens_q": batch.qo_indptr(),
        "cum_seq_lens_kv": batch.kv_indptr(),
        "window_left": o.window_left,
        "sinks": o.sinks,
        "kv_layout": shape.kv_layout,
        "causal": o.causal,
        "return_lse": lse,
    }
    if d.chance(0.4):
        arguments["out"] = batch.out()
    exact = replace(o, sm_scale=bmm1, v_scale=bmm2)
    return _call(
        d, "trtllm context", shape, o, lambda: batch.expected(exact),
        lambda: flashinfer.trtllm_batch_context_with_kv_cache(**arguments), arguments, f"{batch}, {o}", lse=lse,
        outputs=tuple(_tensors(arguments.get("out"))), workspace=workspace, rounded=2,
    )  # fmt: skip


def deepseek(d: Draw) -> Call:
    shape = replace(Shape.draw(d, fp8=False), kv_layout="NHD")
    o = replace(draw_options(d, shape, *_NO_POSITIONS), causal=d.chance(0.5))
    batch = Batch(d, shape, decode=False)
    bmm1, bmm2, lse = d.pick(0.05, 0.2, 1.0), d.pick(0.5, 1.0, 2.0), d.chance(0.5)
    k, v = batch.ragged("NHD")
    arguments = {
        "query": batch.q,
        "key": k,
        "value": v,
        "workspace_buffer": None,
        "seq_lens": batch.seq_lens,
        "max_q_len": max(1, *batch.qo_lens),
        "max_kv_len": max(1, *batch.kv_lens),
        "bmm1_scale": _number(d, bmm1),
        "bmm2_scale": _number(d, bmm2),
        "o_sf_scale": None,
        "batch_size": len(batch.kv_lens),
        "window_left": o.window_left,
        "cum_seq_lens_q": batch.qo_indptr(),
        "cum_seq_lens_kv": batch.kv_indptr(),
        "enable_pdl": None,
        "is_causal": o.causal,
        "return_lse": lse,
        "attention_sinks": o.sinks,
    }
    if d.chance(0.4):
        arguments["out"] = batch.out()
    exact = replace(o, sm_scale=bmm1, v_scale=bmm2)
    return _call(
        d, "deepseek", shape, o, lambda: attend_all(batch.requests(), exact),
        lambda: flashinfer.trtllm_ragged_attention_deepseek(**arguments), arguments, f"{batch}, {o}", lse=lse,
        outputs=tuple(_tensors(arguments.get("out"))), rounded=2,
    )  # fmt: skip


def cudnn_decode(d: Draw) -> Call:
    shape = replace(Shape.draw(d, same_dims=True), kv_layout="HND")
    o = draw_options(d, shape, *_NO_POSITIONS)
    rows = d.pick(1, 1, 3)
    o = replace(o, causal=True, sm_scale=d.pick(0.05, 0.2))
    batch = Batch(d, shape, decode=False, rows=rows)
    k, v = batch.caches()
    lse = d.chance(0.5)
    arguments = {
        "max_sequence_kv": max(1, *batch.kv_lens),
        "actual_seq_lens_kv": batch.seq_lens.view(d.pick((-1,), (-1, 1, 1, 1))),
        "block_tables": batch.block_tables(),
        "return_lse": lse,
        "q_len_per_req": rows,
        "window_left": o.window_left,
        "sinks": o.sinks,
    }
    if d.chance(0.4):
        arguments["out"] = batch.out()
    q, workspace = batch.q, _workspace(d)
    return _call(
        d, "cudnn decode", shape, o, lambda: batch.expected(o),
        lambda: flashinfer.cudnn_batch_decode_with_kv_cache(q, k, v, o.sm_scale, workspace, **arguments),
        (q, k, v, arguments), f"{batch}, {o}", lse=lse, outputs=tuple(_tensors(arguments.get("out"))),
        workspace=workspace,
    )  # fmt: skip


def cudnn_prefill(d: Draw) -> Call:
    paged = d.chance(0.5)
    shape = replace(Shape.draw(d, fp8=False), kv_layout="HND" if paged else "NHD")
    o = Options(causal=d.chance(0.5), sm_scale=d.pick(0.05, 0.2))
    batch = Batch(d, shape, decode=False)
    if paged:
        assert batch.pages is not None
    kv = batch.caches() if paged else batch.ragged("NHD")
    scales = {name: torch.tensor(d.pick(0.5, 2.0), device=d.device) for name in ("q_scale", "k_scale", "v_scale")}
    scales = scales if d.chance(0.4) else {}
    rows = torch.tensor(batch.qo_lens, dtype=torch.int32, device=d.device)
    arguments = {
        "max_token_per_sequence": max(1, *batch.qo_lens),
        "max_sequence_kv": max(1, *batch.kv_lens),
        "actual_seq_lens_q": rows.view(d.pick((-1,), (-1, 1, 1, 1))),
        "actual_seq_lens_kv": batch.seq_lens,
        "block_tables": batch.block_tables() if paged else None,
        "causal": o.causal,
        "return_lse": True,
        **scales,
    }
    q, workspace = batch.q, _workspace(d)
    numbers = {name: float(t) for name, t in scales.items()}
    return _call(
        d, "cudnn prefill", shape, o, lambda: attend_all(batch.requests(), scaled(o, **numbers)),
        lambda: flashinfer.cudnn_batch_prefill_with_kv_cache(q, *kv, o.sm_scale, workspace, **arguments),
        (q, kv, arguments), f"{batch}, {o}, {numbers}, paged={paged}", lse=True, workspace=workspace, rounded=2,
    )  # fmt: skip


def xqa(d: Draw) -> Call:
    shape = Shape.draw(d, same_dims=True)
    window = d.pick(0, 0, 1, 8, 100)
    o = Options(
        causal=True,
        window_left=window - 1,
        sinks=d.pick(None, d.normal(shape.heads[0]).to(d.device)),
        sm_scale=None,
    )
    rows = d.pick(1, 1, 3)
    batch = Batch(d, shape, decode=False, rows=rows)
    count, (heads, kv_heads), dim = len(batch.kv_lens), shape.heads, shape.dims[0]
    q_scale, kv_scale, out_scale = d.pick(0.5, 1.0), d.pick(0.5, 1.0, 2.0), d.pick(1.0, 3.0)
    leading = d.pick((count, 1, rows), (count * rows,)) if rows > 1 else d.pick((count,), (count, 1), (count, 1, 1))
    q = torch.cat(batch.q_rows).view(*leading, heads, dim).to(d.device)
    caches = batch.caches()
    if d.chance(0.3):
        caches = (batch.stacked(),) * 2
    lens = batch.seq_lens if d.chance(0.5) else batch.seq_lens.view(torch.uint32)[:, None]
    arguments = {
        "output": d.buffer(*leading, heads, dim, dtype=shape.dtype) if d.chance(0.5) else None,
        "num_kv_heads": d.pick(None, kv_heads),
        "page_size": d.pick(None, shape.page_size),
        "sinks": o.sinks,
        "q_scale": _number(d, q_scale),
        "kv_scale": _number(d, kv_scale),
        "sliding_win_size": window,
        "kv_layout": shape.kv_layout,
        "rcp_out_scale": out_scale,
        "q_seq_len": rows,
    }
    table = batch.block_tables()
    exact = replace(o, k_scale=q_scale * kv_scale, v_scale=kv_scale * out_scale)
    return _call(
        d, "xqa", shape, o, lambda: batch.expected(exact),
        lambda: flashinfer.xqa(q, *caches, table, lens, **arguments), (q, caches, table, lens, arguments),
        f"{batch}, {o}, {q_scale}, {kv_scale}, {out_scale}", lse=False,
        outputs=tuple(_tensors(arguments["output"])), returns=arguments["output"] is None, rounded=3,
    )  # fmt: skip


def _latent_batch(d: Draw, rows: int | None = 1) -> tuple[Shape, Batch, Tensor]:
    shape = replace(Shape.draw(d, mla=True, fp8=False), kv_layout="NHD")
    batch = Batch(d, shape, decode=False, rows=rows, max_rows=6, longest=d.by_size(40, 150, 700))
    assert batch.pages is not None
    latent_values(batch)
    return shape, batch, d.place(batch.both[0][:, :, 0])


def xqa_mla(d: Draw) -> Call:
    shape, batch, cache = _latent_batch(d)
    q_scale, kv_scale = d.pick(0.05, 0.2), d.pick(0.5, 1.0)
    q, table, lens = batch.q, batch.block_tables(), batch.seq_lens
    exact = Options(sm_scale=1.0, k_scale=q_scale * kv_scale, v_scale=kv_scale)
    values = cache[..., : shape.dims[1]]
    return _call(
        d, "xqa_mla", shape, exact, lambda: batch.expected(exact),
        lambda: flashinfer.xqa_mla(q, cache, values, table, lens, q_scale=q_scale, kv_scale=kv_scale),
        (q, cache, table, lens), str(batch), lse=False, rounded=2,
    )  # fmt: skip


def _mla_decode(d: Draw, name: str, function: Callable[..., Any], *, xqa: bool) -> Call:
    rows = 1 if xqa else d.pick(1, 2, 4)
    shape, batch, cache = _latent_batch(d, rows)
    o = draw_options(d, shape, *_NO_POSITIONS, "window_left")
    bmm1, bmm2 = d.pick(0.05, 0.2), d.pick(0.5, 1.0)
    (width, ckv), count = shape.dims, len(batch.kv_lens)
    query = torch.cat(batch.q_rows).view(count, rows, shape.heads[0], width).to(d.device)
    lse = not xqa and d.chance(0.5)
    arguments = {
        "query": query,
        "kv_cache": cache,
        "workspace_buffer": None,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": ckv,
        "qk_rope_head_dim": width - ckv,
        **_tables(batch),
        "bmm1_scale": _number(d, bmm1),
        "bmm2_scale": _number(d, bmm2),
        "sinks": o.sinks,
        **({} if xqa else {"return_lse": lse}),
    }
    if d.chance(0.4):
        arguments["out"] = d.buffer(count, rows, shape.heads[0], ckv, dtype=shape.dtype)
    exact = replace(o, sm_scale=bmm1, v_scale=bmm2, causal=True)
    return _call(
        d, name, shape, o, lambda: batch.expected(exact), lambda: function(**arguments), arguments, f"{batch}, {o}",
        lse=lse, outputs=tuple(_tensors(arguments.get("out"))), rounded=2,
    )  # fmt: skip


def trtllm_mla(d: Draw) -> Call:
    return _mla_decode(d, "trtllm mla", flashinfer.trtllm_batch_decode_with_kv_cache_mla, xqa=False)


def xqa_mla_decode(d: Draw) -> Call:
    return _mla_decode(d, "xqa mla decode", flashinfer.xqa_batch_decode_with_kv_cache_mla, xqa=True)


def append(d: Draw) -> Call:
    def call(a: Arguments, last: Tensor) -> None:
        table = a["batch_indices"], a["positions"]
        cache = a["k_cache"], a["v_cache"]
        pages = a["kv_indices"], a["kv_indptr"], last
        flashinfer.append_paged_kv_cache(a["k"], a["v"], *table, cache, *pages, kv_layout=a["kv_layout"])

    return append_call(d, "append_kv", call)


def append_mla(d: Draw) -> Call:
    def call(a: Arguments, last: Tensor) -> None:
        places = a["batch_indices"], a["positions"], a["ckv_cache"], a["kpe_cache"]
        flashinfer.append_paged_mla_kv_cache(a["ckv"], a["kpe"], *places, a["kv_indices"], a["kv_indptr"], last)

    return append_call(d, "append_mla_kv", call)


def _merge(op: str, name: str) -> Callable[[Draw], Call]:
    return lambda d: merge_call(d, op, getattr(flashinfer, name))


PUBLIC: dict[str, Callable[[Draw], Call]] = {
    "decode wrapper": decode_wrapper,
    "prefill wrapper": prefill_wrapper,
    "ragged wrapper": ragged_wrapper,
    "BatchAttention": batch_attention,
    "sink wrapper": sink_wrapper,
    "MLA wrapper": mla_wrapper,
    "cascade wrapper": cascade_wrapper,
    "shared prefix": shared_prefix,
    "POD wrapper": pod_wrapper,
    "batch POD wrapper": batch_pod_wrapper,
    "single_decode_with_kv_cache": single_decode,
    "single_prefill_with_kv_cache": single_prefill,
    "trtllm_batch_decode_with_kv_cache": trtllm_decode,
    "trtllm_batch_context_with_kv_cache": trtllm_context,
    "trtllm_ragged_attention_deepseek": deepseek,
    "trtllm_batch_decode_with_kv_cache_mla": trtllm_mla,
    "xqa_batch_decode_with_kv_cache": xqa_batch_decode,
    "xqa_batch_decode_with_kv_cache_mla": xqa_mla_decode,
    "cudnn_batch_decode_with_kv_cache": cudnn_decode,
    "cudnn_batch_prefill_with_kv_cache": cudnn_prefill,
    "xqa": xqa,
    "xqa_mla": xqa_mla,
    "append_paged_kv_cache": append,
    "append_paged_mla_kv_cache": append_mla,
    "variable_length_merge_states": _merge("merge_states_varlen", "variable_length_merge_states"),
    "merge_states (public)": _merge("merge_states", "merge_states"),
    "merge_state_in_place (public)": _merge("merge_state_in_place", "merge_state_in_place"),
}
"""How a call of each public function or wrapper is drawn."""
