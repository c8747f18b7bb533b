"""The model of many GPUs against what was measured, and the guide against the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scaling import Attention, Machine, Split, best_split, decode_us, prefill_us, tables

ROOT = Path(__file__).parents[2]

MEASURED = [
    (1, 128 << 10, 127.9, 36.8, 68.5),
    (1, 512 << 10, 486.2, 126.8, 160.6),
    (8, 128 << 10, 969.2, 248.1, 281.1),
]
"""Requests, tokens, and microseconds: on one GPU, the local part on four, and with all-gather and merge."""


MEASURED_ON_TWO = [
    (1, 128 << 10, 127.2, 66.6, 74.9),
    (1, 512 << 10, 490.5, 247.9, 260.0),
    (8, 128 << 10, 980.8, 491.5, 507.3),
]
"""The same on two GPUs, with the one-shot merge."""


@pytest.mark.parametrize(("batch", "tokens", "alone", "local", "merged"), MEASURED_ON_TWO)
def test_the_model_fits_the_one_shot_merge(batch: int, tokens: int, alone: float, local: float, merged: float) -> None:
    machine, layer = Machine(), Attention()
    assert decode_us(machine, layer, Split(), batch, tokens)[1] == pytest.approx(alone, rel=0.02)
    found = decode_us(machine, layer, Split(context=2), batch, tokens, one_shot=True)
    assert found == pytest.approx((local, merged), rel=0.05)
    guide = (ROOT / "docs/guide/scaling.md").read_text(encoding="utf-8")
    row = next(line for line in guide.splitlines() if f"| {alone} / " in line)
    for measured, model in ((local, found[0]), (merged, found[1])):
        assert f"{measured} / {model:.1f} " in row


@pytest.mark.parametrize(("batch", "tokens", "alone", "local", "merged"), MEASURED)
def test_the_model_fits_the_measurements(batch: int, tokens: int, alone: float, local: float, merged: float) -> None:
    machine, layer = Machine(), Attention()
    assert decode_us(machine, layer, Split(), batch, tokens)[1] == pytest.approx(alone, rel=0.01)
    found = decode_us(machine, layer, Split(context=4), batch, tokens)
    assert found == pytest.approx((local, merged), rel=0.05)


def test_the_guide_has_the_tables_of_the_model() -> None:
    guide = (ROOT / "docs/guide/scaling.md").read_text(encoding="utf-8")
    assert "\n".join(tables()).split("\n\n")[0] in guide
    assert "\n".join(tables()).split("\n\n")[1] in guide


def test_what_the_guide_says_of_splits() -> None:
    machine, layer, mla = Machine(), Attention(), Attention(128, 1, 512)
    assert best_split(machine, layer, 8, 1, 1 << 20) == Split(8, 1)
    assert best_split(machine, layer, 64, 1, 10 << 20) == Split(8, 8)
    assert best_split(machine, mla, 8, 1, 1 << 20).context == 8
    one_host = decode_us(machine, layer, Split(8), 1, 128 << 10)[1]
    assert decode_us(machine, layer, Split(8, 2), 1, 128 << 10)[1] > one_host
    short, long = (prefill_us(machine, layer, Split(8, 8), 8192, n)[1] for n in (128 << 10, 1 << 20))
    assert short < long < 8 * short
