"""Wrong calls of wrappers raise typed errors: what was wrong, what was expected, how to fix it. Nothing is written."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from helpers.error_cases import Case, check_raises, empty
from helpers.wrapper_requests import DEVICE, Requests, int32, workspace

import attn_ops as flashinfer
from attn_ops import errors, planner

R = Requests()
P = Requests((70, 3, 9, 130), (1, 5, 0, 40))
PAGES = torch.tensor([7, 8, 9, 10])


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


def attention(**changes: Any) -> None:
    qo_indptr, page_size = changes.get("qo_indptr", P.qo_indptr), changes.get("page_size", 16)
    wrapper = flashinfer.BatchAttention(device=DEVICE)
    wrapper.plan(qo_indptr, *P.table[:2], P.seq_lens, 4, 2, 64, 64, page_size)


def graph(pages: int = 20, batch: int = 4) -> Any:
    sizes = batch + 1, pages, batch
    buffers = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in sizes)
    return flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers)


def replanned_graph(first: int, then: int) -> None:
    wrapper = graph()
    for rows in (first, then):
        wrapper.plan(*R.table, *R.sizes, q_len_per_req=rows)


def int32_zeros(length: int) -> torch.Tensor:
    return torch.zeros(length, dtype=torch.int32, device=DEVICE)


def masked_graph(mask_bytes: int) -> None:
    mask = torch.zeros(mask_bytes, dtype=torch.uint8, device=DEVICE)
    buffers = *map(int32_zeros, (5, 5, 20, 4)), mask
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers)
    wrapper.plan(P.qo_indptr, *P.table, *P.sizes, custom_mask=P.mask)


def planned_graph() -> Any:
    wrapper = graph()
    wrapper.plan(*R.table, *R.sizes)
    return wrapper


def graph_buffers_of_inference_mode() -> None:
    with torch.inference_mode():
        wrapper = graph()
    wrapper.plan(*R.table, *R.sizes)


def latent_by_lengths() -> None:
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(P.qo_indptr, *P.table[:2], P.seq_lens, 4, 512, 64, 16)
    sizes = (46, 4, 512), (46, 4, 64), (17, 16, 512), (17, 16, 64)
    wrapper.run(*(empty(*size) for size in sizes), kv_len=P.seq_lens)


def latent_of(dtypes: tuple[torch.dtype, ...], **planned: torch.dtype) -> None:
    """Of queries and caches of ``dtypes``."""
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(P.qo_indptr, *P.table[:2], P.seq_lens, 4, 512, 64, 16, **planned)
    sizes = (46, 4, 512), (46, 4, 64), (17, 16, 512), (17, 16, 64)
    tensors = (empty(*size).to(dtype) for size, dtype in zip(sizes, dtypes, strict=True))
    wrapper.run(*tensors, ckv_scale=1.0, kpe_scale=1.0)


HALF, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
DTYPES = BF16, BF16, E4M3, E4M3
LATENTS = {"q_data_type": BF16, "kv_data_type": E4M3}


def listed_prefill(indptr: torch.Tensor, lens: torch.Tensor) -> None:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.plan(torch.arange(3), indptr, PAGES, torch.ones_like(lens), *P.sizes)


def listed_mla(indptr: torch.Tensor, lens: torch.Tensor) -> None:
    flashinfer.BatchMLAPagedAttentionWrapper(workspace()).plan(torch.arange(3), indptr, PAGES, lens, 4, 512, 64, 4)


def listed_attention(indptr: torch.Tensor, lens: torch.Tensor) -> None:
    flashinfer.BatchAttention(device=DEVICE).plan(torch.arange(3), indptr, PAGES, lens, 4, 2, 64, 64, 4)


def run_decode(**options: Any) -> Any:
    return decode().run(R.q, R.cache(), **options)


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
    "dtype of an MLA cache that nothing computes with": (
        lambda: latent_of(DTYPES, kv_data_type=torch.int8),
        errors.DTypeError,
        "BatchMLAPagedAttentionWrapper.plan: kv_data_type is int8; expected float16, bfloat16, float32",
    ),
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
        lambda: decode().run(R.q, R.cache(), 1.0, k_scale=1.0),
        errors.ArgumentError,
        "k_scale is given twice",
    ),
    "too many by position": (lambda: decode().run(R.q, R.cache(), 1.0, 1.0, 1.0), errors.ArgumentError, "at most 2"),
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
    "last_page_len": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(
            *(t.cpu() for t in R.table[:2]), torch.tensor([17, 1, 1, 1]), *R.sizes
        ),
        errors.PageTableError,
        "BatchDecodeWithPagedKVCacheWrapper.plan: last_page_len[0] is 17; expected 1 to page_size 16",
    ),
    "last_page_len beyond every capacity": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(
            *(t.cpu() for t in R.table[:2]), torch.tensor([1, 1, 1 << 30, 1]), *R.sizes
        ),
        errors.PageTableError,
        "plan: last_page_len[2] is 1073741824; expected 1 to page_size 16",
    ),
    "falling indptr": (
        lambda: flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace()).plan(
            torch.tensor([0, 5, 3]), torch.tensor([0, 5, 6]), 4, 2, 64
        ),
        errors.PageTableError,
        "qo_indptr falls from 5 to 3",
    ),
    "lengths of tables": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(*R.table[:2], R.table[2][1:], *R.sizes),
        errors.ShapeError,
        "plan: last_page_len has length 3; expected 4",
    ),
    "float tables": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(
            R.table[0].float(), *R.table[1:], *R.sizes
        ),
        errors.DTypeError,
        "plan: indptr is float32; expected int32 or int64",
    ),
    "pages beyond int32": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(
            R.table[0].cpu(), R.table[1].cpu().long() + 2**32, R.table[2].cpu(), *R.sizes
        ),
        errors.PageTableError,
        "plan: indices has a number beyond int32; expected numbers of pages or tokens",
    ),
    "a mask beyond int32": (
        lambda: flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace()).plan(
            *[torch.tensor([0, 50_000])] * 2, 4, 2, 64, custom_mask=torch.ones(1).bool().expand(50_000**2)
        ),
        errors.CapacityError,
        "custom_mask has 2500000000 elements; expected fewer than 2^31",
    ),
    "other batch in graph mode": (
        lambda: graph(batch=5).plan(*R.table, *R.sizes),
        errors.PlanError,
        "the batch has 4 requests and the buffers are for 5",
    ),
    "other rows of a request in graph mode": (
        lambda: replanned_graph(2, 1),
        errors.PlanError,
        "q_len_per_req is 1; expected 2 as in the first plan, in CUDA-graph mode",
    ),
    "too many pages in graph mode": (
        lambda: graph(pages=7).plan(R.table[0], R.table[1][:13], R.table[2], *R.sizes),
        errors.CapacityError,
        "the batch has 13 pages and paged_kv_indices_buffer capacity for 7; expected capacity for at least 13",
    ),
    "missing buffer": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True),
        errors.ArgumentError,
        "paged_kv_indptr_buffer is missing",
    ),
    "dtype of a buffer": (
        lambda: flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            workspace(), *(torch.zeros(n, device=DEVICE) for n in (5, 9, 4))
        ),
        errors.DTypeError,
        "paged_kv_indptr_buffer is float32; expected int32",
    ),
    "MLA without a scale": (
        lambda: flashinfer.BatchMLAPagedAttentionWrapper(workspace()).plan(
            P.qo_indptr, *P.table[:2], P.seq_lens, 4, 48, 16, 16
        ),
        errors.OptionError,
        "sm_scale is missing for head dimensions 48 + 16",
    ),
    **{
        f"{name} of {what}": (
            lambda plan=plan, indptr=indptr, lens=lens: plan(torch.tensor(indptr), torch.tensor(lens)),
            errors.PageTableError,
            words.replace("kv_", "paged_kv_") if name == "prefill" else words,
        )
        for name, plan in (("prefill", listed_prefill), ("MLA", listed_mla), ("attention", listed_attention))
        for what, indptr, lens, words in (
            ("pages beyond the list", [100, 102, 104], [5, 5], "kv_indptr ends at 104 and kv_indices has 4 entries"),
            ("pages before the list", [-1, 1, 3], [5, 5], "kv_indptr starts at -1; expected 0 or more"),
            ("falling pages", [1, 3, 2], [5, 0], "kv_indptr falls from 3 to 2 at request 1"),
        )
    },
    **{
        f"{name} of a negative length": (
            lambda plan=plan: plan(torch.tensor([0, 2, 4]), torch.tensor([5, -3])),
            errors.PageTableError,
            "kv_len_arr[1] is -3; expected 0 or more tokens",
        )
        for name, plan in (("MLA", listed_mla), ("attention", listed_attention))
    },
    "no pages of decoding": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(R.table[0], None, R.table[2], *R.sizes),
        errors.ArgumentError,
        "indices is missing",
    ),
    "no last pages of prefill": (
        lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace()).plan(
            P.qo_indptr, *P.table[:2], None, *P.sizes
        ),
        errors.ArgumentError,
        "paged_kv_last_page_len is missing",
    ),
    "no rows of ragged prefill": (
        lambda: flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace()).plan(None, P.kv_indptr, *P.sizes[:3]),
        errors.ArgumentError,
        "qo_indptr is missing",
    ),
    "no rows of attention": (lambda: attention(qo_indptr=None), errors.ArgumentError, "qo_indptr is missing"),
    "float rows of attention": (
        lambda: attention(qo_indptr=P.qo_indptr + 0.9),
        errors.DTypeError,
        "qo_indptr is float32; expected int32 or int64",
    ),
    "page size of attention": (lambda: attention(page_size=0), errors.OptionError, "page_size is 0; expected at least"),
    "page size of MLA": (
        lambda: flashinfer.BatchMLAPagedAttentionWrapper(workspace()).plan(
            P.qo_indptr, *P.table[:2], P.seq_lens, 4, 512, 64, 0
        ),
        errors.OptionError,
        "page_size is 0; expected at least 1",
    ),
    "page size of decoding": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(*R.table, 4, 2, 64, 0),
        errors.OptionError,
        "page_size is 0; expected at least 1",
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
    "MLA pages missing": (
        lambda: flashinfer.BatchMLAPagedAttentionWrapper(workspace()).plan(
            P.qo_indptr.cpu(), P.table[0].cpu(), P.table[1].cpu(), P.seq_lens.cpu() + 16, 4, 512, 64, 16
        ),
        errors.PageTableError,
        "request 0 has 86 tokens and 5 pages of 16; expected 6 pages",
    ),
    "MLA tokens of a request without pages": (
        lambda: flashinfer.BatchMLAPagedAttentionWrapper(workspace()).plan(
            torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([0]), torch.tensor([5]), 4, 512, 64, 16
        ),
        errors.PageTableError,
        "request 0 has 5 tokens and 0 pages of 16; expected 1 pages",
    ),
    "MLA of latents without columns": (
        lambda: flashinfer.BatchMLAPagedAttentionWrapper(workspace()).plan(
            P.qo_indptr, *P.table[:2], P.seq_lens, 4, 0, 64, 16
        ),
        errors.OptionError,
        "head_dim_ckv is 0; expected at least 1",
    ),
    "MLA query of one part": (
        lambda: flashinfer.BatchMLAPagedAttentionWrapper(workspace()).run(
            query=[empty(46, 4, 512)], kv_cache=empty(17, 16, 576)
        ),
        errors.ShapeError,
        "the query has 1 parts; expected 2, q_nope and q_pe",
    ),
    "MLA block tables too narrow": (
        lambda: flashinfer.BatchMLAPagedAttentionWrapper(workspace()).plan(
            P.qo_indptr,
            num_heads=4,
            page_size=16,
            block_tables=P.block_tables()[:, :8],
            seq_lens=torch.tensor(P.kv_lens),
        ),
        errors.PageTableError,
        "a request has 130 tokens and block_tables capacity for 128",
    ),
    **{
        f"dtype of {name}": (
            functools.partial(latent_of, tuple(HALF if i == j else d for j, d in enumerate((BF16,) * 4))),
            errors.DTypeError,
            message,
        )
        for i, (name, message) in enumerate(
            {
                "q_nope": "q_pe is bfloat16; expected float16",
                "q_pe": "q_pe is float16; expected bfloat16",
                "ckv_cache": "ckv_cache is float16 and kpe_cache bfloat16; expected one dtype",
                "kpe_cache": "ckv_cache is bfloat16 and kpe_cache float16; expected one dtype",
            }.items()
        )
    },
    **{
        f"planned dtype of {name}": (
            functools.partial(latent_of, tuple(HALF if i == j else d for j, d in enumerate(DTYPES)), **LATENTS),
            errors.DTypeError,
            f"{name} dtype is float16; expected {str(DTYPES[i]).removeprefix('torch.')} as planned",
        )
        for i, name in enumerate(("q_nope", "q_pe", "ckv_cache", "kpe_cache"))
    },
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
    "page size beyond int32": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(*R.table, 4, 2, 64, 2**31),
        errors.OptionError,
        "plan: page_size is 2147483648; expected at most 2147483647, an int32",
    ),
    "fewer rows than planned in CUDA-graph mode": (
        lambda: planned_graph().run(R.q[:3], R.cache()),
        errors.ShapeError,
        "q has 3 rows; expected 4 as planned, or more; call plan()",
    ),
    "a mask beyond its buffer": (
        lambda: masked_graph(sum(-(-n * m // 8) for n, m in zip(P.rows, P.kv_lens, strict=True)) - 1),
        errors.CapacityError,
        "the packed mask has 661 bytes and custom_mask_buf 660; expected at least 661",
    ),
    "last page lengths of another batch": (
        lambda: flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *map(int32_zeros, (5, 20, 5))),
        errors.ShapeError,
        "paged_kv_last_page_len_buffer has 5 elements and paged_kv_indptr_buffer 5; expected 4, for the 4 requests",
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
    "a list as page table": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan([0, 1], *R.table[1:], *R.sizes),  # type: ignore[arg-type]
        errors.ArgumentError,
        "indptr is of type list; expected a tensor; make a tensor of it with torch.tensor(indptr)",
    ),
    "levels of other rows": (
        lambda: flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace()).plan(
            [P.qo_indptr, P.qo_indptr.clamp(max=45)], *([t, t] for t in P.table), *P.sizes
        ),
        errors.ShapeError,
        "the levels have 46, 45 query rows; expected the same number in each level",
    ),
    "buffers of inference mode": (
        graph_buffers_of_inference_mode,
        errors.ArgumentError,
        "plan: paged_kv_indptr_buffer was made in inference mode",
    ),
    "MLA lengths without a table": (
        latent_by_lengths,
        errors.ArgumentError,
        "page_table is missing",
    ),
    "more of POD": (
        lambda: flashinfer.PODWithPagedKVCacheWrapper(workspace()).run(*[None] * 31),
        errors.ArgumentError,
        "1 arguments follow enable_pdl; expected none without jit_args",
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
        wrapper.run(R.q, R.cache(), 1.0, k_scale=1.0, out=out)
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
