"""CUDA kernels run on the host (``helpers/cuda_host``): results against the oracle, and faults that are noticed."""

from __future__ import annotations

import contextlib
import importlib
import math
import re
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import attn_ops

pytest.importorskip("triton")  # whose call of the prefill kernels the CUDA kernel shares

from attn_ops.kernels.cuda import mla, prefill
from attn_ops.kernels.triton import prefill_call
from helpers import mla_cases, oracle
from helpers.cases import Case
from helpers.cuda_host import Fault, Host, HostError, needs_a_compiler
from helpers.harness import Setup
from helpers.hostile_plans import random_plan

from attn_ops.ops import unsupported

merges = importlib.import_module("attn_ops.kernels.cuda.merge_states")

pytestmark = [needs_a_compiler, pytest.mark.usefixtures("poisoned_memory")]

OPS = {"prefill": prefill.batch_prefill, "ragged": prefill.ragged_prefill}


def _case(name: str, **fields: Any) -> Case:
    sizes: dict[str, Any] = {"kv_lens": (70, 0, 150, 2), "qo_lens": (40, 0, 33, 2), "heads": (8, 2)}
    return Case(name, **(sizes | {"dtype": torch.bfloat16, "head_dims": (128, 128)} | fields))


SPLIT: dict[str, Any] = {"kv_lens": (700, 0, 300, 2), "planner": {"num_ctas": 12, "tile_rows": 8}}
F16_64: dict[str, Any] = {"dtype": torch.float16, "head_dims": (64, 64)}
LONGER_64 = F16_64 | {"kv_lens": (470, 0, 210, 2)}
F16_256: dict[str, Any] = {"dtype": torch.float16, "head_dims": (256, 256), "heads": (4, 2)}

PREFILL = [
    ("prefill", _case("causal", causal=True)),
    ("prefill", _case("rows after the last", causal=True, padding=3, spare_batch=2, storage="padded", page_size=8)),
    ("prefill", _case("window, cap, sinks", window_left=33, logits_soft_cap=5.0, sinks=1.0, page_size=8)),
    ("prefill", _case("both windows", window_left=20, window_right=9, heads=(7, 1), out_dtype=torch.float32)),
    ("prefill", _case("splits", **SPLIT, sinks=1.0, page_size=64, storage="fused", kv_layout="HND")),
    ("prefill", _case("splits, window", **SPLIT, causal=True, window_left=200, heads=(10, 2), page_size=24)),
    ("prefill", _case("FP8", out_dtype=torch.float8_e4m3fn, heads=(5, 1), planner={"tile_rows": 64})),
    ("prefill", _case("256", **F16_256, causal=True, logits_soft_cap=5.0, page_size=16)),
    ("prefill", _case("256, splits", **F16_256 | SPLIT, sinks=1.0, window_left=300)),
    ("ragged", _case("ragged", **F16_64, causal=True, storage="padded", planner={"tile_rows": 32})),
    ("ragged", _case("ragged, windows", **F16_64, window_left=40, window_right=3, heads=(6, 2), kv_layout="HND")),
    ("ragged", _case("ragged, E5M2", **F16_64 | SPLIT, causal=True, out_dtype=torch.float8_e5m2)),
    ("prefill", _case("64, pages, cap", **LONGER_64, causal=True, logits_soft_cap=5.0, page_size=8)),
    ("prefill", _case("64, window", **LONGER_64, window_left=230, sinks=1.0, page_size=48)),
    ("ragged", _case("192/128", head_dims=(192, 128), heads=(4, 1), causal=True, sinks=1.0, logits_soft_cap=30.0)),
]

FP8_KV: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn, "kv_scale": (0.5, 3.0)}
FP8_E5M2: dict[str, Any] = {"kv_dtype": torch.float8_e5m2, "kv_scale": (2.0, 0.25)}

FP8_PREFILL = [(kind, replace(case, **(FP8_E5M2 if i % 3 == 2 else FP8_KV))) for i, (kind, case) in enumerate(PREFILL)]
"""The same cases with FP8 keys and values."""


def _attend(kind: str, case: Case, host: Host) -> tuple[Tensor, Tensor]:
    """Run the case on the host and compare it with the oracle."""
    setup = Setup(kind, case)
    with host.installed():
        out, lse = OPS[kind](**setup.arguments)
    setup.check(out, lse, **setup.tolerance("cuda"))
    return out, lse


@pytest.mark.parametrize("seed", range(len(PREFILL)), ids=[case.name for _, case in PREFILL])
def test_prefill(seed: int) -> None:
    host = Host(sms=3, seed=seed)
    _attend(*PREFILL[seed], host)
    assert len(host.launched) == 1


@pytest.mark.parametrize("seed", range(len(FP8_PREFILL)), ids=[case.name for _, case in FP8_PREFILL])
def test_fp8_prefill(seed: int) -> None:
    host = Host(sms=3, seed=seed)
    _attend(*FP8_PREFILL[seed], host)
    (name,) = host.launched
    assert "KV_FP8=1" in name


@pytest.mark.parametrize("kv_scale", [None, (0.0, 1.0), (-2.0, -0.5), (2.0**-120, 1.0)], ids=str)
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_scales_of_fp8_are_any_numbers(kv_scale: tuple[float, float] | None, cap: float) -> None:
    fields = {"kv_dtype": torch.float8_e4m3fn, "kv_scale": kv_scale, "logits_soft_cap": cap, "causal": True}
    _attend("prefill", _case("scales", **fields, window_left=50), Host())


@pytest.mark.parametrize("sm_scale", [-0.5, -0.01, 2.0**-20, 2.0**18], ids=str)
def test_capped_logits_have_any_scale(sm_scale: float) -> None:
    """Scales of both forms of the tanh, and of neither sign alone."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 1, 64, generator=g).to(torch.float16) for n in (20, 150, 150))
    with Host().installed():
        options: dict[str, Any] = {"return_lse": True, "out_dtype": torch.float32}
        out, lse = prefill.single_prefill(q, k, v, sm_scale=sm_scale, logits_soft_cap=5.0, **options)
    logits = 5 * torch.tanh(q[:, 0].double() @ k[:, 0].double().T * sm_scale / 5)
    expected = logits.softmax(1) @ v[:, 0].double()
    torch.testing.assert_close(out[:, 0].double(), expected, rtol=2e-3, atol=2e-3)  # weights are rounded to float16
    torch.testing.assert_close(lse[:, 0].double(), logits.logsumexp(1) / math.log(2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["prefill", "ragged"])
def test_fp8_tokens_before_the_window_may_be_nan(kind: str) -> None:
    case = _case("hidden", kv_lens=(300,), qo_lens=(40,), causal=True, window_left=33, **FP8_KV)
    setup = Setup(kind, case)
    setup.fill_with_nan(torch.arange(300 - 40 - 33))
    with Host().installed():
        out, lse = OPS[kind](**setup.arguments)
    setup.check(out, lse, **setup.tolerance("cuda"))


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_fp8_number_is_converted_exactly(dtype: torch.dtype, fp8: torch.dtype) -> None:
    """One key, of which every query has one column: its logit is a number of the key, and its output is the value.

    Sizes of heads whose kernels other tests here compile.
    """
    dim = {torch.float16: 64, torch.bfloat16: 128}[dtype]
    values = torch.arange(256, dtype=torch.uint8).view(fp8).view(1, -1, dim)
    keys = torch.where(values.float().isfinite(), values.float(), 0.0).to(fp8)
    q = torch.eye(dim, dtype=dtype).unsqueeze(1).repeat(1, values.shape[1], 1)
    with Host().installed():
        options: dict[str, Any] = {"sm_scale": 1.0, "return_lse": True, "out_dtype": torch.float32}
        out, lse = prefill.single_prefill(q, keys, values, **options)
    assert torch.equal(out.nan_to_num(-1e9), values.float().nan_to_num(-1e9).expand(dim, -1, -1))
    assert out.isnan().sum() == dim * values.float().isnan().sum() > 0
    torch.testing.assert_close(lse.T, keys[0].float() / math.log(2), rtol=1e-6, atol=0)


def test_the_order_of_threads_changes_no_bit() -> None:
    case = _case("order", **F16_64, window_left=40, sinks=1.0, planner={"tile_rows": 8})
    first, *others = (_attend("ragged", case, Host(sms=2, seed=seed)) for seed in range(4))
    for one in others:
        assert all(torch.equal(a, b) for a, b in zip(first, one, strict=True))


@pytest.mark.parametrize("rows", [0, 1, 70, 300])
def test_single_prefill(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 64, generator=generator).half() for n, h in ((rows, 4), (210, 2), (210, 2)))
    with Host(sms=2).installed():
        out, lse = prefill.single_prefill(q, k, v, causal=True, return_lse=True)
    oracle.Expected.of([(q, k, v)], causal=True).check(out, lse)


def test_the_counter_of_units_is_0_again_and_one_that_was_not_heals() -> None:
    """A launch with another number may leave units out, but ends, and the next one is right."""
    setup = Setup("ragged", _case("counter", **F16_64, causal=True, planner={"tile_rows": 16}))
    plan = setup.arguments["plan"]
    with Host(sms=2).installed():
        for number in (0, 3, 11, -1, -(2**31)):
            plan.queue[0] = number
            for _ in range(2):
                out, lse = prefill.ragged_prefill(**setup.arguments)
            setup.check(out, lse, **setup.tolerance("cuda"))
            assert plan.queue[0] == 0 or number < 0


@pytest.mark.parametrize("seed", range(6))
def test_plans_of_random_extremes_stay_within_the_tensors(seed: int) -> None:
    """A result means nothing then: several work items may have the same rows."""
    kind = ("prefill", "ragged")[seed % 2]
    setup = Setup(kind, _case("extremes", **SPLIT | F16_64, causal=seed % 3 == 0, padding=2))
    arguments = random_plan(setup.arguments, seed)
    with Host(sms=2, seed=seed).installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_call, "combine_split_tiles", lambda *_, **__: None)
        try:
            OPS[kind](**arguments)
        except HostError as error:
            if not re.match(r"race(.|\n)* of (out|lse|partial)", str(error)):
                raise


MLA = [
    case
    for case in mla_cases.CASES
    if case.dims == (512, 64) and case.dtype == torch.bfloat16 and case.page_size % mla.TILE == 0
]


def _mla_op(*tensors: Any, backend: str, kv_scale: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    return mla.batch_mla(*tensors, **options)


@pytest.mark.parametrize(("seed", "case"), list(enumerate(MLA)), ids=str)
def test_mla(seed: int, case: mla_cases.Mla) -> None:
    host = Host(sms=4, seed=seed)
    with host.installed():
        mla_cases.check(case, op=_mla_op)
    assert len(host.launched) == 1


def _swapped(name: str, heads: int, **options: Any) -> mla_cases.Mla:
    """A case of few packed rows, by default of decode with splits."""
    sizes: dict[str, Any] = {"qo_lens": (1, 1, 0, 1), "kv_lens": (70, 300, 0, 1000), "dims": (512, 64)}
    fixed: dict[str, Any] = {"dtype": torch.bfloat16, "page_size": 64, "sm_scale": None, "planner": {"num_ctas": 12}}
    return mla_cases.Mla(name, heads=heads, **(sizes | fixed | options))


NO_KEYS: dict[str, Any] = {"qo_lens": (1, 1, 1), "kv_lens": (64, 0, 129), "planner": {"num_ctas": 0}}
ROWS: dict[str, Any] = {"qo_lens": (3, 1, 6), "kv_lens": (200, 2, 310), "causal": True}

SWAPPED = [
    *(_swapped(f"{heads} heads", heads) for heads in (1, 5, 12, 16)),
    _swapped("no keys", 16, **NO_KEYS, dtype=torch.float16),
    _swapped("rows of 4", 4, **ROWS, packed=True, page_size=128, planner={"tile_rows": 4}),
    _swapped("rows of 5", 5, **ROWS, page_size=192, planner={"tile_rows": 3, "num_ctas": 6}),
    _swapped("rows of 7", 7, **ROWS, planner={"tile_rows": 2, "fixed_split_size": 1}),
    _swapped("float32", 16, out_dtype=torch.float32),
    _swapped("e4m3", 8, out_dtype=torch.float8_e4m3fn),
    _swapped("e5m2", 16, out_dtype=torch.float8_e5m2, sm_scale=0.02),
    _swapped("float16 of bfloat16", 3, out_dtype=torch.float16),
]


@pytest.mark.parametrize(("seed", "case"), list(enumerate(SWAPPED)), ids=str)
def test_mla_of_few_packed_rows(seed: int, case: mla_cases.Mla) -> None:
    host = Host(sms=4, seed=seed)
    with host.installed():
        mla_cases.check(case, op=_mla_op)
    assert [name.split()[0] for name in host.launched] == ["mla_swap_ab"]


@pytest.mark.parametrize("case", [case for case in SWAPPED if case.name in ("16 heads", "rows of 5")], ids=str)
def test_mla_without_swapped_operands(case: mla_cases.Mla, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "SWAPPED_PACKED_ROWS", 0)
    host = Host(sms=4)
    with host.installed():
        mla_cases.check(case, op=_mla_op)
    assert [name.split()[0] for name in host.launched] == ["mla"]


SHORT: dict[str, Any] = {"qo_lens": (1, 1, 1, 0, 1), "kv_lens": (64, 0, 129, 5, 700), "planner": {"num_ctas": 2}}

DIVIDED = [
    _swapped("16 heads", 16),
    _swapped("16 heads, short", 16, **SHORT, dtype=torch.float16),
    _swapped("rows of 5", 5, **ROWS, page_size=192, planner={"tile_rows": 3, "num_ctas": 6}, out_dtype=torch.float32),
    _swapped("24 heads", 24, out_dtype=torch.float8_e4m3fn),
    _swapped("64 heads, short", 64, **SHORT),
    _swapped("rows of 16", 16, **ROWS, packed=True, page_size=128, planner={"tile_rows": 4, "num_ctas": 2}),
    _swapped("rows of 150", 150, **ROWS, planner={"num_ctas": 4, "tile_rows": 1}, out_dtype=torch.float32),
]
"""Cases of plans that split few query tiles."""


@pytest.mark.parametrize(("seed", "case"), list(enumerate(DIVIDED)), ids=str)
def test_mla_of_clusters_that_divide_kv(seed: int, case: mla_cases.Mla, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that runs two clusters: they have several units."""
    monkeypatch.setattr(mla, "cluster_splits_of", lambda sms, plan: 2)
    host = Host(sms=4, seed=seed)
    with host.installed():
        mla_cases.check(case, op=_mla_op)
    (name,) = host.launched
    assert "SPLITS=2" in name


@pytest.mark.parametrize(("sms", "splits"), [(132, 2), (12, 1)])
def test_the_plan_and_the_gpu_decide_how_many_ctas_divide_kv(sms: int, splits: int) -> None:
    host = Host(sms=sms)
    with host.installed():
        mla_cases.check(_swapped("plan", 16), op=_mla_op)
    (name,) = host.launched
    assert f"SPLITS={splits}" in name


def test_every_size_of_units_runs() -> None:
    """Among the cases above, but for those of few packed rows on clusters."""
    sizes = {mla.units_of(case.heads * case.planner.get("tile_rows", 1))[:2] for case in (*MLA, *SWAPPED)}
    assert sizes == {one[:2] for one in unsupported.CUDA_MLA_KERNELS}


def test_swapped_operands_change_the_result_by_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    outs: list[tuple[Tensor, Tensor]] = []

    def keep(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
        outs.append(_mla_op(*tensors, **options))
        return outs[-1]

    with Host(sms=4).installed():
        for most in (0, 16):
            monkeypatch.setattr(mla, "SWAPPED_PACKED_ROWS", most)
            mla_cases.check(_swapped("both", 16, out_dtype=torch.float32), op=keep)
    (out, lse), (swapped, swapped_lse) = outs
    torch.testing.assert_close(swapped, out, rtol=2e-2, atol=4e-3)
    torch.testing.assert_close(swapped_lse, lse, rtol=1e-5, atol=1e-5)


def test_a_partial_result_may_lie_at_any_multiple_of_4_bytes() -> None:
    def op(q: Any, r: Any, c: Any, k: Any, plan: Any, workspace: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return _mla_op(q, r, c, k, plan, torch.empty(workspace.numel() + 1)[1:], **options)

    for heads in (16, 64):
        with Host(sms=4).installed():
            mla_cases.check(_swapped("shifted", heads), op=op)


@pytest.mark.parametrize("splits", [1, 2])
def test_columns_of_a_partial_result_may_differ_by_many_orders_of_magnitude(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partial results have 11 bits and a scale for 128 columns. Of an average of tokens, each column keeps its own."""
    monkeypatch.setattr(mla, "cluster_splits_of", lambda sms, plan: splits)
    generator = torch.Generator().manual_seed(splits)
    magnitudes = 2.0 ** torch.randint(-100, 100, (4,), generator=generator).repeat_interleave(128)
    magnitudes *= 2.0 ** torch.randint(-12, 13, (512,), generator=generator)
    latent = (torch.randn(10, 64, 512, generator=generator) * magnitudes).bfloat16()
    sizes = {"page_size": 64, "num_qo_heads": 64, "num_kv_heads": 1, "head_dim": 576, "head_dim_vo": 512}
    planner = attn_ops.PrefillPlanner(1, 1, 10, num_ctas=4, **sizes)
    plan = planner.plan(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0, 10], range(10), [64])))
    assert plan.split_tiles[0, 3] > 2
    q = torch.zeros(1, 64, 576, dtype=torch.bfloat16)
    with Host(sms=4).installed():
        rotary = torch.zeros(10, 64, 64, dtype=torch.bfloat16)
        out, _ = mla.batch_mla(*q.split((512, 64), -1), latent, rotary, list(plan), planner.workspace)
    expected = latent.double().flatten(0, 1).mean(0)
    assert ((out.double() - expected).abs() <= 2.0**-8 * expected.abs() + 2.0**-12 * magnitudes).all()


def _states(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of which some have no keys, and NaN in place of an output."""
    generator = torch.Generator().manual_seed(len(shape))
    v, s = (torch.randn(one, generator=generator) for one in (shape, shape[:-1]))
    empty = torch.rand(s.shape, generator=generator) < 0.3
    v[empty], s[empty] = math.nan, -math.inf
    return v.to(dtype), s


def _check_merge(out: Tensor, lse: Tensor, v: Tensor, s: Tensor) -> None:
    expected, expected_lse = oracle.merge(v, s)
    spread = v.double().abs().nan_to_num(0).amax(1)
    eps = max(torch.finfo(out.dtype).eps, 2**-20)
    assert ((out.double() - expected).abs() <= eps * spread).all()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("states", [1, 3, 9, 23, 64])
@pytest.mark.parametrize("dtype", merges.DTYPES, ids=str)
def test_merge_states(dtype: torch.dtype, states: int) -> None:
    v, s = _states(7, states, 3, 48, dtype=dtype)
    with Host(seed=states).installed():
        _check_merge(*merges.merge_states(v, s), v, s)


@pytest.mark.parametrize("dtype", merges.DTYPES, ids=str)
def test_merge_state(dtype: torch.dtype) -> None:
    v, s = _states(9, 2, 5, 64, dtype=dtype)
    (v_a, v_b), (s_a, s_b) = v.unbind(1), s.unbind(1)
    merged = torch.arange(9) % 3 != 1
    with Host(seed=1).installed():
        _check_merge(*merges.merge_state(v_a, s_a, v_b, s_b), v, s)
        out, lse = v_a.clone(), s_a.clone()
        merges.merge_state_in_place(out, lse, v_b, s_b, merged)
    _check_merge(out[merged], lse[merged], v[merged], s[merged])
    assert torch.equal(out[~merged].nan_to_num(7), v_a[~merged].nan_to_num(7))
    assert torch.equal(lse[~merged], s_a[~merged])


def _within(t: Tensor, *more: int) -> Tensor:
    """``t`` in a tensor with so many more elements in each dimension, which are NaN."""
    outer = torch.full([n + m for n, m in zip(t.shape, more, strict=True)], math.nan, dtype=t.dtype)
    inner = outer[tuple(slice(n) for n in t.shape)]
    return inner.copy_(t)


@pytest.mark.parametrize("states", [3, 23])
def test_merges_of_any_strides(states: int) -> None:
    v, s = _states(7, states, 3, 48, dtype=torch.float16)
    v, s = _within(v, 1, 2, 1, 16), _within(s, 2, 1, 5)
    with Host(seed=states).installed():
        _check_merge(*merges.merge_states(v, s), v, s)
        v, s = v[:, :2].contiguous(), s[:, :2].contiguous()
        (v_a, v_b), (s_a, s_b) = v.unbind(1), s.unbind(1)
        v_a, s_a = _within(v_a, 2, 1, 8), _within(s_a, 1, 2)
        _check_merge(*merges.merge_state(v_a, s_a, v_b, s_b), v, s)
        _check_merge(*merges.merge_state(v_b, s_b, v_a, s_a), v, s)
        out, lse = _within(v_a, 1, 1, 16), _within(s_a, 1, 1)
        merges.merge_state_in_place(out, lse, v_b, s_b)
    _check_merge(out, lse, v, s)


def test_parts_of_states_leave_each_row_its_threads() -> None:
    for dim in (8, 48, 128, 1024):
        for states in (1, 8, 64, 500):
            v = torch.empty(3, states, 2, dim, dtype=torch.float16, device="meta")
            vectors, parts = dim // 8, merges._parts(v)
            assert 1 <= parts <= max(1, states // merges.PART_STATES)
            assert parts * vectors <= merges.THREADS


class Planted(NamedTuple):
    """A fault, what the machine says of it, and whether the case is one of an odd group."""

    fault: Fault
    message: str
    odd: bool = False


RELEASE = "arrive(shared_address(&shared.unit_empty));"

PREFILL_FAULTS = {
    "no arrival": Planted(
        Fault("arrive_by_warp(k_empty + number % kKeyStages * 8);", "", 2),
        "deadlock(.|\n)*wait at prefill_producer.cuh",
    ),
    "another parity": Planted(
        Fault(
            "wait(empty + tile % kStages * 8, tile / kStages & 1 ^ 1);",
            "wait(empty + tile % kStages * 8, tile / kStages & 1);",
        ),
        "deadlock",
    ),
    "no wait for a stage": Planted(
        Fault("wait(shared_address(&shared.q_empty[buffer]), n / kQueries & 1 ^ 1);", ""), "race|more arrivals"
    ),
    "the next unit is written before this one is read": Planted(
        Fault("wait(shared_address(&shared.unit_empty), n & 1 ^ 1);", ""), "race|more arrivals|deadlock"
    ),
    "no wait for a unit": Planted(Fault("wait(shared_address(&shared.unit_full), n & 1);", ""), "race|uninitialised"),
    "producer K asks for no unit": Planted(
        Fault("if (!released && unit.end - first <= kTilesAhead * kTile) release_unit(shared), released = true;", ""),
        "deadlock",
    ),
    "producer V releases no unit": Planted(Fault("if (released) release_unit(shared);", ""), "deadlock"),
    "producer Q releases a unit for producer V": Planted(
        Fault(
            f"if (unit.count <= 0) return;\n    {RELEASE}",
            f"if (unit.count <= 0) return; {RELEASE} {RELEASE}",
        ),
        "race|more arrivals",
    ),
    "another number of bytes": Planted(
        Fault("arrive_expect(full, blocks * kQueryBytes);", "arrive_expect(full, 64);"), "lacks 0 of 1 arrivals and -"
    ),
    "no wait for values": Planted(
        Fault("wait(v_full.of(number), v_full.parity(number));\n      mark(kWaitValues);", "mark(kWaitValues);"),
        r"race: (.|\n)*TMA(.|\n)*wgmma",
    ),
    "a stage is released before its last product": Planted(
        Fault(
            "wgmma_wait<0>();\n          "
            "finish_pv(output, partial, probabilities, values_of(previous), alpha_before);\n          "
            "arrive_by_warp(v_empty + previous % kPvStages * 8);",
            "arrive_by_warp(v_empty + previous % kPvStages * 8);\n          wgmma_wait<0>();",
        ),
        r"race: (.|\n)*read by wgmma(.|\n)*TMA",
    ),
    "logits are used in flight": Planted(
        Fault("wgmma_wait<1>();\n        fence_registers(logits);", "fence_registers(logits);"),
        "before wgmma.wait_group",
    ),
    "the output is used in flight, beside the next unit's first logits": Planted(
        Fault(
            "wgmma_wait<1>();\n          finish_pv(output, partial, probabilities, values_of(number), alpha_before);",
            "finish_pv(output, partial, probabilities, values_of(number), alpha_before);",
        ),
        "before wgmma.wait_group",
    ),
    "the next unit's first logits are used in flight": Planted(
        Fault("wgmma_wait<0>();\n          fence_registers(logits);", "fence_registers(logits);"),
        "before wgmma.wait_group",
    ),
    "no wait for the next unit": Planted(
        Fault("wait_for_queries(n + 1);", ""), "race|uninitialised|nothing has written"
    ),
    "no fence of registers": Planted(
        Fault(
            "wgmma_fence();\n    issue_qk(logits, k_major(queries(n), kGroupBytes, kRowBytes), "
            "keys + tile % kKeyStages * (kKeyBytes / 16));",
            "issue_qk(logits, k_major(queries(n), kGroupBytes, kRowBytes), "
            "keys + tile % kKeyStages * (kKeyBytes / 16));",
        ),
        "without wgmma.fence",
    ),
    "no proxy fence after zeros": Planted(
        Fault("fence_async_shared();\n        __syncwarp();", "__syncwarp();"), "no proxy fence"
    ),
    "no proxy fence after copies": Planted(
        Fault("wait_for_chunks();\n  fence_async_shared();", "wait_for_chunks();"), "no proxy fence", odd=True
    ),
    "arrival before copies": Planted(
        Fault(
            "if (exists) copy_queries(p, q, unit, to, thread);\n    arrive(full);",
            "arrive(full);\n    if (exists) copy_queries(p, q, unit, to, thread);",
        ),
        "race|uninitialised",
        odd=True,
    ),
    "no barrier between stores and loads": Planted(
        Fault("sync();  // the state is stored\n", ""),
        "race|uninitialised",
        odd=True,
    ),
    "lane 0 arrives for lanes that still read": Planted(
        Fault(
            "__syncwarp();\n  if (threadIdx.x % 32 == 0) arrive(barrier);",
            "if (threadIdx.x % 32 == 0) arrive(barrier);",
        ),
        "race",
        odd=True,
    ),
    "rows after the last": Planted(
        Fault("if (exists[1]) to_lse[to_row[1]] = lse[1];", "to_lse[to_row[1]] = lse[1];"),
        "outside of all tensors(.|\n)* of lse|race between clusters: (.|\n)* of lse",
    ),
    "no wait for earlier kernels": Planted(Fault("wait_for_earlier_kernels();", ""), "before griddepcontrol.wait"),
}

RELEASE = "if (lane == 0) arrive(tiles.fp8_empty + part * 8);"
CONVERTED = f"fence_async_shared();\n      __syncwarp();\n      {RELEASE}"

FP8_FAULTS = {
    "no proxy fence after conversions": Planted(
        Fault(CONVERTED, CONVERTED.removeprefix("fence_async_shared();\n      ")), "no proxy fence"
    ),
    "lane 0 arrives for lanes that still convert": Planted(
        Fault(CONVERTED, CONVERTED.replace("__syncwarp();\n      ", "")), "race|no proxy fence"
    ),
    "a tile is converted before it has arrived": Planted(
        Fault("wait(tiles.fp8_full + part * 8, tile & 1);", ""), "race|uninitialised"
    ),
    "a tile is loaded over one that is converted": Planted(
        Fault("tiles.wait_for_empty(tile);", ""), "race|more arrivals"
    ),
    "no wait for a stage": Planted(
        Fault("if (part == 0) wait(tiles.empty + tile % STAGES * 8, tile / STAGES & 1 ^ 1);", ""), "race|more arrivals"
    ),
    "the end is passed on while tiles are converted": Planted(
        Fault("for (int i = 0; i < kFp8Stages; ++i) tiles.wait_for_empty(tile + i);", ""), "race|more arrivals"
    ),
    "the end is not passed on": Planted(Fault("arrive(tiles.full);", ""), "deadlock"),
    "a converted tile is not passed on": Planted(
        Fault("if (lane == 0) arrive(tiles.full + tile % (2 * STAGES) * 8);", ""), "deadlock"
    ),
}

STAGED = "fence_async_shared();\n  __syncwarp();"
BULK_STORE = """if (lane % 4 == 0 && exists[r])
      store_bulk(to.values + (row[r] * kLatent + first_column) / 2, staged + (lane / 4 + 8 * r) * kStagedRowBytes,
                 kStored * 2)"""
STORE = "store(SELF * kHalf + p.split * kStored, merge.memory, stored, rows.row_max, sums, p, arguments.results, unit)"
FENCE = "if (SPLITS > 1) fence_async_shared();  // before a query is loaded"

MLA_FAULTS = {
    "the other CTA's consumers are not waited for": Planted(
        Fault("arrive_in_cluster(address_in(barrier, lane));", "arrive_in_cluster(address_in(barrier, 0));"),
        "race|more arrivals|deadlock",
    ),
    "P is stored over keys that are read": Planted(
        Fault(
            "named_sync(kBarrier, kConsumerThreads);\n    store_probabilities(own_stage + kRotary * kBlockBytes, "
            "probabilities);",
            "store_probabilities(own_stage + kRotary * kBlockBytes, probabilities);",
        ),
        r"race: (.|\n)*read by wgmma",
    ),
    "no proxy fence after P": Planted(
        Fault(
            "store_matrices(to + row * kRowBytes + ((2 * i + lane / 16) ^ (row & 7)) * 16, p[i]);\n  "
            "fence_async_shared();",
            "store_matrices(to + row * kRowBytes + ((2 * i + lane / 16) ^ (row & 7)) * 16, p[i]);",
        ),
        "no proxy fence",
    ),
    "a CTA ends before the others' arrivals": Planted(
        Fault("for (int half = 0; half < 2; ++half) wait(empty + ((tile & 1) * 2 + half) * 8, tile >> 1 & 1 ^ 1);", ""),
        "a CTA of the cluster may end before",
    ),
    "the plan is read before it is acquired": Planted(Fault("acquire_plan();", ""), "before the plan is acquired"),
    "mbarriers are used before they are initialised": Planted(
        Fault("cluster_wait_for_init();\n  wait_for_earlier_kernels();", "wait_for_earlier_kernels();"),
        "is no mbarrier",
    ),
    "no proxy fence before a bulk store": Planted(Fault(STAGED, "__syncwarp();"), "no proxy fence(.|\n)*bulk store"),
    "a bulk store does not wait for the other lanes": Planted(Fault(STAGED, "fence_async_shared();"), "bulk store"),
    "a query is loaded over what a bulk store reads": Planted(
        Fault("wait_for_bulk_reads();", ""), "race: (.|\n)*bulk store"
    ),
    "another lane waits for the bulk store": Planted(
        Fault("wait_for_bulk_reads();", "if (lane == 1) wait_for_bulk_reads();"), "race: (.|\n)*bulk store of thread"
    ),
    "a partial result is stored twice": Planted(
        Fault(f"{BULK_STORE};", f"{BULK_STORE}; {BULK_STORE};"), "race: (.|\n)* of partial(.|\n)*bulk store"
    ),
    "a query is loaded over a partial result": Planted(
        Fault(
            f"{STORE};\n      {FENCE}\n      if (reused) arrive_by_warp(q_empty);",
            f"if (reused) arrive_by_warp(q_empty);\n      {STORE};",
        ),
        "race",
    ),
}

MERGE_FAULTS = {
    "columns are sent before the partner has room": Planted(Fault("wait(ready, parity);", ""), "race"),
    "columns are read before they have come": Planted(
        Fault("wait(full, parity);", ""), "race|uninitialised|more arrivals"
    ),
    "a warp waits for its own readiness": Planted(
        Fault("arrive_in_cluster(address_in(ready, partner));", "arrive(ready);"), "race|more arrivals|deadlock"
    ),
    "no proxy fence before the next query": Planted(Fault(FENCE + "\n", ""), "no proxy fence"),
    "a query is loaded over what has come": Planted(
        Fault("if (!reused) arrive_by_warp(q_empty);", "arrive_by_warp(q_empty);"), "race|more arrivals|no proxy fence"
    ),
    "results are staged over columns that other lanes read": Planted(
        Fault("__syncwarp();  // what has arrived is read\n", ""), "race"
    ),
}

SWAPPED_FAULTS = {
    "maxima are read before all warps have stored them": Planted(
        Fault("sync();  // maxima are stored\n", ""), "race|uninitialised"
    ),
    "P is multiplied before all warps have stored it": Planted(
        Fault("sync();  // P is stored\n", ""), "race|uninitialised|no proxy fence"
    ),
    "no proxy fence after P": Planted(Fault("fence_async_shared();  // P\n", ""), "no proxy fence"),
    "a half is released before it is multiplied": Planted(Fault("wgmma_wait<1>();", ""), "race"),
    "no proxy fence before a bulk store": Planted(Fault("fence_async_shared();  // columns\n", ""), "no proxy fence"),
    "columns are staged over those that a bulk store reads": Planted(Fault("wait_for_bulk_reads();", ""), "race"),
    "columns are staged before all are read": Planted(Fault("sync();  // columns are read\n", ""), "race"),
}


def _faulty(planted: dict[str, Planted], name: str) -> Host:
    faults = [one.fault for one in planted.values()]
    return Host(sms=2, faults=faults, planted=1 + list(planted).index(name) if name else 0)


@pytest.mark.parametrize("name", ["", *PREFILL_FAULTS])
def test_faults_of_prefill_are_noticed(name: str) -> None:
    """And the same source without one is not."""
    sizes: dict[str, Any] = {"kv_lens": (280, 70), "qo_lens": (70, 33)}
    even, odd = _case("even", **sizes, heads=(4, 2)), _case("odd", **sizes, heads=(3, 1), planner={"tile_rows": 20})
    host = _faulty(PREFILL_FAULTS, name)
    if not name:
        _attend("prefill", even, host)
        _attend("prefill", odd, host)
        return
    planted = PREFILL_FAULTS[name]
    with pytest.raises(HostError, match=planted.message):
        _attend("prefill", odd if planted.odd else even, host)


@pytest.mark.parametrize("name", ["", *FP8_FAULTS])
def test_faults_of_fp8_are_noticed(name: str) -> None:
    sizes: dict[str, Any] = {"kv_lens": (400, 70), "qo_lens": (70, 33), "heads": (4, 2)}
    noticed = pytest.raises(HostError, match=FP8_FAULTS[name].message) if name else contextlib.nullcontext()
    with noticed:
        _attend("prefill", _case("FP8 KV", **sizes, **FP8_KV), _faulty(FP8_FAULTS, name))


@pytest.mark.parametrize("name", ["", *MLA_FAULTS])
def test_faults_of_mla_are_noticed(name: str) -> None:
    (case,) = (one for one in MLA if str(one) == "512/64 decode")
    case = replace(case, qo_lens=(1, 1), kv_lens=(300, 70))
    noticed = pytest.raises(HostError, match=MLA_FAULTS[name].message) if name else contextlib.nullcontext()
    with _faulty(MLA_FAULTS, name).installed(), noticed:
        mla_cases.check(case, op=_mla_op)


@pytest.mark.parametrize("name", ["", *MERGE_FAULTS])
def test_faults_of_merges_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"qo_lens": (1,) * 5, "kv_lens": (700, 70, 70, 130, 70), "planner": {"num_ctas": 4}}
    host, case = _faulty(MERGE_FAULTS, name), _swapped("faulty", 64, **sizes)
    monkeypatch.setattr(mla, "cluster_splits_of", lambda sms, plan: 2)
    noticed = pytest.raises(HostError, match=MERGE_FAULTS[name].message) if name else contextlib.nullcontext()
    with host.installed(), noticed:
        mla_cases.check(case, op=_mla_op)


@pytest.mark.parametrize("name", ["", *SWAPPED_FAULTS])
def test_faults_of_swapped_operands_are_noticed(name: str) -> None:
    case = _swapped("faulty", 16, qo_lens=(1, 1), kv_lens=(300, 70))
    noticed = pytest.raises(HostError, match=SWAPPED_FAULTS[name].message) if name else contextlib.nullcontext()
    with _faulty(SWAPPED_FAULTS, name).installed(), noticed:
        mla_cases.check(case, op=_mla_op)
