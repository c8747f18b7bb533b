"""Random valid calls of the wrappers of FlashInfer's API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import attn_ops as flashinfer
from helpers.fuzz.attention import latent_values
from helpers.fuzz.batch import Batch, Shape, draw_options, draw_prefill_options
from helpers.fuzz.draw import Call, Draw
from helpers.fuzz.oracle import Options, Request, attend_all, scaled
from helpers.fuzz.public import (
    Arguments,
    common_options,
    draw_cache,
    draw_mask,
    draw_scales,
    draw_workspace,
    public_call,
)
from helpers.oracle import Expected


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
    of_plan, of_run = d.pick(({"q_len_per_req": rows}, {}), ({}, {"q_len_per_req": rows}))
    split: Arguments = d.pick({}, {}, {"disable_split_kv": True}, {"fixed_split_size": 4})
    workspace = draw_workspace(d, fixed_split="fixed_split_size" in split)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, shape.kv_layout, use_tensor_cores=d.chance(0.5), backend=d.pick("auto", "fa2")
    )
    sizes = (*shape.heads, shape.dims[0], shape.page_size)
    dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.kv_dtype}

    def plan(batch: Batch) -> None:
        wrapper.plan(*batch.page_table(host=True), *sizes, **common_options(o), **dtypes, **split, **of_plan)

    earlier = _earlier(d, plan, shape, **drawn)
    batch = Batch(d, shape, **drawn)
    q, cache, lse = batch.q, draw_cache(d, batch), d.chance(0.7)
    scales = draw_scales(d, shape, "q_scale", "k_scale", "v_scale")
    run = {**scales, **_buffers(d, batch, lse), **of_run, "return_lse": lse, "sinks": o.sinks}

    def prepare() -> None:
        earlier()
        plan(batch)

    exact = replace(scaled(o, **scales), causal=True)
    return public_call(
        d, "decode wrapper", shape, o, lambda: batch.expected(exact), lambda: wrapper.run(q, cache, **run),
        (q, cache, run), f"{batch}, {o}, {scales}, {split}, {of_run}", lse=lse, prepare=prepare, workspace=workspace,
        outputs=tuple(run[k] for k in ("out", "lse") if k in run), rounded=2,
    )  # fmt: skip


def _prefill(
    d: Draw,
    name: str,
    shape: Shape,
    o: Options,
    wrapper: Any,
    workspace: Tensor,
    plan: Callable[[Batch, Arguments], None],
    *,
    paged: bool,
    split: Arguments,
) -> Call:
    """A call of a prefill wrapper, which ``plan(batch, mask)`` plans."""
    earlier = _earlier(d, lambda batch: plan(batch, draw_mask(d, batch)), shape, decode=False)
    batch = Batch(d, shape, decode=False)
    if paged:
        assert batch.pages is not None
    mask, lse = draw_mask(d, batch), d.chance(0.7)
    q, kv = batch.q, (draw_cache(d, batch),) if paged else batch.ragged()
    scales = draw_scales(d, shape, "q_scale", "k_scale", "v_scale")
    run = {"return_lse": lse, **_buffers(d, batch, lse)}
    natural = lse and d.chance(0.3)
    if natural:
        run["lse_base"] = "ln"
    run |= {**scales, "sinks": o.sinks}

    def prepare() -> None:
        earlier()
        plan(batch, mask)

    return public_call(
        d, name, shape, o, lambda: attend_all(batch.requests(), scaled(o, **scales)),
        lambda: wrapper.run(q, *kv, **run), (q, kv, run, mask), f"{batch}, {o}, {scales}, {split}, {list(mask)}",
        lse=lse, natural=natural, prepare=prepare, workspace=workspace,
        outputs=tuple(run[k] for k in ("out", "lse") if k in run), rounded=2,
    )  # fmt: skip


def prefill_wrapper(d: Draw) -> Call:
    shape = Shape.draw(d)
    o = draw_prefill_options(d, shape, "k_scale", "v_scale")
    split: Arguments = d.pick({}, {}, {"disable_split_kv": True}, {"fixed_split_size": 64})
    if d.size == "large":
        split = {}  # it would take a large workspace
    workspace = draw_workspace(d, fixed_split="fixed_split_size" in split)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, shape.kv_layout)
    sizes = (*shape.heads, shape.dims[0], shape.page_size, shape.dims[1])
    dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.kv_dtype}

    def plan(batch: Batch, mask: Arguments) -> None:
        table = batch.page_table()
        where, dtype = str(table[0].device), table[0].dtype
        qo_indptr = batch.qo_indptr(dtype, where)
        wrapper.plan(qo_indptr, *table, *sizes, causal=o.causal, **mask, **common_options(o), **dtypes, **split)

    return _prefill(d, "prefill wrapper", shape, o, wrapper, workspace, plan, paged=True, split=split)


def ragged_wrapper(d: Draw) -> Call:
    shape = Shape.draw(d)
    o = draw_prefill_options(d, shape, "k_scale", "v_scale")
    workspace = draw_workspace(d)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, shape.kv_layout)
    sizes = (*shape.heads, *shape.dims)
    dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.kv_dtype}

    def plan(batch: Batch, mask: Arguments) -> None:
        indptr = batch.qo_indptr(), batch.kv_indptr()
        wrapper.plan(*indptr, *sizes, causal=o.causal, **mask, **common_options(o), **dtypes)

    return _prefill(d, "ragged wrapper", shape, o, wrapper, workspace, plan, paged=False, split={})


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
    q, cache = batch.q, draw_cache(d, batch)
    scales = draw_scales(d, shape, "k_scale", "v_scale")
    run = {**scales, **_buffers(d, batch, True)}

    def prepare() -> None:
        earlier()
        plan(batch)

    return public_call(
        d, "BatchAttention", shape, o, lambda: batch.expected(scaled(o, **scales)),
        lambda: wrapper.run(q, cache, **run), (q, cache, run), f"{batch}, {o}, {scales}", lse=True,
        prepare=prepare, outputs=tuple(run[k] for k in ("out", "lse") if k in run), rounded=2,
    )  # fmt: skip


def sink_wrapper(d: Draw) -> Call:
    shape = Shape.draw(d, fp8=False)
    o = draw_options(d, shape, "soft_cap", "pos_encoding", "rope_scale", "rope_theta")
    sinks = d.normal(shape.heads[0]).to(d.device)
    o = replace(o, sinks=sinks, sm_scale=o.sm_scale or 0.2)
    workspace = draw_workspace(d)
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
    q, cache, lse = batch.q, draw_cache(d, batch), d.chance(0.5)
    table = batch.page_table(wide=False)
    return public_call(
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
    workspace = draw_workspace(d)
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

    return public_call(
        d, "MLA wrapper", shape, o, lambda: batch.expected(o), lambda: wrapper.run(**parts, **run),
        (parts, run), f"{batch}, {o}", lse=lse, natural=natural, prepare=prepare, workspace=workspace,
        outputs=tuple(run[k] for k in ("out", "lse") if k in run),
    )  # fmt: skip


def cascade_wrapper(d: Draw) -> Call:
    """Levels over one cache: a part of the requests' keys in each, for the same query rows."""
    shape = Shape.draw(d, same_dims=True, fp8=False)
    o = draw_options(d, shape, "window_left", "sinks", "pos_encoding", "rope_scale", "rope_theta", "causal")
    workspace, levels = draw_workspace(d), d.pick(1, 2, 3)
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

    q, cache = last.q, draw_cache(d, every)
    arguments = [[table[i] for table in tables] for i in range(4)]
    options = {"sm_scale": o.sm_scale, "logits_soft_cap": o.soft_cap or None}
    return public_call(
        d, "cascade wrapper", shape, o, expected, lambda: wrapper.run(q, cache), (q, cache, tables),
        f"{last}, levels={levels}, lengths={every.kv_lens}, {o}", lse=False, workspace=workspace, rounded=3,
        prepare=lambda: wrapper.plan(
            *arguments, *shape.heads, shape.dims[0], size, q_data_type=shape.dtype, **options
        ),
    )  # fmt: skip


def shared_prefix(d: Draw) -> Call:
    shape = Shape.draw(d, same_dims=True, fp8=False)
    decode = d.chance(0.5)
    workspace = draw_workspace(d)
    batch = Batch(d, shape, decode=decode)
    assert batch.pages is not None
    prefix = Batch(d, shape, requests=1)
    kv, q, cache = prefix.ragged(), batch.q, draw_cache(d, batch)
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
    return public_call(
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
    workspace = draw_workspace(d)
    p, batch = Batch(d, shape, decode=False, requests=1), Batch(d, shape)
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace, shape.kv_layout)
    layout_p = d.pick("NHD", "HND")
    q_p, kv_p, q_d, cache = p.q, p.ragged(layout_p), batch.q, draw_cache(d, batch)
    mask = {f"{k}_p": v for k, v in draw_mask(d, p).items()}
    lse_p, lse_d = d.chance(0.5), d.chance(0.5)
    options = {f"{k}_p": v for k, v in common_options(op).items() if k != "logits_soft_cap"}
    planned = {k: v for k, v in common_options(od).items() if k != "logits_soft_cap"}
    layouts = {"kv_layout_p": layout_p, "kv_layout_d": shape.kv_layout}
    scales = draw_scales(d, shape, "q_scale", "k_scale", "v_scale")
    more = {**options, **mask, **layouts, **scales, "causal_p": op.causal, "return_lse_p": lse_p, "return_lse_d": lse_d}
    table = batch.page_table(host=True)
    a = public_call(
        d, "", shape, op, lambda: attend_all(p.requests(), op), lambda: None, (q_p, kv_p, mask), f"{p}, {op}", lse=lse_p
    )  # fmt: skip
    b = public_call(
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
    workspace = draw_workspace(d)
    p, batch = Batch(d, shape, decode=False), Batch(d, shape)
    assert p.pages is not None
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace, shape.kv_layout)
    q_p, cache_p, q_d, cache_d = p.q, draw_cache(d, p), batch.q, draw_cache(d, batch)
    mask, lse = {f"{k}_p": v for k, v in draw_mask(d, p).items()}, d.chance(0.5)
    planned = {k: v for k, v in common_options(o).items() if k != "logits_soft_cap"}
    tables = p.page_table(wide=False), batch.page_table(wide=False)
    a = public_call(d, "", shape, o, lambda: p.expected(o), lambda: None, (q_p, cache_p, mask), f"{p}, {o}", lse=lse)
    free = replace(o, causal=False)
    b = public_call(
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


WRAPPERS: dict[str, Callable[[Draw], Call]] = {
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
}
"""How a call of each wrapper is drawn."""
