"""The CUDA decode kernel and its combine on the host (``helpers/cuda_host``): results, and faults that are noticed."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from attn_ops.kernels.cuda import combine_decode, decode
from helpers.cases import Case
from helpers.cuda_host import Fault, Host, HostError, needs_a_compiler
from helpers.harness import Setup
from torch import Tensor

from attn_ops.plan.state import WORK_FIELDS, DecodePlan

pytestmark = [needs_a_compiler, pytest.mark.usefixtures("poisoned_memory")]

TENSORS = ("q", "k_cache", "v_cache", "plan", "workspace")


def _case(name: str, **fields: Any) -> Case:
    sizes: dict[str, Any] = {"kv_lens": (70, 0, 300, 2), "heads": (8, 2), "planner": {"num_ctas": 3}}
    return Case(name, **(sizes | {"dtype": torch.bfloat16, "head_dims": (128, 128)} | fields))


def _run(setup: Setup, host: Host, of_combine: Host | None = None) -> tuple[Tensor, Tensor]:
    """Both kernels on one host, or the combine on another."""
    arguments = setup.arguments
    positional = [arguments.pop(name) for name in TENSORS]
    with host.installed(), pytest.MonkeyPatch.context() as patch:
        if of_combine is not None:
            patch.setattr(combine_decode, "launch", of_combine.launch)
        return decode.batch_decode(*positional, **arguments)


def _attend(case: Case, host: Host) -> tuple[Tensor, Tensor]:
    """Run the case on the host and compare it with the oracle."""
    setup = Setup("decode", case)
    out, lse = _run(setup, host)
    setup.check(out, lse, **setup.tolerance("cuda"))
    return out, lse


MANY: dict[str, Any] = {"kv_lens": (700, 0, 300, 2, 64, 128), "planner": {"num_ctas": 7}}
F16_64: dict[str, Any] = {"dtype": torch.float16, "head_dims": (64, 64)}
E4M3: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn, "kv_scale": (0.5, 3.0)}
E5M2: dict[str, Any] = {"kv_dtype": torch.float8_e5m2, "kv_scale": (2.0, 0.25)}

CASES = [
    _case("base"),
    _case("splits", **MANY),
    _case("splits, sinks", **MANY, sinks=1.0, page_size=64, storage="fused", kv_layout="HND"),
    _case("one long request", kv_lens=(1000,), heads=(6, 2), planner={"num_ctas": 16}, page_size=8),
    _case("window, cap", window_left=33, logits_soft_cap=5.0, sinks=1.0, page_size=8),
    _case("window, planned", window_left=100, planner={"num_ctas": 4, "window_left": 100}, page_size=24),
    _case("rows after the last", padding=3, spare_batch=2, storage="padded", page_size=8),
    _case("no tokens", kv_lens=(0, 0), sinks=2.0),
    _case("groups of 16", heads=(16, 1), **MANY, page_size=16),
    _case("groups of 7", heads=(14, 2), out_dtype=torch.float32),
    _case("groups of 12", heads=(12, 1), out_dtype=torch.float8_e4m3fn),
    _case("one head", heads=(1, 1), out_dtype=torch.float8_e5m2),
    _case("64", **F16_64, page_size=16),
    _case("64, groups of 16", **F16_64 | MANY, heads=(16, 1), page_size=8, logits_soft_cap=30.0),
    _case("fixed split", **F16_64, kv_lens=(700, 0, 300, 2), page_size=16),
]
CASES[-1] = replace(CASES[-1], planner={"num_ctas": 3, "fixed_split_size": 8})

FP8_CASES = [replace(case, name=f"{case.name}, FP8", **(E5M2 if i % 3 == 2 else E4M3)) for i, case in enumerate(CASES)]


@pytest.mark.parametrize("seed", range(len(CASES + FP8_CASES)), ids=[str(case) for case in CASES + FP8_CASES])
def test_matches_the_oracle(seed: int) -> None:
    case, host = (CASES + FP8_CASES)[seed], Host(seed=seed)
    _attend(case, host)
    of_attention, of_combine = host.launched
    assert f"HEAD_DIM={case.head_dims[0]}" in of_attention
    assert of_combine == "combine_decode"


@pytest.mark.parametrize("case", [CASES[1], FP8_CASES[8]], ids=str)
def test_the_order_of_threads_changes_no_bit(case: Case) -> None:
    first, *others = (_attend(case, Host(seed=seed)) for seed in range(3))
    for one in others:
        assert all(torch.equal(a, b) for a, b in zip(first, one, strict=True))


@pytest.mark.parametrize("exponent", [-100, -20, 20, 90])
def test_fp8_cache_with_a_bfloat16_query_of_any_magnitude(exponent: int) -> None:
    setup = Setup("decode", _case("magnitude", sm_scale=0.1 * 2.0**-exponent, **E4M3))
    setup.q *= 2.0**exponent
    setup.check(*_run(setup, Host()), **setup.tolerance("cuda"))


def test_the_workspace_may_lie_at_any_float() -> None:
    setup = Setup("decode", _case("offset", **MANY))
    setup.planner.workspace = torch.full((setup.planner.workspace.shape[0] + 1,), math.nan)[1:]
    assert setup.planner.workspace.data_ptr() % 16
    setup.check(*_run(setup, Host()), **setup.tolerance("cuda"))


def test_one_image_for_each_kind_of_cache_and_16_heads() -> None:
    assert {(dim, heads) for dim, heads, *_ in decode.SPECIALIZATIONS} == {(d, h) for d in (64, 128) for h in (8, 16)}
    assert len(decode.SPECIALIZATIONS) == 16


EXTREMES: dict[str, dict[str, int]] = {
    "kv_end": {"kv_begin": 100, "kv_end": 2**31 - 1, "position": 2**31 - 2},
    "kv_begin": {"kv_begin": 2**31 - 1, "kv_end": -(2**31)},
    "position": {"kv_end": 2**31 - 1, "position": -(2**31)},
    "page_start": {"kv_end": 2**31 - 1, "page_start": 2**31 - 1},
    "row": {"row": 2**31 - 1, "slot": 2**31 - 1},
    "negative row": {"row": -1, "slot": -1},
}


@pytest.mark.parametrize("name", EXTREMES)
def test_work_items_of_extremes_stay_in_bounds(name: str) -> None:
    setup = Setup("decode", _case("hostile", kv_lens=(70,), heads=(2, 1), window_left=60, planner={"num_ctas": 1}))
    for column, value in EXTREMES[name].items():
        setup.planner.state.work[:, WORK_FIELDS.index(column)] = value
    _run(setup, Host())


@pytest.mark.parametrize("field", DecodePlan._fields[1:])
@pytest.mark.parametrize("value", [-(2**31), -1, 0, 2**31 - 1])
def test_plans_of_extremes_stay_in_bounds(field: str, value: int) -> None:
    setup = Setup("decode", _case("hostile", kv_lens=(300,), heads=(2, 1), planner={"num_ctas": 2}))
    getattr(setup.planner.state, field).fill_(value)
    message = ""
    try:
        _run(setup, Host())
    except HostError as error:
        message = str(error)
    assert not message or "race between clusters" in message  # two CTAs of such a plan may write one row


class Planted(NamedTuple):
    """A fault, and what the machine or the oracle says of it."""

    fault: Fault
    message: str


MULTIPLY_VALUES = (
    "multiply_values(state, shared_address(shared.stages[stage].values) + part, probabilities, item,\n"
    "                      first + warp * kWarpTokens);"
)

FAULTS = {
    "no arrival": Planted(
        Fault("if (first + kTile < item.end) arrive_by_warp(shared_address(&shared.empty[stage]));", ""),
        "deadlock(.|\n)*wait at decode_producer.cuh",
    ),
    "a stage is released before its values are read": Planted(
        Fault(MULTIPLY_VALUES, f"arrive_by_warp(shared_address(&shared.empty[stage])); {MULTIPLY_VALUES}"),
        "race|more arrivals",
    ),
    "no wait for keys": Planted(
        Fault("wait(shared_address(&shared.k_full[stage]), parity);", ""), "race|uninitialised"
    ),
    "no wait for values": Planted(
        Fault("wait(shared_address(&shared.v_full[stage]), parity);", ""), "race|uninitialised"
    ),
    "no wait for a stage": Planted(
        Fault("wait(shared_address(&shared.empty[stage]), tile / kStages & 1 ^ 1);", ""), "race|more arrivals"
    ),
    "another number of bytes": Planted(
        Fault(
            "arrive_expect(k_full, kTileBytes), arrive_expect(v_full, kTileBytes);",
            "arrive_expect(k_full, kTileBytes), arrive_expect(v_full, 64);",
        ),
        "lacks 0 of 1 arrivals and -",
    ),
    "accumulators are stored over keys that are read": Planted(
        Fault("named_sync(kAllConsumers, kConsumerThreads);  // all have read the last tile\n", ""), "race"
    ),
    "accumulators are read before they are stored": Planted(
        Fault(
            "share(state, exchange, shared);\n      named_sync(kAllConsumers, kConsumerThreads);",
            "share(state, exchange, shared);",
        ),
        "race|uninitialised",
    ),
    "no proxy fence": Planted(Fault("fence_async_shared();  // TMA writes here next\n", ""), "no proxy fence"),
    "no wait for the initialisation of barriers": Planted(Fault("__syncthreads();", ""), "is no mbarrier"),
    "the plan is read before it is acquired": Planted(Fault("acquire_plan();", ""), "before the plan is acquired"),
    "no wait for earlier kernels": Planted(
        Fault("if (early) wait_for_earlier_kernels();", ""), "before griddepcontrol.wait"
    ),
    "values after the last token": Planted(Fault("v[j] &= mask[j / 2];", ""), "differs"),
    "another lane's alpha": Planted(
        Fault("state.output[i][b][j] *= alpha[b][j % 2];", "state.output[i][b][j] *= alpha[b][j / 2];"), "differs"
    ),
}


@pytest.mark.parametrize("name", ["", *FAULTS])
def test_faults_are_noticed(name: str) -> None:
    """And the same source without one is not."""
    faults = [one.fault for one in FAULTS.values()]
    host = Host(faults=faults, planted=1 + list(FAULTS).index(name) if name else 0)
    noticed = pytest.raises(AssertionError, match=FAULTS[name].message) if name else contextlib.nullcontext()
    setup = Setup("decode", _case("faults", kv_lens=(300, 200), planner={"num_ctas": 1}))
    with noticed:
        setup.check(*_run(setup, host, Host()), **setup.tolerance("cuda"))


COMBINE_FAULTS = {
    "the plan is read before it is acquired": Planted(Fault("acquire_plan();", ""), "before the plan is acquired"),
    "no wait for decode": Planted(
        Fault("wait_for_earlier_kernels();\n        launch_later_kernels();\n        waited = true;", "waited = true;"),
        "before griddepcontrol.wait",
    ),
    "no wait for copies": Planted(Fault("wait_for_copies<0>();", ""), "race|differs|in flight"),
    "splits after the last": Planted(
        Fault("of_split[i] = i < count ? copies.lse[i][lane] : -kInfinity;", "of_split[i] = copies.lse[i][lane];"),
        "differs",
    ),
    "rows that are not split": Planted(
        Fault("return {first, end, end > first || kv_len[row] <= 0};", "return {first, end, true};"), "differs"
    ),
}


@pytest.mark.parametrize("name", ["", *COMBINE_FAULTS])
def test_faults_of_the_combine_are_noticed(name: str) -> None:
    faults = [one.fault for one in COMBINE_FAULTS.values()]
    host = Host(faults=faults, planted=1 + list(COMBINE_FAULTS).index(name) if name else 0)
    noticed = pytest.raises(AssertionError, match=COMBINE_FAULTS[name].message) if name else contextlib.nullcontext()
    setup = Setup("decode", _case("faults", **MANY))
    with noticed:
        setup.check(*_run(setup, Host(), host), **setup.tolerance("cuda"))
