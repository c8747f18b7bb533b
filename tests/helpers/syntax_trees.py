"""Reading sources as syntax trees."""

from __future__ import annotations

import ast


def name_of(node: ast.AST) -> str:
    """``cache`` of ``functools.cache`` and of ``functools.lru_cache(maxsize=1)``; empty without a name."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
