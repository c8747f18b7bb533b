"""Appending to a paged KV cache, for eager calls on the CPU: the page table is read on the host, and rows are copied.

A run, successive rows at successive places of a page, is one copy. More than :data:`MAX_RUNS` runs are one indexed copy
of all rows. The results are those of the reference, which appends more rows than :data:`MAX_ROWS`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_ops.kernels import reference
from attn_ops.kernels.reference.cache_views import as_nhd, bits

MAX_ROWS = 256
"""Most rows whose places are read one by one."""

MAX_RUNS = 3
"""Most runs of rows that are copied one by one."""

MAX_TABLE = 1024
"""Entries of the largest page table that is read as a whole."""


def _places(
    num_pages: int, page_size: int, batch_indices: Tensor, positions: Tensor, kv_indices: Tensor, kv_indptr: Tensor
) -> list[tuple[int, int, int]]:
    """``(row, page, offset)`` of the rows whose request, position and page are in range."""
    starts, entries, found = kv_indptr.tolist(), [], []
    for row, (request, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        if 0 <= request < len(starts) - 1 and position >= 0:
            entry = starts[request] + position // page_size
            if entry < min(starts[request + 1], kv_indices.shape[0]):
                entries.append(max(entry, 0))
                found.append((row, position % page_size))
    if kv_indices.shape[0] <= MAX_TABLE:
        table = kv_indices.tolist()
        pages = [table[entry] for entry in entries]
    else:
        pages = kv_indices[torch.tensor(entries, dtype=torch.int64, device="cpu")].tolist()
    return [(row, page, offset) for (row, offset), page in zip(found, pages, strict=True) if 0 <= page < num_pages]


def _runs(places: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    """``[row, page, offset, count]`` of successive rows at successive places of a page."""
    runs: list[list[int]] = []
    for row, page, offset in places:
        if runs:
            last = runs[-1]
            if (row, page, offset) == (last[0] + last[3], last[1], last[2] + last[3]):
                last[3] += 1
                continue
        runs.append([row, page, offset, 1])
    return runs


def _scatter(
    new: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    batch_indices: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
) -> None:
    num_pages, page_size = caches[0].shape[:2]
    if 0 in (num_pages, page_size, kv_indices.shape[0]) or kv_indptr.shape[0] < 2:
        return
    places = _places(num_pages, page_size, batch_indices, positions, kv_indices, kv_indptr)
    runs = _runs(places)
    if len(runs) > MAX_RUNS:
        rows, pages, offsets = torch.tensor(places, device="cpu").unbind(1)
    for x, cache in zip(new, caches, strict=True):
        source, target = bits(x), bits(cache)
        if source.untyped_storage().data_ptr() == target.untyped_storage().data_ptr():
            source = source.clone()  # a copy within memory of its own may overlap
        if len(runs) > MAX_RUNS:
            target.index_put_((pages, offsets), source if len(places) == source.shape[0] else source[rows])
            continue
        for row, page, offset, count in runs:
            target[page, offset : offset + count] = source if count == source.shape[0] else source[row : row + count]


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
) -> None:
    if batch_indices.shape[0] > MAX_ROWS:
        places = batch_indices, positions, kv_indices, kv_indptr
        reference.append_kv(k, v, k_cache, v_cache, *places, kv_layout=kv_layout)
        return
    caches = as_nhd(k_cache, kv_layout), as_nhd(v_cache, kv_layout)
    _scatter((k, v), caches, batch_indices, positions, kv_indices, kv_indptr)


def append_mla_kv(
    ckv: Tensor,
    kpe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
) -> None:
    if batch_indices.shape[0] > MAX_ROWS:
        reference.append_mla_kv(ckv, kpe, ckv_cache, kpe_cache, batch_indices, positions, kv_indices, kv_indptr)
        return
    _scatter((ckv, kpe), (ckv_cache, kpe_cache), batch_indices, positions, kv_indices, kv_indptr)
