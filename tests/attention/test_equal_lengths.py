"""``attn::single_prefill`` for several requests of equal lengths, without a plan, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.backends import each_case
from helpers.cases import Case
from helpers.harness import Setup

from attn_ops.errors import OptionError, ShapeError
from attn_ops.plan import equal_requests

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SIZES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "more rows than keys": {"qo_lens": (40,) * 3, "kv_lens": (19,) * 3, "causal": True, "sinks": 1.0},
    "window": {"window_left": 20, "causal": True},
    "window on the right": {"window_left": 9, "window_right": 13},
    "mask": {"masked": 0.5},
    "mask, rows of no whole bytes": {"qo_lens": (3,) * 5, "kv_lens": (53,) * 5, "masked": 0.5},
    "ALiBi": {"pos_encoding": "ALIBI", "causal": True},
    "RoPE": {"pos_encoding": "ROPE_LLAMA", "causal": True},
    "one row": {"qo_lens": (1,) * 4, "kv_lens": (150,) * 4},
    "no keys": {"kv_lens": (0,) * 3, "sinks": 1.0},
    "HND, soft cap": {"kv_layout": "HND", "logits_soft_cap": 5.0, "causal": True},
    "one KV head": {"heads": (6, 1), "head_dims": (128, 128), "causal": True},
    "heads of 96": {"head_dims": (96, 96), "causal": True},
    "several tiles": {"qo_lens": (300,) * 2, "kv_lens": (310,) * 2, "causal": True},
    "several tiles, not causal": {"qo_lens": (300,) * 2, "kv_lens": (410,) * 2},
}


CASES = [
    Case(name, **{"qo_lens": (37,) * 3, "kv_lens": (90,) * 3, "dtype": torch.float16, **sizes})
    for name, sizes in SIZES.items()
]


SPLIT_SIZES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one row": {"qo_lens": (1,) * 3, "kv_lens": (700,) * 3, "heads": (8, 2)},
    "causal, sinks": {"causal": True, "sinks": 1.0},
    "more rows than keys": {"qo_lens": (600,), "kv_lens": (400,), "causal": True},
    "window": {"window_left": 300, "qo_lens": (9,) * 2, "causal": True},
    "window of the last split": {"window_left": 20, "sinks": 1.0},
    "window on the right": {"window_left": 250, "window_right": 13},
    "mask": {"masked": 0.5},
    "ALiBi": {"pos_encoding": "ALIBI", "causal": True},
    "RoPE": {"pos_encoding": "ROPE_LLAMA", "causal": True},
    "no keys": {"kv_lens": (0,) * 2, "sinks": 1.0},
    "fewer keys than splits": {"kv_lens": (130,) * 2},
    "heads of 96, HND": {"head_dims": (96, 96), "kv_layout": "HND"},
    "several tiles": {"qo_lens": (150,) * 2, "causal": True},
    "FP8 keys": {"kv_dtype": torch.float8_e4m3fn, "kv_scale": (0.5, 3.0)},
    "float32": {"dtype": torch.float32},
}

SPLIT = [
    Case(name, **{"qo_lens": (5,) * 2, "kv_lens": (700,) * 2, "dtype": torch.float16, **sizes})
    for name, sizes in SPLIT_SIZES.items()
]


@pytest.fixture
def three_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_requests, "fastest_splits", lambda *_: 3)


@each_case(SPLIT, interpreted=SPLIT)
@pytest.mark.usefixtures("three_splits")
def test_split_requests_match_the_oracle(case: Case, device: str, backend: str) -> None:
    Setup("ragged", case, device).check_equal_lengths(backend)


@each_case(CASES, interpreted=CASES[:12])
def test_matches_oracle(case: Case, device: str, backend: str) -> None:
    Setup("ragged", case, device).check_equal_lengths(backend)


@pytest.mark.parametrize(("batch", "rows", "keys"), [(2, 9, 20), (2, 10, 21), (4, 10, 20)])
def test_unequal_lengths_are_refused(batch: int, rows: int, keys: int) -> None:
    q, k = torch.zeros(rows, 2, 64), torch.zeros(keys, 2, 64)
    with pytest.raises(ShapeError, match=rf"a multiple of batch_size, {batch}; pass requests of equal lengths"):
        torch.ops.attn.single_prefill(q, k, k, batch)


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_without_requests_is_refused(batch: int) -> None:
    t = torch.zeros(0, 2, 64)
    with pytest.raises(OptionError, match=f"batch_size is {batch}; expected 1 or more"):
        torch.ops.attn.single_prefill(t, t, t, batch)
