"""FP8 products of the prefill kernel on the host (``helpers/cuda_host``): results against the oracle, and faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # whose call of the prefill kernels the CUDA kernel shares

from helpers.cases import Case
from helpers.cuda_host import Fault, Host, needs_a_compiler
from helpers.cuda_host.calls import OPS, SPLIT, prefill_case
from helpers.cuda_host.faults import Planted, host_with, noticed
from helpers.fp8_products import TENSOR_CORE_EPS
from helpers.harness import Setup

from attn_ops.kernels.cuda import prefill

pytestmark = [needs_a_compiler, pytest.mark.usefixtures("poisoned_memory")]

E4M3 = torch.float8_e4m3fn


def _case(name: str, **fields: Any) -> Case:
    return prefill_case(name, **({"dtype": E4M3, "out_dtype": torch.bfloat16} | fields))


OF_64, OF_256 = {"head_dims": (64, 64)}, {"head_dims": (256, 256), "heads": (4, 2)}

CASES = [
    ("prefill", _case("causal", causal=True)),
    ("prefill", _case("rows after the last", causal=True, padding=3, spare_batch=2, storage="padded", page_size=8)),
    ("prefill", _case("window, cap, sinks", window_left=33, logits_soft_cap=5.0, sinks=1.0, page_size=8)),
    ("prefill", _case("both windows", window_left=20, window_right=9, heads=(7, 1), out_dtype=torch.float32)),
    ("prefill", _case("splits", **SPLIT, sinks=1.0, page_size=64, storage="fused", kv_layout="HND")),
    ("prefill", _case("splits, window", **SPLIT, causal=True, window_left=200, heads=(10, 2), page_size=24)),
    ("prefill", _case("scales", kv_scale=(0.5, 3.0), out_dtype=None, heads=(5, 1), planner={"tile_rows": 64})),
    ("prefill", _case("negative scale", kv_scale=(-2.0, -0.5), logits_soft_cap=5.0, sm_scale=0.2)),
    ("prefill", _case("first tile unseen", qo_lens=(300, 2), kv_lens=(500, 2), heads=(2, 2), window_left=30)),
    ("prefill", _case("row_max rises", kv_lens=(470, 0, 210, 2), sm_scale=2.0)),
    ("prefill", _case("peaks", sm_scale=3.0, causal=True, out_dtype=torch.float16)),
    ("prefill", _case("64", **OF_64, causal=True, page_size=16)),
    ("prefill", _case("64, splits", **OF_64 | SPLIT, heads=(6, 2), window_left=300)),
    ("prefill", _case("256", **OF_256, causal=True, logits_soft_cap=5.0, page_size=16)),
    ("prefill", _case("256, splits", **OF_256 | SPLIT, sinks=1.0, window_left=300)),
    ("prefill", _case("no keys", kv_lens=(300, 0, 200, 5, 0), qo_lens=(40, 9, 200, 5, 3), causal=True)),
    ("ragged", _case("units of one tile", kv_lens=tuple(range(1, 30, 2)), qo_lens=tuple(range(1, 30, 2)), causal=True)),
    ("ragged", _case("ragged", causal=True, storage="padded", planner={"tile_rows": 32})),
    ("ragged", _case("ragged, windows", window_left=40, window_right=3, heads=(6, 2), kv_layout="HND")),
    ("ragged", _case("ragged, 64", **OF_64, window_left=40, window_right=3, heads=(6, 2), kv_layout="HND")),
    ("ragged", _case("ragged, 64, E5M2", **OF_64 | SPLIT, causal=True, out_dtype=torch.float8_e5m2)),
    ("ragged", _case("ragged, 256", **OF_256, causal=True, sinks=1.0, out_dtype=torch.float32)),
]


def _attend(kind: str, case: Case, host: Host) -> float:
    """Run the case on the host and compare it with the oracle."""
    setup = Setup(kind, case)
    with host.installed():
        out, lse = OPS[kind](**setup.arguments)
    return setup.check_fp8_products(out, lse, TENSOR_CORE_EPS)


@pytest.mark.parametrize("seed", range(len(CASES)), ids=[case.name for _, case in CASES])
def test_prefill(seed: int) -> None:
    host = Host(sms=3, seed=seed)
    _attend(*CASES[seed], host)
    (name,) = host.launched
    assert "Q_FP8=1" in name


BY_TOKENS = [
    replace(case, page_size=(1, 3, 12, 5, 100)[i % 5])
    for i, case in enumerate(case for kind, case in CASES if kind == "prefill")
]
"""Page sizes that are not multiples of 8."""


@pytest.mark.parametrize(("seed", "case"), list(enumerate(BY_TOKENS)), ids=str)
def test_prefill_by_tokens(seed: int, case: Case) -> None:
    host = Host(sms=3, seed=seed)
    _attend("prefill", case, host)
    (name,) = host.launched
    assert "KV_CP_ASYNC=1 PAGED=1 Q_FP8=1" in name


@pytest.mark.parametrize("kind", ["prefill", "ragged"])
def test_tokens_before_the_window_may_be_nan(kind: str) -> None:
    case = _case("hidden", kv_lens=(300,), qo_lens=(40,), causal=True, window_left=33)
    setup = Setup(kind, case)
    setup.fill_with_nan(torch.arange(300 - 40 - 33))
    with Host().installed():
        out, lse = OPS[kind](**setup.arguments)
    setup.check_fp8_products(out, lse, TENSOR_CORE_EPS)


def test_a_single_key_gives_its_value() -> None:
    """Its probability is rounded to 1: every number of e4m3 comes out, in its place."""
    values = torch.arange(256, dtype=torch.uint8).view(E4M3).view(1, 2, 128)
    q, k = torch.randn(40, 4, 128).to(E4M3), torch.randn(1, 2, 128).to(E4M3)
    with Host().installed():
        out, _ = prefill.single_prefill(q, k, values, out_dtype=torch.float32)
    expected = values.float().repeat_interleave(2, 1).expand(40, 4, 128)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_key_has_its_own_value(dim: int) -> None:
    """Query i sees key i alone, as their logits are far above the others: output i is value i."""
    tokens = min(dim, 128)
    eye = 4.0 * torch.eye(dim)[:tokens]
    q, k = (eye.to(E4M3).view(tokens, 1, dim) for _ in range(2))
    v = torch.randn(tokens, 1, dim, generator=torch.Generator().manual_seed(0)).to(E4M3)
    with Host().installed():
        out, _ = prefill.single_prefill(q, k, v, sm_scale=4.0, out_dtype=torch.float32)
    torch.testing.assert_close(out, v.float(), rtol=1e-6, atol=1e-20)


ONE_ACCUMULATOR = Fault(
    "issue_pv(output, partial, probabilities, values_of(number));",
    "for (float& x : partial) x = 0; fence_registers(output); wgmma_fence();"
    "for (int i = 0; i < kTile / 32; ++i) wgmma_e4m3_rs(output, probabilities[i], values_of(number) + i * 2, true);"
    "wgmma_commit();",
)


@pytest.mark.parametrize(("dim", "planted"), [(64, 0), (128, 0), (128, 1), (256, 0)])
def test_sums_over_long_kv_lose_nothing(dim: int, planted: int) -> None:
    """The mean of values of 1 is 1. An accumulator of the tensor cores for all KV tiles would lose several percent."""
    random = torch.Generator().manual_seed(0)
    rows = 128  # with 64 two consumers divide the keys
    q, k = (torch.randn(n, 1, dim, generator=random).to(E4M3) for n in (rows, 4096))
    with Host(faults=[ONE_ACCUMULATOR] if dim == 128 else [], planted=planted).installed():
        out, _ = prefill.single_prefill(q, k, torch.ones_like(k, dtype=torch.float32).to(E4M3), out_dtype=torch.float32)
    if planted:
        assert float((out - 1).mean()) < -3e-2
    else:
        assert float((out - 1).abs().max()) < 1e-2


def test_the_order_of_threads_changes_no_bit() -> None:
    setup = Setup("ragged", _case("order", **OF_64, window_left=40, sinks=1.0, planner={"tile_rows": 8}))
    results = []
    for seed in range(4):
        with Host(sms=2, seed=seed).installed():
            results.append(prefill.ragged_prefill(**setup.arguments))
    for one in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], one, strict=True))


ARRIVE = "if (lane == 0) arrive(v_empty + stage * 8);"
PUBLISH = f"fence_async_shared();\n      __syncwarp();\n      {ARRIVE}"

FAULTS = {
    "no proxy fence after values are transposed": Planted(Fault(PUBLISH, f"__syncwarp(); {ARRIVE}"), "no proxy fence"),
    "lane 0 arrives for lanes that still transpose": Planted(
        Fault(PUBLISH, f"fence_async_shared(); {ARRIVE}"),
        "race|no proxy fence",
    ),
    "values are transposed before they have arrived": Planted(
        Fault("wait(v_full + tile % (2 * kValueStages) * 8, tile / (2 * kValueStages) & 1);", ""),
        "race|uninitialised",
    ),
    "no wait for a stage of transposed values": Planted(
        Fault("wait(t_empty + to * 8, tile / kTransposedStages & 1 ^ 1);", ""),
        "race|more arrivals",
    ),
    "no warp that transposes releases a unit": Planted(
        Fault("release_unit(shared);\n    if (!exists) return;", "if (!exists) return;"),
        "deadlock",
    ),
    "the next unit is written before the one is read": Planted(
        Fault("wait(shared_address(&shared.unit_empty), n & 1 ^ 1);", ""),
        "race|more arrivals",
    ),
    "the next unit is not taken": Planted(
        Fault("if (thread == 0 && first + kTile >= end) pass_unit(p, schedule, n, shared);", ""),
        "deadlock",
    ),
    "no arrival when values have been read": Planted(
        Fault(f"__syncwarp();\n      {ARRIVE}", "__syncwarp();"), "deadlock"
    ),
    "a part of a state is stored before the last one is read": Planted(
        Fault("sync(), store_part(part), sync();", "store_part(part), sync(), sync();"),
        "race",
    ),
}


@pytest.mark.parametrize("name", ["", *FAULTS])
def test_faults_are_noticed(name: str) -> None:
    """And the same source without one is not."""
    case = _case("faults", kv_lens=(900, 70), qo_lens=(16, 9), heads=(4, 2), planner={"tile_rows": 32, "num_ctas": 1})
    with noticed(FAULTS, name):
        _attend("prefill", case, host_with(FAULTS, name))
