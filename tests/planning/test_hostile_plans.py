"""Plans and page tables that no planner makes never let a kernel access memory outside of its tensors.

``kernels/test_sanitizer.py`` runs the same on a GPU, with the Hopper kernels and under compute-sanitizer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.bounds import OutOfBoundsError, checked_accesses
from helpers.calls import arguments
from helpers.hostile_plans import (
    LEAST,
    MOST,
    PLANNED,
    TABLES,
    cut_plans,
    foreign_plan,
    random_plan,
    random_tables,
    zero_plan,
)

from attn_ops.errors import AttnOpsError
from attn_ops.plan.state import WORK_FIELDS

interpreted = pytest.mark.interpreter

SPLITS: dict[str, Any] = {"kv_lens": (40, 0, 70, 1), "planner": {"num_ctas": 6}}
CALLS: dict[str, dict[str, Any]] = {
    "batch_decode": {"kv_lens": (70, 0, 130, 1), "planner": {"num_ctas": 5}, "sinks": 1.0, "window_left": 60},
    "batch_prefill": SPLITS | {"qo_lens": (5, 2, 9, 1), "causal": True, "planner": {"num_ctas": 6, "tile_rows": 4}},
    "ragged_prefill": SPLITS
    | {"qo_lens": (5, 2, 9, 1), "window_left": 50, "window_right": 3, "planner": {"num_ctas": 6, "tile_rows": 4}},
    "batch_mla": SPLITS | {"qo_lens": (1, 2, 1, 1), "causal": True, "planner": {"num_ctas": 6, "tile_rows": 4}},
}
OTHER: dict[str, Any] = {"kv_lens": (200, 3, 0, 9, 64), "page_size": 3}
READERS = [op for op in PLANNED if op in CALLS]


def attempt(op: str, kwargs: dict[str, Any]) -> None:
    """Call the op in the interpreter; an access outside of its tensors raises."""
    with checked_accesses():
        getattr(torch.ops.attn, op)(**kwargs, backend="interpreter")


@interpreted
@pytest.mark.parametrize("op", READERS)
def test_plans_of_random_extremes(op: str) -> None:
    for seed in range(2):
        attempt(op, random_plan(arguments(op, **CALLS[op]), seed))


@interpreted
@pytest.mark.parametrize(
    "columns",
    [
        {"kv_begin": MOST, "kv_end": LEAST},
        {"kv_begin": MOST, "kv_end": LEAST + 100},
        {"kv_begin": MOST, "kv_end": MOST, "position": -100},
        {"kv_begin": 100, "kv_end": MOST, "position": MOST - 1},
        {"kv_begin": 0, "kv_end": MOST, "position": MOST},
        {"kv_end": MOST, "position": LEAST},
        {"kv_end": MOST, "page_start": MOST},
        {"rows": 0, "kv_begin": MOST - 15},
        {"row": MOST, "slot": MOST},
        {"row": -1, "request": MOST},
    ],
    ids=str,
)
@pytest.mark.parametrize("op", READERS)
def test_work_items_of_extremes(op: str, columns: dict[str, int]) -> None:
    kwargs = arguments(op, **CALLS[op])
    for name, value in columns.items():
        kwargs["plan"].work[:, WORK_FIELDS.index(name)] = value
    attempt(op, kwargs)


@interpreted
def test_slots_beyond_the_workspace() -> None:
    kwargs = arguments("batch_decode", **CALLS["batch_decode"])
    kwargs["plan"].kv_len.zero_()
    kwargs["plan"].merge_indptr.fill_(MOST)
    attempt("batch_decode", kwargs)


@interpreted
@pytest.mark.parametrize("op", READERS)
def test_plans_of_other_batches_and_of_zeros(op: str) -> None:
    other = OTHER | ({"qo_lens": (30, 1, 1, 0, 5)} if op != "batch_decode" else {})
    attempt(op, foreign_plan(arguments(op, **CALLS[op]), arguments(op, **other)))
    attempt(op, zero_plan(arguments(op, **CALLS[op])))


@interpreted
@pytest.mark.parametrize("op", TABLES)
def test_page_tables_of_random_extremes(op: str) -> None:
    for seed in range(3):
        attempt(op, random_tables(op, arguments(op), seed))


@pytest.mark.parametrize("op", READERS)
def test_cut_plans_are_refused_or_do_no_harm(op: str) -> None:
    refused = 0
    for _, kwargs in cut_plans(arguments(op, **CALLS[op])):
        try:
            getattr(torch.ops.attn, op)(**kwargs)
        except AttnOpsError:
            refused += 1
    assert refused >= 10


@interpreted
def test_a_planted_access_is_found() -> None:
    from helpers.sanitizer_calls import reads_too_far

    with pytest.raises(Exception, match=OutOfBoundsError.__name__), checked_accesses():
        reads_too_far[(1,)](torch.zeros(128), 128)
