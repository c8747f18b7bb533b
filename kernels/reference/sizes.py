"""Sizes that may be symbols."""

from __future__ import annotations


def any_zero(*sizes: int) -> bool:
    """Whether one of them is 0; a symbol of which nothing is known counts as more."""
    if all(type(size) is int for size in sizes):
        return 0 in sizes
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return any(guard_or_false(size == 0) for size in sizes)
