"""The CUDA decode kernel on the host (``helpers/cuda_host``): results, and faults that are noticed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")  # whose kernel combines splits in graphs

from helpers.cases import Case
from helpers.cuda_host import Fault, Host, HostError, needs_a_compiler
from helpers.cuda_host.faults import Planted, host_with, noticed
from helpers.harness import Setup

from attn_ops.kernels.cuda import decode
from attn_ops.plan.state import WORK_FIELDS, DecodePlan

pytestmark = [needs_a_compiler, pytest.mark.usefixtures("poisoned_memory")]

TENSORS = ("q", "k_cache", "v_cache", "plan", "workspace")


def _case(name: str, **fields: Any) -> Case:
    sizes: dict[str, Any] = {"kv_lens": (70, 0, 300, 2), "heads": (8, 2), "planner": {"num_ctas": 3}}
    return Case(name, **(sizes | {"dtype": torch.bfloat16, "head_dims": (128, 128)} | fields))


def _run(setup: Setup, host: Host, eager: bool = False) -> tuple[Tensor, Tensor]:
    """``eager``: the kernel combines splits, otherwise the definition of a merge does."""
    arguments = setup.arguments
    positional = [arguments.pop(name) for name in TENSORS]
    with host.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "is_eager", lambda q: eager)
        return decode.batch_decode(*positional, **arguments)


def _attend(case: Case, host: Host, eager: bool = False) -> tuple[Tensor, Tensor]:
    """Run the case on the host and compare it with the oracle."""
    setup = Setup("decode", case)
    out, lse = _run(setup, host, eager)
    setup.check(out, lse, **setup.tolerance("cuda"))
    assert not setup.planner.state.split_counters.any()
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
    _case("one head", heads=(1, 1), out_dtype=torch.float8_e5m2, kv_scale=(0.5, 3.0)),
    _case("64", **F16_64, page_size=16),
    _case("64, groups of 16", **F16_64 | MANY, heads=(16, 1), page_size=8, logits_soft_cap=30.0),
    _case("64, four KV heads", **F16_64 | MANY, heads=(36, 4), page_size=16, kv_layout="HND", sinks=1.0),
    _case("64, three KV heads", **F16_64, heads=(6, 3), page_size=32, window_left=90, storage="padded"),
    _case("row_max rises", kv_lens=(700,), planner={"num_ctas": 1}, sm_scale=3.0, page_size=32),
    _case("fixed split", **F16_64, kv_lens=(700, 0, 300, 2), page_size=16),
]
CASES[-1] = replace(CASES[-1], planner={"num_ctas": 3, "fixed_split_size": 8})
CASES += [
    _case("96", head_dims=(96, 96), page_size=16, storage="padded", padding=3, spare_batch=2),
    _case("80, splits, sinks", **MANY, head_dims=(80, 80), sinks=1.0, page_size=64, kv_layout="HND"),
    _case("112, groups of 7", head_dims=(112, 112), heads=(14, 2), window_left=90, out_dtype=torch.float32),
    _case("96, groups of 16", **MANY, head_dims=(96, 96), heads=(32, 2), dtype=torch.float16, logits_soft_cap=5.0),
    _case("80, one KV head", **MANY, head_dims=(80, 80), heads=(5, 1), out_dtype=torch.float8_e4m3fn),
]
FP8_CASES = [replace(case, name=f"{case.name}, FP8", **(E5M2 if i % 3 == 2 else E4M3)) for i, case in enumerate(CASES)]


ROPE: dict[str, Any] = {"pos_encoding": "ROPE_LLAMA"}
ROPE_CASES = [
    _case("RoPE", **ROPE),
    _case("RoPE, splits", **ROPE | MANY, rope=(4.0, 5e5), sinks=1.0, page_size=64, storage="fused", kv_layout="HND"),
    _case("RoPE, one long request", **ROPE, kv_lens=(1000,), heads=(6, 2), planner={"num_ctas": 16}, page_size=8),
    _case("RoPE, window, cap", **ROPE, window_left=33, logits_soft_cap=5.0, sinks=1.0, page_size=8),
    _case("RoPE, rows after the last", **ROPE, padding=3, spare_batch=2, storage="padded", dtype=torch.float16),
    _case("RoPE, no tokens", **ROPE, kv_lens=(0, 0), sinks=2.0),
    _case("RoPE, groups of 16", **ROPE | MANY, heads=(16, 1), page_size=16),
    _case("RoPE, one head", **ROPE, heads=(1, 1), out_dtype=torch.float32),
    _case("RoPE, 64", **ROPE | F16_64, page_size=16),
    _case("RoPE, 64, groups of 16", **ROPE | F16_64 | MANY, heads=(16, 1), page_size=8, logits_soft_cap=30.0),
    _case("RoPE, 64, four KV heads", **ROPE | F16_64 | MANY, heads=(36, 4), page_size=16, kv_layout="HND", sinks=1.0),
    _case("RoPE, 64, three KV heads", **ROPE | F16_64, heads=(6, 3), page_size=32, window_left=90),
]

RUNS = [
    *((case, 3) for case in CASES + FP8_CASES + ROPE_CASES),
    *((case, 132) for case in FP8_CASES if case.head_dims[0] != 64 and case.heads[1] % 2 == 0),
]
"""Cases, and SMs of the GPU: on 132 the CTAs of these plans, of one KV head each, run at once."""


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("seed", range(len(RUNS)), ids=[f"{case}, {sms} SMs" for case, sms in RUNS])
def test_matches_the_oracle(seed: int, eager: bool) -> None:
    case, sms = RUNS[seed]
    host = Host(sms, seed)
    _attend(case, host, eager)
    (launched,) = host.launched
    dim, num_kv_heads = case.head_dims[0], case.heads[1]
    fits = case.planner["num_ctas"] * num_kv_heads <= sms
    pairs = num_kv_heads % 2 == 0 and (dim == 64 or (case.kv_dtype is not None and not fits))
    macros = {f"HEAD_DIM={dim}"} if dim in (64, 128) else {"HEAD_DIM=128", "PADDED=1"}
    assert macros | {f"KV_HEADS={1 + pairs}"} <= set(launched.split())


@pytest.mark.parametrize("case", [CASES[1], CASES[13], FP8_CASES[8]], ids=str)
def test_the_order_of_threads_changes_no_bit(case: Case) -> None:
    first, *others = (_attend(case, Host(seed=seed), eager=True) for seed in range(3))
    for one in others:
        assert all(torch.equal(a, b) for a, b in zip(first, one, strict=True))


@pytest.mark.parametrize("exponent", [-100, -20, 20, 90])
def test_fp8_cache_with_a_bfloat16_query_of_any_magnitude(exponent: int) -> None:
    setup = Setup("decode", _case("magnitude", sm_scale=0.1 * 2.0**-exponent, **E4M3))
    setup.q *= 2.0**exponent
    setup.check(*_run(setup, Host()), **setup.tolerance("cuda"))


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_the_workspace_may_lie_at_any_float(eager: bool) -> None:
    setup = Setup("decode", _case("offset", **MANY))
    setup.planner.workspace = torch.full((setup.planner.workspace.shape[0] + 1,), math.nan)[1:]
    assert setup.planner.workspace.data_ptr() % 16
    setup.check(*_run(setup, Host(), eager), **setup.tolerance("cuda"))


EXTREMES: dict[str, dict[str, int]] = {
    "kv_end": {"kv_begin": 100, "kv_end": 2**31 - 1, "position": 2**31 - 2},
    "kv_begin": {"kv_begin": 2**31 - 1, "kv_end": -(2**31)},
    "position": {"kv_end": 2**31 - 1, "position": -(2**31)},
    "page_start": {"kv_end": 2**31 - 1, "page_start": 2**31 - 1},
    "row": {"row": 2**31 - 1, "slot": 2**31 - 1},
    "negative row": {"row": -1, "slot": -1},
}


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("name", EXTREMES)
def test_work_items_of_extremes_stay_in_bounds(name: str, eager: bool) -> None:
    setup = Setup("decode", _case("hostile", kv_lens=(70,), heads=(2, 1), window_left=60, planner={"num_ctas": 1}))
    for column, value in EXTREMES[name].items():
        setup.planner.state.work[:, WORK_FIELDS.index(column)] = value
    _run(setup, Host(), eager)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("field", DecodePlan._fields[1:])
@pytest.mark.parametrize("value", [-(2**31), -1, 0, 2**31 - 1])
def test_plans_of_extremes_stay_in_bounds(field: str, value: int, eager: bool) -> None:
    setup = Setup("decode", _case("hostile", kv_lens=(300,), heads=(2, 1), planner={"num_ctas": 2}))
    getattr(setup.planner.state, field).fill_(value)
    message = ""
    try:
        _run(setup, Host(), eager)
    except HostError as error:
        message = str(error)
    assert not message or "race between clusters" in message  # two CTAs of such a plan may write one row


QUERY_STORE = "query.store(shared_address(own.query), own.scales, queries.type, thread);"

FAULTS = {
    "no arrival": Planted(
        Fault("arrive_by_warp(shared_address(&shared.empty[stage]));", ""), "deadlock(.|\n)*wait at decode_producer.cuh"
    ),
    "a stage is released before its values are read": Planted(
        Fault(
            "if (hands_over && first + kTile >= item.end) hand_over();",
            "if (hands_over) hand_over(); if (thread == 0) arrive(shared_address(&shared.empty[stage]));",
        ),
        "race|more arrivals",
    ),
    "no wait for keys": Planted(
        Fault("wait(shared_address(&shared.k_full[stage]), parity);", ""), "race|uninitialised"
    ),
    "no wait for values": Planted(
        Fault("wait(shared_address(&shared.v_full[stage]), parity);", "", times=2), "race|uninitialised"
    ),
    "no wait for a stage": Planted(
        Fault("wait(shared_address(&shared.empty[stage]), parity);", "", times=2), "race|more arrivals"
    ),
    "another number of bytes": Planted(
        Fault(
            "arrive_expect(k_full, kTileBytes), arrive_expect(v_full, kTileBytes);",
            "arrive_expect(k_full, kTileBytes), arrive_expect(v_full, 64);",
            times=2,
        ),
        "lacks 0 of 1 arrivals and -",
    ),
    "no turns": Planted(Fault("wait_for_turn();", ""), "race|differs|uninitialised|arrivals"),
    "no turn after an item without tokens": Planted(
        Fault("if (item.end == 0 && hands_over) hand_over();", ""), "deadlock"
    ),
    "the query is read before it is stored": Planted(
        Fault("sync();  // the query is stored\n", ""), "race|uninitialised"
    ),
    "no proxy fence of the query": Planted(
        Fault(f"{QUERY_STORE}\n      fence_async_shared();", QUERY_STORE), "no proxy fence"
    ),
    "P is read before it is stored": Planted(Fault("sync();  // P is stored\n", ""), "race|uninitialised"),
    "no proxy fence of P": Planted(
        Fault("fence_async_shared();  // for P, and for the zeros of zero_values\n", ""), "no proxy fence"
    ),
    "one buffer of P": Planted(Fault("buffer ^= 1;", ""), "race"),
    "maxima are read before they are stored": Planted(
        Fault("sync();  // maxima are stored\n", ""), "race|uninitialised"
    ),
    "no rescaling": Planted(Fault("output[c][place(j, r)] *= alpha;", ""), "differs"),
    "no wait for the initialisation of barriers": Planted(Fault("__syncthreads();", ""), "is no mbarrier|visible"),
    "no wait for earlier kernels": Planted(
        Fault("if (early) wait_for_earlier_kernels();", ""), "before griddepcontrol.wait"
    ),
    "values after the last token": Planted(Fault("zero_values(item, first);", ""), "differs"),
    "sums are read before they are stored": Planted(Fault("sync();  // sums are stored\n", ""), "race|uninitialised"),
    "columns are read before they are stored": Planted(
        Fault("sync();  // columns are stored\n", ""), "race|uninitialised"
    ),
    "splits are counted before they are stored": Planted(
        Fault("sync();  // all threads have stored their part of the split\n", ""), "race"
    ),
    "no splits are combined": Planted(Fault("if (!combines) return;", "return;"), "differs"),
    "rows without tokens are not stored": Planted(Fault("if (combines) store_empty_rows(p, results);", ""), "differs"),
}

ROTATED_KEYS = "fence_async_shared();\n      arrive_by_warp(shared_address(&shared.k_full[stage]));"

ROPE_FAULTS = {
    "keys are rotated before they have arrived": Planted(
        Fault("wait(shared_address(&shared.k_loaded[stage]), parity);", ""), "race|uninitialised"
    ),
    "no proxy fence after keys": Planted(
        Fault(ROTATED_KEYS, ROTATED_KEYS.removeprefix("fence_async_shared();")), "no proxy fence"
    ),
    "rotated keys are not passed on": Planted(Fault(ROTATED_KEYS, "fence_async_shared();"), "deadlock"),
    "angles of the first row for all": Planted(Fault("angles.add(step);", ""), "differs"),
    "queries are not rotated": Planted(
        Fault("query.rotate(shared.turns, item.position, thread);", "query.rotate(shared.turns, 0, thread);"), "differs"
    ),
    "turns are read before they are stored": Planted(
        Fault("store_turns(rope_theta, rope_scale, shared);", ""), "race|uninitialised"
    ),
}


QUERY_LOAD = "x = load(q.q + 2 * (row * q.row + (kv_head() * q.group + head) * q.head) + column * 2);"

PADDED_FAULTS = {
    "columns of both blocks are in both blocks of the query": Planted(
        Fault("return stored < 64 || column >= 64 ? column : -1;", "return column;"), "differs|race"
    ),
    "other columns of the query from the second block on": Planted(
        Fault(QUERY_LOAD, QUERY_LOAD.replace("column * 2", "(column - column / 64 * 8) * 2")), "differs"
    ),
    "columns without a place are stored": Planted(
        Fault("if (PADDED && column < 0) continue;", ""), "outside|race|differs"
    ),
}


@pytest.mark.parametrize("name", ["", *PADDED_FAULTS])
@pytest.mark.parametrize("cache", [{}, E4M3], ids=["16 bits", "FP8"])
def test_faults_of_padded_heads_are_noticed(cache: dict[str, Any], name: str) -> None:
    """An FP8 cache has one block of columns, and the fault of the second one is none there."""
    setup = Setup("decode", _case("80", head_dims=(80, 80), kv_lens=(300, 200), planner={"num_ctas": 3}, **cache))
    planted = name if not (cache and "both blocks" in name) else ""
    with noticed(PADDED_FAULTS, planted):
        setup.check(*_run(setup, host_with(PADDED_FAULTS, name, sms=3), eager=True), **setup.tolerance("cuda"))


@pytest.mark.parametrize("name", ["", *ROPE_FAULTS])
def test_faults_of_rope_are_noticed(name: str) -> None:
    setup = Setup("decode", _case("RoPE", **ROPE, kv_lens=(300, 0, 400, 200), planner={"num_ctas": 1}))
    with noticed(ROPE_FAULTS, name):
        setup.check(*_run(setup, host_with(ROPE_FAULTS, name, sms=3), eager=True), **setup.tolerance("cuda"))


@pytest.mark.parametrize("name", ["", *FAULTS])
def test_faults_are_noticed(name: str) -> None:
    """And the same source without one is not."""
    ctas = 3 if "splits" in name else 1
    case = _case("faults", kv_lens=(300, 0, 400, 200), sm_scale=2.0, planner={"num_ctas": ctas})
    setup = Setup("decode", case)
    if name == "no turn after an item without tokens":
        setup.planner.state.work[1, WORK_FIELDS.index("kv_end")] = 0
    with noticed(FAULTS, name):
        setup.check(*_run(setup, host_with(FAULTS, name, sms=3), eager=True), **setup.tolerance("cuda"))
