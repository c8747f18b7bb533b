"""Caches that drop all entries when they are full."""

from __future__ import annotations

from typing import Any

import pytest

from attn_ops.eager.bounded_cache import BoundedCache


def test_a_full_cache_drops_all_entries_and_their_associated_values() -> None:
    associated: dict[int, str] = {}
    cache: BoundedCache[int, str] = BoundedCache(2, associated)
    for key in range(3):
        assert cache.insert(key, str(key), f"value {key}") == str(key)
    assert (cache, associated) == ({2: "2"}, {2: "value 2"})


def test_a_full_cache_keeps_the_others_of_an_entry_that_is_replaced() -> None:
    cache: BoundedCache[int, str] = BoundedCache(2)
    for key in (0, 1, 1):
        cache.insert(key, str(key))
    assert cache == {0: "0", 1: "1"}


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_dropping_an_entry_may_insert_another(limit: int) -> None:
    """Every entry still has its associated value."""

    class Inserts:
        def __del__(self) -> None:
            cache.insert("last words", 0, "value")

    associated: dict[str, Any] = {}
    cache: BoundedCache[str, Any] = BoundedCache(limit, associated)
    for i in range(limit):
        cache.insert(f"first {i}", Inserts(), "value")
    cache.insert("second", 1, "value")
    assert cache.keys() == associated.keys()
    assert cache
