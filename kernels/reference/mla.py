"""Multi-head latent attention: one KV head whose key is ``[ckv, kpe]`` and whose value is ``ckv``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...options import MLA_SM_SCALE, AttentionOptions
from ...plan import PrefillPlan
from .attention import prefill
from .page import bits


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
    opts = AttentionOptions(sm_scale=MLA_SM_SCALE if sm_scale is None else sm_scale, **options)
    keys = torch.cat((bits(ckv_cache), bits(kpe_cache)), -1).view(ckv_cache.dtype)
    q = torch.cat((q_nope, q_pe), -1)
    return prefill(q, keys[:, :, None], ckv_cache[:, :, None], PrefillPlan(*plan), None, opts, return_lse)
