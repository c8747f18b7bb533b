"""``attn::ragged_prefill`` against the oracle."""

from __future__ import annotations

import pytest
from helpers.cases import RAGGED, RAGGED_SPECIAL, Case
from helpers.harness import Setup

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("case", RAGGED, ids=str)
def test_matches_oracle(case: Case) -> None:
    setup = Setup("ragged", case)
    setup.check(*setup.run())


@pytest.mark.parametrize("case", RAGGED_SPECIAL, ids=str)
def test_masks_positions_and_fp8_match_oracle(case: Case) -> None:
    setup = Setup("ragged", case)
    setup.check(*setup.run())
