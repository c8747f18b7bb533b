"""Masks of the wrong length on a GPU, where reading past them would be seen by nobody."""

from __future__ import annotations

import pytest
from helpers.truncated_masks import LENGTHS, check

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("held", LENGTHS)
@pytest.mark.parametrize("kind", ["prefill", "ragged"])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_bits_beyond_the_end_hide(kind: str, held: int, backend: str) -> None:
    check(kind, held, "cuda", backend)
