"""Which tokens of a request each rank holds (:mod:`attn_ops.plan.context`)."""

from __future__ import annotations

from attn_ops.plan.context import ContextShard

__all__ = ["ContextShard"]
