"""Ops on page tables: ``seq_lens``, ``batch_indices_positions`` and ``page_table``."""

from __future__ import annotations

import pytest
import torch
from helpers.page_tables import PAGE_SIZES, indptr, int32, page_table
from hypothesis import example, given
from hypothesis import strategies as st

from attn_ops.errors import OptionError

pytestmark = pytest.mark.usefixtures("cpu_calls_on_each_backend")

lengths = st.lists(st.one_of(st.just(0), st.integers(0, 700)), max_size=8)

MANY = [i * 7 % 40 for i in range(1300)]
"""More requests than a program of the kernel handles at a time."""


@given(lengths, PAGE_SIZES, st.integers(-5, 300))
@example(MANY, 16, 0)
def test_seq_lens(kv_lens: list[int], page_size: int, anything: int) -> None:
    """An empty request has no tokens, whatever its last page length is."""
    kv_indptr, _, last = page_table(kv_lens, page_size)
    last = torch.where(kv_indptr.diff() > 0, last, anything)
    out = torch.ops.attn.seq_lens(kv_indptr, last, page_size)
    assert out.dtype == torch.int32
    assert out.tolist() == kv_lens


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100)), max_size=8), st.integers(-30, 30))
@example([(n % 3, n) for n in MANY], 5)
@example([(0, 0)] * 600 + [(2, 1)], 600)
def test_batch_indices_positions(requests: list[tuple[int, int]], spare: int) -> None:
    """Rows that follow the tokens before them. The caller may ask for fewer or more rows than are appended."""
    appended = [n for n, _ in requests]
    nnz = max(0, sum(appended) + spare)
    expected = [(b, before + i) for b, (n, before) in enumerate(requests) for i in range(n)]
    expected = (expected + [(-1, -1)] * max(0, spare))[:nnz]
    seq_lens = int32([n + before for n, before in requests])
    request, position = torch.ops.attn.batch_indices_positions(indptr(appended), seq_lens, nnz)
    assert request.dtype == position.dtype == torch.int32
    assert list(zip(request.tolist(), position.tolist(), strict=True)) == expected


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 100)), min_size=1, max_size=8))
@example(2, [(2, 5), (1, 8)])
@example(600, [(n % 3, n) for n in MANY])
def test_rows_before_the_first_request_are_of_none(first: int, requests: list[tuple[int, int]]) -> None:
    appended, nnz = [n for n, _ in requests], first + sum(n for n, _ in requests)
    expected = [(-1, -1)] * first + [(b, before + i) for b, (n, before) in enumerate(requests) for i in range(n)]
    lengths = int32([n + before for n, before in requests])
    request, position = torch.ops.attn.batch_indices_positions(indptr(appended) + first, lengths, nnz)
    assert list(zip(request.tolist(), position.tolist(), strict=True)) == expected


def test_a_negative_length_has_no_pages() -> None:
    table = int32([3, 4, 5, 6, 7, 8]).view(3, 2)
    kv_indptr, kv_indices, last = torch.ops.attn.page_table(table, int32([20, -40, 17]), 16)
    assert kv_indptr.tolist() == [0, 2, 2, 4]
    assert kv_indices.tolist() == [3, 4, 7, 8, 0, 0]
    assert last.tolist() == [4, 0, 1]


@given(lengths, PAGE_SIZES, st.integers(0, 4))
@example(MANY, 16, 1)
@example([0] * 511 + [5] + [0] * 600 + [3], 3, 0)
def test_page_table(kv_lens: list[int], page_size: int, spare: int) -> None:
    """The pages of all rows are concatenated, without what is behind a row's last page."""
    pages = [-(-n // page_size) for n in kv_lens]
    width = max([0, *pages]) + spare
    table = torch.arange(1, len(pages) * width + 1, dtype=torch.int32).view(len(pages), width)
    kv_indptr, kv_indices, last = torch.ops.attn.page_table(table, int32(kv_lens), page_size)
    line = [page for row, n in zip(table.tolist(), pages, strict=True) for page in row[:n]]
    assert kv_indptr.tolist() == indptr(pages).tolist()
    assert kv_indices.tolist() == line + [0] * (table.numel() - len(line))
    assert last.tolist() == [(n - 1) % page_size + 1 if n else 0 for n in kv_lens]
    assert {t.dtype for t in (kv_indptr, kv_indices, last)} == {torch.int32}


@given(st.lists(st.one_of(st.integers(-3, 60), st.integers(2**31 - 40, 2**31 - 1)), max_size=8), PAGE_SIZES)
@example([257], 256)
def test_a_length_past_its_row_of_the_table_fills_the_row(kv_lens: list[int], page_size: int) -> None:
    width = 2
    table = torch.arange(1, len(kv_lens) * width + 1, dtype=torch.int32).view(len(kv_lens), width)
    held = [min(max(n, 0), width * page_size) for n in kv_lens]
    expected = torch.ops.attn.page_table(table, int32(held), page_size)
    got = torch.ops.attn.page_table(table, int32(kv_lens), page_size)
    assert [t.tolist() for t in got] == [t.tolist() for t in expected]
    assert torch.ops.attn.seq_lens(got[0], got[2], page_size).tolist() == held


@given(lengths, st.sampled_from([1, 3, 16]), st.integers(1, 4), st.integers(1, 3), st.integers(0, 5))
@example(MANY, 16, 3, 2, 0)
def test_shard_page_table(kv_lens: list[int], page_size: int, world: int, run: int, spare: int) -> None:
    """Every token is in the table of the rank that holds it, in order, and in no other."""
    kv_indptr, kv_indices, last = page_table(kv_lens, page_size)
    kv_indices = torch.cat((kv_indices, int32([-7] * spare)))
    interleave, pages_of = run * page_size, list(zip(kv_indptr.tolist(), kv_lens, strict=False))
    for rank in range(world):
        own = torch.ops.attn.shard_page_table(kv_indptr, kv_indices, last, page_size, rank, world, interleave)
        assert {t.dtype for t in own} == {torch.int32}
        held = [[t for t in range(n) if t // interleave % world == rank] for n in kv_lens]
        pages = [
            [kv_indices[first + t // page_size] for t in tokens[::page_size]]
            for (first, _), tokens in zip(pages_of, held, strict=True)
        ]
        line = [int(page) for of in pages for page in of]
        assert own[0].tolist() == indptr([len(of) for of in pages]).tolist()
        assert own[1].tolist() == line + [0] * (len(kv_indices) - len(line))
        assert own[2].tolist() == [(len(tokens) - 1) % page_size + 1 if tokens else 0 for tokens in held]


@pytest.mark.parametrize(
    ("rank", "world", "interleave", "words"),
    [
        (2, 2, 16, "rank is 2; expected 0 to 1"),
        (0, 0, 16, "world is 0"),
        (0, 2, 24, "the interleave of context is 24 tokens with page_size 16; expected a multiple of page_size"),
        (0, 1 << 20, 1 << 20, "at most"),
    ],
)
def test_shards_that_do_not_exist(rank: int, world: int, interleave: int, words: str) -> None:
    table = page_table([40, 3], 16)
    with pytest.raises(OptionError, match=words):
        torch.ops.attn.shard_page_table(*table, 16, rank, world, interleave)


@given(st.lists(st.integers(-9, 20), min_size=2, max_size=6), st.integers(0, 8))
@example([0, 3, 2**31 - 1, -(2**31), 2], 4)
def test_shards_of_entries_out_of_range(kv_indptr: list[int], pages: int) -> None:
    """Entries beyond ``kv_indices`` are left out, and nothing outside of it is read."""
    indices, last = torch.arange(10, 10 + pages, dtype=torch.int32), int32([3] * (len(kv_indptr) - 1))
    held = int32([min(max(n, 0), pages) for n in kv_indptr])
    for rank in range(2):
        own = torch.ops.attn.shard_page_table(int32(kv_indptr), indices, last, 4, rank, 2, 4)
        expected = torch.ops.attn.shard_page_table(held, indices, last, 4, rank, 2, 4)
        assert [t.tolist() for t in own] == [t.tolist() for t in expected]
