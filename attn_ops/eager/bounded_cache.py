"""Dicts with a bound on the number of entries."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict of at most ``limit`` entries, if they are added by :meth:`insert`. A full cache drops all entries.

    ``associated`` is a dict with a value for each key of the cache. It is written and cleared with the cache.
    """

    def __init__(self, limit: int, associated: dict[K, Any] | None = None) -> None:
        super().__init__()
        self.limit, self.associated = limit, associated
        self.lock = threading.RLock()  # dropping an entry may run code that inserts one

    def insert(self, key: K, entry: V, value: Any = None) -> V:
        """Add an entry and return it; ``value`` is its associated value. A full cache drops all entries first."""
        dropped: list[Any] = []  # freed when both dicts are consistent again: freeing may run code that inserts
        with self.lock:
            if len(self) >= self.limit and key not in self:
                dropped += self.values()
                self.clear()
                if self.associated is not None:
                    dropped += self.associated.values()
                    self.associated.clear()
            if self.associated is not None:
                self.associated[key] = value
            self[key] = entry
        return entry
