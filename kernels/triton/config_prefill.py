"""Tile sizes of the general prefill kernel (prefill and MLA), as pure functions of the problem.

The tuned tables (:mod:`.config_tuned`) come first. There is no autotuning: AOTInductor would run it on zeros.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from attn_ops.gpu import compute_capability, shared_memory
from attn_ops.kernels.triton.launch import Options
from attn_ops.plan.sizing import CTA_PACKED_ROWS
from attn_ops.plan.state import KV_BLOCK

RESERVED_SHARED_BYTES = 2048
"""Shared memory that the kernel takes in addition to its query and KV tiles."""

MIN_DOT = 16
"""The smallest dimension of a ``tl.dot``."""


class PrefillTile(NamedTuple):
    """Tile sizes and launch options of the prefill kernel."""

    rows: int  # packed rows of a CTA
    kv: int  # tokens of a KV tile
    options: Options


def split_dim(dim: int) -> tuple[int, int]:
    """The columns of a key as ``(part A, part B)``.

    Two parts if they take less padding to powers of 2 than one, otherwise ``(dim, 0)``: 192 is 128 and 64, not 256.
    """
    whole = pad(dim)
    low = max(MIN_DOT, whole // 2)
    if low < dim and low + pad(dim - low) < whole:
        return low, dim - low
    return dim, 0


def pad(dim: int) -> int:
    """The block size of a part with ``dim`` columns: a power of 2, at least :data:`MIN_DOT`; 0 for no part."""
    return max(MIN_DOT, triton.next_power_of_2(dim)) if dim else 0


def run_length(page_size: int, kv_tile: int) -> int:
    """Tokens of a run: consecutive tokens of a KV tile that lie in one page if they begin at a multiple of the run.

    At most a KV block, since split points are multiples of one.
    """
    return min(page_size & -page_size, kv_tile, KV_BLOCK)


# Best first, as measured on an H200. WGMMA takes at least 64 rows. The last tiles of a table are for GPUs with less
# shared memory.
TILES_UP_TO_128 = (
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
TILES_UP_TO_256 = (PrefillTile(128, 64, Options(8, 2)), *TILES_UP_TO_128[3:])
TILES_UP_TO_512 = (
    PrefillTile(64, 64, Options(8, 2)),
    PrefillTile(64, 32, Options(8, 2)),
    *TILES_UP_TO_128[5:],
)
"""Tiles by the padded head dim; shared keys and values, of MLA, use the last table."""

TILES_FLOAT32 = (
    PrefillTile(32, 32, Options(4, 1)),
    PrefillTile(16, 32, Options(4, 1)),
    PrefillTile(16, 16, Options(4, 1)),
)
"""Tiles for float32, which does not use tensor cores; beyond a padded head dim of 128 the last one."""


def tensor_memory(device: torch.device) -> bool:
    """Whether matrix products of 64 rows and more accumulate in tensor memory, not in registers: on Blackwell."""
    capability = compute_capability(device)
    return capability is not None and capability[0] == 10


@functools.cache
def prefill_tile(
    device: torch.device, dtype: torch.dtype, dim_qk: int, dim_vo: int, shared: bool, packed_rows: int
) -> PrefillTile:
    """The first tile of the problem's table that fits in shared memory and has no more rows than the query tiles.

    A tile of more than CTA_PACKED_ROWS rows must leave no more rows unused than tiles of CTA_PACKED_ROWS rows: for 384
    packed rows, tiles of 256 leave 128 unused, and tiles of 128 none.

    shared       values are part A of the keys, and are loaded once
    packed_rows  of the plan's query tiles; a query tile with more than ``rows`` packed rows takes several CTAs
    """
    table: tuple[PrefillTile, ...]
    head_dim = max(pad(dim_qk), pad(dim_vo)) if not shared else 512
    if dtype == torch.float32:
        table = TILES_FLOAT32 if head_dim <= 128 else TILES_FLOAT32[2:]
    else:
        table = TILES_UP_TO_128 if head_dim <= 128 else TILES_UP_TO_256 if head_dim <= 256 else TILES_UP_TO_512
    budget = shared_memory(device)[0]
    row_bytes = (pad(dim_vo) + pad(dim_qk - dim_vo) if shared else pad(dim_qk)) * dtype.itemsize
    for tile in table:
        # Blackwell's matrix instructions do not read values in the layout of keys: Triton keeps a second copy.
        two_copies = not shared or (tile.rows >= 64 and tensor_memory(device))
        token_bytes = row_bytes + (pad(dim_vo) * dtype.itemsize if two_copies else 0)
        used = tile.rows * row_bytes + tile.options.num_stages * tile.kv * token_bytes
        fits = tile.rows <= max(MIN_DOT, triton.next_power_of_2(packed_rows))
        if tile.rows > CTA_PACKED_ROWS:
            fits = fits and -packed_rows % tile.rows <= -packed_rows % CTA_PACKED_ROWS
        if fits and used <= budget - RESERVED_SHARED_BYTES:
            return tile
    return table[-1]
