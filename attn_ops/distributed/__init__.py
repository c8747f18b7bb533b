"""Attention over several GPUs. Importing this package registers the sharding rules of every op for DTensors."""

import importlib
from typing import Any

from attn_ops.distributed import sharding

HOMES = {
    "ContextShard": "attn_ops.plan.context",
    "merge_context": "attn_ops.distributed.merge",
    "ContextExchange": "attn_ops.distributed.merge_one_shot",
    "RankAgreement": "attn_ops.distributed.sharding_agreement",
    "shard_plan": "attn_ops.distributed.sharding_plan",
}
"""The module of each public name, which is imported when the name is first used."""

__all__ = [*HOMES]

sharding.register()


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
