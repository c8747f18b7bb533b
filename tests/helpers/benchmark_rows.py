"""Small rows of the benchmarks, and implementations that are compared on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import comparison
from benchmarks.comparison import NotMeasuredError
from benchmarks.decode_rows import DecodeRow
from benchmarks.prefill_rows import PrefillRow

SMALL = DecodeRow("small", (40, 7, 16), 4, 2, 1.0, head_dim=16)
STEP = PrefillRow("step", (1, 1, 1, 9, 30), (20, 33, 5, 40, 30), None, True, 4, 2, 16, 16)


def peer_of(call: Callable[[Any], Any]) -> comparison.Prepare:
    """A peer that returns ``call(problem)`` for each copy."""
    return lambda problem: lambda copy: call(problem)


def refuses(problem: Any) -> Any:
    raise NotMeasuredError("it has no kernel")


def fails(problem: Any) -> Any:
    raise RuntimeError("\nno such kernel\nand much more")


def on_cpu(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Make the problems of class ``name`` of a benchmark on the CPU."""
    monkeypatch.setattr(module, name, functools.partial(getattr(module, name), device="cpu"))
