"""Prefill problems of the benchmarks: their float32 reference, and the pairs that their rates count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks import comparison, prefill
from benchmarks.prefill_problem import PrefillProblem
from benchmarks.prefill_rows import PrefillRow

pytestmark = pytest.mark.usefixtures("two_copies")

SMALL = PrefillRow("small", (40, 7), (90, 33), None, num_qo_heads=6, num_kv_heads=2, head_dim=64, head_dim_vo=64)

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window and cap": {"window_left": 20, "logits_soft_cap": 5.0},
    "random mask": {"causal": False, "mask": "random"},
    "causal mask": {"causal": False, "mask": "causal"},
    "RoPE": {"pos_encoding": "ROPE_LLAMA"},
    "ALiBi": {"pos_encoding": "ALIBI"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_prefill_problem_detects_wrong_results(name: str) -> None:
    row = replace(SMALL, **OPTIONS[name])
    problem = PrefillProblem(row, device="cpu")
    call = prefill._paged(problem)
    out = call(0)
    assert problem.error(out) < comparison.MAX_RELATIVE_ERROR
    assert problem.error(call(1)) > comparison.MAX_RELATIVE_ERROR  # another copy of the cache
    unmasked = prefill._paged(PrefillProblem(replace(SMALL, causal=False), device="cpu"))
    assert problem.error(unmasked(0)) > comparison.MAX_RELATIVE_ERROR  # without the options


def test_a_causal_mask_counts_the_pairs_of_causal_attention() -> None:
    causal, as_mask, random = (replace(SMALL, **OPTIONS[name]) for name in ("causal", "causal mask", "random mask"))
    assert causal.flops() == as_mask.flops() < random.flops()
