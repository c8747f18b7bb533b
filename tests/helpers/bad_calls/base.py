"""A wrong call of an op, and changes that make one of a valid call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attn_ops import DecodePlan, DecodePlanner, PrefillPlanner
from attn_ops.errors import (
    AttnOpsError,
)
from helpers.calls import Arguments, arguments

ALL = torch.full((999,), 255, dtype=torch.uint8)
SIZES: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64}
ROWS, TOKENS = (1 << 28) + 1, (1 << 31) - (1 << 20) + 1


@dataclass(frozen=True)
class Bad:
    """A valid call of ``op`` with ``changes``: each a value, or a function of the value that it replaces.

    The message must read ``op: <what>; expected <expected>; <how to fix it>``. ``what`` and ``expected`` are the
    beginnings of these parts.
    """

    op: str
    changes: Arguments
    error: type[AttnOpsError]
    what: str
    expected: str

    def arguments(self) -> Arguments:
        kwargs = dict(valid(self.op))
        for name, change in self.changes.items():
            kwargs[name] = change(kwargs[name]) if callable(change) else change
        return kwargs

    def __str__(self) -> str:
        return f"{self.op}: {self.what}"


@cache
def valid(op: str) -> Arguments:
    """Shared by all wrong calls, since none may write."""
    return arguments(op)


def meta(t: Tensor) -> Tensor:
    return t.to("meta")


def leaf(t: Tensor) -> Tensor:
    return t.clone().requires_grad_()


def to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: t.to(dtype)


def every_other(t: Tensor) -> Tensor:
    """The same sizes, but a last stride of 2."""
    return torch.stack((t, t), -1).flatten(-2)[..., ::2]


def dims(*index: Any) -> Callable[[Tensor], Tensor]:
    return lambda t: t[index]


def but_last(plan: Any) -> list[Tensor]:
    return list(plan)[:-1]


def shared(t: Tensor) -> Tensor:
    """The same number of rows, all in the memory of the first."""
    return t[:1].clone().expand(t.shape)


def overlapping(t: Tensor) -> Tensor:
    """Rows that begin one element before the end of the row before them."""
    strides = list(t.stride())
    strides[-2] = t.shape[-1] - 1
    return t.new_zeros(t.numel()).as_strided(t.shape, strides)


def twice(t: Tensor) -> Tensor:
    return torch.cat((t, t))


def longer(dim: int, size: int) -> Callable[[Tensor], Tensor]:
    """A tensor with ``size`` rows in ``dim`` but memory for one: the first, expanded."""
    return lambda t: t.narrow(dim, 0, 1).expand(*(size if i == dim else n for i, n in enumerate(t.shape)))


def resized(length: int) -> Callable[[Tensor], Tensor]:
    """A tensor of that length: the first entries, or all and zeros."""
    return lambda t: torch.cat((t, t.new_zeros(length, *t.shape[1:])))[:length]


def sized(dim: int, size: int) -> Callable[[Tensor], Tensor]:
    """A tensor with another size of one dimension, of those that are 1 in memory."""
    return lambda t: t.new_empty((0, *[1] * (t.dim() - 1))).expand(
        *(size if i == dim else n for i, n in enumerate(t.shape))
    )


def replan(**changes: Any) -> Callable[[Any], Any]:
    """A plan of the same kind for another problem."""

    def planner(plan: Any) -> Any:
        max_batch, max_pages = plan.kv_len.shape[0], plan.kv_indices.shape[0]
        sizes = {"page_size": 16 if max_pages else 1, "max_kv_len": 999, **SIZES, **changes}
        if type(plan).__name__ == "DecodePlan":
            return DecodePlanner(sizes.pop("max_batch", max_batch), max_pages, **sizes).state
        return PrefillPlanner(max_batch, 44, sizes.pop("max_pages", max_pages), **sizes).state

    return planner


def field(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return lambda plan: plan._replace(**{name: change(getattr(plan, name))})


def empty_batch(plan: DecodePlan) -> DecodePlan:
    cut = {"kv_indptr": 1, "kv_len": 0, "merge_indptr": 1, "work": 1}
    return plan._replace(**{name: getattr(plan, name)[:length].clone() for name, length in cut.items()})
