"""A call gives the same bits every time."""

from __future__ import annotations

import pytest
import torch
from helpers.kernel_calls import CALLS, call, run
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

RUNS = 20


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = a.reshape(-1), b.reshape(-1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.numel() else a.shape == b.shape


@pytest.mark.parametrize("name", CALLS)
def test_twenty_runs_give_the_same_bits(name: str) -> None:
    op, kwargs = call(name)
    before = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, kwargs)
    first = [t.clone() for t in run(op, kwargs)]
    for _ in range(RUNS - 1):
        kwargs = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, before)
        for t, expected in zip(run(op, kwargs), first, strict=True):
            assert same_bits(t, expected)
