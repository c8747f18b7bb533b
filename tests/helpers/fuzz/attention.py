"""Random valid calls of the attention ops, except block-sparse attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import attn_ops
from helpers.fuzz.batch import FP8, Batch, Shape, draw_options, draw_prefill_options, tolerance
from helpers.fuzz.draw import Call, Draw, tensors_of
from helpers.fuzz.oracle import Options, attend_all
from helpers.fuzz.rounding import check_rounded
from helpers.oracle import Expected

ops = torch.ops.attn

COUNTERS = ("split_counters", "queue")
"""Fields of plans that a call writes, and leaves at 0."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def op_options(op: str, o: Options, shape: Shape, d: Draw, mask: Tensor | None = None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "sm_scale": o.sm_scale,
        "logits_soft_cap": o.soft_cap,
        "window_left": o.window_left,
        "sinks": o.sinks,
    }
    if shape.is_fp8 and ((o.k_scale, o.v_scale) != (1.0, 1.0) or d.chance(0.5)):
        options["kv_scale"] = torch.tensor([o.k_scale, o.v_scale], device=d.device)
    if op != "batch_mla":
        options |= {"pos_encoding": o.pos_encoding, "rope_scale": o.rope_scale, "rope_theta": o.rope_theta}
        options["kv_layout"] = shape.kv_layout
    if op != "batch_decode":
        options["causal"] = o.causal
    if op not in ("batch_decode", "batch_mla"):
        options["window_right"] = o.window_right
    if mask is not None:
        options["mask"] = mask
    return options


def attention_call(
    d: Draw, op: str, arguments: dict[str, Any], expected: Expected, shape: Shape, o: Options, text: str, **more: Any
) -> Call:
    arguments = {**arguments, "backend": d.backend, "return_lse": d.chance(0.8)}
    # Triton's interpreter rounds to FP8 without a carry into the exponent: 0.49 becomes 0.25.
    fp8 = () if d.backend == "interpreter" else FP8
    out_dtype = arguments["out_dtype"] = d.pick(None, None, None, *FLOATS, *fp8)
    text, tolerated = f"{text}, out_dtype={out_dtype}", tolerance(d, shape, o)

    def run() -> Any:
        return getattr(ops, op)(**arguments)

    def check(result: tuple[Tensor, Tensor]) -> None:
        out, lse = result
        assert out.dtype == (out_dtype or shape.dtype)
        assert out.is_contiguous()
        sums = lse if arguments["return_lse"] else None
        if sums is None:
            assert lse.shape == (0,)
        if out_dtype is None:
            expected.check(out, sums, **tolerated)
        else:
            check_rounded(expected, out, sums, shape.dtype, **tolerated)

    writes = tensors_of(arguments.get("workspace"))
    plan = arguments.get("plan")
    counters = [getattr(plan, name, None) for name in COUNTERS]
    reads = [t for t in tensors_of(arguments) if all(t is not one for one in counters)]
    return Call(op, text, run, check, reads, writes, **more)


def poison_plan(planner: Any) -> None:
    """No part of an earlier plan may remain in use."""
    for t in planner.state:
        t.fill_(1000)
    planner.workspace.fill_(math.nan)


def batch_decode(d: Draw) -> Call:
    shape = Shape.draw(d)
    o = draw_options(d, shape, "causal")
    batch, padding = Batch(d, shape), d.pick(0, 0, 2)
    fixed = d.chance(0.2)
    planner = attn_ops.DecodePlanner(
        max_batch=len(batch.kv_lens) + padding + d.pick(0, 3),
        max_pages=max(1, sum(map(len, batch.pages)) + d.pick(2, 9)),
        page_size=shape.page_size,
        num_qo_heads=shape.heads[0],
        num_kv_heads=shape.heads[1],
        head_dim=shape.dims[0],
        head_dim_vo=shape.dims[1],
        max_kv_len=d.pick(None, max(1, *batch.kv_lens)),
        window_left=o.window_left if d.chance(0.4) else -1,
        num_ctas=d.pick(None, 1, 3, 16, 40),
        fixed_split_size=d.pick(1, 4, 16) if fixed else None,
        cache_pages=d.pick(None, batch.num_pages),
        device=d.device,
    )
    if d.chance(0.3):  # another batch before, in the same tensors
        planner.plan(torch.zeros(2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.tensor([1]))
    poison_plan(planner)
    plan = planner.plan(*batch.page_table(host=True))
    queries = torch.cat([*batch.q_rows, torch.zeros(padding, *batch.q_rows[0].shape[1:], dtype=shape.dtype)])
    caches = batch.caches() if d.chance(0.6) or shape.dims[0] != shape.dims[1] else tuple(batch.stacked().unbind(1))
    arguments = {
        "q": d.place(queries),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "plan": plan,
        "workspace": planner.workspace,
        **op_options("batch_decode", o, shape, d),
    }
    text = f"{batch}, {o}, padding={padding}, fixed={fixed}"
    return attention_call(d, "batch_decode", arguments, batch.expected(o, padding), shape, o, text)


def _prefill(d: Draw, op: str) -> Call:
    ragged = op == "ragged_prefill"
    shape = Shape.draw(d)
    o = draw_prefill_options(d, shape)
    batch, padding = Batch(d, shape, decode=False), d.pick(0, 0, 2)
    if not ragged:
        assert batch.pages is not None
    mask = None
    if d.chance(0.25):
        batch.draw_masks()
        mask = batch.packed_masks()
        if not len(mask):
            mask = torch.zeros(1, dtype=torch.uint8, device=d.device)
    planned_causal = o.causal and mask is None and d.chance(0.5)
    fixed = d.pick(4, 64) if d.chance(0.15) else None
    planner = attn_ops.PrefillPlanner(
        max_batch=len(batch.kv_lens) + d.pick(0, 3),
        max_tokens=max(1, batch.rows + d.pick(0, 5)),
        max_pages=0 if ragged else max(1, sum(map(len, batch.pages)) + d.pick(2, 9)),
        page_size=1 if ragged else shape.page_size,
        num_qo_heads=shape.heads[0],
        num_kv_heads=shape.heads[1],
        head_dim=shape.dims[0],
        head_dim_vo=shape.dims[1],
        max_kv_len=max(1, *batch.kv_lens) + d.pick(0, 100) if ragged else d.pick(None, max(1, *batch.kv_lens)),
        causal=planned_causal,
        window_left=o.window_left if d.chance(0.4) else -1,
        window_right=o.window_right if d.chance(0.4) else -1,
        tile_rows=d.pick(None, None, 1, 3, 16, 64),
        num_ctas=None if fixed else d.pick(None, None, 1, 12, 60),
        fixed_split_size=fixed,
        device=d.device,
    )
    poison_plan(planner)
    dtype = d.pick(torch.int32, torch.int64)
    qo_indptr = batch.qo_indptr(dtype, d.pick("cpu", d.device))
    if ragged:
        plan = planner.plan(qo_indptr, batch.kv_indptr(qo_indptr.dtype, str(qo_indptr.device)))
        kv = dict(zip(("k", "v"), batch.ragged(), strict=True))
    else:
        indptr = (t.to(qo_indptr.device, qo_indptr.dtype) for t in batch.page_table())
        plan = planner.plan(qo_indptr, *indptr)
        kv = dict(zip(("k_cache", "v_cache"), batch.caches(), strict=True))
    queries = torch.cat([*batch.q_rows, torch.zeros(padding, *batch.q_rows[0].shape[1:], dtype=shape.dtype)])
    arguments = {
        "q": d.place(queries),
        **kv,
        "plan": plan,
        "workspace": planner.workspace,
        **op_options(op, o, shape, d, mask),
    }
    requests = attend_all(batch.requests(), o, padding)
    text = f"{batch}, {o}, padding={padding}, masked={mask is not None}, planned_causal={planned_causal}"
    return attention_call(d, op, arguments, requests, shape, o, text)


def batch_prefill(d: Draw) -> Call:
    return _prefill(d, "batch_prefill")


def ragged_prefill(d: Draw) -> Call:
    return _prefill(d, "ragged_prefill")


def single_prefill(d: Draw) -> Call:
    shape = Shape.draw(d)
    o = draw_prefill_options(d, shape)
    batch = Batch(d, shape, decode=False, requests=d.pick(1, 1, 2, 3, 7), equal=True)
    mask = None
    if d.chance(0.25):
        batch.draw_masks()
        mask = batch.packed_masks(whole_bytes=False)
    k, v = batch.ragged()
    arguments = {"q": batch.q, "k": k, "v": v, **op_options("single_prefill", o, shape, d, mask)}
    if len(batch.kv_lens) > 1 or d.chance(0.5):
        arguments["batch_size"] = len(batch.kv_lens)
    text = f"{batch}, {o}, masked={mask is not None}"
    return attention_call(d, "single_prefill", arguments, attend_all(batch.requests(), o), shape, o, text)


def batch_mla(d: Draw) -> Call:
    shape = Shape.draw(d, mla=True)
    o = draw_options(d, shape, "pos_encoding", "rope_scale", "rope_theta")
    (width, ckv), (heads, _) = shape.dims, shape.heads
    batch = Batch(d, shape, decode=d.chance(0.5), max_rows=8, longest=d.by_size(40, 150, 700))
    assert batch.pages is not None
    latent_values(batch)
    if o.sm_scale is None and width != 576:
        o = Options(**{**vars(o), "sm_scale": 0.2})
    exact = Options(**{**vars(o), "sm_scale": 1 / math.sqrt(192)}) if o.sm_scale is None else o
    planner = attn_ops.PrefillPlanner(
        max_batch=len(batch.kv_lens) + d.pick(0, 2),
        max_tokens=max(1, batch.rows),
        max_pages=max(1, sum(map(len, batch.pages)) + 2),
        page_size=shape.page_size,
        num_qo_heads=heads,
        num_kv_heads=1,
        head_dim=width,
        head_dim_vo=ckv,
        causal=o.causal and d.chance(0.5),
        tile_rows=d.pick(None, None, 1, 4),
        num_ctas=d.pick(None, 1, 33),
        device=d.device,
    )
    poison_plan(planner)
    plan = planner.plan(batch.qo_indptr(), *batch.page_table(wide=False))
    cache = batch.both[0][:, :, 0].float()
    parts = cache[..., :ckv].to(shape.kv_dtype), cache[..., ckv:].to(shape.kv_dtype)
    if d.chance(0.5):
        whole = d.place(batch.both[0][:, :, 0])
        ckv_cache, kpe_cache = whole[..., :ckv], whole[..., ckv:]
    else:
        ckv_cache, kpe_cache = map(d.place, parts)
    q = torch.cat(batch.q_rows)
    if d.chance(0.5):
        whole_q = d.place(q)
        q_nope, q_pe = whole_q[..., :ckv], whole_q[..., ckv:]
    else:
        q_nope, q_pe = d.place(q[..., :ckv]), d.place(q[..., ckv:])
    arguments = {
        "q_nope": q_nope,
        "q_pe": q_pe,
        "ckv_cache": ckv_cache,
        "kpe_cache": kpe_cache,
        "plan": plan,
        "workspace": planner.workspace,
        **op_options("batch_mla", o, shape, d),
    }
    return attention_call(d, "batch_mla", arguments, batch.expected(exact), shape, o, f"{batch}, {o}")


def latent_values(batch: Batch) -> None:
    """The values of MLA are the first columns of the keys."""
    batch.values = [k[..., : batch.shape.dims[1]] for k in batch.keys]
