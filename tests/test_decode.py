"""``attn::batch_decode`` against the oracle."""

from __future__ import annotations

import pytest
from cases import DECODE, Case
from harness import Setup

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("case", DECODE, ids=str)
def test_matches_oracle(case: Case) -> None:
    setup = Setup("decode", case)
    setup.check(*setup.run())
