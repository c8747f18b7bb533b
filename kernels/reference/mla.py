"""Multi-head latent attention: one KV head whose key is ``[ckv, kpe]`` and whose value is ``ckv``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...plan import PrefillPlan
from .attention import Options, prefill
from .page import bits

DEFAULT_SM_SCALE = 1 / math.sqrt(128 + 64)
"""For 512 + 64, whose keys are 128 + 64 wide before they are absorbed; other sizes must name theirs."""


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
    opts = Options(sm_scale=DEFAULT_SM_SCALE if sm_scale is None else sm_scale, **options)
    keys = torch.cat((bits(ckv_cache), bits(kpe_cache)), -1).view(ckv_cache.dtype)
    q = torch.cat((q_nope, q_pe), -1)
    return prefill(q, keys[:, :, None], ckv_cache[:, :, None], PrefillPlan(*plan), None, opts, return_lse)
