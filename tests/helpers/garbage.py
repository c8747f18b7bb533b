"""Python's cyclic garbage collector in a long test run. Hooks of pytest, which ``tests/conftest.py`` imports.

A full collection visits every object that is alive: a million of them, from imported modules and compiled graphs, after
some files of tests. That was a fifth of the time. So the objects that are alive after collection of the tests and after
each file are left out of later collections. Collections of young objects are rarer than Python's default: a trace makes
many objects, most of which live until it ends.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

THRESHOLDS = (50_000, 20, 100)
"""Thresholds of the collector for its generations of objects."""


def _freeze() -> None:
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.set_threshold(*THRESHOLDS)
    _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    result = yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()
    return result
