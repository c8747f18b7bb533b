"""Attention over ragged keys and values in one call, without a plan(): shapes alone decide the plan's size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_ops.frontend import plan_in_call
from attn_ops.frontend.arguments import positive, ranked
from attn_ops.frontend.base import as_sinks
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.scales import Scale, fold
from attn_ops.plan.resizable import PlanSpec


def attend_ragged(
    where: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    output_spec: OutputSpec,
    *,
    causal: bool,
    sm_scale: float | None,
    logit_scales: dict[str, Scale],
    value_scales: dict[str, Scale],
    window_left: int = -1,
    sinks: Any = None,
    backend: str = "auto",
) -> Any:
    """``q [nnz_qo, num_qo_heads, head_dim]``, ``k, v [nnz_kv, num_kv_heads, head_dim]``; both indptr int32."""
    for name, t in (("the query", q), ("the key", k), ("the value", v)):
        ranked(where, name, t, "[rows, heads, head_dim]")
    positive(where, num_qo_heads=q.shape[1])
    output_spec.check(where, q, v.shape[-1])
    shape = PlanSpec(
        decode=False,
        paged=False,
        page_size=1,
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim_qk=q.shape[2],
        head_dim_vo=v.shape[-1],
        window_left=window_left,
        causal=causal,
    )
    scales = fold(where, sm_scale, q.shape[2], q.device, logit_scales, value_scales)
    plan = plan_in_call.plan_ragged(shape, qo_indptr, kv_indptr, q.shape[0], k.shape[0])
    out, lse = torch.ops.attn.ragged_prefill(
        q,
        k,
        v,
        plan,
        plan_in_call.scratch(plan),
        sm_scale=scales.sm_scale,
        window_left=window_left,
        sinks=as_sinks(where, sinks, q.device),
        kv_scale=scales.kv_scale,
        causal=causal,
        return_lse=output_spec.needs_lse,
        backend=backend,
    )
    return output_spec.finalize(out, lse, scales.output)
