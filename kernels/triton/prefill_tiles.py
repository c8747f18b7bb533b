"""Tile sizes of prefill and MLA, as pure functions of the problem."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from ...plan import KV_UNIT
from .launch import Options


class PrefillTile(NamedTuple):
    rows: int  # pairs of a query row and a head of one KV head in a program
    kv: int  # KV tokens in a step
    options: Options


def split_dim(dim: int) -> tuple[int, int]:
    """``dim`` of a key as two parts whose padding to powers of 2 costs less than that of one, or ``(dim, 0)``."""
    whole = max(16, triton.next_power_of_2(dim))
    low = max(16, whole // 2)
    if low < dim and low + pad(dim - low) < whole:
        return low, dim - low
    return dim, 0


def pad(dim: int) -> int:
    """The power of 2 that a part of a head is padded to; matrix instructions take no fewer than 16."""
    return max(16, triton.next_power_of_2(dim)) if dim else 0


def run_length(page_size: int, block: int) -> int:
    """Tokens in a row that lie in one page if they begin at a multiple of their number; at most a unit of work."""
    return min(page_size & -page_size, block, KV_UNIT)


@functools.cache
def prefill_tile(dtype: torch.dtype, kv_dtype: torch.dtype, dim_qk: int, dim_vo: int, pairs: int) -> PrefillTile:
    """``pairs`` query rows times heads per KV head in the plan's tiles; more than ``rows`` take several programs."""
    pairs, dim = max(16, triton.next_power_of_2(pairs)), max(dim_qk, dim_vo)
    if dtype == torch.float32:
        return PrefillTile(min(pairs, 32 if dim <= 128 else 16), 32 if dim <= 128 else 16, Options(4, 1))
    if dim > 256:
        return PrefillTile(min(pairs, 64), 32, Options(8 if pairs > 32 else 4, 2))
    if pairs <= 64:
        return PrefillTile(pairs, 64 if dim <= 128 else 32, Options(4, 3))
    return PrefillTile(128, 64, Options(8, 3 if dim <= 128 else 2))
