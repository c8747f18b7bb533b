"""Tile sizes, as pure functions of the problem: no autotuning, which AOTInductor would run on zeros."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from .launch import Options


class DecodeTile(NamedTuple):
    kv: int  # KV tokens in a step
    heads: int  # query heads of one KV head in a program; the tensor cores take no fewer than 16
    dim_qk: int  # head_dim of keys, padded to a power of 2
    dim_vo: int
    options: Options


@functools.cache
def decode_tile(device: torch.device, dtype: torch.dtype, head_dim_qk: int, head_dim_vo: int, group: int) -> DecodeTile:
    dim_qk, dim_vo = (max(16, triton.next_power_of_2(dim)) for dim in (head_dim_qk, head_dim_vo))
    heads = min(64 if max(dim_qk, dim_vo) <= 256 else 32, max(16, triton.next_power_of_2(group)))
    kv = 64
    return DecodeTile(kv, heads, dim_qk, dim_vo, Options(num_warps=4, num_stages=3))
