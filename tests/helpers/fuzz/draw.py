"""Random choices of one seed, tensors in poisoned memory, and a guard of the memory that a call may not write."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

POISON = -(1 << 30) - 7
"""The integers in unused memory: a page number and a length that nothing has."""


@dataclass
class Draw:
    """All choices of one seed. ``large`` draws larger sizes, ``small`` those that an interpreter can run."""

    seed: int
    device: str = "cpu"
    backend: str = "auto"
    size: str = "medium"
    random: random.Random = field(init=False)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)

    def pick(self, *values: T) -> T:
        return self.random.choice(values)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def integer(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def by_size(self, small: T, medium: T, large: T) -> T:
        return {"small": small, "medium": medium, "large": large}[self.size]

    def place(self, t: Tensor, free: int | None = None) -> Tensor:
        """``t`` on the device, sometimes a view with other strides of memory that is poisoned around it.

        The first ``free`` dimensions, by default all but the last, may have any stride.
        """
        if self.chance(0.4) or not t.dim():
            return t.to(self.device)
        free = t.dim() - 1 if free is None else free
        order = list(range(free))
        if self.chance(0.5):
            self.random.shuffle(order)
        order += range(free, t.dim())
        sizes = [t.shape[d] + (self.pick(0, 0, 1, 3, 8) if free > d or d == t.dim() - 1 == free else 0) for d in order]
        offset = self.pick(0, 0, 1, 8)
        strides = [0] * t.dim()
        step = 1
        for d, size in reversed(list(zip(order, sizes, strict=True))):
            strides[d] = step
            step *= max(size, 1)
        memory = torch.full((offset + step + self.pick(0, 5),), math.nan).to(t.dtype)
        if not t.is_floating_point():
            memory = torch.full(memory.shape, 1 if t.dtype == torch.bool else POISON % 256, dtype=t.dtype)
        memory.as_strided(t.shape, strides, offset).copy_(t)
        return memory.to(self.device).as_strided(t.shape, strides, offset)

    def buffer(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A contiguous output buffer within memory that must stay as it is."""
        before, after = self.pick(0, 8), self.pick(0, 8)
        memory = torch.full((before + math.prod(shape) + after,), math.nan).to(dtype)
        return memory.to(self.device)[before : before + math.prod(shape)].view(shape)


class Guard:
    """Copies of the whole storage of tensors, to find what a call wrote."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.kept = {t.untyped_storage().data_ptr(): (t, _bytes(t).clone()) for t in tensors if t.numel()}

    def check(self, written: Iterable[Tensor]) -> None:
        """Raise if a byte changed that is not an element of one of ``written``."""
        for t in written:
            _, before = self.kept.get(t.untyped_storage().data_ptr(), (None, None))
            if before is not None and t.numel():
                whole = before.untyped_storage()
                view = torch.empty(0, dtype=t.dtype, device=t.device).set_(
                    whole, t.storage_offset(), t.shape, t.stride()
                )
                view.copy_(t)
        for t, before in self.kept.values():
            changed = (_bytes(t) != before).nonzero()
            assert not len(changed), (
                f"{len(changed)} bytes changed from {int(changed[0])} on, in the memory of {list(t.shape)} {t.dtype}"
            )


def tensors_of(*found: Any) -> list[Tensor]:
    """The tensors in trees of Python values."""
    return [t for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, Tensor)]


def _bytes(t: Tensor) -> Tensor:
    storage = t.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage, 0, (storage.nbytes(),), (1,))


@dataclass
class Call:
    """A valid call with its expected result.

    prepare  what precedes the call, such as plan(); never traced
    run      the call. It may run more than once, and gives the same result every time
    check    compares a result of run()
    reads    tensors that nothing may write
    writes   tensors that run() may write
    text     what was drawn
    """

    name: str
    text: str
    run: Callable[[], Any]
    check: Callable[[Any], None]
    reads: list[Tensor]
    writes: list[Tensor] = field(default_factory=list)
    prepare: Callable[[], Any] | None = None
    traceable: bool = True
