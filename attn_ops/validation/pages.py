"""Checks of the ops on page tables and caches."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DTypeError
from ..registry import Problem
from .common import FLOATS, FP8, Op, caches, dtype_name


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    *,
    kv_layout: str = "NHD",
    backend: str = "auto",
) -> Problem:
    op = Op("append_kv")
    op.tensor("k", k, "[nnz, num_kv_heads, head_dim]", FLOATS + FP8, None)
    op.tensor("v", v, "[nnz, num_kv_heads, head_dim]", FLOATS + FP8, k)
    page_size, heads = caches(op, k, k_cache, v_cache, kv_layout)
    for name, t, cache in (("k", k, k_cache), ("v", v, v_cache)):
        op.size(name, "tokens", t.shape[0], k.shape[0], "k")
        op.size(name, "KV heads", int(t.shape[1]), heads, "the cache")
        op.size(name, "head_dim", int(t.shape[2]), int(cache.shape[3]), f"{name}_cache")
        if t.dtype != cache.dtype:
            op.fail(
                DTypeError,
                f"{name} is {dtype_name(t)} and {name}_cache {dtype_name(cache)}",
                "one dtype",
                f"convert {name}",
            )
    for name, t in (("batch_indices", batch_indices), ("positions", positions)):
        op.tensor(name, t, "[nnz]", (torch.int32,), k)
        op.size(name, "tokens", t.shape[0], k.shape[0], "k")
    op.tensor("kv_indices", kv_indices, "[pages]", (torch.int32,), k)
    op.tensor("kv_indptr", kv_indptr, "[batch + 1]", (torch.int32,), k)
    op.no_grad(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    return Problem(
        "append_kv",
        k.device.type,
        k.dtype,
        k_cache.dtype,
        heads,
        heads,
        int(k.shape[2]),
        int(v.shape[2]),
        page_size,
    )
