"""Tile sizes of prefill and MLA, as pure functions of the problem."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from attn_ops.kernels.triton.config_decode import shared_memory
from attn_ops.kernels.triton.launch import Options

from attn_ops.plan.state import KV_BLOCK

RESERVED = 2048
"""Bytes of shared memory that a kernel takes beside its operands."""


class PrefillTile(NamedTuple):
    """Tile sizes and launch options of the prefill kernel."""

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
    return min(page_size & -page_size, block, KV_BLOCK)


# Best first, as measured on an H200; warpgroup matrix instructions take no fewer than 64 rows. The tables end
# with tiles that fit smaller multiprocessors.
NARROW = (
    PrefillTile(256, 64, Options(16, 3)),
    PrefillTile(128, 64, Options(8, 3)),
    PrefillTile(128, 64, Options(8, 2)),
    PrefillTile(64, 64, Options(4, 2)),
    PrefillTile(64, 32, Options(4, 2)),
    PrefillTile(32, 64, Options(4, 2)),
    PrefillTile(32, 32, Options(4, 2)),
    PrefillTile(16, 64, Options(4, 2)),
    PrefillTile(16, 16, Options(4, 1)),
)
MEDIUM = (PrefillTile(128, 64, Options(8, 2)), *NARROW[3:])
WIDE = (PrefillTile(64, 64, Options(8, 2)), PrefillTile(64, 32, Options(8, 2)), *NARROW[5:])
EXACT = (PrefillTile(32, 32, Options(4, 1)), PrefillTile(16, 32, Options(4, 1)), PrefillTile(16, 16, Options(4, 1)))
"""For float32, which is computed outside of the tensor cores."""


@functools.cache
def tensor_memory(device: torch.device) -> bool:
    """Whether matrix instructions of 64 rows and more accumulate outside of registers: on Blackwell."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 10


@functools.cache
def prefill_tile(
    device: torch.device, dtype: torch.dtype, dim_qk: int, dim_vo: int, shared: bool, pairs: int
) -> PrefillTile:
    """``pairs`` query rows times heads per KV head in the plan's tiles; more than ``rows`` take several programs.

    ``shared`` values are a part of the keys.
    """
    table: tuple[PrefillTile, ...]
    wide = max(pad(dim_qk), pad(dim_vo)) if not shared else 512
    if dtype == torch.float32:
        table = EXACT if wide <= 128 else EXACT[2:]
    else:
        table = NARROW if wide <= 128 else MEDIUM if wide <= 256 else WIDE
    budget = shared_memory(device)[0]
    row_bytes = (pad(dim_vo) + pad(dim_qk - dim_vo) if shared else pad(dim_qk)) * dtype.itemsize
    for tile in table:
        # The instructions of Blackwell do not take keys as they lie for values.
        copied = not shared or (tile.rows >= 64 and tensor_memory(device))
        token_bytes = row_bytes + (pad(dim_vo) * dtype.itemsize if copied else 0)
        fits = tile.rows * row_bytes + tile.options.num_stages * tile.kv * token_bytes <= budget - RESERVED
        if fits and tile.rows <= max(16, triton.next_power_of_2(pairs)):
            return tile
    return table[-1]
