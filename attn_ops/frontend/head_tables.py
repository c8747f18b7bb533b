"""Page tables that differ between KV heads, or between keys and values, as the single table that the ops take.

Per head           each KV head of a request becomes a request, over pages of one head: views of the caches, or of
                   copies if no stride fits
Per keys, values   the pages of both caches are copied, in the order of their tables
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_ops.errors import DeviceError, ShapeError, fail, shape_of
from attn_ops.frontend.arguments import given_tensor, positive
from attn_ops.frontend.kv_cache import paged_sizes
from attn_ops.ops.options import FP8, PAGED_DIMS
from attn_ops.plan.page_table import as_int32

Caches = tuple[Tensor, Tensor]


def _two_tables(where: str, tables: Tensor, device: torch.device) -> Tensor:
    tables = given_tensor(where, "block_tables", tables, device)
    if tables.dim() != 3 or tables.shape[1] != 2:
        expected = "[batch, 2, max_pages_per_request], of keys and of values"
        fail(ShapeError, where, f"block_tables is {shape_of(tables)}", expected, "stack the two tables")
    return tables


def table_of_latents(where: str, tables: Tensor, device: torch.device) -> Tensor:
    """The first of the two tables in ``tables [batch, 2, pages]``, which are equal: a latent is key and value."""
    return _two_tables(where, tables, device)[:, 0]


def with_one_table(where: str, caches: Caches, tables: Tensor, device: torch.device) -> tuple[Caches, Tensor]:
    """Keys and values by ``tables [batch, 2, pages]``, of which row 0 is of the keys: their pages, and one table."""
    tables = _two_tables(where, tables, device)
    tables = as_int32(where, "block_tables", tables).to(device)
    batch, _, width = tables.shape
    found = []
    for cache, table in zip(caches, tables.unbind(1), strict=True):
        positive(where, pages=cache.shape[0])
        if cache.device != device:
            fail(DeviceError, where, f"a KV cache is on {cache.device}", f"{device}, where the query is", "move it")
        pages = cache.view(torch.uint8) if cache.dtype in FP8 else cache
        found.append(pages[table.flatten().clamp(0, cache.shape[0] - 1).long()].view(cache.dtype))
    in_order = torch.arange(batch * width, dtype=torch.int32, device=device).view(batch, width)
    return (found[0], found[1]), in_order


class HeadTables(NamedTuple):
    """A decode batch with a page table per KV head, as a batch of ``num_kv_heads * batch`` requests with one KV head.

    caches  ``[pages, ...]``, with one KV head, in the layout of the caller's caches
    table   int32 ``[num_kv_heads * batch, pages]``
    """

    caches: Caches
    table: Tensor
    num_kv_heads: int

    @classmethod
    def of(cls, where: str, caches: Caches, tables: Tensor, kv_layout: str, device: torch.device) -> HeadTables:
        """The batch of ``tables [num_kv_heads, batch, pages]``."""
        head_axis = PAGED_DIMS[kv_layout].head
        _, heads = paged_sizes(where, caches[0], kv_layout)
        positive(where, num_kv_heads=heads, pages=caches[0].shape[0])
        if caches[1].shape[:3] != caches[0].shape[:3]:
            expected = f"{shape_of(caches[0].shape[:3])}, as the keys, and a head_dim"
            fail(ShapeError, where, f"the value cache is {shape_of(caches[1])}", expected, "correct it")
        tables = given_tensor(where, "block_tables", tables, device)
        if tables.dim() != 3 or tables.shape[0] != heads:
            expected = f"[{int(heads)}, batch, max_pages_per_request], of each KV head"
            fail(ShapeError, where, f"block_tables is {shape_of(tables)}", expected, "pass a table of each KV head")
        tables = as_int32(where, "block_tables", tables).to(device)
        steps = [_heads_apart(cache, head_axis) for cache in caches]
        if steps[0] is None or steps[0] != steps[1]:
            caches = caches[0].contiguous(), caches[1].contiguous()
            steps = [_heads_apart(cache, head_axis) for cache in caches]
        step, pages = steps[0], caches[0].shape[0]
        assert step is not None
        number = (pages - 1) * step + heads
        k, v = (_of_one_head(cache, head_axis, number) for cache in caches)
        head = torch.arange(heads, dtype=torch.int32, device=device)[:, None, None]
        return cls((k, v), (tables.clamp(0, pages - 1) * step + head).flatten(0, 1), heads)

    def split(self, query: Tensor) -> Tensor:
        """``[batch * q_len, num_qo_heads, head_dim]`` as rows of one KV head: all rows of KV head 0, then of head 1."""
        by_head = torch.unflatten(query, 1, (self.num_kv_heads, -1))
        return by_head.transpose(0, 1).flatten(0, 1)

    def join(self, t: Tensor) -> Tensor:
        """The inverse of :meth:`split`, for outputs and LSEs."""
        return torch.unflatten(t, 0, (self.num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)


def _heads_apart(cache: Tensor, head_axis: int) -> int | None:
    """The stride of a page in units of the stride of a head, None if it is no whole number."""
    if 1 in (cache.shape[0], cache.shape[head_axis]):  # the stride of a single page or head means nothing
        return cache.shape[head_axis]
    page, head = cache.stride(0), cache.stride(head_axis)
    return page // head if head > 0 and page % head == 0 else None


def _of_one_head(cache: Tensor, head_axis: int, number: int) -> Tensor:
    """Every head of every page as a page. Pages overlap where heads lie between tokens."""
    sizes, strides = list(cache.shape), list(cache.stride())
    if sizes[head_axis] > 1:
        strides[0] = strides[head_axis]
    sizes[0], sizes[head_axis] = number, 1
    return cache.as_strided(sizes, strides)
