"""Decode tiles, as a pure function of the problem: no autotuning, which AOTInductor would run on zeros.

From sweeps on an H200 (``python -m benchmarks sweep``): memory is kept busy by two CTAs on a multiprocessor,
each with a step in flight while it works on the one before.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from .launch import Options

WARPS = 4
CTAS_PER_SM = 2
STEPS = ((64, 3), (64, 2), (32, 3), (32, 2), (16, 3), (16, 2))
"""``(KV tokens, pipeline stages)``, the first that fits in shared memory is taken."""


class DecodeTile(NamedTuple):
    kv: int  # KV tokens in a step
    heads: int  # query heads of one KV head in a program
    dim_qk: int  # head_dim of keys, padded to a power of 2
    dim_vo: int
    options: Options
    pdl: int = 0


@functools.cache
def shared_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that a CTA and a multiprocessor have; those of Hopper where there is no GPU to ask."""
    if not torch.cuda.is_available():
        return 227 << 10, 228 << 10
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin, properties.shared_memory_per_multiprocessor


def shared_bytes(kv: int, stages: int, heads: int, dim_qk: int, dim_vo: int, element: int) -> int:
    """What the pipeline of a tile takes, and the exchange of its result. Wide tiles need a buffer more."""
    buffers = stages if heads >= 64 else stages - 1
    return buffers * (kv * (dim_qk + dim_vo) + heads * dim_qk) * element + 4 * heads * dim_vo


@functools.cache
def decode_tile(device: torch.device, dtype: torch.dtype, head_dim_qk: int, head_dim_vo: int, group: int) -> DecodeTile:
    dim_qk, dim_vo = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim_qk, head_dim_vo))
    # Tensor cores take no fewer than 16 rows; float32 is computed outside of them.
    wide = max(dim_qk, dim_vo)
    if dtype == torch.float32:
        least, most = 1, 16 if wide <= 256 else 4
    else:
        least, most = 16, 64 if wide <= 128 else 32 if wide <= 256 else 16
    heads = min(most, max(least, triton.next_power_of_2(group)))
    per_block, per_sm = shared_memory(device)
    for budget in (per_sm // CTAS_PER_SM - 1024, per_block):
        for kv, stages in STEPS:
            if shared_bytes(kv, stages, heads, dim_qk, dim_vo, dtype.itemsize) <= budget:
                return DecodeTile(kv, heads, dim_qk, dim_vo, Options(WARPS, stages))
    raise AssertionError("the smallest tile fits every supported multiprocessor")
