"""A Hopper GPU with a compiler, as far as the selection of kernels asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from attn_ops.ops import backends, unsupported


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every kernel compiles. The list gets the specializations of those that are compiled."""
    from attn_ops.kernels.cuda import compile as compile_module

    compiled: list[Any] = []

    def unavailable_reason(*specializations: Any) -> str:
        compiled.extend(specializations)
        return ""

    monkeypatch.setattr(compile_module, "unavailable_reason", unavailable_reason)
    monkeypatch.setattr(unsupported, "is_available", lambda: True)
    monkeypatch.setattr(unsupported, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(unsupported, "triton_installed", lambda: True)
    backends.choose.cache_clear()
    yield compiled
    backends.choose.cache_clear()
