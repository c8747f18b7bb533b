"""Arguments of the public signatures that are accepted and have no effect on any result.

They steer another library's internals, or repeat what other arguments say. Every other argument either changes the
result or is refused (:mod:`attn_ops.frontend.unsupported`); ``tests/frontend/test_arguments.py`` checks this.
"""

from __future__ import annotations

_JIT = "kernels are not generated from a user's source; use the named options"
_BOUND = "a bound on lengths that the lengths themselves give"
_AGAIN = "says again what the page table says"
_ACCURACY = "accumulation and softmax are float32"
_LAUNCH = "a launch attribute of another library's kernels"
_SCRATCH = "scratch memory that these ops do not need"

IGNORED: dict[str, str] = {
    "allow_fp16_qk_reduction": _ACCURACY,
    "use_fp16_qk_reduction": _ACCURACY,
    "use_fp16_softmax": _ACCURACY,
    "backend": "names another library's kernels; `reference` and `triton` choose this library's where it has such a "
    "choice, and `auto` the first that can",
    "use_tensor_cores": "the backend decides",
    "cute_dsl_impl": "names another library's kernels",
    "bf16q_fp8kv_transform_mode": "FP8 keys and values are converted as they are read",
    "enable_pdl": _LAUNCH,
    "sm_count": _LAUNCH,
    "request_order": "the order in which requests are scheduled",
    "request_order_plan": "the order in which requests are scheduled",
    "is_cuda_graph_compatible": "every call is capturable",
    "is_var_seq": "lengths may always differ",
    "jit_kwargs": _JIT,
    "variant_owns_mask": _JIT,
    "non_blocking": "host tensors are always copied without waiting, in stream order",
    "disable_split_kv": "splits change no more than rounding; True plans unsplit work",
    "uniform_q_len": _AGAIN,
    "block_tables": _AGAIN,
    "seq_lens": _AGAIN,
    "seq_lens_q": _AGAIN,
    "q_seq_lens_cpu": _AGAIN,
    "kv_seq_lens_cpu": _AGAIN,
    "max_token_per_sequence": _BOUND,
    "max_sequence_kv": _BOUND,
    "max_seq_len": _BOUND,
    "max_q_len": _BOUND,
    "max_kv_len": _BOUND,
    "max_item_len_ptr": "a bound on items that the places of their tokens give",
    "int_workspace_buffer": "a plan owns its integers",
    "int_workspace_buffers": "a plan owns its integers",
    "multi_ctas_kv_counter_buffer": _SCRATCH,
    "semaphores": _SCRATCH,
    "workspace_buffer": "a call without a plan() allocates its own; wrappers do compute in it",
    "cum_seq_lens_kv": _AGAIN,
    "qk_nope_head_dim": "the width of keys before absorption, which matters to bmm1_scale alone",
    "variant": "one kernel reads caches of any strides",
    "skip_all_rows_active_check": "rows without a key are always handled",
    "mask_indptr_buf": "the offsets of the masks follow from the lengths",
    "kv_last_page_len": "a token's place follows from kv_indptr and its position",
}
"""name -> why. ``block_tables`` and the lengths matter where a function takes what it attends to from them."""

_FOLLOW = "dtypes follow the tensors of run()"
_NO_ROTATION = "no positional encoding is applied"
_ONE_ROW = "one query row sees every key, causal or not"
_DIVIDED = "bmm2_scale is divided by it already"
HERE: dict[str, str] = {
    "attention.plan.q_data_type": _FOLLOW,
    "attention.plan.kv_data_type": _FOLLOW,
    "mla.plan.query_layout": "run() recognises packed and split queries",
    "mla.plan.kv_cache_layout": "run() recognises packed and split caches",
    "mla.plan.scale_mode": "run() takes numbers and tensors",
    "mla.plan.use_sinks": "run() honours sinks wherever they are given",
    "pod.run.causal_d": _ONE_ROW,
    "decode.plan.is_causal": _ONE_ROW,
    "trtllm decode.call.o_scale": _DIVIDED,
    "xqa decode.call.o_scale": _DIVIDED,
    "shared prefix, prefill.forward.rope_scale": _NO_ROTATION,
    "shared prefix, prefill.forward.rope_theta": _NO_ROTATION,
}
"""Arguments that have no effect in one place, named by the surfaces of ``tests/helpers/surfaces/``."""
