"""MLA kernels in CUDA C++ run on the host (``helpers/cuda_host``): results against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_ops

pytest.importorskip("triton")  # whose call of the prefill kernels the CUDA kernel shares

from helpers import mla_cases
from helpers.cuda_host import Host, needs_a_compiler
from helpers.cuda_host.calls import FP8_KV, mla_op, swapped

from attn_ops.kernels.cuda import mla
from attn_ops.ops import cuda_kernels
from attn_ops.plan.sizing import packed_rows_of_tile
from attn_ops.plan.state import PlanProblem, PrefillPlan

pytestmark = [needs_a_compiler, pytest.mark.usefixtures("poisoned_memory")]

MLA = [
    case
    for case in mla_cases.CASES
    if case.dims == (512, 64) and case.dtype == torch.bfloat16 and case.page_size % mla.TILE == 0
]


@pytest.mark.parametrize(("seed", "case"), list(enumerate(MLA)), ids=str)
def test_mla(seed: int, case: mla_cases.Mla) -> None:
    host = Host(sms=4, seed=seed)
    with host.installed():
        mla_cases.check(case, op=mla_op)
    assert len(host.launched) == 1


NO_KEYS: dict[str, Any] = {"qo_lens": (1, 1, 1), "kv_lens": (64, 0, 129), "planner": {"num_ctas": 0}}
ROWS: dict[str, Any] = {"qo_lens": (3, 1, 6), "kv_lens": (200, 2, 310), "causal": True}

SWAPPED = [
    *(swapped(f"{heads} heads", heads) for heads in (1, 5, 12, 16)),
    swapped("no keys", 16, **NO_KEYS, dtype=torch.float16),
    swapped("rows of 4", 4, **ROWS, packed=True, page_size=128, planner={"tile_rows": 4}),
    swapped("rows of 5", 5, **ROWS, page_size=192, planner={"tile_rows": 3, "num_ctas": 6}),
    swapped("rows of 7", 7, **ROWS, planner={"tile_rows": 2, "fixed_split_size": 1}),
    swapped("row_max rises", 16, sm_scale=0.5),
    swapped("float32", 16, out_dtype=torch.float32),
    swapped("e4m3", 8, out_dtype=torch.float8_e4m3fn),
    swapped("e5m2", 16, out_dtype=torch.float8_e5m2, sm_scale=0.02),
    swapped("float16 of bfloat16", 3, out_dtype=torch.float16),
]


@pytest.mark.parametrize(("seed", "case"), list(enumerate(SWAPPED)), ids=str)
def test_mla_of_few_packed_rows(seed: int, case: mla_cases.Mla) -> None:
    host = Host(sms=4, seed=seed)
    with host.installed():
        mla_cases.check(case, op=mla_op)
    assert [name.split()[0] for name in host.launched] == ["mla_swap_ab"]


FP8 = [
    *(swapped(f"{heads} heads", heads, **FP8_KV) for heads in (1, 12, 16, 20, 64, 128, 192)),
    *(swapped(f"no keys, {heads} heads", heads, **FP8_KV | NO_KEYS, dtype=torch.float16) for heads in (16, 32, 128)),
    swapped("rows of 4", 4, **FP8_KV | ROWS, packed=True, page_size=128, planner={"tile_rows": 4}),
    swapped("rows of 24", 24, **FP8_KV | ROWS, packed=True, page_size=128, planner={"tile_rows": 4, "num_ctas": 6}),
    swapped("rows of 150", 150, **FP8_KV | ROWS, planner={"num_ctas": 4, "tile_rows": 1}, out_dtype=torch.float32),
    swapped("rows of 7", 7, **FP8_KV | ROWS, planner={"tile_rows": 2, "fixed_split_size": 1}),
    swapped("e5m2", 16, kv_dtype=torch.float8_e5m2, dtype=torch.float16),
    swapped("e5m2 to bfloat16", 5, kv_dtype=torch.float8_e5m2, out_dtype=torch.float32),
    swapped("e5m2, 128 heads", 128, kv_dtype=torch.float8_e5m2),
    swapped("keys times 0", 16, kv_dtype=torch.float8_e4m3fn, kv_scale=(0.0, 2.0)),
    *(
        swapped(f"negative scales, {heads} heads", heads, kv_dtype=torch.float8_e4m3fn, kv_scale=(-0.5, -2.0))
        for heads in (16, 64)
    ),
]


@pytest.fixture(params=[1, 2])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """CTAs that divide KV: one, or two where none share it. The list has those of each launch."""
    of_plans: list[int] = []

    def cluster_splits_of(sms: int, plan: PrefillPlan) -> int:
        of_plans.append(min(request.param, 2 // mla.mla_cluster(packed_rows_of_tile(PlanProblem.of(plan.problem)))))
        return of_plans[-1]

    monkeypatch.setattr(mla, "cluster_splits_of", cluster_splits_of)
    return of_plans


@pytest.mark.parametrize(("seed", "case"), list(enumerate(FP8)), ids=str)
def test_mla_of_an_fp8_cache(seed: int, case: mla_cases.Mla, splits: list[int]) -> None:
    host = Host(sms=4, seed=seed)
    with host.installed():
        mla_cases.check(case, op=mla_op)
    (name,) = host.launched
    assert "KV_FP8=1" in name
    assert f"SPLITS={splits[-1]}" in name


def by_tokens(*cases: mla_cases.Mla) -> list[mla_cases.Mla]:
    """The cases with page sizes that are not multiples of a KV tile."""
    return [replace(case, page_size=(1, 3, 16, 40)[i % 4]) for i, case in enumerate(cases)]


@pytest.mark.parametrize(("seed", "case"), list(enumerate(by_tokens(*MLA, *SWAPPED, *FP8))), ids=str)
def test_mla_by_tokens(seed: int, case: mla_cases.Mla) -> None:
    host = Host(sms=4, seed=seed)
    with host.installed():
        mla_cases.check(case, op=mla_op)
    (name,) = host.launched
    assert "KV_CP_ASYNC=1" in name


@pytest.mark.parametrize("part", ["ckv_cache", "kpe_cache"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_nan_in_an_fp8_cache_stays_nan(dtype: torch.dtype, part: str) -> None:
    """In the request that has it, and in no other one."""
    sizes = {"page_size": 64, "num_qo_heads": 8, "num_kv_heads": 1, "head_dim": 576, "head_dim_vo": 512}
    planner = attn_ops.PrefillPlanner(2, 2, 4, **sizes, num_ctas=0, tile_rows=1)
    plan = planner.plan(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2], [0, 2, 4], range(4), [36, 36])))
    q_nope, q_pe = torch.ones(2, 8, 512).bfloat16(), torch.ones(2, 8, 64).bfloat16()
    caches = {"ckv_cache": torch.ones(4, 64, 512).to(dtype), "kpe_cache": torch.ones(4, 64, 64).to(dtype)}
    caches[part].view(torch.uint8)[1, 30, 50] = 0x7F
    with Host(sms=4).installed():
        out, lse = mla.batch_mla(q_nope, q_pe, **caches, plan=list(plan), workspace=planner.workspace, return_lse=True)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1].eq(1).all()


@pytest.mark.parametrize("case", [case for case in SWAPPED if case.name in ("16 heads", "rows of 5")], ids=str)
def test_mla_without_swapped_operands(case: mla_cases.Mla, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "cuda_mla_swapped_rows", lambda *_: ())
    host = Host(sms=4)
    with host.installed():
        mla_cases.check(case, op=mla_op)
    assert [name.split()[0] for name in host.launched] == ["mla"]


SHORT: dict[str, Any] = {"qo_lens": (1, 1, 1, 0, 1), "kv_lens": (64, 0, 129, 5, 700), "planner": {"num_ctas": 2}}

DIVIDED = [
    swapped("16 heads", 16),
    swapped("16 heads, short", 16, **SHORT, dtype=torch.float16),
    swapped("rows of 5", 5, **ROWS, page_size=192, planner={"tile_rows": 3, "num_ctas": 6}, out_dtype=torch.float32),
    swapped("24 heads", 24, out_dtype=torch.float8_e4m3fn),
    swapped("rows of 16, two at a time", 16, **ROWS, planner={"tile_rows": 2, "num_ctas": 4}, sm_scale=0.5),
    swapped("64 heads, short", 64, **SHORT),
    swapped("64 heads, row_max rises", 64, sm_scale=0.5),
    swapped("rows of 16", 16, **ROWS, packed=True, page_size=128, planner={"tile_rows": 4, "num_ctas": 2}),
    swapped("rows of 150", 150, **ROWS, planner={"num_ctas": 4, "tile_rows": 1}, out_dtype=torch.float32),
]
"""Cases of plans that split few query tiles."""

DIVIDED_BY_TOKENS = by_tokens(*DIVIDED, *(case for case in FP8 if case.heads < 128))


@pytest.mark.parametrize(("seed", "case"), list(enumerate((*DIVIDED, *DIVIDED_BY_TOKENS))), ids=str)
def test_mla_of_clusters_that_divide_kv(seed: int, case: mla_cases.Mla, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that runs two clusters: they have several units."""
    monkeypatch.setattr(mla, "cluster_splits_of", lambda sms, plan: 2)
    host = Host(sms=4, seed=seed)
    with host.installed():
        mla_cases.check(case, op=mla_op)
    (name,) = host.launched
    assert "SPLITS=2" in name


@pytest.mark.parametrize(("sms", "splits"), [(132, 2), (12, 1)])
def test_the_plan_and_the_gpu_decide_how_many_ctas_divide_kv(sms: int, splits: int) -> None:
    host = Host(sms=sms)
    with host.installed():
        mla_cases.check(swapped("plan", 16), op=mla_op)
    (name,) = host.launched
    assert f"SPLITS={splits}" in name


def test_every_size_of_units_runs() -> None:
    rows = [case.heads * case.planner.get("tile_rows", 1) for case in (*MLA, *SWAPPED)]
    for copied in (False, True):
        sizes = {mla.units_of(packed_rows, by_tokens=copied)[:2] for packed_rows in rows}
        assert sizes == {key[:2] for key in cuda_kernels.cuda_mla_keys(torch.bfloat16, False, copied)}


def test_swapped_operands_change_the_result_by_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    outs: list[tuple[Tensor, Tensor]] = []

    def keep(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
        outs.append(mla_op(*tensors, **options))
        return outs[-1]

    with Host(sms=4).installed():
        for rows in ((), (16,)):
            monkeypatch.setattr(mla, "cuda_mla_swapped_rows", lambda *_, rows=rows: rows)
            mla_cases.check(swapped("both", 16, out_dtype=torch.float32), op=keep)
    (out, lse), (of_swapped, lse_of_swapped) = outs
    torch.testing.assert_close(of_swapped, out, rtol=2e-2, atol=4e-3)
    torch.testing.assert_close(lse_of_swapped, lse, rtol=1e-5, atol=1e-5)


def test_a_partial_result_may_lie_at_any_multiple_of_4_bytes() -> None:
    def op(q: Any, r: Any, c: Any, k: Any, plan: Any, workspace: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return mla_op(q, r, c, k, plan, torch.empty(workspace.numel() + 1)[1:], **options)

    for heads in (16, 64):
        with Host(sms=4).installed():
            mla_cases.check(swapped("shifted", heads), op=op)


@pytest.mark.parametrize("splits", [1, 2])
def test_columns_of_a_partial_result_may_differ_by_many_orders_of_magnitude(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float16 with a scale for each 128 columns keeps 11 bits. With a query of 0 the output is the mean of tokens."""
    monkeypatch.setattr(mla, "cluster_splits_of", lambda sms, plan: splits)
    generator = torch.Generator().manual_seed(splits)
    magnitudes = 2.0 ** torch.tensor([-114, -50, 0, 90]).repeat_interleave(128)
    magnitudes[128:] *= 2.0 ** torch.randint(-12, 13, (384,), generator=generator)
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
