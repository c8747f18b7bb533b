"""A plan that Inductor's code writes is published, for kernels that read plans before the preceding kernel has ended.

Scheduling is the same for all devices. These graphs are on the CPU, and are scheduled as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.page_tables import indptr, page_table
from torch._inductor import ir
from torch._inductor.scheduler import Scheduler
from torch._inductor.virtualized import V

import attn_ops

pytest.importorskip("triton")

from attn_ops.kernels.reference import plan as reference_plan

SIZES: dict[str, Any] = {"page_size": 4, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "num_ctas": 3}
LENGTHS = (9, 40, 3)


class Scheduled(BaseException):
    """The order of the kernels is known. Code generation is not part of these tests."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, set[str]]]:
    """The kernels of a graph, in order: whether each is one of Triton's, and the inputs of the graph that it writes."""
    found: list[tuple[bool, set[str]]] = []

    def codegen(self: Scheduler) -> None:
        inputs = set(V.graph.graph_inputs)
        for node in self.nodes:
            written = {name for buffer in node.get_outputs() for name in buffer.get_mutations()}
            found.append((isinstance(node.node, ir.UserDefinedTritonKernel), written & inputs))
        raise Scheduled

    monkeypatch.setattr(Scheduler, "codegen", codegen)
    monkeypatch.setattr(reference_plan, "_read_early", lambda t: True)
    return found


def _schedule(function: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(Scheduled):
        torch.compile(function, fullgraph=True)(*args)


def _plan_decode(**options: Any) -> tuple[Callable[..., Any], list[Any]]:
    planner = attn_ops.DecodePlanner(4, 40, **SIZES, **options)

    def step(*args: Any) -> Any:
        torch.ops.attn.plan_decode(*args[:3], list(args[3:]), backend="reference")
        return args[-1] + 1

    return step, [*page_table(LENGTHS, 4), *planner.state]


def _plan_prefill(**options: Any) -> tuple[Callable[..., Any], list[Any]]:
    planner = attn_ops.PrefillPlanner(4, 30, 40, **SIZES, **options)

    def step(*args: Any) -> Any:
        torch.ops.attn.plan_prefill(*args[:4], list(args[4:]), backend="reference")
        return args[-1] + 1

    return step, [indptr((5, 20, 1)), *page_table(LENGTHS, 4), *planner.state]


@pytest.mark.parametrize(
    "case",
    [
        lambda: _plan_decode(),
        lambda: _plan_decode(fixed_split_size=16),
        lambda: _plan_prefill(causal=True),
        lambda: _plan_prefill(fixed_split_size=16),
    ],
    ids=["decode", "decode fixed", "prefill", "prefill fixed"],
)
def test_a_kernel_comes_after_those_that_write_the_plan(
    case: Callable[[], tuple[Callable[..., Any], list[Any]]], kernels: list[tuple[bool, set[str]]]
) -> None:
    step, args = case()
    _schedule(step, *args)
    writers = [(is_triton, written) for is_triton, written in kernels if written]
    fields = set().union(*(written for is_triton, written in writers if not is_triton))
    assert len(fields) >= 6
    for field in fields:
        assert [is_triton for is_triton, written in writers if field in written][-1], field
