"""``attn::batch_decode`` against the oracle."""

from __future__ import annotations

import pytest
from cases import DECODE, DECODE_SPECIAL, Case
from harness import Setup

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("case", DECODE, ids=str)
def test_matches_oracle(case: Case) -> None:
    setup = Setup("decode", case)
    setup.check(*setup.run())


@pytest.mark.parametrize("case", DECODE_SPECIAL, ids=str)
def test_positions_and_fp8_match_oracle(case: Case) -> None:
    setup = Setup("decode", case)
    setup.check(*setup.run())
