"""``attn::batch_prefill`` against the oracle."""

from __future__ import annotations

import pytest
from helpers.cases import PREFILL, PREFILL_SPECIAL, Case
from helpers.harness import Setup

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("case", PREFILL, ids=str)
def test_matches_oracle(case: Case) -> None:
    setup = Setup("prefill", case)
    setup.check(*setup.run())


@pytest.mark.parametrize("case", PREFILL_SPECIAL, ids=str)
def test_masks_positions_and_fp8_match_oracle(case: Case) -> None:
    setup = Setup("prefill", case)
    setup.check(*setup.run())


def test_room_for_long_requests_costs_nothing() -> None:
    """Of 16 million tokens: eager calls on the CPU gather as many as there are."""
    setup = Setup("prefill", Case("long", qo_lens=(3, 2, 40, 1), causal=True, planner={"max_kv_len": 1 << 24}))
    setup.check(*setup.run())
