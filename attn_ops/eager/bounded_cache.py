"""Caches with a bound."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict of at most ``limit`` entries, if they are added by :meth:`insert`. A full cache drops all of them.

    ``companion`` has something beside each entry, under the same key: it is written and emptied with the cache.
    """

    def __init__(self, limit: int, companion: dict[K, Any] | None = None) -> None:
        super().__init__()
        self.limit, self.companion = limit, companion
        self.lock = threading.RLock()  # dropping an entry may run code that inserts one

    def insert(self, key: K, entry: V, beside: Any = None) -> V:
        """Add an entry and return it, and ``beside`` to the companion. A full cache drops all others first."""
        dropped: list[Any] = []  # freed when both are consistent again: that may run code that inserts
        with self.lock:
            if len(self) >= self.limit and key not in self:
                dropped += self.values()
                self.clear()
                if self.companion is not None:
                    dropped += self.companion.values()
                    self.companion.clear()
            if self.companion is not None:
                self.companion[key] = beside
            self[key] = entry
        return entry
