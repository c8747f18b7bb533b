"""Random valid calls with an FP8 query: wrappers and functions, with scales as numbers, tensors and per head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import attn_ops as flashinfer
from helpers.fuzz.batch import FP8, Batch, Shape, draw_options
from helpers.fuzz.draw import Call, Draw, tensors_of
from helpers.fuzz.oracle import Options, Request, attend_all
from helpers.fuzz.rounding import check_rounded

OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, *FP8)
NO_POSITIONS = ("pos_encoding", "rope_scale", "rope_theta", "soft_cap", "sm_scale")


@dataclass
class Query:
    """A batch with an FP8 query, and the scales of its call. ``scales`` are float64 ``[heads, 1]`` in the oracle."""

    d: Draw
    shape: Shape
    batch: Batch
    o: Options
    out_dtype: torch.dtype | None
    lse: bool
    arguments: dict[str, Any] = field(default_factory=dict)
    scales: list[Tensor] = field(default_factory=lambda: [torch.ones(1, 1, dtype=torch.float64)] * 3)

    @classmethod
    def draw(cls, d: Draw, *without: str, rows: int | None = None, same_dims: bool = False) -> Query:
        shape = Shape.draw(d, same_dims=same_dims, fp8=False)
        dtype = d.pick(*FP8)
        shape = replace(shape, dtype=dtype, kv_dtype=d.pick(dtype, *FP8, shape.kv_dtype))
        o = draw_options(d, shape, "k_scale", "v_scale", *without)
        batch = Batch(d, shape, decode=False, rows=rows, max_rows=20, longest=d.by_size(40, 150, 1500))
        assert batch.pages is not None
        return cls(d, shape, batch, o, d.pick(None, *OUT_DTYPES), d.chance(0.6))

    @property
    def computed(self) -> torch.dtype:
        """The dtype that the query is converted to."""
        return torch.float16 if self.shape.kv_dtype in FP8 else self.shape.kv_dtype

    def draw_scales(self, *names: str) -> None:
        """Scales of query, keys and values by these names."""
        d, (heads, kv_heads) = self.d, self.shape.heads
        form = d.pick("none", "number", "tensor", "per head")
        for i, (name, count) in enumerate(zip(names, (heads, kv_heads, kv_heads), strict=True)):
            values = torch.rand(count if form == "per head" else 1, generator=d.generator) + 0.25
            if form == "none":
                continue
            self.arguments[name] = float(values) if form == "number" else values.to(d.device)
            self.scales[i] = values.double()[:, None]
        if form == "per head":
            self.arguments = {name: t.view(-1) for name, t in self.arguments.items()}

    def call(self, name: str, run: Callable[[], Any], reads: Any, prepare: Callable[[], Any] | None = None) -> Call:
        q, k, v = self.scales
        requests = [
            Request(r.q.double() * q, r.k.double() * k, r.v.double() * v, r.mask) for r in self.batch.requests()
        ]
        expected = attend_all(requests, self.o)
        work = torch.finfo(self.computed)
        # A query with scales per head is rounded once more, and kernels round rotated queries and keys.
        rounded = len(q) > 1 or self.o.pos_encoding == "ROPE_LLAMA"
        tolerance = {"float32_eps": work.eps / 8 if rounded and self.computed != torch.float32 else 2**-23}
        tolerance["smallest"] = work.smallest_normal * max(1.0, float(v.max()))

        def check(result: Any) -> None:
            out, lse = result if self.lse else (result, None)
            assert out.dtype == (self.out_dtype or self.shape.dtype)
            flat = out.reshape(expected.out.shape)
            check_rounded(expected, flat, lse, self.computed, **tolerance)

        text = f"{self.batch}, {self.o}, {list(self.arguments)}, out_dtype={self.out_dtype}, {[*map(len, self.scales)]}"
        return Call(name, text, run, check, tensors_of(reads, self.arguments), prepare=prepare)


def _planned(o: Options) -> dict[str, Any]:
    given: dict[str, Any] = {"pos_encoding_mode": o.pos_encoding, "window_left": o.window_left, "sm_scale": o.sm_scale}
    rope = {"rope_scale": o.rope_scale, "rope_theta": o.rope_theta} if o.pos_encoding == "ROPE_LLAMA" else {}
    return given | rope | {"logits_soft_cap": o.soft_cap or None}


def _workspace(d: Draw) -> Tensor:
    return torch.zeros(1 << (27 if d.device == "cuda" else 20), dtype=torch.uint8, device=d.device)


def _dtypes(x: Query) -> dict[str, Any]:
    dtypes = {"q_data_type": x.shape.dtype, "kv_data_type": x.shape.kv_dtype}
    return dtypes if x.out_dtype is None else {**dtypes, "o_data_type": x.out_dtype}


def decode_wrapper(d: Draw) -> Call:
    rows = d.pick(1, 1, 3)
    x = Query.draw(d, "causal", rows=rows, same_dims=True)
    x.o = replace(x.o, causal=True)
    x.draw_scales("q_scale", "k_scale", "v_scale")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(d), x.shape.kv_layout)
    table, sizes = x.batch.page_table(), (*x.shape.heads, x.shape.dims[0], x.shape.page_size)
    q, cache, run = x.batch.q, x.batch.caches(), {**x.arguments, "sinks": x.o.sinks, "return_lse": x.lse}
    return x.call(
        "decode wrapper, FP8 query",
        lambda: wrapper.run(q, cache, **run),
        (q, cache, x.o.sinks),
        lambda: wrapper.plan(*table, *sizes, **_planned(x.o), **_dtypes(x), q_len_per_req=rows),
    )


def prefill_wrapper(d: Draw) -> Call:
    x = Query.draw(d)
    x.draw_scales("q_scale", "k_scale", "v_scale")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(d), x.shape.kv_layout)
    table, qo_indptr = x.batch.page_table(wide=False), x.batch.qo_indptr()
    sizes = (*x.shape.heads, x.shape.dims[0], x.shape.page_size, x.shape.dims[1])
    mask = {"custom_mask": x.batch.draw_masks()} if d.chance(0.25) else {}
    q, cache, run = x.batch.q, x.batch.caches(), {**x.arguments, "sinks": x.o.sinks, "return_lse": x.lse}
    return x.call(
        "prefill wrapper, FP8 query",
        lambda: wrapper.run(q, cache, **run),
        (q, cache, mask, x.o.sinks),
        lambda: wrapper.plan(qo_indptr, *table, *sizes, causal=x.o.causal, **mask, **_planned(x.o), **_dtypes(x)),
    )


def ragged_wrapper(d: Draw) -> Call:
    x = Query.draw(d)
    x.draw_scales("q_scale", "k_scale", "v_scale")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(d), x.shape.kv_layout)
    indptr, sizes = (x.batch.qo_indptr(), x.batch.kv_indptr()), (*x.shape.heads, *x.shape.dims)
    q, kv, run = x.batch.q, x.batch.ragged(), {**x.arguments, "sinks": x.o.sinks, "return_lse": x.lse}
    return x.call(
        "ragged wrapper, FP8 query",
        lambda: wrapper.run(q, *kv, **run),
        (q, kv, x.o.sinks),
        lambda: wrapper.plan(*indptr, *sizes, causal=x.o.causal, **_planned(x.o), **_dtypes(x)),
    )


def trtllm_decode(d: Draw) -> Call:
    rows = d.pick(1, 1, 3)
    x = Query.draw(d, *NO_POSITIONS, rows=rows, same_dims=True)
    bmm1, bmm2 = d.pick(0.05, 0.2), d.pick(0.5, 1.0, 200.0)
    x.o = replace(x.o, causal=True, sm_scale=bmm1)
    x.scales[2] = x.scales[2] * bmm2
    arguments = {
        "query": x.batch.q,
        "kv_cache": x.batch.caches(),
        "workspace_buffer": None,
        "block_tables": x.batch.block_tables(),
        "seq_lens": x.batch.seq_lens,
        "max_seq_len": max(1, *x.batch.kv_lens),
        "bmm1_scale": torch.tensor(bmm1, device=d.device) if d.chance(0.3) else bmm1,
        "bmm2_scale": torch.tensor(bmm2, device=d.device) if d.chance(0.3) else bmm2,
        "window_left": x.o.window_left,
        "kv_layout": x.shape.kv_layout,
        "sinks": x.o.sinks,
        "q_len_per_req": rows,
        "return_lse": x.lse,
        **({} if x.out_dtype is None else {"out_dtype": x.out_dtype}),
    }
    return x.call(
        "trtllm decode, FP8 query", lambda: flashinfer.trtllm_batch_decode_with_kv_cache(**arguments), arguments
    )


FORMS = (decode_wrapper, prefill_wrapper, ragged_wrapper, trtllm_decode)


def fp8_query(d: Draw) -> Call:
    return d.pick(*FORMS)(d)


FP8_CALLS: dict[str, Callable[[Draw], Call]] = {"FP8 query": fp8_query}
