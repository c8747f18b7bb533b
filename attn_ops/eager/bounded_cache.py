"""Caches with a bound."""

from __future__ import annotations

import threading
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict of at most ``limit`` entries, if they are added by :meth:`insert`. A full cache drops all of them.

    ``companion`` has entries of the same keys, and is emptied with the cache. Whoever changes both holds ``lock``.
    """

    def __init__(self, limit: int, companion: dict[K, Any] | None = None) -> None:
        super().__init__()
        self.limit, self.companion = limit, companion
        self.lock = threading.RLock()  # dropping an entry may run code that inserts one

    def insert(self, key: K, entry: V) -> V:
        """Add an entry and return it. If the cache is full, all others are dropped first."""
        with self.lock:
            if len(self) >= self.limit:
                self.clear()
                if self.companion is not None:
                    self.companion.clear()
            self[key] = entry
        return entry
