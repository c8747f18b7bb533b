"""Arguments that have no effect in one place, which :data:`~attn_ops.policy.FLASHINFER` does not name."""

from __future__ import annotations

_FOLLOW = "dtypes follow the tensors of run()"
_NO_ROTATION = "no positional encoding is applied"
_ONE_ROW = "one query row sees every key, causal or not"
_DIVIDED = "bmm2_scale is divided by it already"
NO_EFFECT_HERE: dict[str, str] = {
    "attention.plan.q_data_type": _FOLLOW,
    "attention.plan.kv_data_type": _FOLLOW,
    "mla.plan.query_layout": "run() recognises packed and split queries",
    "mla.plan.kv_cache_layout": "run() recognises packed and split caches",
    "mla.plan.scale_mode": "run() takes numbers and tensors",
    "mla.plan.use_sinks": "run() honours sinks wherever they are given",
    "pod.run.causal_d": _ONE_ROW,
    "decode.plan.is_causal": _ONE_ROW,
    **dict.fromkeys((f"cudnn decode.call.batch_offsets_{x}" for x in "kv"), "block_tables says where pages are"),
    "trtllm decode.call.o_scale": _DIVIDED,
    "xqa decode.call.o_scale": _DIVIDED,
    "shared prefix, prefill.forward.rope_scale": _NO_ROTATION,
    "shared prefix, prefill.forward.rope_theta": _NO_ROTATION,
}
"""``surface.stage.argument`` -> why."""
