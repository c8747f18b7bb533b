"""``attn::batch_prefill``, ``attn::ragged_prefill`` and ``attn::single_prefill`` against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.backends import each_case
from helpers.cases import (
    PREFILL,
    PREFILL_BASE,
    PREFILL_SPECIAL,
    RAGGED,
    RAGGED_SPECIAL,
    RIGHT_WINDOWS,
    Case,
    rounds_in_the_interpreter,
)
from helpers.harness import Setup

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SPLIT = [
    replace(PREFILL_BASE, name=f"split{i}", kv_lens=(300, 0, 700, 130), planner={"num_ctas": 12, "tile_rows": 16}, **o)
    for i, o in enumerate(({"causal": True, "sinks": 1.0}, {"window_left": 600, "page_size": 64}, {"masked": 0.5}))
]
SPLIT.append(  # rows that see no key in any split of their tile
    replace(PREFILL_BASE, name="split3", kv_lens=(300,), qo_lens=(9,), planner={"num_ctas": 4}, masked=0.004)
)
NO_KEYS = [
    replace(PREFILL_BASE, name=f"sinks of rows without keys {i}", kv_lens=lengths, padding=3, sinks=1.0, **o)
    for i, (lengths, o) in enumerate(
        (((2, 0, 20, 1), {"causal": True}), ((0, 0, 0, 0), {}), ((9, 0, 20, 1), {"masked": 0.02}))
    )
]
SINGLE = [*(case for case in RAGGED if "planned" not in case.name), *RAGGED_SPECIAL]


def _every(step: int, cases: list[Case]) -> list[Case]:
    """A few cases for the interpreter, which is slow. NumPy multiplies no bfloat16."""
    return [case for case in cases if case.dtype != torch.bfloat16 and rounds_in_the_interpreter(case)][::step]


def _shorter(case: Case) -> Case:
    """The case with half of the tokens, in about as many splits, which have several KV tiles."""
    planner = case.planner | ({"fixed_split_size": 6, "tile_rows": 16} if "fixed_split_size" in case.planner else {})
    lengths, window = tuple(-(-n // 2) for n in case.kv_lens), case.window_left // 2  # -1, no window, stays -1
    return replace(case, kv_lens=lengths, window_left=window, planner=planner)


PAGED_INTERPRETED = [
    *map(_shorter, SPLIT),
    *NO_KEYS,
    *(_shorter(case) for case in PREFILL if case.name.startswith("fixed split")),
    *_every(23, PREFILL),
    *_every(9, PREFILL_SPECIAL),
]


@each_case([*PREFILL, *PREFILL_SPECIAL, *NO_KEYS], interpreted=PAGED_INTERPRETED)
def test_paged_matches_oracle(case: Case, device: str, backend: str) -> None:
    Setup("prefill", case, device).check_run(backend)


@each_case([*RAGGED, *RAGGED_SPECIAL], interpreted=[*_every(29, RAGGED), *_every(13, RAGGED_SPECIAL)])
def test_ragged_matches_oracle(case: Case, device: str, backend: str) -> None:
    Setup("ragged", case, device).check_run(backend)


@each_case(RIGHT_WINDOWS, interpreted=map(_shorter, _every(6, RIGHT_WINDOWS)))
def test_right_windows_of_pages_match_oracle(case: Case, device: str, backend: str) -> None:
    Setup("prefill", case, device).check_run(backend)


@each_case(RIGHT_WINDOWS, interpreted=map(_shorter, _every(13, RIGHT_WINDOWS)))
def test_right_windows_of_ragged_keys_match_oracle(case: Case, device: str, backend: str) -> None:
    Setup("ragged", case, device).check_run(backend)


@each_case([case for case in RIGHT_WINDOWS if "planned" not in case.name], interpreted=RIGHT_WINDOWS[:15:4])
def test_right_windows_of_one_request_match_oracle(case: Case, device: str, backend: str) -> None:
    Setup("ragged", case, device).check_single(backend)


@each_case([*SINGLE, *NO_KEYS])
def test_single_matches_oracle(case: Case, device: str, backend: str) -> None:
    Setup("ragged", case, device).check_single(backend)


def test_max_kv_len_of_16_million_takes_no_memory() -> None:
    """Eager calls on the CPU gather as many tokens as there are, not as many as the plan allows."""
    setup = Setup("prefill", Case("long", qo_lens=(3, 2, 40, 1), causal=True, planner={"max_kv_len": 1 << 24}))
    setup.check(*setup.run())
