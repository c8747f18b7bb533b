"""Decode tiles, as a pure function of the problem: no autotuning, which AOTInductor would run on zeros.

From sweeps on an H200 (``python -m benchmarks tune``, whose tables go first: :mod:`.tuned`). Memory is busiest
with two CTAs on a multiprocessor, each of which works on one step while the next is on its way; three CTAs, or more
steps on their way, are no faster, and steps of half or twice the size a little slower. An FP8 step has twice the
tokens: with as many as others it is slower by a fifth.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from attn_ops.kernels.triton.launch import Options

from attn_ops.plan.state import CTAS_PER_SM

WARPS = 4
STAGES = 3
STEP_BYTES = 32 << 10
"""Keys and values of a step, where that is 16 to 128 tokens."""

SHORT_SHARES = {1: ((128, 3),), 2: ((128, 3), (1024, 4))}
"""By the bytes of a cache element: shares of at most so many tokens take steps of half the size, in so many stages.

They end before the arithmetic of a last step is hidden behind other loads.
"""

MIN_SHORT_STEP = 32


class DecodeTile(NamedTuple):
    """Tile sizes and launch options of the decode kernel."""

    kv: int  # KV tokens in a step
    heads: int  # query heads of one KV head in a program
    dim_qk: int  # head_dim of keys, padded to a power of 2
    dim_vo: int
    options: Options


@functools.cache
def shared_memory(device: torch.device) -> tuple[int, int]:
    """Bytes that a CTA and a multiprocessor have; those of Hopper where there is no GPU to ask."""
    if not torch.cuda.is_available():
        return 227 << 10, 228 << 10
    properties = torch.cuda.get_device_properties(device)
    optin = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return optin, properties.shared_memory_per_multiprocessor


@functools.cache
def evenly(device: torch.device, programs: int) -> int:
    """Shared memory with which no multiprocessor has room for more programs of a grid than an even share.

    Programs that are launched while another kernel ends would crowd on the multiprocessors that it left first.
    """
    each = triton.cdiv(programs, torch.cuda.get_device_properties(device).multi_processor_count)
    return max(0, shared_memory(device)[1] // (each + 1) - 896)  # and 1024 that each program takes beside it


def shared_bytes(
    kv: int,
    stages: int,
    heads: int,
    dim_qk: int,
    dim_vo: int,
    element: int,
    kv_element: int | None = None,
    exchanged: bool = False,
) -> int:
    """What the pipeline of a tile takes, and the exchange of its result. Wide tiles need a buffer more.

    Keys that are computed with before they are multiplied, rotated ones and FP8 ones in float32, are ``exchanged`` too.
    """
    buffers = stages if heads >= 64 else stages - 1
    step = kv * (dim_qk + dim_vo) * (kv_element or element) + heads * dim_qk * element
    return buffers * step + 4 * heads * dim_vo + exchanged * kv * dim_qk * element


def short_stages(kv_dtype: torch.dtype, tokens: int, num_ctas: int) -> int:
    """Stages of a plan with room for so many tokens where that makes its shares short, 0 where it does not."""
    for share, stages in SHORT_SHARES.get(kv_dtype.itemsize, ()):
        if tokens <= num_ctas * share:
            return stages
    return 0


@functools.cache
def decode_tile(
    device: torch.device,
    dtype: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    group: int,
    kv_dtype: torch.dtype | None = None,
    halves: bool = False,
    short: int = 0,
) -> DecodeTile:
    """``kv_dtype``: that of the query if None. ``halves``: keys are read in two. ``short``: :func:`short_stages`."""
    kv_element, parts = (kv_dtype or dtype).itemsize, 2 if halves else 1
    dim_part, dim_vo = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim_qk // parts, head_dim_vo))
    dim_qk = parts * dim_part
    wide = max(dim_qk, dim_vo)
    if dtype == torch.float32:  # computed outside of the tensor cores
        most = 16 if wide <= 256 else 4
    else:
        most = 64 if wide <= 128 else 32 if wide <= 256 else 16
    if halves or kv_element < dtype.itemsize:  # the query stays in registers
        most //= 2
    heads = min(most, triton.next_power_of_2(group))
    element = dtype.itemsize if dtype == torch.float32 else kv_element
    kv = min(128 // parts, max(16, STEP_BYTES // ((dim_qk + dim_vo) * element)))
    kv = 1 << (kv.bit_length() - 1)
    most_stages = STAGES
    if short and kv >= 2 * MIN_SHORT_STEP:
        kv, most_stages = kv // 2, short
    per_block, per_sm = shared_memory(device)
    for budget in (per_sm // CTAS_PER_SM - 1024, per_block):
        for tokens, stages in ((kv, most_stages), (kv, 2), (max(16, kv // 2), 2)):
            sizes = (heads, dim_qk, dim_vo, dtype.itemsize, kv_element, halves or kv_element < element)
            if shared_bytes(tokens, stages, *sizes) <= budget:
                return DecodeTile(tokens, heads, dim_part, dim_vo, Options(WARPS, stages))
    raise AssertionError("the smallest tile fits every supported multiprocessor")
