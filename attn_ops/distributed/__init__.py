"""Attention over several GPUs. Importing this package registers the sharding rules of every op for DTensors."""

import importlib
from typing import Any

from attn_ops.distributed import sharding

EXPORTS: dict[str, tuple[str, ...]] = {
    "context": ("ContextShard",),
    "merge": ("merge_context",),
    "merge_one_shot": ("ContextExchange",),
    "sharding_agreement": ("RankAgreement",),
    "sharding_plan": ("shard_plan",),
}
"""The public names by their modules, which are imported when a name is first used."""

HOMES = {name: module for module, names in EXPORTS.items() for name in names}

__all__ = [*HOMES]

sharding.register()


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
