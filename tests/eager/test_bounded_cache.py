"""Caches that drop all entries when they are full."""

from __future__ import annotations

from typing import Any

import pytest

from attn_ops.eager.bounded_cache import BoundedCache


def test_a_full_cache_drops_all_entries_and_what_is_beside_them() -> None:
    companion: dict[int, str] = {}
    cache: BoundedCache[int, str] = BoundedCache(2, companion)
    for key in range(3):
        assert cache.insert(key, str(key), f"beside {key}") == str(key)
    assert (cache, companion) == ({2: "2"}, {2: "beside 2"})


def test_a_full_cache_keeps_the_others_of_an_entry_that_is_replaced() -> None:
    cache: BoundedCache[int, str] = BoundedCache(2)
    for key in (0, 1, 1):
        cache.insert(key, str(key))
    assert cache == {0: "0", 1: "1"}


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_dropping_an_entry_may_insert_another(limit: int) -> None:
    """Every entry still has what is beside it."""

    class Inserts:
        def __del__(self) -> None:
            cache.insert("last words", 0, "beside")

    companion: dict[str, Any] = {}
    cache: BoundedCache[str, Any] = BoundedCache(limit, companion)
    for i in range(limit):
        cache.insert(f"first {i}", Inserts(), "beside")
    cache.insert("second", 1, "beside")
    assert cache.keys() == companion.keys()
    assert cache
