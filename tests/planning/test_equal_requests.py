"""How requests of equal lengths are divided without a plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from attn_ops.plan.equal_requests import SPLIT_BLOCK, EqualRequests, divide, divide_rows
from attn_ops.symbolic_sizes import quotient

SMS = 132


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(multi_processor_count=SMS, major=9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)


def requests(batch: Any, rows: Any, keys: Any, heads: tuple[int, int] = (32, 8), **options: Any) -> EqualRequests:
    return divide(torch.device("cuda"), heads, (128, 128), batch, rows, keys, **options)


@pytest.mark.parametrize(
    ("sizes", "splits"),
    [
        ((1, 1, 200), 1),
        ((1, 1, 512), 4),
        ((1, 1, 4096), 8),  # half of the SMs, which read keys of few rows nearly as fast as all
        ((1, 1, 32768), 16),
        ((1, 64, 4096), 8),
        ((8, 1, 4096), 2),
        ((16, 1, 4096), 1),
        ((1, 512, 8192), 1),  # fills the device
        ((1, 256, 8192), 2),
        ((1, 1, 0), 1),
    ],
    ids=str,
)
def test_few_rows_over_many_keys_are_split(sizes: tuple[int, int, int], splits: int) -> None:
    assert requests(*sizes, causal=True).splits == splits


def test_rows_that_see_few_keys_are_not_split() -> None:
    assert requests(1, 7, 8192, window_left=200).splits == 1
    assert requests(1, 500, 520, causal=True).splits == 1
    assert requests(1, 500, 520).splits == 1
    assert requests(1, 128, 1500).splits > 1


@given(
    st.integers(1, 9), st.integers(1, 300), st.integers(0, 40000), st.sampled_from([(1, 1), (8, 8), (64, 4)]),
    st.integers(-1, 3000), st.booleans(),
)  # fmt: skip
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_splits_have_all_visible_keys_and_none_is_empty(
    batch: int, rows: int, keys: int, heads: tuple[int, int], window: int, causal: bool
) -> None:
    found = requests(batch, rows, keys, heads, window_left=window, causal=causal)
    visible = keys if window < 0 else min(keys, rows + window)
    assert (found.splits - 1) * found.split_keys < max(visible, 1)
    assert found.splits == 1 or visible <= found.splits * found.split_keys
    assert found.split_keys % SPLIT_BLOCK == 0
    assert found.num_slots == (batch * found.splits if found.splits > 1 else 0)


def test_symbolic_sizes_have_splits_without_guards() -> None:
    env = ShapeEnv()
    batch, rows, keys = (env.create_unbacked_symint() for _ in range(3))
    for symbol in (batch, rows, keys):
        torch._check(symbol >= 0)
    found = requests(batch, rows, keys, causal=True)
    for hints, splits in (((1, 1, 8192), 8), ((1, 1, 100), 1), ((64, 500, 8192), 1), ((2, 64, 300), 1)):
        values = {s.node.expr: n for s, n in zip((batch, rows, keys), hints, strict=True)}
        assert found.splits.node.expr.xreplace(values) == splits
        assert found.num_slots.node.expr.xreplace(values) == (splits * hints[0] if splits > 1 else 0)


@pytest.mark.parametrize("rows", [1, 5])
def test_a_program_divides_no_requests(rows: int) -> None:
    """PyTorch drops a maximum of a batch and 1, but an exported program takes a batch of 0."""

    class Splits(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> tuple[int, int]:
            batch, keys = q.shape[0], k.shape[1]
            found = divide_rows(batch, keys, -1, 16, 4) if rows == 1 else requests(batch, rows, keys)
            return found.splits, found.num_slots

    dims = {"q": {0: torch.export.Dim("batch", max=500)}, "k": {0: None, 1: torch.export.Dim("keys", max=9000)}}
    program = torch.export.export(Splits(), (torch.zeros(3), torch.zeros(1, 700)), dynamic_shapes=dims).module()
    assert program(torch.zeros(0), torch.zeros(1, 4096))[1] == 0
    assert program(torch.zeros(2), torch.zeros(1, 4096)) == (8, 16)
    assert program(torch.zeros(5), torch.zeros(1, 4096)) == (3, 15)
    assert program(torch.zeros(2), torch.zeros(1, 0)) == (1, 0)


def test_a_quotient_is_that_of_integers_or_large() -> None:
    for n in (0, 1, 7, 66, 132, 65535):
        assert [quotient(n, divisor) for divisor in range(1, 300)] == [n // divisor for divisor in range(1, 300)]
        assert quotient(n, 0) >= n
