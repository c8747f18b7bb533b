"""Random valid calls of every op, public function and wrapper, against the oracle (:mod:`helpers.fuzz`).

Every call has random sizes, dtypes, layouts, strides and options, on memory that is poisoned with NaN. Its inputs must
be unchanged after it, and so must all memory around its outputs.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.fuzz import functions, ops, run, shards, sparse, wrappers
from helpers.fuzz.calls import CALLS
from helpers.fuzz.draw import Call, Draw
from helpers.fuzz.run import FuzzError, run_seed

import attn_ops
from attn_ops import exports
from attn_ops.ops.schemas import SCHEMAS

SEEDS = range(int(os.environ.get("ATTN_OPS_FUZZ_SEEDS", "30")))
"""The first seeds of every call. ``ATTN_OPS_FUZZ_SEEDS`` is another number of them."""


@pytest.mark.parametrize("name", CALLS)
def test_matches_oracle(name: str) -> None:
    for seed in SEEDS:
        run_seed(name, seed)


@pytest.mark.parametrize("name", CALLS)
def test_traced_call_matches_oracle(name: str) -> None:
    run_seed(name, 1000, trace=True)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", [*ops.OPS, *shards.SHARD_CALLS])
def test_kernels_match_oracle_in_the_interpreter(name: str) -> None:
    for seed in SEEDS[:2]:
        run_seed(name, seed, backend="interpreter", size="small")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_matches_oracle_on_the_gpu(name: str) -> None:
    """Few seeds: each compiles kernels. ``python -m helpers.fuzz --device cuda`` runs more."""
    for seed in SEEDS[:2]:
        run_seed(name, seed, device="cuda", size="large")


def test_every_op_and_public_name_has_a_call() -> None:
    planned = {"plan_decode", "plan_prefill"}  # by the planners of the other ops
    assert set(ops.OPS) | planned == set(SCHEMAS)
    source = "".join(map(inspect.getsource, (functions, wrappers, sparse)))
    elsewhere = {
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",  # the decode wrapper with buffers: test_decode
        "convert_bsr_mask_layout",  # by the wrapper that takes masks of blocks
        "fast_decode_plan",  # plan() of the decode wrapper
        "get_batch_indices_positions",  # the ops of these names
        "get_seq_lens",
        "merge_state",
        "packbits",
        "segment_packbits",
        "single_prefill_with_kv_cache_return_lse",  # single_prefill_with_kv_cache(return_lse=True)
    }
    assert {
        name for name in exports.HOMES if f"flashinfer.{name}" not in source and f'"{name}"' not in source
    } == elsewhere
    assert all(hasattr(attn_ops, name) for name in elsewhere)


# The fuzzer finds what it must find.

Change = Callable[[Call], Call]


def _with_run(change: Callable[[Call, Any], Any]) -> Change:
    return lambda call: replace(call, run=lambda: change(call, call.run()))


def _off_by(factor: float) -> Change:
    return _with_run(lambda _, result: ((result[0].float() * factor).to(result[0].dtype), result[1]))


def _writes_an_input(call: Call) -> Call:
    memory = call.reads[1].untyped_storage()
    before = memory[0]

    def run() -> None:
        memory[0] = 255 - before

    return replace(call, run=run, check=lambda _: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_off_by(1.02), "out differs"),
        (_off_by(float("nan")), "out differs"),
        (_with_run(lambda _, result: (result[0], result[1] + 1e-3)), "lse differs"),
        (_writes_an_input, "1 bytes changed"),
    ],
)
def test_a_planted_fault_is_found(change: Change, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run.CALLS, "batch_decode", lambda d: change(ops.batch_decode(d)))
    errors = []
    for seed in range(20):
        with contextlib.suppress(FuzzError):
            run_seed("batch_decode", seed)
            continue
        with pytest.raises(
            FuzzError, match=f'python -m helpers.fuzz "batch_decode" --seed {seed} --device cpu'
        ) as found:
            run_seed("batch_decode", seed)
        errors.append(str(found.value))
    assert len(errors) >= 10  # some of the batches have no keys, and some calls return no LSE
    assert all(message in error for error in errors)


def test_a_seed_draws_the_same_call() -> None:
    texts = [{name: draw(Draw(5)).text for name, draw in CALLS.items()} for _ in range(2)]
    assert texts[0] == texts[1]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        assert {name: draw(Draw(5)).text for name, draw in CALLS.items()} == texts[0]
