"""``attn::batch_mla``: prefill of one KV head whose key is ``[ckv, kpe]`` and whose value is ``ckv``, read once."""

from __future__ import annotations

from typing import Any

from attn_ops.kernels.triton.hopper import hopper_for
from attn_ops.kernels.triton.prefill import Operands, attend
from attn_ops.meta.outputs import batch_mla as allocate
from torch import Tensor

from attn_ops.ops.options import MLA_SM_SCALE, AttentionOptions
from attn_ops.plan.state import PlanProblem, PrefillPlan


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
    out, lse = allocate(q_nope, return_lse=return_lse)
    state = PrefillPlan(*plan)
    o = AttentionOptions(MLA_SM_SCALE if sm_scale is None else sm_scale, **options)
    call = q_nope, q_pe, ckv_cache, kpe_cache, PlanProblem.of(state.problem), o
    special = hopper_for("hopper_mla", q_nope, lambda module: module.unsupported_reasons(*call))
    if special:
        special.attend((q_nope, q_pe), (ckv_cache, kpe_cache), out, lse, state, workspace, o.sm_scale, o.causal)
        return out, lse
    x = Operands(
        q=q_nope,
        q_b=q_pe,
        k=ckv_cache,
        k_b=kpe_cache,
        v=ckv_cache,
        dims=(q_nope.shape[2], q_pe.shape[2], q_nope.shape[2]),
        offset_b=0,
        heads=(q_nope.shape[1], 1),
        k_strides=(ckv_cache.stride(0), ckv_cache.stride(1), 0),
        k_b_strides=(kpe_cache.stride(0), kpe_cache.stride(1)),
        v_strides=(0, 0, 0),
        kv_rows=0,
        shared=True,
    )
    attend(x, out, lse, state, workspace, o)
    return out, lse
