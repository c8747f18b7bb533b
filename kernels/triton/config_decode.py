"""Tile sizes of decode, a pure function of the problem. There is no autotuning: AOTInductor would tune on zeros.

The choices come from sweeps on an H200 (``python -m benchmarks tune``, whose tables take precedence:
:mod:`.config_tuned`). Bandwidth is highest with two CTAs per SM, each of which computes on one KV tile while it loads
the next. Three CTAs per SM or more stages are no faster, and tiles of half or twice the size a little slower. FP8 tiles
have twice the tokens: with the tokens of 16-bit tiles they are slower by a fifth.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from attn_ops.gpu import num_sms, shared_memory
from attn_ops.kernels.triton.launch import Options
from attn_ops.plan.state import CTAS_PER_SM

NUM_WARPS = 4
NUM_STAGES = 3

KV_TILE_BYTES = 32 << 10
"""Bytes of the keys and values of a KV tile, if that is 16 to 128 tokens."""

SHORT_WORK = {1: ((128, 3),), 2: ((128, 3), (1024, 4))}
"""``(tokens per CTA, stages)`` by bytes of a cache element. CTAs of at most this many tokens take half KV tiles.

Such a CTA has no later loads to hide the computation on its last tile, which a half tile makes shorter.
"""

MIN_SHORT_TILE_TOKENS = 32

SHARED_PER_CTA_BYTES = 1024
"""Shared memory that the driver reserves for each CTA."""


class DecodeTile(NamedTuple):
    """Block sizes of decode, powers of 2."""

    kv: int  # tokens of a KV tile
    heads: int  # query heads of one KV head in a program
    dim_qk: int  # at least head_dim_qk, or half of it with rotated keys
    dim_vo: int  # at least head_dim_vo
    options: Options


@functools.lru_cache(maxsize=256)
def min_shared_for_even_spread(device: torch.device, programs: int) -> int:
    """Bytes of shared memory per CTA with which no SM has room for more than an even share of a grid.

    Programs launched while the preceding kernel finishes (PDL) would otherwise crowd on the SMs that it leaves first.
    """
    programs_per_sm = triton.cdiv(programs, num_sms(device))
    # One program more must not fit; shared memory is allocated in units of 128 bytes.
    return max(0, shared_memory(device)[1] // (programs_per_sm + 1) - SHARED_PER_CTA_BYTES + 128)


def shared_bytes(
    kv: int,
    stages: int,
    heads: int,
    dim_qk: int,
    dim_vo: int,
    element: int,
    kv_element: int,
    exchanged: bool,
) -> int:
    """A bound on the shared memory of a tile in bytes: the pipeline's buffers, and the exchange of its result.

    ``element`` and ``kv_element`` are bytes of an element of the query and of the cache. Tiles of 64 heads and more
    have one buffer more. Keys that are computed before the product, rotated or FP8 ones in float32, are ``exchanged``.
    """
    buffers = stages if heads >= 64 else stages - 1
    tile = kv * (dim_qk + dim_vo) * kv_element + heads * dim_qk * element
    return buffers * tile + 4 * heads * dim_vo + exchanged * kv * dim_qk * element


def short_stages(kv_dtype: torch.dtype, tokens: int, num_ctas: int) -> int:
    """Stages for a plan with a capacity of ``tokens`` if that is short work per CTA, otherwise 0."""
    for tokens_per_cta, stages in SHORT_WORK.get(kv_dtype.itemsize, ()):
        if tokens <= num_ctas * tokens_per_cta:
            return stages
    return 0


@functools.cache
def decode_tile(
    device: torch.device,
    dtype: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    group: int,
    kv_dtype: torch.dtype,
    halves: bool,
    short: int,
) -> DecodeTile:
    """The tile for ``group`` query heads per KV head.

    Args:
        kv_dtype: dtype of the cache.
        halves: keys are loaded in two halves of the head, to be rotated.
        short: :func:`short_stages`.
    """
    kv_element, parts = kv_dtype.itemsize, 2 if halves else 1
    dim_part, dim_vo = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim_qk // parts, head_dim_vo))
    dim_qk = parts * dim_part
    largest_dim = max(dim_qk, dim_vo)
    if dtype == torch.float32:  # computed without tensor cores
        max_heads = 16 if largest_dim <= 256 else 4
    else:
        max_heads = 64 if largest_dim <= 128 else 32 if largest_dim <= 256 else 16
    if halves or kv_element < dtype.itemsize:  # the query stays in registers
        max_heads //= 2
    heads = min(max_heads, triton.next_power_of_2(group))
    element = dtype.itemsize if dtype == torch.float32 else kv_element
    kv = min(128 // parts, max(16, KV_TILE_BYTES // ((dim_qk + dim_vo) * element)))
    kv = 1 << (kv.bit_length() - 1)
    max_stages = NUM_STAGES
    if short and kv >= 2 * MIN_SHORT_TILE_TOKENS:
        kv, max_stages = kv // 2, short
    per_cta, per_sm = shared_memory(device)
    for budget in (per_sm // CTAS_PER_SM - SHARED_PER_CTA_BYTES, per_cta):
        for tokens, stages in ((kv, max_stages), (kv, 2), (max(16, kv // 2), 2)):
            sizes = (heads, dim_qk, dim_vo, dtype.itemsize, kv_element, halves or kv_element < element)
            if shared_bytes(tokens, stages, *sizes) <= budget:
                return DecodeTile(tokens, heads, dim_part, dim_vo, Options(NUM_WARPS, stages))
    raise AssertionError(f"no decode tile fits into {per_cta} bytes of shared memory; expected: 16 tokens always fit")
