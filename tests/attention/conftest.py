"""A fixture of the tests of the CUDA attention kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ``Specialization`` of each launch of CUDA kernels by ops of prefill and MLA, which need a Hopper GPU.

    Not the tensors, which a CUDA graph wants freed.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    specializations: list[Any] = []
    for name in ("prefill", "single_decode", "mla"):
        module = importlib.import_module(f"attn_ops.kernels.cuda.{name}")
        monkeypatch.setattr(module, "launch", _recorded(module.launch, specializations))
    return specializations


def _recorded(launch: Callable[..., None], specializations: list[Any]) -> Callable[..., None]:
    def recorded(specialization: Any, *args: Any, **kwargs: Any) -> None:
        specializations.append(specialization)
        launch(specialization, *args, **kwargs)

    return recorded
