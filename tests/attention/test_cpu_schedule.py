"""Kernel calls of a plan on the CPU: they are found by its numbers, and calls of one key have their own tensors."""

from __future__ import annotations

import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cases import DECODE_BASE, PREFILL_BASE, Case
from helpers.harness import Setup
from helpers.oracle import Expected

from attn_ops.eager.bounded_cache import BoundedCache
from attn_ops.kernels.cpu import readers, schedule, sdpa

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BASES = {"decode": DECODE_BASE, "prefill": PREFILL_BASE, "ragged": PREFILL_BASE}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One element for each plan whose kernel calls are computed."""
    computed, kernel_calls = [], schedule.of_plan

    def observed(*args: Any) -> Any:
        computed.append(args)
        return kernel_calls(*args)

    monkeypatch.setattr(schedule, "of_plan", observed)
    monkeypatch.setattr(schedule, "_KEPT", BoundedCache(schedule.MAX_PLANS))
    return computed


@pytest.mark.parametrize("kind", list(BASES))
def test_layers_share_the_kernel_calls_of_a_plan(kind: str, planned: list[object]) -> None:
    setup = Setup(kind, BASES[kind])
    setup.check(*setup.run("cpu"))
    doubled = {"v" if kind == "ragged" else "v_cache": setup.v * 2}
    out, lse = setup.run("cpu", **doubled)
    setup.check(out / 2, lse)
    assert len(planned) == 1


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_plan_that_is_written_again(kind: str, page_size: int, planned: list[object]) -> None:
    """Its kernel calls are those of its present numbers."""
    rows = (1,) * 3 if kind == "prefill" else ()
    setup = Setup(kind, replace(DECODE_BASE, page_size=page_size, kv_lens=(20, 20, 20), qo_lens=rows))
    setup.check(*setup.run("cpu"))
    indices = setup.plan_inputs[-2]
    pages = 3 * -(-20 // page_size)
    indices[:pages] = indices[:pages].roll(pages // 3)  # each request has the pages of the one before it
    setup.replan()
    out, lse = setup.run("cpu", q=setup.q.roll(1, 0))
    setup.check(out.roll(-1, 0), lse.roll(-1, 0))
    assert len(planned) == 2


def test_it_keeps_no_tensor_of_a_caller(planned: list[object]) -> None:
    for kind, base in BASES.items():
        setup = Setup(kind, base)
        setup.run("cpu")
        planned.clear()
        kept = [weakref.ref(t.untyped_storage()) for t in setup.planner.state if t.numel()]
        del setup
        assert all(t() is None for t in kept)
    assert schedule._KEPT


def test_the_plans_that_are_kept_are_bounded(planned: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    schedule._KEPT.limit = 2
    setups = [Setup("decode", replace(DECODE_BASE, kv_lens=(9, n))) for n in (1, 2, 3)]
    for setup in setups * 2:
        setup.check(*setup.run("cpu"))
    assert len(schedule._KEPT) <= 2
    monkeypatch.setattr(schedule, "MAX_NUMBERS", 1)
    schedule._KEPT.clear()
    for setup in setups:
        setup.check(*setup.run("cpu"))
    assert not schedule._KEPT


def test_kernel_calls_of_inference_mode_serve_other_calls(planned: list[object]) -> None:
    setup = Setup("decode", DECODE_BASE)
    with torch.inference_mode():
        setup.check(*setup.run("cpu"))
    with torch.no_grad():
        setup.check(*setup.run("cpu"))
    assert len(planned) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_calls_of_a_key_read_their_own_tensors(layout: str, dtype: torch.dtype) -> None:
    """They may begin anywhere in their memory."""
    memory = torch.randn(3, 40, 9, 2, 64, dtype=dtype)
    queries = torch.randn(40, 5, 4, 64, dtype=dtype)
    for at in (0, 3, 17):
        q, (k, v) = queries[at], memory[:2, at]
        given = (t if layout == "NHD" else t.transpose(0, 1) for t in (k, v))
        out, _ = torch.ops.attn.single_prefill(q, *given, causal=True, kv_layout=layout, backend="cpu")
        Expected.of([(q, k, v, torch.ones(5, 9, dtype=torch.bool).tril(9 - 5))]).check(out)


GATHERED: list[tuple[str, Case]] = [
    ("decode", replace(DECODE_BASE, kv_lens=(37, 37, 130))),
    ("decode", replace(DECODE_BASE, kv_lens=(20,) * 3, dtype=torch.bfloat16, kv_dtype=torch.float8_e5m2)),
    ("prefill", replace(PREFILL_BASE, causal=True, dtype=torch.bfloat16)),
    ("prefill", replace(PREFILL_BASE, window_left=9, page_size=3)),
]


@pytest.mark.parametrize(("kind", "case"), GATHERED, ids=str)
def test_memory_of_gathered_keys(kind: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken again by later calls, changes no earlier result, and is one for each thread."""
    monkeypatch.setattr(readers, "MIN_KEPT_BYTES", 1)
    monkeypatch.setattr(readers, "GATHERED", readers.Gathered())
    setups = [Setup(kind, case, seed=seed) for seed in range(3)]
    results = [setup.run("cpu") for setup in setups]
    kept = [t.data_ptr() for t in readers.GATHERED.kept]
    assert all(t.numel() for t in readers.GATHERED.kept)
    results += [setup.run("cpu") for setup in setups]
    assert [t.data_ptr() for t in readers.GATHERED.kept] == kept
    with ThreadPoolExecutor(3) as pool:
        results += pool.map(lambda setup: setup.run("cpu"), setups * 8)
    for setup, (out, lse) in zip(setups * 10, results, strict=True):
        setup.check(out, lse)


def test_gathered_keys_that_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "GATHERED", readers.Gathered())
    for least, most in ((1 << 40, 1 << 50), (0, 1)):
        monkeypatch.setattr(readers, "MIN_KEPT_BYTES", least)
        monkeypatch.setattr(readers, "MAX_KEPT_BYTES", most)
        setup = Setup("decode", DECODE_BASE)
        setup.check(*setup.run("cpu"))
    assert not any(t.numel() for t in readers.GATHERED.kept)


NUMBERS = (0.5, -3e38, 1e-40, 0.0, math.inf, -math.inf, math.nan, -math.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_that_the_reference_would_give(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extension module and PyTorch's reductions say the same: outputs are finite, LSEs below infinity and not 0."""
    for number in NUMBERS:
        for of_lse in (False, True):
            out, lse = torch.randn(3, 4, 5).to(dtype), torch.randn(3, 4) + 9
            (lse if of_lse else out).view(-1)[7] = number
            for o, s in ((out, lse), (out.transpose(0, 1), lse.t()), (out[..., :4], lse), (out, lse[:, :3])):
                finite = all(map(math.isfinite, o.flatten().tolist()))
                expected = finite and all(x < math.inf and x != 0 for x in s.flatten().tolist())
                for most in (1 << 16, -1):
                    monkeypatch.setattr(sdpa, "MAX_READ", most)
                    assert sdpa._is_regular(o, s) == expected
