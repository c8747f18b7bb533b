"""Caches that drop all entries when they are full."""

from __future__ import annotations

from typing import Any

from attn_ops.eager.bounded_cache import BoundedCache


def test_a_full_cache_drops_all_entries_and_those_of_its_companion() -> None:
    companion: dict[int, str] = {}
    cache: BoundedCache[int, str] = BoundedCache(2, companion)
    for key in range(3):
        assert cache.insert(key, str(key)) == str(key)
        companion[key] = "beside"
    assert (cache, companion) == ({2: "2"}, {2: "beside"})


def test_dropping_an_entry_may_insert_another() -> None:
    class Inserts:
        def __del__(self) -> None:
            cache.insert("last words", 0)

    cache: BoundedCache[str, Any] = BoundedCache(1)
    cache.insert("first", Inserts())
    cache.insert("second", 1)
    assert cache.keys() >= {"second"}
