"""The surfaces of all public wrappers: for every parameter a value that changes the result."""

from __future__ import annotations

from typing import Any

import torch

import attn_ops as flashinfer
from helpers.surfaces.base import BF16, HALF, LSE, OPTIONS, ROPE, SCALES, D, P, Raises, Surface, buffers
from helpers.wrapper_requests import DEVICE, Requests, workspace

UNCAPPED = {name: value for name, value in {**OPTIONS, **ROPE}.items() if name != "logits_soft_cap"}
SPLIT = {"fixed_split_size": Raises(0)}
"""Splits change only rounding: test_split_kv."""


def table(r: Requests, names: tuple[str, str, str]) -> dict[str, Any]:
    return dict(zip(names, r.table, strict=True))


def sizes(r: Requests, *names: str) -> dict[str, Any]:
    return dict(zip(names, r.sizes, strict=False))


SIZES = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
DECODE_TABLE = ("indptr", "indices", "last_page_len")
PAGED_TABLE = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
DECODE_PLAN = {**table(D, DECODE_TABLE), **sizes(D, *SIZES), "pos_encoding_mode": "ROPE_LLAMA"}
DTYPES: dict[str, Any] = {
    **dict.fromkeys(("q_data_type", "kv_data_type", "data_type"), Raises(BF16)),
    "o_data_type": BF16,
}
PREFILL_PLAN = {
    "qo_indptr": P.qo_indptr,
    **table(P, PAGED_TABLE),
    **sizes(P, "num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size"),
    "pos_encoding_mode": "ROPE_LLAMA",
}
RAGGED_PLAN = {
    "qo_indptr": P.qo_indptr,
    "kv_indptr": P.kv_indptr,
    **sizes(P, "num_qo_heads", "num_kv_heads", "head_dim_qk"),
    "pos_encoding_mode": "ROPE_LLAMA",
}
MASKS = {"custom_mask": P.mask, "packed_custom_mask": torch.full((661,), 5, dtype=torch.uint8, device=DEVICE)}
PREFILL_OPTIONS = {
    **OPTIONS,
    **ROPE,
    **DTYPES,
    **MASKS,
    **SPLIT,
    **dict.fromkeys(("prefix_len_ptr", "token_pos_in_items_ptr"), Raises(P.seq_lens)),
    "causal": True,
    "head_dim_vo": Raises(32),
    "head_dim": Raises(64),
    "window_right": 3,
}
PREFILL_RUN = {**SCALES, **LSE, **buffers(P), "sinks": P.sinks, "window_left": 3, "args": None}
LSE_FORM = {"lse_base": Raises("nonsense"), "lse_layout": Raises("nonsense")}
GRAPH: dict[str, Any] = {"use_cuda_graph": Raises(True)}
POD_TABLE = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")
SHARED = dict(zip(("k_shared", "v_shared"), D.ragged(), strict=True))

WRAPPERS = [
    Surface(
        "decode",
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        {
            "init": {"float_workspace_buffer": workspace()},
            "plan": DECODE_PLAN,
            "run": {"q": D.q, "paged_kv_cache": D.cache()},
        },
        {
            "init": {"kv_layout": Raises("HND"), **GRAPH},
            "plan": {**OPTIONS, **ROPE, **DTYPES, **SPLIT, "q_len_per_req": Raises(2)},
            "run": {
                **SCALES,
                **LSE,
                **buffers(D),
                "window_left": 3,
                "sinks": D.sinks,
                "q_len_per_req": Raises(2),
                "args": None,
            },
        },
    ),
    Surface(
        "decode of two rows",
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        {
            "init": {"float_workspace_buffer": workspace()},
            "plan": {**DECODE_PLAN, "q_len_per_req": 2},
            "run": {"q": torch.cat((D.q, D.q)), "paged_kv_cache": D.cache()},
        },
        {"plan": {"is_causal": False}},
    ),
    Surface(
        "decode, 0.1",
        flashinfer.BatchDecodeWithPagedKVCacheWrapper,
        {
            "init": {"float_workspace_buffer": workspace()},
            "plan": DECODE_PLAN,
            "forward": {"q": D.q, "paged_kv_cache": D.cache()},
        },
        {"forward": {**OPTIONS, **ROPE, **SCALES, **LSE}},
    ),
    Surface(
        "prefill",
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        {
            "init": {"float_workspace_buffer": workspace()},
            "plan": PREFILL_PLAN,
            "run": {"q": P.q, "paged_kv_cache": P.cache()},
        },
        {
            "init": {"kv_layout": Raises("HND"), "backend": Raises("cudnn"), **GRAPH},
            "plan": PREFILL_OPTIONS,
            "run": {**PREFILL_RUN, **LSE_FORM},
        },
    ),
    Surface(
        "prefill, 0.1",
        flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        {
            "init": {"float_workspace_buffer": workspace()},
            "plan": PREFILL_PLAN,
            "forward": {"q": P.q, "paged_kv_cache": P.cache()},
        },
        {"forward": {**OPTIONS, **ROPE, **LSE, "k_scale": 2.0, "v_scale": 2.0, "causal": True}},
    ),
    Surface(
        "ragged",
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
        {
            "init": {"float_workspace_buffer": workspace()},
            "plan": RAGGED_PLAN,
            "run": {"q": P.q, "k": P.ragged()[0], "v": P.ragged()[1]},
        },
        {
            "init": {"kv_layout": Raises("HND"), **GRAPH},
            "plan": {**PREFILL_OPTIONS, **dict.fromkeys(("v_indptr", "o_indptr"), Raises(P.kv_indptr + 1))},
            "run": {**PREFILL_RUN, **LSE_FORM, "o_scale": 2.0},
        },
    ),
    Surface(
        "ragged, 0.1",
        flashinfer.BatchPrefillWithRaggedKVCacheWrapper,
        {
            "init": {"float_workspace_buffer": workspace()},
            "plan": RAGGED_PLAN,
            "forward": {"q": P.q, "k": P.ragged()[0], "v": P.ragged()[1]},
        },
        {"forward": {**OPTIONS, **ROPE, **LSE, "causal": True}},
    ),
    Surface(
        "attention",
        flashinfer.BatchAttention,
        {
            "init": {"device": DEVICE},
            "plan": {
                "qo_indptr": P.qo_indptr,
                "kv_indptr": P.table[0],
                "kv_indices": P.table[1],
                "kv_len_arr": P.seq_lens,
                **sizes(P, "num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size"),
                "head_dim_vo": 64,
            },
            "run": {"q": P.q, "kv_cache": P.cache()},
        },
        {
            "init": {"kv_layout": Raises("HND")},
            "plan": {"causal": True, "sm_scale": 0.9, "logits_soft_cap": 0.5},
            "run": {"k_scale": HALF, "v_scale": HALF, "logits_soft_cap": 0.5, **buffers(P)},
        },
    ),
    Surface(
        "sink",
        flashinfer.BatchAttentionWithAttentionSinkWrapper,
        {
            "init": {
                "float_workspace_buffer": workspace(),
                "head_dim_qk": 64,
                "head_dim_vo": 64,
                "q_data_type": "float16",
                "kv_data_type": "float16",
            },
            "plan": {k: v for k, v in PREFILL_PLAN.items() if k not in ("head_dim_qk", "pos_encoding_mode")},
            "run": {"q": P.q, "paged_kv_cache": P.cache()},
        },
        {
            "init": {
                "kv_layout": Raises("HND"),
                "pos_encoding_mode": "ALIBI",
                "window_left": 3,
                "head_dim_qk": Raises(32),
                "head_dim_vo": Raises(32),
                "q_data_type": Raises(BF16),
                "kv_data_type": Raises(BF16),
                **GRAPH,
            },
            "plan": {"head_dim_qk": Raises(32), "args": None, "kwargs": None},
        },
    ),
    Surface(
        "mla",
        flashinfer.BatchMLAPagedAttentionWrapper,
        {
            "init": {"float_workspace_buffer": workspace()},
            "plan": {
                "qo_indptr": P.qo_indptr,
                "kv_indptr": P.table[0],
                "kv_indices": P.table[1],
                "kv_len_arr": P.seq_lens,
                "num_heads": 4,
                "head_dim_ckv": 48,
                "head_dim_kpe": 16,
                "page_size": 16,
                "sm_scale": 0.1,
            },
            "run": {
                "q_nope": P.q[..., :48],
                "q_pe": P.q[..., 48:],
                "ckv_cache": P.cache()[0][:, :, 0, :48],
                "kpe_cache": P.cache()[0][:, :, 0, 48:],
            },
        },
        {
            "init": {"kv_layout": Raises("nonsense"), **GRAPH},
            "plan": {
                "causal": True,
                "sm_scale": 0.9,
                "q_data_type": Raises(BF16),
                "kv_data_type": Raises("nonsense"),
                "cum_seq_lens_q": Raises(P.qo_indptr),
                "block_tables": Raises(P.block_tables()),
                "seq_lens": None,
                "lse_mode": Raises("nonsense"),
                "output_dtype": BF16,
                "output_scale": Raises("nonsense"),
            },
            "run": {
                **LSE,
                "o_scale": Raises(2.0),
                "ckv_scale_arr": Raises(torch.ones(1, device=DEVICE)),
                "out": torch.zeros(46, 4, 48, dtype=torch.float16, device=DEVICE),
                "lse": buffers(P)["lse"],
                "return_lse_base_on_e": None,
                "page_table": Raises(P.block_tables()),
                "kv_len": None,
                "query": Raises(P.q),
                "kv_cache": Raises(P.cache()[0][:, :, 0]),
                "ckv_scale": 0.5,
                "kpe_scale": 2.0,
                "sinks": P.sinks,
                "bmm1_scale": 0.9,
                "bmm2_scale": 2.0,
            },
        },
    ),
    Surface(
        "pod",
        flashinfer.PODWithPagedKVCacheWrapper,
        {
            "init": {"float_workspace_buffer": workspace()},
            "plan": DECODE_PLAN,
            "run": {
                "q_p": P.q,
                "k_p": P.ragged()[0],
                "v_p": P.ragged()[1],
                "q_d": D.q,
                "paged_kv_cache_d": D.cache(),
                "pos_encoding_mode_p": "ROPE_LLAMA",
            },
        },
        {
            "init": {"kv_layout": Raises("HND"), **GRAPH},
            "plan": {
                k: v for k, v in {**OPTIONS, **ROPE, **DTYPES}.items() if k not in ("logits_soft_cap", "o_data_type")
            },
            "run": {
                **SCALES,
                "custom_mask_p": torch.arange(46 * 212, device=DEVICE) % 3 == 0,
                "packed_custom_mask_p": torch.full((46 * 212 // 8,), 5, dtype=torch.uint8, device=DEVICE),
                "causal_p": True,
                **{f"{name}_{part}": value for part in "pd" for name, value in {**UNCAPPED, **LSE}.items()},
                **{f"kv_layout_{part}": Raises("HND") for part in "pd"},
                "custom_mask_d": Raises(D.mask),
                "packed_custom_mask_d": Raises(D.mask),
            },
        },
    ),
    Surface(
        "batch pod",
        flashinfer.BatchPODWithPagedKVCacheWrapper,
        {
            "init": {"float_workspace_buffer": workspace()},
            "plan": {
                **{f"{name}_p": t for name, t in zip(POD_TABLE, (P.qo_indptr, *P.table), strict=True)},
                **{f"{name}_d": t for name, t in zip(POD_TABLE, (D.qo_indptr, *D.table), strict=True)},
                **sizes(D, *SIZES),
                "pos_encoding_mode": "ROPE_LLAMA",
            },
            "run": {"q_p": P.q, "paged_kv_cache_p": P.cache(), "q_d": D.q, "paged_kv_cache_d": D.cache()},
        },
        {
            "init": {"kv_layout": Raises("HND")},
            "plan": {k: v for k, v in {**UNCAPPED, **DTYPES}.items() if k != "o_data_type"},
            "run": {
                **SCALES,
                **LSE,
                "causal_p": True,
                **{f"{name}_p": mask for name, mask in MASKS.items()},
            },
        },
    ),
    Surface(
        "cascade",
        flashinfer.MultiLevelCascadeAttentionWrapper,
        {
            "init": {"num_levels": 2, "float_workspace_buffer": workspace()},
            "plan": {
                "qo_indptr_arr": [P.qo_indptr] * 2,
                "paged_kv_indptr_arr": [P.table[0]] * 2,
                "paged_kv_indices_arr": [P.table[1]] * 2,
                "paged_kv_last_page_len": [P.table[2]] * 2,
                **sizes(P, *SIZES),
                "pos_encoding_mode": "ROPE_LLAMA",
            },
            "run": {"q": P.q, "paged_kv_cache": P.cache()},
        },
        {
            "init": {"kv_layout": Raises("HND"), **GRAPH},
            "plan": {**OPTIONS, **ROPE, "causal": True, "q_data_type": Raises(BF16), "kv_data_type": Raises(BF16)},
        },
    ),
    Surface(
        "shared prefix, decode",
        flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
        {
            "init": {"float_workspace_buffer": workspace()},
            "begin_forward": {**{f"unique_kv_{k}": t for k, t in table(D, DECODE_TABLE).items()}, **sizes(D, *SIZES)},
            "forward": {"q": D.q, **SHARED, "unique_kv_cache": D.cache()},
        },
        {"init": {"kv_layout": Raises("HND")}, "begin_forward": {"data_type": Raises(BF16)}},
    ),
    Surface(
        "shared prefix, prefill",
        flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
        {
            "init": {"float_workspace_buffer": workspace()},
            "begin_forward": {"qo_indptr": P.qo_indptr, **table(P, PAGED_TABLE), **sizes(P, *SIZES)},
            "forward": {"q": P.q, **SHARED, "unique_kv_cache": P.cache()},
        },
        {"init": {"kv_layout": Raises("HND")}, "forward": {"causal": True, "sm_scale": 0.9}},
    ),
]
