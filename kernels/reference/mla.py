"""Multi-head latent attention with absorbed weights: prefill with one KV head, key ``[ckv, kpe]`` and value ``ckv``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_ops.kernels.reference.attention import prefill
from attn_ops.kernels.reference.cache_views import bits
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
    opts = AttentionOptions(sm_scale=mla_scale(sm_scale), **options)
    keys = torch.cat((bits(ckv_cache), bits(kpe_cache)), -1).view(ckv_cache.dtype)
    q = torch.cat((q_nope, q_pe), -1)
    return prefill(q, keys[:, :, None], ckv_cache[:, :, None], PrefillPlan(*plan), None, opts, return_lse)
