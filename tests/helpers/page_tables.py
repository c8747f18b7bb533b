"""Page tables of batches, lengths for Hypothesis, and work items of plans in Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from attn_ops import DecodePlan, PrefillPlan

PAGE_SIZES = st.sampled_from([1, 3, 16, 64, 257])

# Empty, about one KV block, a few, and long enough to be split many times.
LENGTHS = st.one_of(st.just(0), st.integers(1, 3), st.integers(60, 70), st.integers(1, 500), st.integers(0, 20_000))


class Item(NamedTuple):
    """A row of ``plan.work``."""

    row: int
    rows: int
    kv_begin: int
    kv_end: int
    position: int
    page_start: int
    slot: int
    request: int


def items(plan: DecodePlan | PrefillPlan) -> list[Item]:
    return [Item(*row) for row in plan.work.tolist()]


def int32(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def indptr(lengths: Sequence[int]) -> Tensor:
    return int32([0, *lengths]).cumsum(0, dtype=torch.int32)


def page_table(lengths: Sequence[int], page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """``kv_indptr``, ``kv_indices`` (all different) and ``kv_last_page_len``."""
    pages = [-(-n // page_size) for n in lengths]
    indices = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0))
    return indptr(pages), indices.int(), int32([(n - 1) % page_size + 1 if n else 0 for n in lengths])


def disjoint(ranges: Sequence[tuple[int, int]], begin: int, end: int) -> bool:
    """Whether the half-open ranges are nonempty, and cover ``begin`` to ``end`` without overlap."""
    at = begin
    for a, b in sorted(ranges):
        if a != at or b <= a:
            return False
        at = b
    return at == end
