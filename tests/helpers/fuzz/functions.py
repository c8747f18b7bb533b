"""Random valid calls of the public functions of FlashInfer's API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import attn_ops as flashinfer
from helpers.fuzz.append import append_call
from helpers.fuzz.attention import latent_values
from helpers.fuzz.batch import Batch, Shape, draw_options, draw_prefill_options
from helpers.fuzz.draw import Call, Draw, tensors_of
from helpers.fuzz.merge import merge_call
from helpers.fuzz.oracle import Options, attend_all, scaled
from helpers.fuzz.public import (
    Arguments,
    common_options,
    draw_cache,
    draw_mask,
    draw_scales,
    draw_workspace,
    public_call,
)


def single_decode(d: Draw) -> Call:
    shape = Shape.draw(d)
    o = draw_options(d, shape, "causal", "sinks", "k_scale", "v_scale")
    batch = Batch(d, shape, requests=1)
    kv, q, lse = batch.ragged(), d.place(batch.q_rows[0][0]), d.chance(0.5)
    scales = draw_scales(d, shape, "q_scale", "k_scale", "v_scale")
    arguments = {**common_options(o), **scales, "kv_layout": shape.kv_layout, "return_lse": lse}
    return public_call(
        d, "single_decode", shape, o, lambda: attend_all(batch.requests(), scaled(o, **scales)),
        lambda: flashinfer.single_decode_with_kv_cache(q, *kv, **arguments), (q, kv), f"{batch}, {o}, {scales}",
        lse=lse, rounded=2,
    )  # fmt: skip


def single_prefill(d: Draw) -> Call:
    shape = Shape.draw(d)
    o = draw_prefill_options(d, shape, "sinks", "k_scale", "v_scale")
    batch = Batch(d, shape, decode=False, requests=1)
    kv, lse = batch.ragged(), d.chance(0.5)
    mask = draw_mask(d, batch)
    if "custom_mask" in mask and d.chance(0.5):
        mask["custom_mask"] = mask["custom_mask"].view(batch.rows, batch.kv_lens[0])
    scales = draw_scales(d, shape, "k_scale", "v_scale")
    arguments = {
        **common_options(o),
        **mask,
        **scales,
        "causal": o.causal,
        "kv_layout": shape.kv_layout,
        "return_lse": lse,
    }
    q = batch.q
    return public_call(
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
        "kv_cache": draw_cache(d, batch),
        "workspace_buffer": d.pick(None, draw_workspace(d)),
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
    return public_call(
        d, name, shape, o, lambda: batch.expected(exact), lambda: function(**arguments), arguments, f"{batch}, {o}",
        lse=lse, outputs=tuple(tensors_of(arguments.get("out"))), workspace=arguments["workspace_buffer"], rounded=2,
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
    workspace = draw_workspace(d)
    arguments = {
        "query": batch.q,
        "kv_cache": draw_cache(d, batch),
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
    return public_call(
        d, "trtllm context", shape, o, lambda: batch.expected(exact),
        lambda: flashinfer.trtllm_batch_context_with_kv_cache(**arguments), arguments, f"{batch}, {o}", lse=lse,
        outputs=tuple(tensors_of(arguments.get("out"))), workspace=workspace, rounded=2,
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
    return public_call(
        d, "deepseek", shape, o, lambda: attend_all(batch.requests(), exact),
        lambda: flashinfer.trtllm_ragged_attention_deepseek(**arguments), arguments, f"{batch}, {o}", lse=lse,
        outputs=tuple(tensors_of(arguments.get("out"))), rounded=2,
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
    q, workspace = batch.q, draw_workspace(d)
    return public_call(
        d, "cudnn decode", shape, o, lambda: batch.expected(o),
        lambda: flashinfer.cudnn_batch_decode_with_kv_cache(q, k, v, o.sm_scale, workspace, **arguments),
        (q, k, v, arguments), f"{batch}, {o}", lse=lse, outputs=tuple(tensors_of(arguments.get("out"))),
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
    q, workspace = batch.q, draw_workspace(d)
    numbers = {name: float(t) for name, t in scales.items()}
    return public_call(
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
    return public_call(
        d, "xqa", shape, o, lambda: batch.expected(exact),
        lambda: flashinfer.xqa(q, *caches, table, lens, **arguments), (q, caches, table, lens, arguments),
        f"{batch}, {o}, {q_scale}, {kv_scale}, {out_scale}", lse=False,
        outputs=tuple(tensors_of(arguments["output"])), returns=arguments["output"] is None, rounded=3,
    )  # fmt: skip


def _latent_batch(d: Draw, rows: int | None = 1) -> tuple[Shape, Batch, Tensor]:
    shape = replace(Shape.draw(d, mla=True, fp8=False), kv_layout="NHD")
    if shape.dims[0] == shape.dims[1]:  # these functions have a RoPE part
        shape = replace(shape, dims=(shape.dims[1] + 16, shape.dims[1]))
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
    return public_call(
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
    return public_call(
        d, name, shape, o, lambda: batch.expected(exact), lambda: function(**arguments), arguments, f"{batch}, {o}",
        lse=lse, outputs=tuple(tensors_of(arguments.get("out"))), rounded=2,
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


FUNCTIONS: dict[str, Callable[[Draw], Call]] = {
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
"""How a call of each public function is drawn."""
