"""Views and rows of caches in any layout and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.ops.options import DENSE_DIMS


def as_nhd(cache: Tensor, kv_layout: str) -> Tensor:
    """A view of a paged cache as ``[pages, page_size, num_kv_heads, head_dim]``."""
    return cache if kv_layout == "NHD" else cache.transpose(1, 2)


def block_pages(t: Tensor, page_size: int, kv_layout: str) -> Tensor:
    """A view of dense keys or values as a paged cache of the same layout, whose pages lie in order."""
    token = DENSE_DIMS[kv_layout].token
    return t.unflatten(token, (t.shape[token] // page_size, page_size)).movedim(token, 0)


def bits(cache: Tensor) -> Tensor:
    """An FP8 tensor as bytes, any other as it is: PyTorch does not implement indexing for all FP8 dtypes."""
    return cache.view(torch.uint8) if cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else cache


def gather(cache: Tensor, index: Tensor) -> Tensor:
    """``cache[index]`` for any dtype. It copies whole rows, where indexing on the CPU copies elements."""
    return bits(cache).index_select(0, index.flatten()).unflatten(0, index.shape).view(cache.dtype)


def with_spare_row(t: Tensor) -> Tensor:
    """``t``, with a row of zeros behind the last if the number of rows is symbolic.

    A package may be called without rows, and what is out of range needs a row to read.
    """
    if type(t.shape[0]) is int:
        return t
    return torch.cat((bits(t), bits(t).new_zeros((1, *t.shape[1:])))).view(t.dtype)
