"""``attn::batch_decode`` against the oracle."""

from __future__ import annotations

import pytest
from helpers.cases import DECODE, DECODE_SPECIAL, Case
from helpers.harness import Setup

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("case", DECODE, ids=str)
def test_matches_oracle(case: Case) -> None:
    setup = Setup("decode", case)
    setup.check(*setup.run())


@pytest.mark.parametrize("case", DECODE_SPECIAL, ids=str)
def test_positions_and_fp8_match_oracle(case: Case) -> None:
    setup = Setup("decode", case)
    setup.check(*setup.run())


def test_room_for_long_requests_costs_nothing() -> None:
    """Of 16 million tokens: eager calls on the CPU gather as many as there are."""
    setup = Setup("decode", Case("long", planner={"max_kv_len": 1 << 24}))
    setup.check(*setup.run())
