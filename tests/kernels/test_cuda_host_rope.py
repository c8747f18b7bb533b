"""Prefill with RoPE in CUDA C++ on the host (``helpers/cuda_host``): results against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # whose call of the prefill kernels the CUDA kernel shares

from helpers.cases import Case
from helpers.cuda_host import Host, needs_a_compiler
from helpers.cuda_host.calls import FP8_KV, SPLIT, attend
from helpers.cuda_host.calls import prefill_case as _case

pytestmark = [needs_a_compiler, pytest.mark.usefixtures("poisoned_memory")]

ROPE: dict[str, Any] = {"pos_encoding": "ROPE_LLAMA", "causal": True}
MASK: dict[str, Any] = {"pos_encoding": "ROPE_LLAMA", "causal": False, "masked": 0.4}
OF_64, OF_256 = {"head_dims": (64, 64)}, {"head_dims": (256, 256), "heads": (4, 2)}

CASES = [
    ("prefill", _case("causal", **ROPE)),
    ("prefill", _case("not causal", **ROPE | {"causal": False}, rope=(4.0, 5e5), page_size=8)),
    ("prefill", _case("more rows than keys", **ROPE, kv_lens=(30, 5), qo_lens=(40, 7))),
    ("prefill", _case("window, cap, sinks", **ROPE, window_left=33, logits_soft_cap=5.0, sinks=1.0, page_size=64)),
    ("prefill", _case("splits", **ROPE | SPLIT, heads=(7, 1), storage="fused", kv_layout="HND")),
    ("prefill", _case("splits, units of 128", **ROPE, kv_lens=(700, 0, 300, 2), planner={"num_ctas": 12})),
    ("prefill", _case("groups that do not divide 64", **ROPE, heads=(10, 2), dtype=torch.float16)),
    ("prefill", _case("pages of one token", **ROPE, page_size=1)),
    ("prefill", _case("pages of one token, window", **ROPE, page_size=5, window_left=33, dtype=torch.float16)),
    ("prefill", _case("no keys", **ROPE, kv_lens=(300, 0, 200, 5, 0), qo_lens=(40, 9, 200, 5, 3))),
    ("prefill", _case("64", **ROPE | OF_64, page_size=16, dtype=torch.float16)),
    ("prefill", _case("64, splits", **ROPE | OF_64 | SPLIT, heads=(6, 2), window_left=300)),
    ("prefill", _case("256", **ROPE | OF_256, logits_soft_cap=5.0, page_size=16)),
    ("prefill", _case("256, splits", **ROPE | OF_256 | SPLIT, sinks=1.0, window_left=300)),
    ("prefill", _case("mask", **MASK, padding=3, spare_batch=2)),
    ("prefill", _case("mask that hides most tokens", **MASK | {"masked": 0.01}, kv_lens=(700,), qo_lens=(9,))),
    ("prefill", _case("mask, window, cap, tokens", **MASK, window_left=50, logits_soft_cap=5.0, page_size=1)),
    ("prefill", _case("64, mask, splits", **MASK | OF_64 | SPLIT | {"causal": False}, kv_layout="HND")),
    ("prefill", _case("256, mask", **MASK | OF_256, sinks=1.0, page_size=64)),
    ("ragged", _case("ragged, mask", **MASK, dtype=torch.float16)),
    ("ragged", _case("ragged", **ROPE, storage="padded", planner={"tile_rows": 32})),
    ("ragged", _case("ragged, window", **ROPE, window_left=40, heads=(6, 2), kv_layout="HND")),
    ("ragged", _case("ragged, 64", **ROPE | OF_64, dtype=torch.float16)),
    ("ragged", _case("ragged, 256", **ROPE | OF_256, out_dtype=torch.float32)),
]


FP8_E5M2: dict[str, Any] = {"kv_dtype": torch.float8_e5m2, "kv_scale": (2.0, 0.25)}
FP8_CASES = [
    (kind, replace(case, **(FP8_E5M2 if i % 3 == 2 else FP8_KV)))
    for i, (kind, case) in enumerate(CASES)
    if case.masked is None
]
"""The same cases with FP8 keys and values."""


@pytest.mark.parametrize(("kind", "case"), FP8_CASES, ids=[case.name for _, case in FP8_CASES])
def test_prefill_with_rotated_fp8_keys(kind: str, case: Case) -> None:
    host = Host()
    attend(kind, case, host)
    (name,) = host.launched
    assert "KV_FP8=1" in name
    assert "ROPE=1" in name


@pytest.mark.parametrize(("kind", "case"), CASES, ids=[case.name for _, case in CASES])
def test_prefill_with_rotated_queries_and_keys(kind: str, case: Case) -> None:
    attend(kind, case, Host())
