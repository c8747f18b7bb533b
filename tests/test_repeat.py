"""Which calls the Triton backend offers to repeat; that repeats are right is tested on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from attn_ops.kernels.triton import launch


def _record(monkeypatch: pytest.MonkeyPatch, *tensors: torch.Tensor, compute: bool = False) -> object:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)

    def function(*args: torch.Tensor) -> torch.Tensor:
        out = torch.empty(4)
        if compute:
            out.zero_()
        assert launch._recorded is not None
        launch._recorded.append((object(), (*args, out)))
        return out

    return launch.record(function, tensors, {})[1]


def test_a_call_of_launches_alone_is_repeated(monkeypatch: pytest.MonkeyPatch):
    assert _record(monkeypatch, torch.zeros(4), torch.zeros(4)) is not None


def test_a_tensor_passed_twice_is_not(monkeypatch: pytest.MonkeyPatch):
    """The next call of this key may pass two tensors, of which only one would be read."""
    same = torch.zeros(4)
    assert _record(monkeypatch, same, same) is None


def test_a_call_that_computes_is_not(monkeypatch: pytest.MonkeyPatch):
    assert _record(monkeypatch, torch.zeros(4), compute=True) is None
