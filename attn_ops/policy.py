"""The policy on the arguments of FlashInfer and FlashAttention: which have no effect here, and which are refused.

Every other argument of the public signatures changes the result. ``tests/frontend/test_arguments.py`` and
``tests/flash_attn/test_refusals.py`` check this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Policy(NamedTuple):
    """The policy on the arguments of one library.

    no_effect     name -> why. Some arguments have an effect in a function that documents it
    unsupported   name -> (values that change nothing, reason). None changes nothing
    negligible    name -> the largest value of an unsupported argument that changes less than float32 rounding
    no_effect_in  function or method -> name -> why. Elsewhere the argument has an effect
    """

    no_effect: Mapping[str, str]
    unsupported: Mapping[str, tuple[tuple[Any, ...], str]]
    negligible: Mapping[str, float] = {}
    no_effect_in: Mapping[str, Mapping[str, str]] = {}


_NO_JIT = "kernels are not generated from a user's source; use the named options"
_BOUND = "a bound on lengths, which are known"
_REPEATS = "repeats the page table"
_ACCURACY = "accumulation and softmax are float32"
_LAUNCH = "a launch attribute of another library's kernels"
_SCRATCH = "scratch memory that these ops do not need"

_FOLLOW = "dtypes follow the tensors of run()"
_NO_ROTATION = "no positional encoding is applied"
_ONE_ROW = "the one query row of a request sees every key, causal or not"
_DIVIDED = "bmm2_scale is divided by it already"
_PAGES = "block_tables says where pages are"

_FP4 = "4-bit caches are not read here; use a float16, bfloat16, float32 or FP8 cache"
_SAGE = "scales are per tensor; fold them into bmm1_scale and bmm2_scale"
_FP4_OUT = "4-bit outputs are not written here; use a float16, bfloat16, float32 or FP8 output"
_PROFILER = "there is no in-kernel profiler; profile with torch.profiler"
_CONTEXT = "a call on one rank's keys has enable_dcp=True; on all keys leave them out"
_JIT = (
    "kernels are not generated from a user's source; of its variants the AttentionSink of wrappers is known, by name; "
    "otherwise use the named options"
)
_PER_HEAD = "give block maps of KV heads to VariableBlockSparseAttentionWrapper"
_SPARSE = "every key counts; choose keys with a custom_mask or by the page table"
_TRAINING = "there is no backward and no dropout; pass 0.0, and use the flash_attn package to train"
_ALIBI = "slopes are not an argument; for the standard slopes use pos_encoding_mode='ALIBI' of the prefill wrappers"

FLASHINFER = Policy(
    no_effect={
        "allow_fp16_qk_reduction": _ACCURACY,
        "use_fp16_qk_reduction": _ACCURACY,
        "use_fp16_softmax": _ACCURACY,
        "backend": "names another library's kernels; `reference`, `triton` and `cuda` choose this library's where it "
        "has such a choice, and `auto` the first that can; `cudnn` also means the layout of its caches for the paged "
        "prefill wrapper",
        "use_tensor_cores": "the backend decides",
        "cute_dsl_impl": "names another library's kernels",
        "bf16q_fp8kv_transform_mode": "FP8 keys and values are converted as they are read",
        "enable_pdl": _LAUNCH,
        "sm_count": _LAUNCH,
        "kv_splits": "splits change no more than rounding, and are made for load balance",
        "use_clc": _LAUNCH,
        "request_order": "the order in which requests are scheduled",
        "request_order_plan": "the order in which requests are scheduled",
        "is_cuda_graph_compatible": "every call is capturable",
        "is_var_seq": "lengths may always differ",
        "jit_kwargs": _NO_JIT,
        "variant_owns_mask": _NO_JIT,
        "non_blocking": "host tensors are always copied without waiting, in stream order",
        "disable_split_kv": "splits change no more than rounding; True plans unsplit work",
        "uniform_q_len": _REPEATS,
        "block_tables": _REPEATS,
        "seq_lens": _REPEATS,
        "seq_lens_q": _REPEATS,
        "q_seq_lens_cpu": _REPEATS,
        "kv_seq_lens_cpu": _REPEATS,
        "max_token_per_sequence": _BOUND,
        "max_sequence_kv": _BOUND,
        "max_seq_len": _BOUND,
        "max_q_len": _BOUND,
        "max_kv_len": _BOUND,
        "max_item_len_ptr": "a bound on items, which follows from the positions of their tokens",
        "int_workspace_buffer": "a plan owns its integers",
        "int_workspace_buffers": "a plan owns its integers",
        "multi_ctas_kv_counter_buffer": _SCRATCH,
        "semaphores": _SCRATCH,
        "workspace_buffer": "a call without a plan() allocates its own; wrappers do compute in it",
        "cum_seq_lens_kv": _REPEATS,
        "qk_nope_head_dim": "the width of keys before absorption, which matters only to bmm1_scale",
        "variant": "one kernel reads caches of any strides",
        "skip_all_rows_active_check": "rows without a key are always handled",
        "mask_indptr_buf": "the offsets of the masks follow from the lengths",
        "kv_last_page_len": "a token's place follows from kv_indptr and its position",
    },
    unsupported={
        "jit_args": ((), _JIT),
        "kv_cache_sf": ((), _FP4),
        "k_sf_cache": ((), _FP4),
        "v_sf_cache": ((), _FP4),
        "o_sf_scale": ((1.0, -1.0), _FP4_OUT),
        "o_sf_vec_size": ((), _FP4_OUT),
        "sage_attn_sfs": (((None,) * 4,), _SAGE),
        "num_elts_per_sage_attn_blk": (((0,) * 4,), _SAGE),
        "skip_softmax_threshold_scale_factor": ((0, 0.0), _SPARSE + "; factors up to 2^-24 change less than rounding"),
        "skip_softmax": ((False,), _SPARSE),
        "block_mask": ((), _PER_HEAD),
        "kv_block_lens": ((), "give the sizes of blocks to VariableBlockSparseAttentionWrapper"),
        "q2k_indices": ((), _PER_HEAD),
        "q2k_num": ((), _PER_HEAD),
        "uses_spcompress": ((False,), _SPARSE),
        "use_profiler": ((False,), _PROFILER),
        "profiler_buffer": ((), _PROFILER),
        "cp_world": ((1,), _CONTEXT),
        "cp_rank": ((0,), _CONTEXT),
        "causal_seqlens_kv_global": ((), _CONTEXT),
        "window_right": ((0,), "`causal` decides whether keys after the query count; pass causal or is_causal"),
        "kv_scale_format": (("auto",), "MLA caches are float16, bfloat16, float32 or plain FP8"),
        "metadata": ((), "give the arguments of plan() themselves"),
    },
    negligible={"skip_softmax_threshold_scale_factor": 2.0**-24},
    no_effect_in={
        "BatchAttention.plan": {"q_data_type": _FOLLOW, "kv_data_type": _FOLLOW},
        "BatchDecodeWithPagedKVCacheWrapper.plan": {"is_causal": _ONE_ROW},
        "BatchMLAPagedAttentionWrapper.plan": {
            "query_layout": "run() recognizes packed and split queries",
            "kv_cache_layout": "run() recognizes packed and split caches",
            "scale_mode": "run() takes numbers and tensors",
            "use_sinks": "run() applies sinks wherever they are given",
        },
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward": {
            "rope_scale": _NO_ROTATION,
            "rope_theta": _NO_ROTATION,
        },
        "PODWithPagedKVCacheWrapper.run": {"causal_d": _ONE_ROW},
        "cudnn_batch_decode_with_kv_cache": {"batch_offsets_k": _PAGES, "batch_offsets_v": _PAGES},
        "trtllm_batch_decode_with_kv_cache": {"o_scale": _DIVIDED},
        "xqa_batch_decode_with_kv_cache": {"o_scale": _DIVIDED},
    },
)
"""``block_tables`` and lengths have an effect in functions that read the page table from them. With ``backend="cudnn"``
lengths also decide whether offsets count elements or tokens. ``is_causal`` of the decode wrapper has an effect with
several query rows per request.

A small ``skip_softmax_threshold_scale_factor`` is negligible: keys may be left out whose probability, relative to the
largest of the row, is below the factor over the number of keys. All such probabilities together are at most the factor.
"""

FLASH_ATTENTION = Policy(
    no_effect={
        "max_seqlen": _BOUND,
        "max_seqlen_q": _BOUND,
        "max_seqlen_k": _BOUND,
        "deterministic": "the forward pass is deterministic",
        "num_splits": "the plan splits requests for load balance, which changes no more than rounding",
        "pack_gqa": "query heads of one KV head always share a tile",
        "sm_margin": _LAUNCH,
        "has_softcap": "a plan does not depend on it",
    },
    unsupported={
        "dropout_p": ((0, 0.0), _TRAINING),
        "alibi_slopes": ((), _ALIBI),
    },
)
"""A ``dropout_p`` of None is refused too (:func:`attn_ops.frontend.flash.arguments.refuse`)."""

NO_EFFECT = FLASHINFER.no_effect.keys() | FLASH_ATTENTION.no_effect.keys()
UNSUPPORTED = FLASHINFER.unsupported.keys() | FLASH_ATTENTION.unsupported.keys()
"""Names of these arguments of both libraries."""
