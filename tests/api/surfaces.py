"""Every public callable with a base call, and a value of every parameter that changes what the call gives.

A surface has stages: a function has ``call``; a wrapper ``init``, ``plan``, ``run`` and so on. ``inputs`` are the
arguments of the base call, ``effects`` the values, each of which must change the result of ``outcome``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from api.requests import DEVICE, Requests, workspace

import attn_ops as flashinfer

D = Requests(kv_layout="NHD")
H = Requests(kv_layout="HND")
P = Requests((70, 3, 9, 130), (1, 5, 0, 40))
PH = Requests((70, 3, 9, 130), (1, 5, 0, 40), kv_layout="HND")
BF16 = torch.bfloat16
HALF = torch.tensor(0.5, device=DEVICE)


@dataclass
class Raises:
    """A value that is looked at: it is an error beside the base call."""

    value: Any


@dataclass
class Surface:
    """``stages``: name -> (callable, arguments of the base call); called in order, the last one gives the result."""

    name: str
    make: Callable[..., Any]
    stages: dict[str, dict[str, Any]]
    effects: dict[str, dict[str, Any]] = field(default_factory=dict)
    methods: dict[str, str] = field(default_factory=dict)

    def function(self, stage: str) -> Callable[..., Any]:
        if stage in ("call", "init"):
            return self.make
        return getattr(self.make, self.methods.get(stage, stage))

    def outcome(self, changed: str = "", **changes: Any) -> Any:
        arguments = {stage: {**base, **(changes if stage == changed else {})} for stage, base in self.stages.items()}
        if "call" in arguments:
            return self.make(**arguments["call"])
        wrapper = self.make(**arguments["init"])
        result = None
        for stage in list(arguments)[1:]:
            result = getattr(wrapper, self.methods.get(stage, stage))(**arguments[stage])
        return result


OPTIONS: dict[str, Any] = {
    "pos_encoding_mode": "ALIBI",
    "window_left": 3,
    "logits_soft_cap": 0.5,
    "sm_scale": 0.9,
}
ROPE: dict[str, Any] = {"rope_scale": 4.0, "rope_theta": 100.0}
UNCAPPED = {name: value for name, value in {**OPTIONS, **ROPE}.items() if name != "logits_soft_cap"}
SCALES: dict[str, Any] = {"q_scale": 2.0, "k_scale": 2.0, "v_scale": 2.0}
LSE: dict[str, Any] = {"return_lse": True}
SPLIT = {"fixed_split_size": Raises(0)}
"""Splits change no more than rounding: test_splits."""


def buffers(r: Requests) -> dict[str, Any]:
    out = torch.zeros(*r.q.shape[:2], r.head_dims[1], dtype=r.dtype, device=DEVICE)
    return {"out": out, "lse": torch.zeros(r.q.shape[:2], device=DEVICE)}


def table(r: Requests, names: tuple[str, str, str]) -> dict[str, Any]:
    return dict(zip(names, r.table, strict=True))


def sizes(r: Requests, *names: str) -> dict[str, Any]:
    return dict(zip(names, r.sizes, strict=False))


SIZES = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
DECODE_TABLE = ("indptr", "indices", "last_page_len")
PAGED_TABLE = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
# With rotation on, so that its parameters have something to change.
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
HIDDEN = torch.zeros(4, 2, dtype=torch.uint16, device=DEVICE)
"""A draft of which no row sees its own token."""

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
}
PREFILL_RUN = {**SCALES, **LSE, **buffers(P), "sinks": P.sinks, "window_left": 3, "args": None}
LSE_FORM = {"lse_base": Raises("nonsense"), "lse_layout": Raises("nonsense")}
GRAPH: dict[str, Any] = {"use_cuda_graph": Raises(True)}
TABLES = {"block_tables": H.block_tables(), "seq_lens": H.seq_lens, "max_seq_len": 130}
CACHES = dict(zip(("k_cache", "v_cache"), H.cache(), strict=True))
CUDNN = {"scale": 0.125, "workspace_buffer": None, "max_sequence_kv": 130, "block_tables": H.block_tables()}
BMM: dict[str, Any] = {"bmm1_scale": 0.5, "bmm2_scale": 2.0}
ROWS = {"q_len_per_req": Raises(2)}
POD_TABLE = ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len")
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
SHARED = dict(zip(("k_shared", "v_shared"), D.ragged(), strict=True))

SURFACES = [
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
                "custom_mask": torch.arange(46 * 212, device=DEVICE) % 3 == 0,
                "packed_custom_mask": torch.full((46 * 212 // 8,), 5, dtype=torch.uint8, device=DEVICE),
                "o_dtype": BF16,
                **dict.fromkeys(("scale_q", "scale_k", "scale_v", "k_scale", "v_scale"), HALF),
            }
        },
    ),
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
        {"init": {"kv_layout": Raises("HND"), **GRAPH}, "plan": PREFILL_OPTIONS, "run": {**PREFILL_RUN, **LSE_FORM}},
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
        {"init": {"kv_layout": Raises("HND"), **GRAPH}, "plan": PREFILL_OPTIONS, "run": {**PREFILL_RUN, **LSE_FORM}},
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
            },
            "run": {
                **LSE,
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
                **{f"batch_offsets_{c}": Raises(torch.ones(5)) for c in "qokv"},
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

ELSEWHERE = {
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": "test_decode.test_cuda_graph_mode_fills_the_callers_buffers",
    "append_paged_kv_cache": "test_page",
    "append_paged_mla_kv_cache": "test_page",
    "fast_decode_plan": "test_decode.test_fast_decode_plan; its arguments are those of plan()",
    "get_batch_indices_positions": "test_page",
    "get_seq_lens": "test_page",
    "merge_state": "test_cascade",
    "merge_state_in_place": "test_cascade",
    "merge_states": "test_cascade",
    "packbits": "test_page",
    "segment_packbits": "test_page",
    "single_prefill_with_kv_cache_return_lse": "test_prefill; its arguments are those of single_prefill_with_kv_cache",
    "variable_length_merge_states": "test_cascade",
}
"""Functions of a few tensors, every one of which is an input."""
