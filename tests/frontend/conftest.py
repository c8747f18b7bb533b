"""On a GPU, every call of a prepared method is made again: the replay must give the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_ops.eager import prepared_call


def _same(first: Any, second: Any) -> None:
    if isinstance(first, tuple):
        for a, b in zip(first, second, strict=True):
            _same(a, b)
    elif isinstance(first, torch.Tensor):
        torch.testing.assert_close(second, first, rtol=0, atol=0, equal_nan=True)
    else:
        assert first is second is None


@pytest.fixture(autouse=True)
def _calls_are_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    make = prepared_call._method_cache

    def twice(*of_method: Any) -> Any:
        cache = make(*of_method)

        def call(*args: Any, **kwargs: Any) -> Any:
            first = cache(*args, **kwargs)
            second = cache(*args, **kwargs)
            if not torch.cuda.is_current_stream_capturing():
                _same(first, second)
            return second

        return call

    if torch.cuda.is_available():
        monkeypatch.setattr(prepared_call, "_method_cache", twice)
