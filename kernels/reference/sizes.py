"""Sizes that may be symbolic."""

from __future__ import annotations


def any_zero(*sizes: int) -> bool:
    """Whether one of the sizes is 0. A symbolic size that is not known to be 0 counts as nonzero, without a guard."""
    if all(type(size) is int for size in sizes):
        return 0 in sizes
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return any(guard_or_false(size == 0) for size in sizes)


def enough(capacity: int, needed: int) -> bool:
    """Whether ``capacity`` suffices. A symbolic size gets a guard; one that only the run knows is taken to fit."""
    condition = needed <= capacity
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(condition)
