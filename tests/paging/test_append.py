"""``attn::append_kv`` and ``attn::append_mla_kv``: each token is written to its place, and no other byte changes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from helpers.cases import DECODE_BASE, Case, one_at_a_time
from helpers.oracle import PagedBatch
from torch import Tensor

from attn_ops.kernels import reference

on_each_backend = pytest.mark.usefixtures("cpu_calls_on_each_backend")

KV_LENS = (37, 0, 130, 1)
"""Tokens of each request. The pages in the page table hold these, and those to the end of the last page."""

AXES = {
    "dtype": (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    "heads": ((1, 1), (8, 8)),
    "head_dims": ((16, 16), (80, 80), (192, 128), (512, 512)),
    "page_size": (1, 3, 64, 257),
    "kv_layout": ("HND",),
    "storage": ("fused", "padded"),
}
BASES = (
    DECODE_BASE,
    replace(DECODE_BASE, name="HND,fused", kv_layout="HND", storage="fused"),
    replace(DECODE_BASE, name="HND,padded", kv_layout="HND", storage="padded", page_size=3),
)
CASES = one_at_a_time(DECODE_BASE, AXES)

# (request, position) of each token
ROWS: dict[str, list[tuple[int, int]]] = {
    "tokens": [(0, 36), (2, 129), (3, 0), (2, 0), (2, 64), (0, 5)],
    "skipped rows": [(0, 36), (-1, 0), (2, 129), (-1, 7), (-1, -1)],
    "first row skipped": [(-1, 0), (2, 3)],
    "only skipped rows": [(-1, 0), (-1, 3)],
    "no rows": [],
    "request without pages": [(1, 0), (0, 2)],
    "beyond the pages": [(0, 10_000), (3, 300), (2, 100)],
    "no such request": [(4, 0), (77, 1), (0, 1)],
    "negative position": [(0, -1), (2, -40), (0, 0)],
}


def _batch(case: Case) -> PagedBatch:
    generator = torch.Generator().manual_seed(0)
    sizes = (case.page_size, case.heads[1], *case.head_dims)
    return PagedBatch(KV_LENS, *sizes, case.kv_layout, case.dtype, "cpu", case.storage, generator)


def _append(case: Case, batch: PagedBatch, rows: list[tuple[int, int]], k: Tensor, v: Tensor) -> None:
    request, position = torch.tensor(rows, dtype=torch.int32).view(-1, 2).unbind(1)
    torch.ops.attn.append_kv(
        k,
        v,
        batch.k_cache,
        batch.v_cache,
        request.contiguous(),
        position.contiguous(),
        batch.kv_indices,
        batch.kv_indptr,
        kv_layout=case.kv_layout,
    )


def _tokens(case: Case, count: int) -> tuple[Tensor, Tensor]:
    """Keys and values as slices of one projection: neither is contiguous."""
    (_, heads), (dim, dim_vo) = case.heads, case.head_dims
    both = torch.randn(count, heads, dim + dim_vo, generator=torch.Generator().manual_seed(1)).to(case.dtype)
    return both.split((dim, dim_vo), -1)


def _same(memory: list[Tensor], expected: list[Tensor]) -> None:
    for actual, wanted in zip(memory, expected, strict=True):
        torch.testing.assert_close(actual.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)


def _write(case: Case, batch: PagedBatch, rows: list[tuple[int, int]], k: Tensor, v: Tensor) -> None:
    """What the op must do, one token at a time."""
    indptr, indices = batch.kv_indptr.tolist(), batch.kv_indices.tolist()
    for i, (b, position) in enumerate(rows):
        if 0 <= b < len(KV_LENS) and position >= 0:
            place, offset = indptr[b] + position // case.page_size, position % case.page_size
            if place < indptr[b + 1]:
                page = indices[place]
                for cache, new in ((batch.k_cache, k[i]), (batch.v_cache, v[i])):
                    for head in range(new.shape[0]):
                        at = (page, offset, head) if case.kv_layout == "NHD" else (page, head, offset)
                        cache[at] = new[head]


MIXED = [(0, 36), (-1, 0), (2, 129), (0, 10_000), (1, 0), (2, 0), (3, 0), (4, 1), (0, -3)]


@on_each_backend
@pytest.mark.parametrize(
    ("case", "rows"),
    [
        *(pytest.param(case, rows, id=f"{case}-{name}") for case in BASES for name, rows in ROWS.items()),
        *(pytest.param(case, MIXED, id=f"{case}-mixed") for case in CASES),
    ],
)
def test_append(case: Case, rows: list[tuple[int, int]]) -> None:
    batch, expected = _batch(case), _batch(case)
    k, v = _tokens(case, len(rows))
    _append(case, batch, rows, k, v)
    _write(case, expected, rows, k, v)
    _same(batch.memory, expected.memory)


@on_each_backend
@pytest.mark.parametrize("page", [9, 10, 1 << 30, -1, -(1 << 31)])
def test_tokens_on_pages_that_the_cache_does_not_have_are_skipped(page: int) -> None:
    caches = [torch.full((9, 4, 2, 8), 7.0) for _ in range(2)]
    k, v = torch.zeros(2, 2, 8), torch.ones(2, 2, 8)
    places = ([0, 0], [5, 2], [8, page], [0, 2])  # the second page of the request is not in the cache
    torch.ops.attn.append_kv(k, v, *caches, *(torch.tensor(t, dtype=torch.int32) for t in places))
    for cache, new in zip(caches, (k, v), strict=True):
        expected = torch.full((9, 4, 2, 8), 7.0)
        expected[8, 2] = new[1]
        assert torch.equal(cache, expected)


@on_each_backend
def test_memory_behind_the_offsets_of_the_pages_is_not_read() -> None:
    """Request 1 would have two pages if the table went on."""
    caches = [torch.full((3, 4, 2, 8), 7.0) for _ in range(2)]
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    places = (torch.tensor(t, dtype=torch.int32) for t in ([1], [0], [2, 0, 1]))
    torch.ops.attn.append_kv(*(torch.zeros(1, 2, 8) for _ in range(2)), *caches, *places, offsets[:2])
    assert all((cache == 7.0).all() for cache in caches)


@on_each_backend
@pytest.mark.parametrize("case", BASES, ids=str)
def test_whole_cache_token_by_token(case: Case) -> None:
    """The tokens of all requests, appended in any order, make the cache that holds them."""
    batch, expected = _batch(case), _batch(case)
    for memory in batch.memory:
        memory.copy_(torch.tensor(torch.nan))
    rows = [(b, t) for b, length in enumerate(KV_LENS) for t in range(length)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(2))
    k, v = torch.cat(batch.keys)[order], torch.cat(batch.values)[order]
    shuffled = [rows[i] for i in order]
    for part in (slice(0, 1), slice(1, 60), slice(60, None)):
        _append(case, batch, shuffled[part], k[part], v[part])
    _same(batch.memory, expected.memory)


@on_each_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("widths", [(32, 8), (40, 0), (0, 16)], ids=str)
def test_append_mla(widths: tuple[int, int], dtype: torch.dtype) -> None:
    """The two parts of latent tokens, in one packed cache. Either part may be empty."""
    memory = torch.zeros(5, 3, sum(widths) + 4).to(dtype)
    new = torch.randn(4, sum(widths), generator=torch.Generator().manual_seed(0)).to(dtype)
    places = [torch.tensor(t, dtype=torch.int32) for t in ([0, 1, -1, 1], [4, 0, 2, 300], [3, 1, 4], [0, 2, 3])]
    expected = memory.float()
    expected[1, 1, :-4], expected[4, 0, :-4] = new[0].float(), new[1].float()
    torch.ops.attn.append_mla_kv(*new.split(widths, 1), *memory[..., :-4].split(widths, -1), *places)
    assert torch.equal(memory.float(), expected)


@on_each_backend
def test_empty_cache_and_empty_batch() -> None:
    """Without pages to write to, or requests to write for, nothing happens."""
    case = DECODE_BASE
    k, v = _tokens(case, 1)
    batch = _batch(case)
    before = [m.clone() for m in batch.memory]
    none = torch.zeros(0, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    empty = batch.k_cache[:0], batch.v_cache[:0]
    for caches, indices, indptr in (
        (empty, batch.kv_indices, batch.kv_indptr),
        ((batch.k_cache, batch.v_cache), none, zero),
        ((batch.k_cache, batch.v_cache), none, none),
    ):
        torch.ops.attn.append_kv(k, v, *caches, zero, zero, indices, indptr)
    _same(batch.memory, before)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_random_batches_on_a_gpu_are_appended_as_by_the_reference(seed: int) -> None:
    """Rows of no request, positions beyond the pages and a page number beyond the cache among them."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, dim_qk, dim_vo = draw.choice([1, 8, 40]), draw.choice([8, 128, 512]), draw.choice([8, 80, 512])
    page_size, layout, requests, pages = draw.choice([1, 3, 16]), draw.choice(["NHD", "HND"]), 3, 5
    capacity = requests * pages * page_size

    def cache(dim: int) -> torch.Tensor:
        middle = (page_size, heads) if layout == "NHD" else (heads, page_size)
        return torch.randn(requests * pages, *middle, dim + 8, generator=generator).bfloat16()[..., :dim]

    place = torch.randperm(capacity, generator=generator)[: draw.randint(0, capacity)]
    request, position = (place // (pages * page_size)).int(), (place % (pages * page_size)).int()
    skipped = torch.rand(place.shape, generator=generator)
    request[skipped < 0.2] = -1
    request[(skipped > 0.2) & (skipped < 0.3)] = requests + 5
    position[(skipped > 0.3) & (skipped < 0.4)] = 10_000
    kv_indices = torch.randperm(requests * pages, generator=generator).int()
    kv_indices[0] = 99
    tokens = [torch.randn(len(place), heads, dim, generator=generator).bfloat16() for dim in (dim_qk, dim_vo)]
    table = [request, position, kv_indices, torch.arange(requests + 1).int() * pages]
    expected = [cache(dim_qk), cache(dim_vo)]
    actual = [t.cuda() for t in expected]
    reference.append_kv(*tokens, *expected, *table, kv_layout=layout)
    torch.ops.attn.append_kv(
        *(t.cuda() for t in tokens), *actual, *(t.cuda() for t in table), kv_layout=layout, backend="triton"
    )
    for want, got in zip(expected, actual, strict=True):
        assert torch.equal(want, got.cpu())


def test_entries_that_the_page_table_does_not_have_are_skipped() -> None:
    """``kv_indptr`` may end beyond ``kv_indices``, as after a batch that is too large."""
    k, cache = torch.ones(2, 1, 8), torch.zeros(3, 2, 1, 8)
    rows, positions, indices, indptr = (torch.tensor(t, dtype=torch.int32) for t in ([0, 0], [1, 2], [2], [0, 4]))
    torch.ops.attn.append_kv(k, k, cache, cache.clone(), rows, positions, indices, indptr)
    assert cache[2, 1].eq(1).all()
    assert cache.sum() == 8
