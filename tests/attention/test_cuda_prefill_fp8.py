"""FP8 products of the CUDA prefill kernel: e4m3 queries, keys and values, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cases import Case, one_at_a_time
from helpers.fp8_products import TENSOR_CORE_EPS, Fp8Expected
from helpers.harness import OPS, Setup

import attn_ops

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

E4M3 = torch.float8_e4m3fn

BASE = Case(
    "base",
    kv_lens=(700, 9, 40, 2, 0, 300),
    qo_lens=(100, 3, 7, 0, 5, 300),
    dtype=E4M3,
    out_dtype=torch.float32,
    heads=(8, 2),
    head_dims=(128, 128),
    causal=True,
)
AXES: dict[str, tuple[Any, ...]] = {
    "causal": (False,),
    "out_dtype": (None, torch.bfloat16, torch.float16, torch.float8_e5m2),
    "heads": ((4, 4), (8, 1), (7, 1), (10, 2), (72, 1)),
    "head_dims": ((64, 64), (256, 256)),
    "kv_layout": ("HND",),
    "storage": ("fused", "padded"),
    "page_size": (8, 48, 64, 256),
    "window_left": (0, 33, 128, 1000),
    "sm_scale": (3.0,),
    "logits_soft_cap": (5.0, 50.0),
    "sinks": (1.0, 100.0),
    "kv_scale": ((0.5, 3.0), (0.0, 1.0), (-2.0, -0.5)),
    "kv_lens": ((5, 0, 33, 1, 1, 60), (2048, 3, 7, 64, 5, 300)),
    "planner": ({"tile_rows": 1}, {"tile_rows": 16}, {"tile_rows": 33}, {"tile_rows": 128}),
}
SPLIT: dict[str, Any] = {"kv_lens": (3000, 2000), "qo_lens": (40, 33), "planner": {"num_ctas": 8}}
CASES = [
    *one_at_a_time(BASE, AXES),
    *(
        replace(BASE, name=f"{name}, {dims[0]}", head_dims=dims, **options)
        for dims in ((64, 64), (128, 128), (256, 256))
        for name, options in {
            "rows beyond the batch": {"padding": 70, "spare_batch": 3, "planner": {"tile_rows": 64}},
            "both windows": {"window_left": 20, "window_right": 7, "causal": False, "heads": (7, 1)},
            "split": SPLIT,
            "split, all options": {**SPLIT, "logits_soft_cap": 5.0, "sinks": 1.0, "window_left": 1500},
            "alternating warpgroups": {"planner": {"tile_rows": 16}, "kv_layout": "HND"},
            "alternating warpgroups, split": {**SPLIT, "planner": {"num_ctas": 8, "tile_rows": 16}},
        }.items()
    ),
]


def _check(kind: str, case: Case, launches: list[Any]) -> None:
    setup = Setup(kind, case, "cuda")
    assert "cuda.prefill_e4m3: runs it" in attn_ops.explain(OPS[kind], **setup.arguments)
    setup.check_fp8_products(*setup.run(), TENSOR_CORE_EPS)
    assert launches
    assert all("Q_FP8=1" in launch.name for launch in launches)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_paged_matches_oracle(case: Case, launches: list[Any]) -> None:
    _check("prefill", case, launches)


@pytest.mark.parametrize("case", [c for c in CASES if c.storage != "fused" and c.page_size == 16], ids=str)
def test_ragged_matches_oracle(case: Case, launches: list[Any]) -> None:
    _check("ragged", case, launches)


@pytest.mark.parametrize("rows", [1, 70, 300])
def test_single_matches_oracle(rows: int, launches: list[Any]) -> None:
    q, k, v = (torch.randn(n, h, 128, device="cuda").to(E4M3) for n, h in ((rows, 4), (500, 2), (500, 2)))
    out, lse = torch.ops.attn.single_prefill(q, k, v, causal=True, return_lse=True, out_dtype=torch.float32)
    Fp8Expected.of([(q, k, v)], causal=True).check(out, lse, float32_eps=TENSOR_CORE_EPS)
    assert launches


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_key_has_its_own_value(dim: int, launches: list[Any]) -> None:
    """Query i sees key i alone, as their logits are far above the others: output i is value i."""
    tokens = min(dim, 128)
    eye = 4.0 * torch.eye(dim, device="cuda")[:tokens]
    q, k = (eye.to(E4M3).view(tokens, 1, dim) for _ in range(2))
    v = torch.randn(tokens, 1, dim, device="cuda").to(E4M3)
    out, _ = torch.ops.attn.single_prefill(q, k, v, sm_scale=4.0, out_dtype=torch.float32)
    torch.testing.assert_close(out, v.float(), rtol=1e-3, atol=1e-20)
    assert launches


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("tokens", [1024, 8192, 65536])
def test_sums_over_long_kv_lose_nothing(tokens: int, dim: int, launches: list[Any]) -> None:
    """The mean of values of 1 is 1. An accumulator of the tensor cores for all KV tiles lost 13% of 8,192 keys."""
    q, k = (torch.randn(n, h, dim, device="cuda").to(E4M3) for n, h in ((256, 4), (tokens, 1)))
    v = torch.ones(tokens, 1, dim, device="cuda").to(E4M3)
    out, _ = torch.ops.attn.single_prefill(q, k, v, out_dtype=torch.float32)
    assert float((out - 1).abs().max()) < 1e-2
    assert abs(float((out - 1).mean())) < 2e-3
    assert launches


def test_repeated_calls_and_graphs_give_the_same_bits(launches: list[Any]) -> None:
    """Also while memory is busy: each warpgroup waits for its own KV tiles."""
    setup = Setup("prefill", replace(BASE, name="split", **SPLIT), "cuda")
    first = setup.run()
    assert all(torch.equal(a, b) for _ in range(50) for a, b in zip(first, setup.run(), strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = setup.run()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(first, replayed, strict=True))
    assert launches
