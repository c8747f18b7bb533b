"""FLOP formulas: every op has one, and attention counts the keys that each row sees."""

from __future__ import annotations

import pytest
import torch
from helpers.cases import DECODE, PREFILL, RAGGED, RIGHT_WINDOWS
from helpers.harness import Setup
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import attn_ops.flops  # noqa: F401  registers the formulas
from attn_ops.ops.schemas import SCHEMAS


def _visible(qo_len: int, kv_len: int, causal: bool, window_left: int, window_right: int) -> int:
    pairs = 0
    for i in range(qo_len):
        for j in range(kv_len):
            hidden = causal and j + qo_len > kv_len + i
            hidden |= window_left >= 0 and not j + qo_len + window_left >= kv_len + i
            hidden |= window_right >= 0 and not j + qo_len <= kv_len + i + window_right
            pairs += not hidden
    return pairs


@pytest.mark.parametrize("op", SCHEMAS)
def test_every_op_has_a_formula(op: str) -> None:
    assert getattr(torch.ops.attn, op) in flop_registry


_UNMASKED = [case for case in RIGHT_WINDOWS if case.masked is None]
"""A custom mask is not read: FLOPs are those of a mask that hides nothing."""


def _cases():
    for kind, cases in (("decode", DECODE), ("prefill", PREFILL), ("ragged", RAGGED), ("prefill", _UNMASKED)):
        small = [case for case in cases if max(case.kv_lens, default=0) <= 200 and case.head_dims[0] <= 128]
        yield from ((kind, case) for case in small[::6])


@pytest.mark.parametrize(("kind", "case"), list(_cases()), ids=str)
def test_attention_counts_visible_keys(kind: str, case) -> None:
    setup = Setup(kind, case)
    with FlopCounterMode(display=False) as counter:
        setup.run()
    lengths = list(zip(setup.qo_lens, case.kv_lens, strict=True))
    if kind == "decode":
        lengths = [(1, n) for n in case.kv_lens if n]
    windows = case.window_left, case.window_right
    pairs = sum(_visible(m, n, kind == "decode" or case.causal, *windows) for m, n in lengths)
    assert counter.get_total_flops() == 2 * case.heads[0] * sum(case.head_dims) * pairs


def test_single_prefill_and_mla_sizes() -> None:
    q, k, v = torch.zeros(3, 4, 16), torch.zeros(5, 2, 16), torch.zeros(5, 2, 8)
    with FlopCounterMode(display=False) as counter:
        torch.ops.attn.single_prefill(q, k, v, causal=True)
    assert counter.get_total_flops() == 2 * 4 * (16 + 8) * (3 + 4 + 5)
    with FlopCounterMode(display=False) as counter:
        torch.ops.attn.single_prefill(q, k, v, causal=True, mask=torch.full((2,), 255, dtype=torch.uint8))
    assert counter.get_total_flops() == 2 * 4 * (16 + 8) * 3 * 5
