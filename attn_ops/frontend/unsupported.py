"""Arguments of the public signatures that are refused, since honouring them would change the result."""

from __future__ import annotations

from typing import Any

_FP4 = "4-bit caches are not read here; use a float16, bfloat16, float32 or FP8 cache"
_SAGE = "scales are per tensor; fold them into bmm1_scale and bmm2_scale"
_FP4_OUT = "outputs are float16, bfloat16 or float32; quantise afterwards"
_PROFILER = "there is no in-kernel profiler; profile with torch.profiler"
_CONTEXT = "KV is not sharded over ranks here; shard it, and merge with merge_states"
_JIT = (
    "kernels are not generated from a user's source; of its variants the AttentionSink of wrappers is known, by name; "
    "otherwise use the named options"
)
_SPARSE = "every key counts; choose keys with a custom_mask or by the page table"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "jit_args": ((), _JIT),
    "kv_cache_sf": ((), _FP4),
    "k_sf_cache": ((), _FP4),
    "v_sf_cache": ((), _FP4),
    "o_sf_scale": ((1.0, -1.0), _FP4_OUT),
    "o_sf_vec_size": ((), _FP4_OUT),
    "sage_attn_sfs": (((None,) * 4,), _SAGE),
    "num_elts_per_sage_attn_blk": (((0,) * 4,), _SAGE),
    "skip_softmax_threshold_scale_factor": ((0, 0.0), _SPARSE),
    "skip_softmax": ((False,), _SPARSE),
    "enable_block_sparse_attention": ((False,), _SPARSE),
    "sparse_mla_top_k": ((0,), _SPARSE),
    "sparse_mla_top_k_lens": ((), _SPARSE),
    "uses_spcompress": ((False,), _SPARSE),
    "use_profiler": ((False,), _PROFILER),
    "profiler_buffer": ((), _PROFILER),
    "cp_world": ((1,), _CONTEXT),
    "cp_rank": ((0,), _CONTEXT),
    "enable_dcp": ((False,), _CONTEXT),
    "causal_seqlens_kv_global": ((), _CONTEXT),
    "window_right": ((0,), "keys after the query are causal's business; pass causal or is_causal"),
    "v_indptr": ((), "values lie where the keys do; kv_indptr holds for both"),
    "o_indptr": ((), "the output lies as the query does; qo_indptr holds for both"),
    "uses_shared_paged_kv_idx": ((True,), "keys and values share one page table; pass two caches of one numbering"),
    "kv_scale_format": (("auto",), "MLA caches are float16, bfloat16, float32 or plain FP8"),
    "metadata": ((), "give the arguments of plan() themselves"),
    "output_scale": (("none",), _FP4_OUT),
    "o_scale": ((1, 1.0), "outputs are not quantised; divide the output, or fold the scale into v_scale"),
    "ckv_scale_arr": ((), "scales are per tensor; pass ckv_scale and kpe_scale"),
}
"""name -> (values that change nothing, reason). None always changes nothing."""
