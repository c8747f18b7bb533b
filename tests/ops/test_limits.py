"""Limits of sizes that the kernels count in 32 bits: what the tables of bad calls do not show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.bad_calls import ROWS, TOKENS, longer
from torch import Tensor, nn
from torch.export import Dim

from attn_ops.errors import CapacityError


class Attend(nn.Module):
    """Takes any number of rows and tokens."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.attn.single_prefill(q, k, v)[0]


def _inputs() -> tuple[Tensor, ...]:
    return torch.randn(3, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)


@pytest.fixture(autouse=True)
def no_earlier_graphs() -> None:
    torch._dynamo.reset()


def test_limits_do_not_narrow_an_exported_program() -> None:
    rows, tokens = Dim("rows"), Dim("tokens")
    program = torch.export.export(Attend(), _inputs(), dynamic_shapes=({0: rows}, {0: tokens}, {0: tokens}))
    q, k, v = torch.randn(7, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    torch.testing.assert_close(program.module()(q, k, v), Attend()(q, k, v))
    with pytest.raises(CapacityError, match=f"q has {ROWS} query rows; expected at most {ROWS - 1}; pass fewer at"):
        program.module()(longer(0, ROWS)(q), k, v)


@pytest.mark.parametrize(("sizes", "message"), [((ROWS, 1), f"q has {ROWS} query"), ((1, TOKENS), f"k has {TOKENS}")])
def test_a_compiled_graph_for_fewer_refuses_more(sizes: tuple[int, int], message: str) -> None:
    step: Any = torch.compile(Attend(), backend="eager", fullgraph=True, dynamic=True)
    step(*_inputs())
    q, k, v = _inputs()
    rows, tokens = sizes
    long = longer(0, rows)(q), longer(0, tokens)(k), longer(0, tokens)(v)
    with pytest.raises(Exception, match=f"single_prefill: {message}"):
        step(*long)
