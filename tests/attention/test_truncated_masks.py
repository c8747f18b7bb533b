"""Masks of the wrong length, at the ops that cannot check it."""

from __future__ import annotations

import pytest
from helpers.truncated_masks import LENGTHS, check

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("held", LENGTHS)
@pytest.mark.parametrize("kind", ["prefill", "ragged"])
def test_bits_beyond_the_end_hide(kind: str, held: int) -> None:
    check(kind, held)
