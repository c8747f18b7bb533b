"""``batch_mla`` of the triton backend against the oracle."""

from __future__ import annotations

import pytest
from mla import CASES, Mla, check

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(case: Mla) -> None:
    check(case, "cuda", "triton")
