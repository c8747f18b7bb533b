"""``attn::batch_mla``: prefill of one KV head whose key is ``[ckv, kpe]`` and whose value is ``ckv``, read once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_ops.kernels.triton.prefill import launch_tiles
from attn_ops.kernels.triton.prefill_call import Operands, attend
from attn_ops.ops.options import AttentionOptions, mla_scale
from attn_ops.plan.state import PrefillPlan


def batch_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    plan: list[Tensor],
    workspace: Tensor,
    *,
    sm_scale: float | None = None,
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    x = Operands(
        q=q_nope,
        q_b=q_pe,
        k=ckv_cache,
        v=kpe_cache,
        dims=(int(q_nope.shape[2]), int(q_pe.shape[2]), int(q_nope.shape[2])),
        heads=(int(q_nope.shape[1]), 1),
        k_strides=(ckv_cache.stride(0), ckv_cache.stride(1), 0),
        v_strides=(kpe_cache.stride(0), kpe_cache.stride(1), 0),
        kv_rows=0,
        shared=True,
    )
    o = AttentionOptions(mla_scale(sm_scale), **options)
    return attend(launch_tiles, x, PrefillPlan(*plan), workspace, return_lse, o)
