"""``attn::batch_prefill`` against the oracle."""

from __future__ import annotations

import pytest
from cases import PREFILL, PREFILL_SPECIAL, Case
from harness import Setup

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("case", PREFILL, ids=str)
def test_matches_oracle(case: Case) -> None:
    setup = Setup("prefill", case)
    setup.check(*setup.run())


@pytest.mark.parametrize("case", PREFILL_SPECIAL, ids=str)
def test_masks_positions_and_fp8_match_oracle(case: Case) -> None:
    setup = Setup("prefill", case)
    setup.check(*setup.run())
