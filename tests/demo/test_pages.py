"""The page allocator and page tables."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_ops.demo.pages import PageAllocator, page_table, pages_for


@settings(max_examples=200)
@given(num_pages=st.integers(0, 12), wishes=st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_every_page_is_free_or_held_once(num_pages: int, wishes: list[tuple[bool, int]]) -> None:
    allocator, held = PageAllocator(num_pages), list[list[int]]()
    for take, number in wishes:
        if take and number <= allocator.num_free:
            held.append(allocator.allocate(number))
        elif take:
            with pytest.raises(MemoryError, match=f"{number} pages"):
                allocator.allocate(number)
        elif held:
            allocator.release(held.pop(number % len(held)))
        taken = [page for pages in held for page in pages]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(num_pages))
        assert allocator.num_free == num_pages - len(taken)
    for pages in held:
        allocator.release(pages)
    assert sorted(allocator.allocate(num_pages)) == list(range(num_pages))


@pytest.mark.parametrize("pages", [[0, 0], [2], [5]])
def test_only_held_pages_are_released(pages: list[int]) -> None:
    allocator = PageAllocator(4)
    allocator.allocate(2)
    with pytest.raises(ValueError, match="not all allocated"):
        allocator.release(pages)
    assert allocator.num_free == 2


def test_a_page_is_released_once() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.release(pages[:1])
    with pytest.raises(ValueError, match="not all allocated"):
        allocator.release(pages)
    assert allocator.num_free == 3
    assert allocator.allocate(3).count(pages[0]) == 1


@settings(max_examples=200)
@given(data=st.data(), page_size=st.integers(1, 5), lengths=st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_a_page_table_lists_the_pages_in_use(data: st.DataObject, page_size: int, lengths: list[int]) -> None:
    spare = data.draw(st.lists(st.integers(0, 2), min_size=len(lengths), max_size=len(lengths)))
    counts = [pages_for(length, page_size) for length in lengths]
    numbers = iter(data.draw(st.permutations(range(sum(counts) + sum(spare)))))
    pages = [[next(numbers) for _ in range(count + more)] for count, more in zip(counts, spare, strict=True)]
    capacity = sum(counts) + data.draw(st.integers(0, 3))

    table = page_table(pages, lengths, page_size, capacity)

    assert table.kv_indices.shape == (capacity,)
    for b, length in enumerate(lengths):
        begin, end = table.kv_indptr[b : b + 2].tolist()
        assert table.kv_indices[begin:end].tolist() == pages[b][: counts[b]]
        last = int(table.kv_last_page_len[b])
        assert (end - begin - 1) * page_size + last == length if length else (end, last) == (begin, 0)
