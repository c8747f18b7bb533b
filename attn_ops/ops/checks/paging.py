"""Checks of the ops on page tables and caches."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.errors import ArgumentError, DTypeError, OptionError, dtype_name
from attn_ops.ops.backends import Problem
from attn_ops.ops.checks.checker import OpChecker, caches
from attn_ops.ops.options import FLOATS, FP8
from attn_ops.plan.context import ContextShard
from attn_ops.plan.state import INT32_MAX
from attn_ops.symbolic_sizes import guard_or_false, same_elements


def _places(
    op: OpChecker, new: Tensor, batch_indices: Tensor, positions: Tensor, kv_indices: Tensor, kv_indptr: Tensor
) -> None:
    """Check the tensors that give the positions of the rows of ``new`` in the cache."""
    for name, t in (("batch_indices", batch_indices), ("positions", positions)):
        op.tensor(name, t, "[nnz]", (torch.int32,), new)
        op.size(name, "tokens", t.shape[0], new.shape[0], "the appended rows")
    op.tensor("kv_indices", kv_indices, "[pages]", (torch.int32,), new)
    op.tensor("kv_indptr", kv_indptr, "[batch + 1]", (torch.int32,), new)


def _same_dtype(op: OpChecker, name: str, new: Tensor, cache: Tensor) -> None:
    if new.dtype != cache.dtype:
        op.fail(
            DTypeError,
            f"{name} is {dtype_name(new.dtype)} and {name}_cache {dtype_name(cache.dtype)}",
            "one dtype",
            f"convert {name}",
        )


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
    op = OpChecker("append_kv")
    op.tensor("k", k, "[nnz, num_kv_heads, head_dim]", FLOATS + FP8, None)
    op.tensor("v", v, "[nnz, num_kv_heads, head_dim]", FLOATS + FP8, k)
    page_size, heads = caches(op, k, k_cache, v_cache, kv_layout)
    for name, t, cache in (("k", k, k_cache), ("v", v, v_cache)):
        op.size(name, "tokens", t.shape[0], k.shape[0], "k")
        op.size(name, "KV heads", int(t.shape[1]), heads, "the cache")
        op.size(name, "head_dim", int(t.shape[2]), int(cache.shape[3]), f"{name}_cache")
        _same_dtype(op, name, t, cache)
        op.no_overlap(f"{name}_cache", cache)
    if same_elements(k_cache, v_cache) and not same_elements(k, v):  # with one tensor for k and v, one cache is right
        op.fail(
            ArgumentError,
            "k_cache and v_cache are one tensor, and k and v are not",
            "a cache for each",
            "pass two tensors, or cache[:, 0] and cache[:, 1] of one",
        )
    _places(op, k, batch_indices, positions, kv_indices, kv_indptr)
    op.no_grad(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    return Problem(
        op=op.name,
        device=k.device,
        dtype=k.dtype,
        kv_dtype=k_cache.dtype,
        num_qo_heads=heads,
        num_kv_heads=heads,
        head_dim_qk=int(k.shape[2]),
        head_dim_vo=int(v.shape[2]),
        page_size=page_size,
    )


def append_mla_kv(
    ckv: Tensor,
    kpe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    *,
    backend: str = "auto",
) -> Problem:
    op = OpChecker("append_mla_kv")
    op.tensor("ckv", ckv, "[nnz, head_dim_ckv]", FLOATS + FP8, None)
    op.tensor("kpe", kpe, "[nnz, head_dim_kpe]", FLOATS + FP8, ckv)
    op.size("kpe", "tokens", kpe.shape[0], ckv.shape[0], "ckv")
    for name, t, cache in (("ckv", ckv, ckv_cache), ("kpe", kpe, kpe_cache)):
        op.tensor(f"{name}_cache", cache, f"[pages, page_size, head_dim_{name}]", FLOATS + FP8, ckv)
        op.size(name, "head_dim", int(t.shape[1]), int(cache.shape[2]), f"{name}_cache")
        _same_dtype(op, name, t, cache)
        op.no_overlap(f"{name}_cache", cache)
        for dim in (0, 1):
            op.size(f"{name}_cache", f"dimension {dim}", cache.shape[dim], ckv_cache.shape[dim], "ckv_cache")
    _places(op, ckv, batch_indices, positions, kv_indices, kv_indptr)
    op.no_grad(ckv=ckv, kpe=kpe, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
    return Problem(
        op=op.name,
        device=ckv.device,
        dtype=ckv.dtype,
        kv_dtype=ckv_cache.dtype,
        head_dim_qk=int(ckv.shape[1]) + int(kpe.shape[1]),
        head_dim_vo=int(ckv.shape[1]),
        page_size=int(ckv_cache.shape[1]),
    )


def _size(op: OpChecker, name: str, value: int, least: int) -> None:
    """Raise unless ``value`` is at least ``least`` and an int32, as far as is known of a symbolic size."""
    if guard_or_false(value < least):
        op.fail(OptionError, f"{name} is {value}", f"at least {least}", "change it")
    if type(value) is int and value > INT32_MAX:
        op.fail(OptionError, f"{name} is {value}", f"at most {INT32_MAX}, an int32", "change it")


def batch_indices_positions(append_indptr: Tensor, seq_lens: Tensor, nnz: int, *, backend: str = "auto") -> Problem:
    op = OpChecker("batch_indices_positions")
    op.indptr("append_indptr", append_indptr, "[batch + 1]", None)
    op.per_request("seq_lens", seq_lens, "append_indptr", append_indptr)
    _size(op, "nnz", nnz, 0)
    return Problem(op.name, append_indptr.device)


def seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int, *, backend: str = "auto") -> Problem:
    op = OpChecker("seq_lens")
    op.indptr("kv_indptr", kv_indptr, "[batch + 1]", None)
    op.per_request("kv_last_page_len", kv_last_page_len, "kv_indptr", kv_indptr)
    _size(op, "page_size", page_size, 1)
    return Problem(op.name, kv_indptr.device)


def page_table(block_tables: Tensor, seq_lens: Tensor, page_size: int, *, backend: str = "auto") -> Problem:
    op = OpChecker("page_table")
    op.tensor("block_tables", block_tables, "[batch, max_pages_per_request]", (torch.int32,), None)
    op.tensor("seq_lens", seq_lens, "[batch]", (torch.int32,), block_tables)
    op.size("seq_lens", "length", seq_lens.shape[0], block_tables.shape[0], "block_tables")
    _size(op, "page_size", page_size, 1)
    width = block_tables.shape[1]
    if type(width) is int and type(page_size) is int and width * page_size > INT32_MAX:
        op.fail(
            OptionError,
            f"a request of {width} pages of page_size {page_size} has up to {width * page_size} tokens",
            f"at most {INT32_MAX}, an int32",
            "pass narrower block_tables, or the page_size of the cache",
        )
    return Problem(op.name, block_tables.device)


def block_sparse_table(
    block_mask: Tensor,
    row_indptr: Tensor,
    col_indptr: Tensor,
    page_size: int,
    max_pages: int,
    *,
    causal: bool = False,
    backend: str = "auto",
) -> Problem:
    op = OpChecker("block_sparse_table")
    op.tensor("block_mask", block_mask, "[num_maps, block_rows, block_cols]", (torch.bool,), None)
    for name, t, dim in (("row_indptr", row_indptr, "block_rows"), ("col_indptr", col_indptr, "block_cols")):
        op.tensor(name, t, f"[num_maps, {dim} + 1]", (torch.int32,), block_mask)
        op.size(name, "maps", t.shape[0], block_mask.shape[0], "block_mask")
        blocks = block_mask.shape[1 if dim == "block_rows" else 2]
        op.size(name, "entries", t.shape[1], blocks + 1, f"block_mask, one more than its {dim}")
    _size(op, "page_size", page_size, 1)
    _size(op, "max_pages", max_pages, 0)
    return Problem(op.name, block_mask.device)


def shard_page_table(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    page_size: int,
    rank: int,
    world: int,
    interleave: int,
    *,
    backend: str = "auto",
) -> Problem:
    op = OpChecker("shard_page_table")
    op.indptr("kv_indptr", kv_indptr, "[batch + 1]", None)
    op.tensor("kv_indices", kv_indices, "[pages]", (torch.int32,), kv_indptr)
    op.per_request("kv_last_page_len", kv_last_page_len, "kv_indptr", kv_indptr)
    _size(op, "page_size", page_size, 1)
    ContextShard(rank, world, interleave).check_page_size(op.name, page_size)
    return Problem(op.name, kv_indptr.device)
