"""A run() that is captured once follows every plan() that fits, for all wrappers that promise it.

On a GPU the run is captured in a CUDA graph. On the CPU it is called again with the same tensors.
"""

from __future__ import annotations

import pytest
from helpers.cuda_graph_steps import STEPS, replays


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", STEPS)
def test_replays_follow_every_plan(name: str) -> None:
    step = STEPS[name]()
    for r, results in replays(step):
        step.check(r, results)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", STEPS)
def test_plan_tensors_keep_their_addresses(name: str) -> None:
    """A captured run() reads the same addresses after every plan()."""
    step = STEPS[name]()
    assert len({step.addresses() for _ in replays(step)}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_captured_run_without_poisoned_memory(name: str) -> None:
    """As in use: the graph has no kernels that fill new tensors."""
    step, addresses = STEPS[name](), set()
    for r, results in replays(step):
        step.check(r, results)
        addresses.add(step.addresses())
    assert len(addresses) == 1
