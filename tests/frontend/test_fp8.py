"""FP8 queries and outputs of the public functions and wrappers, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.fp8_products import rounding_of_probabilities
from helpers.mla_requests import Latents
from helpers.oracle import Expected
from helpers.tracing import GraphRecorder
from helpers.wrapper_requests import DEVICE, Requests, workspace
from torch import Tensor

import attn_ops as flashinfer
from attn_ops import errors

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16 = torch.bfloat16, torch.float16
QO_LENS = (1, 5, 0, 40)
KV_LENS = (70, 3, 9, 130)


def check(
    out: Tensor, expected: Expected, factor: float | Tensor = 1.0, *, dtype: torch.dtype = E4M3, eps: float = 2**-7
) -> None:
    """``out`` is the oracle's output times ``factor``, saturated and rounded to ``dtype``.

    ``eps`` times the spread is the error before that rounding: of probabilities and of the op's output in 16 bits.
    """
    assert out.dtype == dtype
    factor = torch.as_tensor(factor, dtype=torch.float64).cpu()
    limits = torch.finfo(dtype)
    truth = expected.out * factor
    error = (eps + 2**-20 * (1 + expected.reach)[..., None]) * expected.spread * factor + 2**-24 * factor
    if dtype in (E4M3, E5M2):
        largest = truth.abs() + error
        exponent = largest.clamp_min(limits.smallest_normal).log2().floor()
        error = error + 0.5 * limits.eps * 2**exponent
        truth = truth.clamp(limits.min, limits.max)
    got = out.cpu().double()
    assert got.isfinite().all()
    wrong = (got - truth).abs() > error * (1 + 1e-9)
    assert not wrong.any(), (got[wrong][:4], truth[wrong][:4], error.expand_as(truth)[wrong][:4])


def tables(r: Requests) -> tuple[Tensor, Tensor]:
    return r.block_tables(), r.seq_lens


def trtllm_decode(r: Requests, **options: Any) -> Any:
    return flashinfer.trtllm_batch_decode_with_kv_cache(
        r.q, r.cache(), None, *tables(r), 130, kv_layout=r.kv_layout, **options
    )


def trtllm_context(r: Requests, **options: Any) -> Any:
    scales = options.pop("bmm1_scale", 1.0), options.pop("bmm2_scale", 1.0)
    lengths = 40, 130, *scales, 4, r.qo_indptr, r.kv_indptr
    return flashinfer.trtllm_batch_context_with_kv_cache(
        r.q, r.cache(), None, *tables(r), *lengths, kv_layout=r.kv_layout, causal=False, **options
    )


def planned_prefill(r: Requests, **options: Any) -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), r.kv_layout)
    wrapper.plan(r.qo_indptr, *r.table, *r.sizes, q_data_type=r.dtype, kv_data_type=r.kv_dtype, **options)
    return wrapper


def planned_ragged(r: Requests, **options: Any) -> flashinfer.BatchPrefillWithRaggedKVCacheWrapper:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    dtypes = {"q_data_type": r.dtype, "kv_data_type": r.kv_dtype}
    wrapper.plan(r.qo_indptr, r.kv_indptr, *r.heads, r.head_dims[0], **dtypes, **options)
    return wrapper


def decode_requests(**options: Any) -> Requests:
    return Requests(**{"dtype": BF16, "kv_dtype": E4M3, **options})


def prefill_requests(**options: Any) -> Requests:
    return Requests(KV_LENS, QO_LENS, **{"dtype": BF16, "kv_dtype": E4M3, **options})


FACTOR = 300.0
"""Scale of the output, with which some elements exceed the range of e4m3."""


def _into(out: Tensor, call: Callable[[Tensor], Any]) -> Tensor:
    call(out)
    return out


def _empty(q: Tensor) -> Tensor:
    return torch.empty_like(q, dtype=E4M3)


OUTPUTS: dict[str, Callable[[Requests], Tensor]] = {
    "xqa": lambda r: _into(
        _empty(r.q),
        lambda out: flashinfer.xqa(r.q, *r.cache(), *tables(r), out, rcp_out_scale=FACTOR, kv_layout=r.kv_layout),
    ),
    "xqa_batch_decode": lambda r: flashinfer.xqa_batch_decode_with_kv_cache(
        r.q, r.cache(), None, *tables(r), 130, 0.125, FACTOR, out=_empty(r.q), kv_layout=r.kv_layout, o_scale=3.0
    ),
    "trtllm decode": lambda r: trtllm_decode(r, bmm1_scale=0.125, bmm2_scale=FACTOR, out_dtype=E4M3, o_scale=3.0),
    "trtllm decode, tensor scales": lambda r: trtllm_decode(
        r,
        bmm1_scale=torch.tensor(0.125, device=DEVICE),
        bmm2_scale=torch.tensor(FACTOR, device=DEVICE),
        out=_empty(r.q),
    ),
    "wrapper": lambda r: _planned_decode(r).run(r.q, r.cache(), v_scale=FACTOR),
    "wrapper, out": lambda r: _planned_decode(r).run(
        r.q, r.cache(), v_scale=torch.tensor(FACTOR, device=DEVICE), out=_empty(r.q)
    ),
}


def _planned_decode(r: Requests) -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), r.kv_layout)
    wrapper.plan(*r.table, *r.sizes, q_data_type=r.dtype, kv_data_type=r.kv_dtype, o_data_type=E4M3)
    return wrapper


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize("name", OUTPUTS)
def test_fp8_output_of_decode(name: str, kv_dtype: torch.dtype | None) -> None:
    r = decode_requests(kv_dtype=kv_dtype)
    expected = r.expected(sm_scale=0.125)
    assert (expected.out.abs() * FACTOR > torch.finfo(E4M3).max).any()
    check(OUTPUTS[name](r), expected, FACTOR)


PREFILL_OUTPUTS: dict[str, Callable[[Requests], Tensor]] = {
    "trtllm context": lambda r: trtllm_context(r, bmm1_scale=0.125, bmm2_scale=FACTOR, out_dtype=E4M3),
    "trtllm context, out": lambda r: trtllm_context(
        r, bmm1_scale=torch.tensor(0.125, device=DEVICE), bmm2_scale=FACTOR, out=_empty(r.q)
    ),
    "wrapper": lambda r: planned_prefill(r, o_data_type=E4M3).run(r.q, r.cache(), v_scale=FACTOR),
    "ragged wrapper": lambda r: planned_ragged(r, o_data_type=E4M3).run(r.q, *r.ragged(), o_scale=1 / FACTOR),
    "ragged wrapper, tensor": lambda r: planned_ragged(r, o_data_type=E4M3).run(
        r.q, *r.ragged(), o_scale=torch.full((1, 1, 1, 1), 1 / FACTOR, device=DEVICE), out=_empty(r.q)
    ),
    "deepseek": lambda r: flashinfer.trtllm_ragged_attention_deepseek(
        *(r.q, *r.ragged(), None, r.seq_lens, 40, 130, 0.125, FACTOR, None, 4, -1, r.qo_indptr, r.kv_indptr),
        *(None, False, False),
        out=_empty(r.q),
    ),
}


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
@pytest.mark.parametrize("name", PREFILL_OUTPUTS)
def test_fp8_output_of_prefill(name: str, kv_dtype: torch.dtype | None) -> None:
    r = prefill_requests(kv_dtype=kv_dtype)
    check(PREFILL_OUTPUTS[name](r), r.expected(sm_scale=0.125), FACTOR)


@pytest.mark.parametrize("paged", [True, False])
def test_fp8_output_of_cudnn(paged: bool) -> None:
    r = prefill_requests(kv_layout="HND")
    cache = r.cache() if paged else r.ragged()
    lengths = {"actual_seq_lens_q": torch.tensor(QO_LENS, device=DEVICE), "actual_seq_lens_kv": r.seq_lens}
    bounds = {"max_token_per_sequence": 40, "max_sequence_kv": 130, "causal": False, "return_lse": True}
    table = r.block_tables() if paged else None
    out, lse = flashinfer.cudnn_batch_prefill_with_kv_cache(
        *(r.q, *cache, 0.125, None), **bounds, **lengths, block_tables=table, v_scale=FACTOR, o_data_type=E4M3
    )
    expected = r.expected(sm_scale=0.125)
    check(out, expected, FACTOR)
    torch.testing.assert_close(lse.cpu().double(), expected.lse, rtol=1e-5, atol=1e-5)
    decode = decode_requests(kv_layout="HND")
    out = flashinfer.cudnn_batch_decode_with_kv_cache(
        *(decode.q, *decode.cache(), 0.125, None),
        max_sequence_kv=130,
        actual_seq_lens_kv=decode.seq_lens,
        block_tables=decode.block_tables(),
        out=_empty(decode.q),
    )
    check(out, decode.expected(sm_scale=0.125))


def test_an_e5m2_output_is_saturated() -> None:
    r = decode_requests()
    out = trtllm_decode(r, bmm1_scale=0.125, bmm2_scale=1e6, out_dtype="float8_e5m2")
    check(out, r.expected(sm_scale=0.125), 1e6, dtype=E5M2)
    assert (out.float().abs() == torch.finfo(E5M2).max).any()


def test_scales_that_exceed_float16() -> None:
    """The op's output has 16 bits; scales of an FP8 output are applied after it, in float32."""
    r = decode_requests(dtype=F16)
    v_scale, o_scale = torch.tensor(1e-6, device=DEVICE), 1e6
    out = trtllm_decode(r, bmm1_scale=0.125, bmm2_scale=v_scale * o_scale, out_dtype=E4M3)
    check(out, r.expected(sm_scale=0.125))


def test_scales_of_an_fp8_output_are_multiplied_in_float32() -> None:
    """The values times their scale exceed float16; the output does not."""
    r = prefill_requests(dtype=F16)
    v_scale = torch.tensor(1e6, device=DEVICE)
    out = planned_ragged(r, o_data_type=E4M3).run(r.q, *r.ragged(), v_scale=v_scale, o_scale=1e6)
    check(out, r.expected())


def test_a_scaled_fp8_output_is_rounded_once() -> None:
    """Over one key the output is its value. The product with the scale is exact in float32, and not in float16."""
    values, scale = (1 + torch.arange(1024) / 1024).half().view(1, 16, 64).to(DEVICE), 1 + 2**-9
    zeros = torch.zeros_like(values)
    out = flashinfer.single_prefill_with_kv_cache(zeros, zeros, values, v_scale=scale, o_dtype=E4M3)
    assert torch.equal(out.float(), (values.float() * scale).to(E4M3).float())
    assert not torch.equal(out.float(), (values * scale).to(E4M3).float())


def test_a_bad_o_scale() -> None:
    r = prefill_requests()
    with pytest.raises(errors.OptionError, match=r"o_scale is 0\.0; expected a positive number"):
        planned_ragged(r, o_data_type=E4M3).run(r.q, *r.ragged(), o_scale=0.0)


def test_strings_and_bools_are_no_scales() -> None:
    """A negative scale of the values is one."""
    r = prefill_requests()
    wrapper = planned_ragged(r, o_data_type=E4M3)
    for name in ("q_scale", "k_scale", "v_scale", "o_scale"):
        for value in ("2", True):
            with pytest.raises(errors.ArgumentError, match=f"{name} is {value!r}, of type .*; expected a number or a"):
                wrapper.run(r.q, *r.ragged(), **{name: value})
    negative, positive = (wrapper.run(r.q, *r.ragged(), v_scale=value) for value in (-2.0, 2.0))
    assert torch.equal(negative.float(), -positive.float())


# ------------------------------------------------------------------------------------------------------------ queries


def per_head(r: Requests) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = r.heads[0], r.heads[1], r.heads[1]
    return tuple((torch.rand(n, generator=generator) * 1.5 + 0.1).to(DEVICE) for n in sizes)  # type: ignore[return-value]


def scaled(r: Requests, scales: tuple[Any, Any, Any], **options: Any) -> Expected:
    """The oracle's result of the FP8 numbers times their scales."""
    q_scale, k_scale, v_scale = (torch.as_tensor(s).cpu().double().reshape(-1, 1) for s in scales)
    parts = zip(r.q.cpu().split(r.rows), r.batch.keys, r.batch.values, strict=True)
    requests = [(q.double() * q_scale, k.double() * k_scale, v.double() * v_scale, None) for q, k, v in parts]
    return Expected.of(requests, **options)


@pytest.mark.parametrize("out_dtype", [F16, BF16, E4M3])
@pytest.mark.parametrize("kind", ["paged", "ragged", "single"])
@pytest.mark.parametrize("form", ["numbers", "tensors", "per head"])
def test_fp8_query_of_prefill(kind: str, form: str, out_dtype: torch.dtype) -> None:
    r = prefill_requests(dtype=E4M3)
    scales: tuple[Any, Any, Any] = (0.5, 1.5, 2.0)
    if form == "tensors":
        scales = tuple(torch.tensor(s, device=DEVICE) for s in scales)
    if form == "per head":
        scales = per_head(r)
    if kind == "single":
        r = Requests((70,), (5,), dtype=E4M3, kv_dtype=E4M3)
        got = flashinfer.single_prefill_with_kv_cache(r.q, *r.ragged(), *scales, o_dtype=out_dtype, return_lse=True)
    elif kind == "ragged":
        got = planned_ragged(r, o_data_type=out_dtype).run(r.q, *r.ragged(), *scales, return_lse=True)
    else:
        got = planned_prefill(r, o_data_type=out_dtype).run(r.q, r.cache(), *scales, return_lse=True)
    expected = scaled(r, scales)
    check(got[0], expected, dtype=out_dtype, eps=2**-6 + rounding_of_probabilities())
    torch.testing.assert_close(got[1].cpu().double(), expected.lse, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_scales_per_head_of_heads_before_tokens(kind: str) -> None:
    r = prefill_requests(dtype=E4M3, kv_layout="HND")
    scales = per_head(r)
    if kind == "paged":
        out = planned_prefill(r, o_data_type=BF16).run(r.q, r.cache(), *scales)
    else:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "HND")
        wrapper.plan(r.qo_indptr, r.kv_indptr, *r.sizes[:3], q_data_type=E4M3, kv_data_type=E4M3, o_data_type=BF16)
        out = wrapper.run(r.q, *r.ragged("HND"), *scales)
    check(out, scaled(r, scales), dtype=BF16, eps=2**-6)


def test_fp8_query_without_dtypes_of_the_output() -> None:
    r = decode_requests(dtype=E4M3)
    expected = r.expected(sm_scale=0.125)
    for out in (
        trtllm_decode(r, bmm1_scale=0.125),
        flashinfer.xqa(r.q, *r.cache(), *tables(r), kv_layout=r.kv_layout),
        flashinfer.xqa_batch_decode_with_kv_cache(r.q, r.cache(), None, *tables(r), 130, 0.125, kv_layout=r.kv_layout),
    ):
        check(out, expected)
    check(trtllm_decode(r, bmm1_scale=0.125, out_dtype=BF16), expected, dtype=BF16)


def test_fp8_query_of_deepseek_gives_bfloat16() -> None:
    r = prefill_requests(dtype=E4M3)
    out = flashinfer.trtllm_ragged_attention_deepseek(
        *(r.q, *r.ragged(), None, r.seq_lens, 40, 130, 0.125, 2.0, None, 4, -1, r.qo_indptr, r.kv_indptr),
        *(None, False, False),
    )
    check(out, r.expected(sm_scale=0.125), 2.0, dtype=BF16, eps=2**-7 + rounding_of_probabilities())


def test_fp8_query_of_the_decode_wrapper() -> None:
    r = decode_requests(dtype=E4M3)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), r.kv_layout)
    wrapper.plan(*r.table, *r.sizes, q_data_type=E4M3, kv_data_type=E4M3, o_data_type=BF16)
    out = wrapper.run(r.q, r.cache(), q_scale=0.5, k_scale=2.0, v_scale=3.0)
    check(out, scaled(r, (0.5, 2.0, 3.0)), dtype=BF16)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("form", ["numbers", "tensors", "per head"])
def test_fp8_query_of_the_decode_wrapper_with_scales_by_position(form: str, rows: int) -> None:
    r = Requests((70, 3, 130), (rows,) * 3, dtype=E4M3, kv_dtype=E4M3)
    scales: tuple[Any, Any, Any] = (0.5, 1.5, 2.0)
    if form == "tensors":
        scales = tuple(torch.tensor(s, device=DEVICE) for s in scales)
    if form == "per head":
        scales = per_head(r)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), r.kv_layout)
    options = {"q_len_per_req": rows, "is_causal": False}
    wrapper.plan(*r.table, *r.sizes, q_data_type=E4M3, kv_data_type=E4M3, o_data_type=BF16, **options)
    eps = 2**-6 + rounding_of_probabilities()
    for more in ((), (3.0,)):  # FlashInfer reads three of them
        check(wrapper.run(r.q, r.cache(), *scales, *more), scaled(r, scales), dtype=BF16, eps=eps)


def test_fewer_than_three_scales_by_position_of_an_fp8_query() -> None:
    """FlashInfer ignores them over a paged cache, and takes scales that are not given as 1 over ragged keys."""
    r = prefill_requests(dtype=E4M3)
    paged, ragged = planned_prefill(r, o_data_type=BF16), planned_ragged(r, o_data_type=BF16)
    eps = 2**-6 + rounding_of_probabilities()
    for given in ((0.5,), (0.5, 1.5)):
        check(paged.run(r.q, r.cache(), *given), r.expected(), dtype=BF16, eps=eps)
        q_scale, k_scale = (*given, 1.0)[:2]
        check(ragged.run(r.q, *r.ragged(), *given), scaled(r, (q_scale, k_scale, 1.0)), dtype=BF16, eps=eps)


def test_negative_scales_per_head() -> None:
    r = prefill_requests(dtype=E4M3)
    q_scale, k_scale, v_scale = per_head(r)
    out = planned_prefill(r, o_data_type=BF16).run(r.q, r.cache(), -q_scale, k_scale, v_scale)
    check(out, scaled(r, (-q_scale, k_scale, v_scale)), dtype=BF16, eps=2**-6 + rounding_of_probabilities())


@pytest.mark.parametrize("value", [-0.5, 0.0, -2], ids=str)
@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_a_negative_scale_is_a_number_or_a_tensor(dtype: torch.dtype, value: float) -> None:
    r = prefill_requests(dtype=dtype)
    wrapper = planned_prefill(r, o_data_type=BF16)
    one = torch.tensor(float(value), device=DEVICE)
    for scales in ({"q_scale": value}, {"q_scale": value, "k_scale": one}, {"q_scale": 0.5, "k_scale": value}):
        tensors = {name: torch.as_tensor(float(scale), device=DEVICE) for name, scale in scales.items()}
        numbers = wrapper.run(r.q, r.cache(), **scales, return_lse=True)
        for got, want in zip(numbers, wrapper.run(r.q, r.cache(), **tensors, return_lse=True), strict=True):
            torch.testing.assert_close(got, want)
    both = {name: torch.tensor(float(value), device=DEVICE) for name in ("q_scale", "k_scale")}
    torch.testing.assert_close(
        wrapper.run(r.q, r.cache(), q_scale=value, k_scale=value), wrapper.run(r.q, r.cache(), **both)
    )
    with pytest.raises(errors.OptionError, match=r"the product of the logits' scales \(q_scale, k_scale\) is -"):
        wrapper.run(r.q, r.cache(), q_scale=-(2.0**100), k_scale=2.0**100)


def test_a_scale_of_latents_is_positive() -> None:
    m = Latents(dtype=BF16, kv_dtype=E4M3)
    wrapper, tensors = planned_mla(m, BF16), (*m.split(m.q), *m.split(m.cache))
    for value in (-0.5, 0.0):
        with pytest.raises(errors.OptionError, match=rf"run: ckv_scale is {value}; expected a positive number"):
            wrapper.run(*tensors, ckv_scale=value, kpe_scale=1.0)


def test_a_wrong_number_of_scales() -> None:
    r = prefill_requests(dtype=E4M3)
    wrapper = planned_prefill(r, o_data_type=BF16)
    with pytest.raises(errors.ShapeError, match="k_scale has 3 values; expected 1, or 2, one per head"):
        wrapper.run(r.q, r.cache(), k_scale=torch.ones(3, device=DEVICE))
    with pytest.raises(errors.UnsupportedError, match="bmm1_scale has 4 values; expected one for the whole tensor"):
        trtllm_decode(decode_requests(dtype=E4M3), bmm1_scale=torch.ones(4, device=DEVICE))


def test_a_cascade_refuses_an_fp8_query() -> None:
    r = prefill_requests(dtype=E4M3)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(1, workspace())
    lists = [r.qo_indptr], *([t] for t in r.table)
    with pytest.raises(errors.UnsupportedError, match="q_data_type is float8_e4m3fn"):
        wrapper.plan(*lists, *r.sizes, q_data_type=E4M3)


def test_fp8_query_and_output_compile() -> None:
    r = prefill_requests(dtype=E4M3)
    wrapper, scales = planned_prefill(r, o_data_type=E4M3), per_head(r)
    step = torch.compile(lambda q, k, v, *s: wrapper.run(q, (k, v), *s), fullgraph=True, backend="aot_eager")
    check(step(r.q, *r.cache(), *scales), scaled(r, scales), eps=2**-6)


# ---------------------------------------------------------------------------------------------------------------- MLA


def planned_mla(m: Latents, q_data_type: torch.dtype, **options: Any) -> flashinfer.mla.BatchMLAPagedAttentionWrapper:
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace())
    dtypes = q_data_type, m.cache.dtype
    wrapper.plan(m.qo_indptr, *m.table, 3, *m.dims, m.page_size, False, 0.1, *dtypes, **options)
    return wrapper


@pytest.mark.parametrize("q_dtype", [BF16, E4M3])
def test_fp8_output_of_mla(q_dtype: torch.dtype) -> None:
    m = Latents(dtype=q_dtype, kv_dtype=E4M3)
    wrapper = planned_mla(m, q_dtype, output_dtype=E4M3, output_scale="per-tensor")
    out = wrapper.run(*m.split(m.q), *m.split(m.cache), ckv_scale=0.5, kpe_scale=2.0, o_scale=0.25)
    check(out, m.expected(0.5, 2.0, sm_scale=0.1), 4.0)
    with pytest.raises(errors.OptionError, match="output_scale is 'row'; expected none, per-tensor"):
        planned_mla(m, q_dtype, output_scale="row")


@pytest.mark.parametrize("scales", [(0.01, 3.0), (0.5, -2.0), (2.0, -0.5)], ids=str)
@pytest.mark.parametrize("q_dtype", [F16, BF16, E4M3])
def test_scales_of_mla_that_are_far_apart(q_dtype: torch.dtype, scales: tuple[float, float]) -> None:
    """No part of the query overflows float16, in which an FP8 query is multiplied too."""
    m, (ckv_scale, kpe_scale) = Latents(dtype=q_dtype, kv_dtype=E4M3), scales
    m.q = (m.q.float() * 100).to(q_dtype)
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(m.qo_indptr, *m.table, 3, *m.dims, m.page_size, False, 1e-3, q_dtype, m.cache.dtype)
    out = wrapper.run(*m.split(m.q), *m.split(m.cache), ckv_scale=ckv_scale, kpe_scale=kpe_scale)
    check(out, m.expected(ckv_scale, kpe_scale, sm_scale=1e-3), dtype=BF16 if q_dtype == E4M3 else q_dtype)


def test_fp8_query_of_mla_gives_bfloat16() -> None:
    m = Latents(dtype=E4M3, kv_dtype=E4M3)
    out = planned_mla(m, E4M3).run(*m.split(m.q), *m.split(m.cache), ckv_scale=0.5, kpe_scale=0.5)
    check(out, m.expected(0.5, sm_scale=0.1), dtype=BF16)
    m = Latents(((1, 40), (1, 0), (1, 20)), dtype=E4M3, kv_dtype=E4M3)
    out = flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(
        *(m.q[:, None], m.cache, None, 0, *m.dims, m.block_tables, m.table[2], 40), bmm1_scale=0.1
    )
    check(out[:, 0], m.expected(sm_scale=0.1), dtype=BF16)


@pytest.mark.parametrize("q_dtype", [BF16, E4M3])
@pytest.mark.parametrize("planned", [True, False])
def test_scales_per_group_of_latents(planned: bool, q_dtype: torch.dtype) -> None:
    lengths = ((1, 40), (1, 0), (1, 20))
    m = Latents(lengths, dims=(256, 16), dtype=q_dtype, kv_dtype=E4M3)
    groups = torch.rand(*m.cache.shape[:2], 2, generator=torch.Generator().manual_seed(5)) + 0.25
    latents = []
    starts, pages, _ = (t.cpu() for t in m.table)
    for b, latent in enumerate(m.latents):
        place = torch.arange(len(latent))
        scale = groups[pages[starts[b] + place // m.page_size].long(), place % m.page_size].repeat_interleave(128, 1)
        latents.append(torch.cat((latent[:, :256].double() * scale, latent[:, 256:].double() * 2.0), 1))
    parts = zip(m.q.cpu().split(m.rows), latents, strict=True)
    expected = Expected.of([(q, k[:, None], k[:, None, :256], None) for q, k in parts], sm_scale=0.1)
    scales: dict[str, Any] = {"ckv_scale_arr": groups.to(DEVICE), "kpe_scale": 2.0}
    wrapper = planned_mla(m, q_dtype)
    tables = {} if planned else {"page_table": m.block_tables, "kv_len": m.table[2]}
    for run in (wrapper.run, torch.compile(wrapper.run, fullgraph=True, backend="aot_eager")):
        out = run(*m.split(m.q), *m.split(m.cache), **tables, **scales)
        assert out.dtype == BF16
        # Latents are rounded to bfloat16, which moves logits.
        assert (out.cpu().double() - expected.out).abs().max() < 0.06 * expected.spread.max()


def test_scales_per_group_alone_make_a_page_table() -> None:
    """Of the dequantized pages: kept by eager calls, so that they repeat, also if the first call was compiled."""
    m = Latents(((1, 40), (1, 20)), dims=(256, 16), dtype=BF16, kv_dtype=E4M3)
    groups: dict[str, Any] = {"ckv_scale_arr": torch.ones(*m.cache.shape[:2], 2, device=DEVICE)}
    wrapper, tensors = planned_mla(m, BF16), (*m.split(m.q), *m.split(m.cache))
    expected = wrapper.run(*tensors, ckv_scale=1.0, kpe_scale=1.0)
    assert wrapper._page_numbers is None
    graph = GraphRecorder()
    compiled = torch.compile(wrapper.run, fullgraph=True, backend=graph)(*tensors, **groups, kpe_scale=1.0)
    assert wrapper._page_numbers is None
    assert graph.ops == ["plan_prefill", "batch_mla"]  # which publishes the page table
    torch.testing.assert_close(compiled, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(wrapper.run(*tensors, **groups, kpe_scale=1.0), compiled)
    kept = wrapper._page_numbers
    wrapper.run(*tensors, **groups, kpe_scale=1.0)
    assert wrapper._page_numbers is kept is not None
    more = Latents(((1, 400), (1, 200)), dims=(256, 16), dtype=BF16, kv_dtype=E4M3)
    sizes = 3, *more.dims, more.page_size, False, 0.1, BF16, E4M3
    wrapper.plan(more.qo_indptr, *more.table, *sizes)
    groups["ckv_scale_arr"] = torch.ones(*more.cache.shape[:2], 2, device=DEVICE)
    tensors = *more.split(more.q), *more.split(more.cache)
    expected = wrapper.run(*tensors, ckv_scale=1.0, kpe_scale=1.0)
    torch.testing.assert_close(wrapper.run(*tensors, **groups, kpe_scale=1.0), expected, rtol=0.02, atol=0.02)


def test_wrong_scales_per_group() -> None:
    m = Latents(dims=(256, 16), dtype=BF16, kv_dtype=E4M3)
    wrapper, tensors = planned_mla(m, BF16), (*m.split(m.q), *m.split(m.cache))
    pages, page_size, _ = m.cache.shape
    for scales, error, message in (
        (torch.ones(pages, page_size, 3), errors.ShapeError, r"Invalid shape of ckv_scale_arr: .* ckv / 128"),
        (torch.ones(pages, page_size, 2).half(), errors.DTypeError, "ckv_scale_arr is float16; expected float32"),
    ):
        with pytest.raises(error, match=message):
            wrapper.run(*tensors, ckv_scale_arr=scales.to(DEVICE), kpe_scale=1.0)
    *queries, ckv, kpe = tensors
    with pytest.raises(errors.ShapeError, match=r"ckv_cache is .* expected \[pages, page_size, ckv\]"):
        wrapper.run(*queries, ckv[:, :, None], kpe, ckv_scale_arr=scales.float().to(DEVICE), kpe_scale=1.0)


@pytest.mark.parametrize("planned", [True, False])
def test_scales_of_latents_per_tensor_and_per_group_exclude_each_other(planned: bool) -> None:
    m = Latents(dims=(256, 16), dtype=BF16, kv_dtype=E4M3)
    wrapper, groups = planned_mla(m, BF16), torch.ones(*m.cache.shape[:2], 2, device=DEVICE)
    tables = {} if planned else {"page_table": m.block_tables, "kv_len": m.table[2]}
    with pytest.raises(errors.OptionError, match=r"Exactly one of ckv_scale or ckv_scale_arr .* both are given"):
        wrapper.run(*(*m.split(m.q), *m.split(m.cache)), ckv_scale=7.0, ckv_scale_arr=groups, kpe_scale=1.0, **tables)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({}, "Exactly one of ckv_scale or ckv_scale_arr .* none is given"),
        ({"ckv_scale": 1.0}, "kpe_scale is None for an FP8 cache; expected a number"),
        ({"kpe_scale": 1.0}, "Exactly one of ckv_scale or ckv_scale_arr .* none is given"),
    ],
)
def test_an_fp8_latent_cache_needs_its_scales(scales: dict[str, Any], message: str) -> None:
    m = Latents(dtype=BF16, kv_dtype=E4M3)
    with pytest.raises(ValueError, match=message):
        planned_mla(m, BF16).run(*m.split(m.q), *m.split(m.cache), **scales)


def test_o_scale_of_mla_without_an_fp8_output() -> None:
    m = Latents(dtype=BF16, kv_dtype=BF16)
    wrapper = planned_mla(m, BF16)
    for out in (None, torch.empty_like(m.split(m.q)[0])):
        with pytest.raises(ValueError, match="o_scale is given and the output is bfloat16; expected an FP8 output"):
            wrapper.run(*m.split(m.q), *m.split(m.cache), out=out, o_scale=0.5)
