"""Wrong calls of wrappers raise typed errors: what was wrong, what was expected, how to fix it. Nothing is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.error_cases import Case, check_raises, empty
from helpers.wrapper_requests import DEVICE, Requests, int32, workspace

import attn_ops as flashinfer
from attn_ops import errors, planner

R = Requests()
P = Requests((70, 3, 9, 130), (1, 5, 0, 40))


def decode(**plan: Any) -> Any:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*R.table, *R.sizes, **plan)
    return wrapper


def prefill(**plan: Any) -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.plan(P.qo_indptr, *P.table, *P.sizes, **plan)
    return wrapper


def ragged(**plan: Any) -> Any:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    wrapper.plan(P.qo_indptr, P.kv_indptr, *P.sizes[:3], **plan)
    return wrapper


def run_decode(**options: Any) -> Any:
    return decode().run(R.q, R.cache(), **options)


def run_fp8(*args: Any, **options: Any) -> Any:
    """The ragged wrapper with an FP8 query, whose scales may follow the keys and values."""
    dtype = torch.float8_e4m3fn
    wrapper = ragged(q_data_type=dtype, kv_data_type=dtype)
    return wrapper.run(*(t.to(dtype) for t in (P.q, *P.ragged())), *args, **options)


CASES: dict[str, Case] = {
    "run before plan": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).run(R.q, R.cache()),
        errors.PlanError,
        "there is no plan; expected plan() before run()",
    ),
    "mode": (
        lambda: decode(pos_encoding_mode="ROPE"),
        errors.OptionError,
        "pos_encoding_mode is 'ROPE'; expected NONE, ROPE_LLAMA, ALIBI",
    ),
    "layout": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NDH"),
        errors.OptionError,
        "kv_layout is 'NDH'; expected NHD or HND",
    ),
    "dtype of q": (
        lambda: decode().run(R.q.bfloat16(), R.cache()),
        errors.DTypeError,
        "q dtype is bfloat16; expected float16 as planned",
    ),
    "dtype of the cache": (
        lambda: decode(data_type="bfloat16").run(R.q.bfloat16(), R.cache()),
        errors.DTypeError,
        "the KV cache dtype is float16; expected bfloat16 as planned",
    ),
    **{
        f"{name} that nothing computes with": (
            lambda name=name, dtype=dtype: decode(**{name: dtype}),
            errors.DTypeError,
            f"BatchDecodeWithPagedKVCacheWrapper.plan: {name} is {shown}; expected float16, bfloat16, float32, "
            "float8_e4m3fn or float8_e5m2; convert the tensor",
        )
        for name, dtype, shown in (
            ("q_data_type", "int8", "int8"),
            ("kv_data_type", "torch.float64", "float64"),
            ("data_type", torch.int32, "int32"),
        )
    },
    "dtype name": (lambda: decode(q_data_type="half16"), errors.DTypeError, "q_data_type is 'half16'"),
    "output dtype": (
        lambda: decode(o_data_type=torch.float64),
        errors.UnsupportedError,
        "o_data_type is float64; expected float16, bfloat16, float32, float8_e4m3fn or float8_e5m2",
    ),
    "rows": (lambda: decode().run(R.q[:3], R.cache()), errors.ShapeError, "q has 3 rows; expected 4 as planned"),
    "rows of speculation": (
        lambda: decode(q_len_per_req=2).run(R.q, R.cache()),
        errors.ShapeError,
        "q has 4 rows; expected 8 as planned, q_len_per_req 2 of each request; call plan()",
    ),
    "rows of run": (
        lambda: decode().run(R.q, R.cache(), q_len_per_req=2),
        errors.ShapeError,
        "q has 4 rows; expected 8, q_len_per_req 2 of each request; correct q or q_len_per_req",
    ),
    "other rows of run": (
        lambda: decode(q_len_per_req=2).run(R.q, R.cache(), q_len_per_req=1),
        errors.ShapeError,
        "q_len_per_req is 1; expected 2 as planned; call plan() without it, and name it in run()",
    ),
    "no rows of run": (
        lambda: decode().run(R.q, R.cache(), q_len_per_req=0),
        errors.OptionError,
        "q_len_per_req is 0; expected at least 1",
    ),
    "rows of prefill": (lambda: prefill().run(P.q[1:], P.cache()), errors.ShapeError, "45 rows; expected 46"),
    "keys of ragged prefill": (
        lambda: ragged().run(P.q, *(t[:-1] for t in P.ragged())),
        errors.ShapeError,
        "k and v have 211 rows; expected 212 as planned by kv_indptr, or more",
    ),
    "heads": (lambda: decode().run(R.q[:, :2], R.cache()), errors.PlanError, "num_qo_heads 4"),
    **{
        f"causal {causal!r} with a mask": (
            lambda causal=causal: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace()).plan(
                P.qo_indptr, *P.table, *P.sizes, causal=causal, custom_mask=P.mask
            ),
            errors.ArgumentError,
            f"BatchPrefillWithPagedKVCacheWrapper.plan: causal is {shown}; expected True or False",
        )
        for causal, shown in (("bad", "'bad', of type str"), (None, "None"))
    },
    "causal of block-sparse attention": (
        lambda: flashinfer.BlockSparseAttentionWrapper(workspace()).plan(
            int32(0, 1, 2), int32(0, 1), 4, 4, 2, 2, 4, 2, 64, causal="bad"
        ),
        errors.ArgumentError,
        "BlockSparseAttentionWrapper.plan: causal is 'bad', of type str; expected True or False",
    ),
    "uneven heads": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(*R.table, 5, 2, 64, 16),
        errors.ShapeError,
        "5 query heads do not share 2 KV heads evenly",
    ),
    "page size": (
        lambda: decode().run(R.q, Requests(page_size=8).cache()),
        errors.PlanError,
        "the plan was made for page_size 16; expected a plan for page_size 8",
    ),
    "out shape": (lambda: run_decode(out=empty(4, 4, 32)), errors.ShapeError, "out is [4, 4, 32]; expected [4, 4, 64]"),
    "out dtype": (
        lambda: run_decode(out=empty(4, 4, 64, dtype=torch.float32)),
        errors.DTypeError,
        "out is float32; expected float16",
    ),
    "lse shape": (
        lambda: prefill().run(P.q, P.cache(), lse=empty(46, 4, dtype=torch.float32), return_lse=True, lse_layout="HN"),
        errors.ShapeError,
        "lse is [46, 4]; expected [4, 46]",
    ),
    "lse dtype": (lambda: run_decode(lse=empty(4, 4)), errors.DTypeError, "lse is float16; expected float32"),
    "lse base": (
        lambda: prefill().run(P.q, P.cache(), lse_base="e"),
        errors.OptionError,
        "lse_base is 'e'; expected log2 or ln",
    ),
    "mask length": (
        lambda: prefill(custom_mask=P.mask[1:]),
        errors.ShapeError,
        "custom_mask is [5284]; expected",
    ),
    "mask dtype": (lambda: prefill(custom_mask=P.mask.float()), errors.DTypeError, "custom_mask is float32"),
    "packed mask length": (
        lambda: ragged(packed_custom_mask=empty(662, dtype=torch.uint8)),
        errors.ShapeError,
        "packed_custom_mask is [662]; expected [661]",
    ),
    "old and new name": (
        lambda: prefill(head_dim=64),
        errors.ArgumentError,
        "head_dim and head_dim_qk are both given",
    ),
    "old and new name of a buffer": (
        lambda: flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            workspace(), mask_indptr_buf=empty(1), qk_indptr_buf=empty(1)
        ),
        errors.ArgumentError,
        "qk_indptr_buf and mask_indptr_buf are both given",
    ),
    "old and new name of a switch": (
        lambda: ragged(allow_fp16_qk_reduction=True, use_fp16_qk_reduction=True),
        errors.ArgumentError,
        "allow_fp16_qk_reduction and use_fp16_qk_reduction are both given",
    ),
    "page_size missing": (
        lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace()).plan(P.qo_indptr, *P.table, 4, 2, 64),
        errors.ArgumentError,
        "page_size is missing",
    ),
    "mask in the place of head_dim_vo": (
        lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace()).plan(
            P.qo_indptr, *P.table, *P.sizes, P.mask
        ),
        errors.ArgumentError,
        "pass what follows page_size by name",
    ),
    "scale twice": (
        lambda: run_fp8(1.0, 1.0, 1.0, k_scale=1.0),
        errors.ArgumentError,
        "k_scale is given twice",
    ),
    "too many by position": (lambda: run_fp8(1.0, 1.0, 1.0, 1.0), errors.ArgumentError, "at most 3"),
    "scale per head": (
        lambda: prefill().run(P.q, P.cache(), k_scale=torch.ones(2, device=DEVICE)),
        errors.UnsupportedError,
        "k_scale has 2 values",
    ),
    "refused": (
        lambda: run_decode(skip_softmax_threshold_scale_factor=0.5),
        errors.UnsupportedError,
        "skip_softmax_threshold_scale_factor is 0.5, which is not supported",
    ),
    "rank of the cache": (
        lambda: decode().run(R.q, R.cache()[0]),
        errors.ShapeError,
        "the KV cache is one tensor [15, 16, 2, 64]; expected [pages, 2, ...]",
    ),
    "a mask beyond int32": (
        lambda: flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace()).plan(
            *[torch.tensor([0, 50_000])] * 2, 4, 2, 64, custom_mask=torch.ones(1).bool().expand(50_000**2)
        ),
        errors.CapacityError,
        "custom_mask has 2500000000 elements; expected fewer than 2^31",
    ),
    "no query heads planned": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(*R.table, 0, 2, 64, 16),
        errors.OptionError,
        "num_qo_heads is 0; expected at least 1",
    ),
    "out that requires grad": (
        lambda: run_decode(out=empty(4, 4, 64).requires_grad_()),
        errors.GradientError,
        "out requires grad; expected inference",
    ),
    "lse that requires grad": (
        lambda: run_decode(lse=empty(4, 4, dtype=torch.float32).requires_grad_()),
        errors.GradientError,
        "lse requires grad; expected inference",
    ),
    "expanded out": (
        lambda: run_decode(out=empty(1, 4, 64).expand(4, 4, 64)),
        errors.ShapeError,
        "out is written and its elements overlap, with stride 0 in dimension 0; expected memory of its own",
    ),
    "expanded lse": (
        lambda: run_decode(lse=empty(4, 1, dtype=torch.float32).expand(4, 4)),
        errors.ShapeError,
        "lse is written and its elements overlap, with stride 0 in dimension 1; expected memory of its own",
    ),
    "rows of out that overlap": (
        lambda: run_decode(out=empty(4, 4, 64).as_strided((4, 4, 64), (64, 64, 1))),
        errors.ShapeError,
        "out is written and its elements overlap, with stride 64 in dimension 0; expected memory of its own",
    ),
    "columns of lse that overlap": (
        lambda: run_decode(lse=empty(4, 4, dtype=torch.float32).as_strided((4, 4), (2, 1))),
        errors.ShapeError,
        "lse is written and its elements overlap, with stride 2 in dimension 0; expected memory of its own",
    ),
    "sinks that are no tensor": (
        lambda: run_decode(sinks=0.5),
        errors.ArgumentError,
        "sinks is 0.5; expected a float32 tensor [num_qo_heads]; pass such a tensor",
    ),
    "levels": (
        lambda: flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace()).plan([], [], [], [], 4, 2, 64, 16),
        errors.ShapeError,
        "qo_indptr_arr has 0 tensors; expected 2",
    ),
    "device of out": (
        lambda: run_decode(out=empty(4, 4, 64).to("meta")),
        errors.DeviceError,
        f"out is on meta; expected {R.q.device}, where the query is",
    ),
    "too many levels": (
        lambda: flashinfer.MultiLevelCascadeAttentionWrapper(1025, workspace()),
        errors.OptionError,
        "num_levels is 1025; expected at most 1024",
    ),
    "no levels": (
        lambda: flashinfer.MultiLevelCascadeAttentionWrapper(0, workspace()),
        errors.OptionError,
        "num_levels is 0; expected at least 1",
    ),
    "the other layout": (
        lambda: decode().run(R.q, tuple(t.transpose(1, 2) for t in R.cache())),
        errors.ShapeError,
        "in layout NHD the KV cache has pages of 2 tokens and 16 heads; expected 16 tokens and 2 heads as planned; "
        "name kv_layout='HND'",
    ),
    "no cache": (lambda: decode().run(R.q, None), errors.ArgumentError, "paged_kv_cache is None; expected a tensor"),
    "levels of other rows": (
        lambda: flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace()).plan(
            [P.qo_indptr, P.qo_indptr.clamp(max=45)], *([t, t] for t in P.table), *P.sizes
        ),
        errors.ShapeError,
        "the levels have 46, 45 query rows; expected the same number in each level",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_call_raises(name: str) -> None:
    check_raises(CASES[name])


def test_failed_calls_write_nothing() -> None:
    wrapper, out = decode(), empty(4, 4, 64)
    plan = [t.clone() for t in wrapper._planned.plan]
    with pytest.raises(errors.ShapeError):
        wrapper.run(R.q, R.cache(), out=out, lse=empty(3, 4, dtype=torch.float32))
    with pytest.raises(errors.ShapeError):
        wrapper.run(R.q, R.cache(), out=out, lse=empty(1, 4, dtype=torch.float32).expand(4, 4))
    with pytest.raises(errors.PageTableError):
        wrapper.plan(torch.tensor([0, 1, 1, 0, 2]), *(t.cpu() for t in R.table[1:]), *R.sizes)
    with pytest.raises(errors.ArgumentError):
        wrapper.run(R.q, R.cache(), k_scale="1", out=out)
    assert (out == 0).all()
    assert all(map(torch.equal, plan, wrapper._planned.plan))
    R.expected().check(wrapper.run(R.q, R.cache()))


def test_workspace_too_small_names_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "ctas_per_head", lambda *_: 8)
    wrapper = decode()
    needed, _ = wrapper.workspace_size(*R.table, *R.sizes)
    small = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(needed - 1))
    with pytest.raises(errors.CapacityError, match=f"has {needed - 1} bytes; expected at least {needed}"):
        small.plan(*R.table, *R.sizes)
    with pytest.raises(errors.CapacityError, match=f"expected at least {needed}"):
        wrapper.reset_workspace_buffer(workspace(needed - 1), None)
    R.expected().check(wrapper.run(R.q, R.cache()))


def test_a_refused_workspace_is_not_used_by_the_next_plan() -> None:
    wrapper = decode(fixed_split_size=4)
    with pytest.raises(errors.CapacityError, match="the float workspace has 16 bytes; expected at least"):
        wrapper.reset_workspace_buffer(workspace(16))
    wrapper.plan(*R.table, *R.sizes, fixed_split_size=4)
    R.expected().check(wrapper.run(R.q, R.cache()))


def test_a_dtype_error_is_a_type_error_and_a_value_error() -> None:
    """PyTorch raises the one, FlashInfer the other."""
    for builtin in (TypeError, ValueError):
        with pytest.raises(builtin, match="q dtype is bfloat16; expected float16 as planned"):
            decode().run(R.q.bfloat16(), R.cache())


@pytest.mark.parametrize("method", ["plan", "workspace_size"])
def test_sizes_are_checked_alike_by_plan_and_workspace_size(method: str) -> None:
    name = f"BatchDecodeWithPagedKVCacheWrapper.{method}"
    call = getattr(decode(), method)
    with pytest.raises(errors.OptionError, match=rf"^{name}: num_qo_heads is 0; expected at least 1; change it$"):
        call(*R.table, 0, *R.sizes[1:])
    with pytest.raises(errors.ShapeError, match=rf"^{name}: 4 query heads do not share 3 KV heads evenly"):
        call(*R.table, 4, 3, *R.sizes[2:])
    with pytest.raises(errors.ArgumentError, match=rf"^BatchPrefill\w+\.{method}: causal is None"):
        getattr(prefill(), method)(P.qo_indptr, *P.table, *P.sizes, causal=None)
