"""Attention variants that FlashInfer compiles from a user's source: of these, the one that the ops have themselves."""

from __future__ import annotations

from typing import Any

from attn_ops.frontend.arguments import refuse

SCALES = ("k_scale", "v_scale")
SINK = ("sinks", "sm_scale")
_SINK_ARGS = [["sink"], ["sm_scale"], "AttentionSink"]
"""Names of its tensors, names of its scalars, its own name: places 7, 9 and 11 of ``jit_args``."""


def follow(where: str, jit_args: Any) -> tuple[str, str]:
    """The arguments of run() that may follow the caches by position."""
    if jit_args is not None and list(jit_args[7:12:2]) == _SINK_ARGS:
        return SINK
    refuse(where, jit_args=jit_args)
    return SCALES
