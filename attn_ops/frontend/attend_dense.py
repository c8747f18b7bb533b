"""One request whose keys and values are plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_ops.frontend.arguments import positive, ranked
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.scales import Scale, fold


def check_dense(where: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Ranks and sizes that :func:`attend_dense`, and what makes a mask for it, rely on."""
    ranked(where, "q", q, "[qo_len, num_qo_heads, head_dim]")
    for name, t in (("k", k), ("v", v)):
        ranked(where, name, t, "[kv_len, num_kv_heads, head_dim]")
    positive(where, num_qo_heads=q.shape[1], head_dim=q.shape[2])


def attend_dense(
    where: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layout: str,
    options: dict[str, Any],
    output_spec: OutputSpec,
    *,
    logit_scales: dict[str, Scale],
    value_scales: dict[str, Scale],
) -> Any:
    """``q [qo_len, num_qo_heads, head_dim]`` over ``k, v [kv_len, num_kv_heads, head_dim]`` (HND: heads first)."""
    output_spec.check(where, q, v.shape[-1])
    options = dict(options)
    scales = fold(where, options.pop("sm_scale"), q.shape[-1], q.device, logit_scales, value_scales)
    out, lse = torch.ops.attn.single_prefill(
        q,
        k,
        v,
        sm_scale=scales.sm_scale,
        kv_scale=scales.kv_scale,
        kv_layout=kv_layout,
        return_lse=output_spec.needs_lse,
        **options,
    )
    return output_spec.finalize(out, lse, scales.output)
