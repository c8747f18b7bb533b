"""``batch_prefill``, ``ragged_prefill`` and ``single_prefill`` of the triton backend against the oracle."""

from __future__ import annotations

import pytest
import torch
from cases import PREFILL, PREFILL_SPECIAL, RAGGED, RAGGED_SPECIAL, Case
from harness import Setup
from test_single import check_single

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


def tolerance(case: Case) -> dict[str, float]:
    """Rotated queries and keys are rounded to the dtype before they are multiplied."""
    return {"float32_eps": torch.finfo(case.dtype).eps / 8} if case.pos_encoding == "ROPE_LLAMA" else {}


@pytest.mark.parametrize("case", [*PREFILL, *PREFILL_SPECIAL], ids=str)
def test_paged(case: Case) -> None:
    setup = Setup("prefill", case, "cuda")
    setup.check(*setup.run("triton"), **tolerance(case))


@pytest.mark.parametrize("case", [*RAGGED, *RAGGED_SPECIAL], ids=str)
def test_ragged(case: Case) -> None:
    setup = Setup("ragged", case, "cuda")
    setup.check(*setup.run("triton"), **tolerance(case))


@pytest.mark.parametrize("case", [*(c for c in RAGGED if "planned" not in c.name), *RAGGED_SPECIAL], ids=str)
def test_single(case: Case) -> None:
    check_single(case, "cuda", "triton", **tolerance(case))
