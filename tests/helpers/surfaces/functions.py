"""The surfaces of all public attention functions: for every parameter a value that changes the result."""

from __future__ import annotations

from typing import Any

import torch

import attn_ops as flashinfer
from helpers.surfaces.base import BF16, HALF, LSE, OPTIONS, ROPE, SCALES, D, P, Raises, Surface, buffers
from helpers.wrapper_requests import DEVICE, Requests

H = Requests(kv_layout="HND")
PH = Requests((70, 3, 9, 130), (1, 5, 0, 40), kv_layout="HND")
HIDDEN = torch.zeros(4, 2, dtype=torch.uint16, device=DEVICE)
"""A tree mask in which no row sees its own token."""
TABLES = {"block_tables": H.block_tables(), "seq_lens": H.seq_lens, "max_seq_len": 130}
CUDNN = {"scale": 0.125, "workspace_buffer": None, "max_sequence_kv": 130, "block_tables": H.block_tables()}
BMM: dict[str, Any] = {"bmm1_scale": 0.5, "bmm2_scale": 2.0}
ROWS = {"q_len_per_req": Raises(2)}
MLA_CALL: dict[str, Any] = {
    "query": D.q[:, None],
    "kv_cache": D.cache()[0][:, :, 0],
    "workspace_buffer": None,
    "qk_nope_head_dim": 32,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "block_tables": D.block_tables(),
    "seq_lens": D.seq_lens,
    "max_seq_len": 130,
    "bmm1_scale": 0.1,
}
MLA_EFFECTS: dict[str, Any] = {
    "kv_lora_rank": Raises(32),
    "qk_rope_head_dim": Raises(32),
    "out": torch.zeros(4, 1, 4, 48, dtype=torch.float16, device=DEVICE),
    "bmm1_scale": 0.5,
    "bmm2_scale": 2.0,
    "sinks": [D.sinks],
}
PLACES = D.block_tables()[:, :1, None] * D.cache()[0].shape[1] + torch.arange(5, device=DEVICE)
FIRST_TOKENS: dict[str, Any] = {
    "kv_cache": MLA_CALL["kv_cache"].contiguous(),
    "block_tables": PLACES,
    "sparse_mla_top_k": 5,
}

FUNCTIONS = [
    Surface(
        "single_decode",
        flashinfer.single_decode_with_kv_cache,
        {"call": {"q": P.q[0], "k": P.ragged()[0], "v": P.ragged()[1], "pos_encoding_mode": "ROPE_LLAMA"}},
        {"call": {**OPTIONS, **ROPE, **SCALES, **LSE, "kv_layout": Raises("HND")}},
    ),
    Surface(
        "single_prefill",
        flashinfer.single_prefill_with_kv_cache,
        {"call": {"q": P.q, "k": P.ragged()[0], "v": P.ragged()[1], "pos_encoding_mode": "ROPE_LLAMA"}},
        {
            "call": {
                **OPTIONS,
                **ROPE,
                **LSE,
                "kv_layout": Raises("HND"),
                "causal": True,
                "window_right": 3,
                "custom_mask": torch.arange(46 * 212, device=DEVICE) % 3 == 0,
                "packed_custom_mask": torch.full((46 * 212 // 8,), 5, dtype=torch.uint8, device=DEVICE),
                "o_dtype": BF16,
                **dict.fromkeys(("scale_q", "scale_k", "scale_v", "k_scale", "v_scale"), HALF),
            }
        },
    ),
    Surface(
        "trtllm decode",
        flashinfer.trtllm_batch_decode_with_kv_cache,
        {"call": {"query": H.q, "kv_cache": H.cache(), "workspace_buffer": None, **TABLES, "bmm1_scale": 0.1}},
        {
            "call": {
                **BMM,
                "bmm1_scale_log2": HALF,
                **LSE,
                **ROWS,
                **buffers(H),
                "window_left": 3,
                "out_dtype": BF16,
                "sinks": [H.sinks],
                "mask": HIDDEN,
                "kv_layout": Raises("NHD"),
                "cum_seq_lens_q": torch.tensor([0, 2, 2, 3, 4], device=DEVICE),
                "uses_shared_paged_kv_idx": Raises(False),
                "enable_block_sparse_attention": Raises(True),
                "cp_world": Raises(0),
                "cp_rank": Raises(1),
                "causal_seqlens_kv_global": H.seq_lens // 2,
            }
        },
    ),
    Surface(
        "xqa decode",
        flashinfer.xqa_batch_decode_with_kv_cache,
        {"call": {"query": D.q, "kv_cache": D.cache(), "workspace_buffer": None, "bmm1_scale": 0.1, **TABLES}},
        {
            "call": {
                **BMM,
                **ROWS,
                "out": buffers(D)["out"],
                "window_left": 3,
                "sinks": D.sinks,
                "mask": HIDDEN,
                "kv_layout": Raises("HND"),
                "q_cu_seq_lens": torch.tensor([0, 2, 2, 3, 4], device=DEVICE),
            }
        },
    ),
    Surface(
        "trtllm context",
        flashinfer.trtllm_batch_context_with_kv_cache,
        {
            "call": {
                "query": PH.q,
                "kv_cache": PH.cache(),
                "workspace_buffer": None,
                "block_tables": PH.block_tables(),
                "seq_lens": PH.seq_lens,
                "max_q_len": 40,
                "max_kv_len": 130,
                "bmm1_scale": 0.125,
                "bmm2_scale": 1.0,
                "batch_size": 4,
                "cum_seq_lens_q": PH.qo_indptr,
                "cum_seq_lens_kv": PH.kv_indptr,
            }
        },
        {
            "call": {
                **LSE,
                **buffers(PH),
                "window_left": 3,
                "out_dtype": BF16,
                "sinks": PH.sinks,
                "kv_layout": Raises("NHD"),
                "causal": False,
                "uses_shared_paged_kv_idx": Raises(False),
            }
        },
    ),
    Surface(
        "cudnn decode",
        flashinfer.cudnn_batch_decode_with_kv_cache,
        {
            "call": {
                "q": H.q,
                "k_cache": H.cache()[0],
                "v_cache": H.cache()[1],
                **CUDNN,
                "actual_seq_lens_kv": H.seq_lens,
            }
        },
        {
            "call": {
                **LSE,
                **ROWS,
                **buffers(H),
                "window_left": 3,
                "sinks": H.sinks,
                **{f"batch_offsets_{c}": Raises(torch.ones(5)) for c in "qo"},
            }
        },
    ),
    Surface(
        "cudnn prefill",
        flashinfer.cudnn_batch_prefill_with_kv_cache,
        {
            "call": {
                "q": PH.q,
                "k_cache": PH.cache()[0],
                "v_cache": PH.cache()[1],
                **CUDNN,
                "block_tables": PH.block_tables(),
                "max_token_per_sequence": 40,
                "actual_seq_lens_q": torch.tensor(PH.qo_lens, device=DEVICE),
                "actual_seq_lens_kv": PH.seq_lens,
                "causal": False,
                "return_lse": False,
            }
        },
        {
            "call": {
                **buffers(PH),
                "causal": True,
                "return_lse": True,
                **dict.fromkeys(("q_scale", "k_scale", "v_scale"), HALF),
                "o_data_type": BF16,
                "lse_base": Raises("nonsense"),
                "batch_offsets_units": Raises("nonsense"),
                "batch_offsets_stats": Raises(torch.ones(5)),
                **{f"batch_offsets_{c}": Raises(torch.ones(5)) for c in "qokv"},
            }
        },
    ),
    Surface(
        "xqa",
        flashinfer.xqa,
        {
            "call": {
                "q": D.q,
                "k_cache": D.cache()[0],
                "v_cache": D.cache()[1],
                "page_table": D.block_tables(),
                "seq_lens": D.seq_lens,
            }
        },
        {
            "call": {
                "output": buffers(D)["out"],
                "num_kv_heads": Raises(3),
                "page_size": Raises(3),
                "head_dim": Raises(3),
                "sinks": D.sinks,
                "q_scale": 2.0,
                "kv_scale": 2.0,
                "sliding_win_size": 3,
                "kv_layout": Raises("HND"),
                "rcp_out_scale": 2.0,
                "mask": HIDDEN,
                "q_seq_len": Raises(2),
                "q_cu_seq_lens": torch.tensor([0, 2, 2, 3, 4], device=DEVICE),
            }
        },
    ),
    Surface(
        "xqa_mla",
        flashinfer.xqa_mla,
        {
            "call": {
                "q": D.q,
                "k_cache": D.cache()[0][:, :, 0],
                "v_cache": D.cache()[0][:, :, 0, :48],
                "page_table": D.block_tables(),
                "seq_lens": D.seq_lens,
            }
        },
        {
            "call": {
                "output": torch.zeros(4, 4, 48, dtype=torch.float16, device=DEVICE),
                "page_size": Raises(3),
                "q_scale": 2.0,
                "kv_scale": 2.0,
            }
        },
    ),
    Surface(
        "trtllm mla",
        flashinfer.trtllm_batch_decode_with_kv_cache_mla,
        {"call": MLA_CALL},
        {
            "call": {
                **MLA_EFFECTS,
                **LSE,
                "lse": buffers(D)["lse"],
                "cum_seq_lens_q": Raises(D.qo_indptr),
                "return_lse_base": Raises("nonsense"),
                "sparse_mla_top_k": Raises(8),
                "sparse_mla_top_k_lens": Raises(D.seq_lens),
                "uses_shared_paged_kv_idx": Raises(False),
            }
        },
    ),
    Surface(
        "trtllm mla, sparse",
        flashinfer.trtllm_batch_decode_with_kv_cache_mla,
        {"call": {**MLA_CALL, **FIRST_TOKENS}},
        {
            "call": {
                **MLA_EFFECTS,
                **LSE,
                "lse": buffers(D)["lse"],
                "cum_seq_lens_q": Raises(D.qo_indptr),
                "return_lse_base": Raises("nonsense"),
                "sparse_mla_top_k": Raises(8),
                "sparse_mla_top_k_lens": torch.tensor([2, 1, 3, 1], device=DEVICE),
                "uses_shared_paged_kv_idx": Raises(False),
            }
        },
    ),
    Surface(
        "xqa mla",
        flashinfer.xqa_batch_decode_with_kv_cache_mla,
        {"call": MLA_CALL},
        {"call": MLA_EFFECTS},
    ),
    Surface(
        "deepseek",
        flashinfer.trtllm_ragged_attention_deepseek,
        {
            "call": {
                "query": P.q,
                "key": P.ragged()[0],
                "value": P.ragged()[1],
                "workspace_buffer": None,
                "seq_lens": P.seq_lens,
                "max_q_len": 40,
                "max_kv_len": 130,
                "bmm1_scale": 0.1,
                "bmm2_scale": 1.0,
                "o_sf_scale": None,
                "batch_size": 4,
                "window_left": -1,
                "cum_seq_lens_q": P.qo_indptr,
                "cum_seq_lens_kv": P.kv_indptr,
                "enable_pdl": None,
                "is_causal": False,
                "return_lse": False,
            }
        },
        {
            "call": {
                **LSE,
                **buffers(P),
                "bmm1_scale": 0.5,
                "bmm2_scale": 2.0,
                "o_sf_scale": Raises(2.0),
                "batch_size": Raises(3),
                "window_left": 3,
                "is_causal": True,
                "attention_sinks": P.sinks,
            }
        },
    ),
]
