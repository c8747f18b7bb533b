"""Wrappers that are planned again between runs on inputs of fixed address; tests/gpu replays the same as graphs."""

from __future__ import annotations

import pytest
from helpers.cuda_graph_steps import STEPS, replays

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("name", STEPS)
def test_runs_follow_the_plan(name: str) -> None:
    step = STEPS[name]()
    for r, results in replays(step):
        step.check(r, results)


@pytest.mark.parametrize("name", STEPS)
def test_a_plan_stays_where_it_is(name: str) -> None:
    """A captured run() reads the same addresses after every plan()."""
    step = STEPS[name]()
    assert len({step.addresses() for _ in replays(step)}) == 1
