"""The options of the attention ops, under their names in the schemas, for checks and kernels alike."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class AttentionOptions(NamedTuple):
    sm_scale: float | None = None
    logits_soft_cap: float = 0.0
    window_left: int = -1
    sinks: Tensor | None = None
    kv_scale: Tensor | None = None
    pos_encoding: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 10000.0
    causal: bool = False
    mask: Tensor | None = None


WIDEST_WINDOW = (1 << 30) - 1
"""The largest ``window_left``: positions are int32, and so are their differences from it."""

MLA_DIMS, MLA_SM_SCALE = (512, 64), 1 / math.sqrt(128 + 64)
"""The head of MLA that has a default scale: its keys are 128 + 64 wide before they are absorbed."""
