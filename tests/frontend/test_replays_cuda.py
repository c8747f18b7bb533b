"""A run() captured in a CUDA graph follows every plan() that fits, for every wrapper that promises it."""

from __future__ import annotations

import pytest
from helpers.cuda_graph_steps import STEPS, replays

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", STEPS)
def test_captured_run_follows_the_plan(name: str) -> None:
    step, addresses = STEPS[name](), set()
    for r, results in replays(step):
        step.check(r, results)
        addresses.add(step.addresses())
    assert len(addresses) == 1
