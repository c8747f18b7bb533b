"""Attention over several GPUs."""

import importlib
from typing import Any

EXPORTS: dict[str, tuple[str, ...]] = {
    "context": ("ContextShard",),
    "merge": ("merge_context",),
    "merge_one_shot": ("ContextExchange",),
}
"""The public names by their modules, which are imported when a name is first used."""

HOMES = {name: module for module, names in EXPORTS.items() for name in names}

__all__ = [*HOMES]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES})
