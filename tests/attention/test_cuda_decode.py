"""The CUDA decode kernel against the oracle, in eager calls and graphs, and while memory is busy."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cases import Case, one_at_a_time, sampled
from helpers.harness import Setup

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

BASE = Case(
    "base", kv_lens=(700, 9, 0, 40, 2, 300), dtype=torch.bfloat16, heads=(8, 2), head_dims=(128, 128), page_size=16
)
AXES: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.float16,),
    "out_dtype": (torch.float8_e4m3fn, torch.float8_e5m2, torch.float32, torch.float16),
    "heads": ((1, 1), (4, 4), (8, 1), (7, 1), (10, 2), (16, 1), (26, 2), (64, 8)),
    "head_dims": ((64, 64), (96, 96), (80, 80), (112, 112)),
    "kv_layout": ("HND",),
    "storage": ("fused", "padded"),
    "page_size": (32, 48, 64, 256),
    "window_left": (0, 1, 33, 127, 128, 1000),
    "sm_scale": (0.01, 30.0),
    "logits_soft_cap": (5.0, 50.0),
    "sinks": (1.0, 100.0),
    "kv_scale": ((2.0, 0.25),),
    "kv_lens": (
        (1,),
        (0, 0),
        (63, 64, 65, 127, 128, 129),
        (2000, 3000),
        tuple(range(40)),
        (33000, 7, 7),
        (64,) * 300,
    ),
    "planner": ({"num_ctas": 3}, {"num_ctas": 7}, {"num_ctas": 64}, {"fixed_split_size": 8}),
    "padding": (3,),
    "spare_batch": (5,),
}
FP8_AXES: dict[str, tuple[Any, ...]] = {
    "kv_dtype": (torch.float8_e4m3fn, torch.float8_e5m2),
    "kv_scale": (None, (0.5, 3.0)),
}
FP8 = replace(BASE, kv_dtype=torch.float8_e4m3fn, kv_scale=(2.0, 0.25))
ROPE = replace(BASE, pos_encoding="ROPE_LLAMA")
ROPE_AXES: dict[str, tuple[Any, ...]] = {name: AXES[name] for name in AXES if name != "kv_scale"}
ROPE_AXES |= {"rope": ((4.0, 5e5),), "head_dims": ((64, 64),)}
CASES = [
    *one_at_a_time(BASE, AXES),
    *(replace(case, name=f"RoPE, {case.name}") for case in one_at_a_time(ROPE, ROPE_AXES)),
    *(replace(case, name=f"RoPE, {case.name}") for case in sampled(ROPE, ROPE_AXES, 40, seed=7)),
    *(replace(case, name=f"FP8, {case.name}") for case in one_at_a_time(FP8, AXES | FP8_AXES)),
    *sampled(BASE, AXES, 60, seed=5),
    *(replace(case, name=f"FP8, {case.name}") for case in sampled(FP8, AXES | FP8_AXES, 60, seed=6)),
    *(
        replace(base, name=f"{base.name}, {heads[1]} KV heads of 64", head_dims=(64, 64), heads=heads, kv_layout=layout)
        for base in (BASE, replace(FP8, name="FP8"), replace(ROPE, name="RoPE"))
        for heads, layout in (((9, 3), "NHD"), ((72, 6), "NHD"), ((32, 4), "HND"))
    ),
    replace(BASE, name="empty", kv_lens=(), padding=2),
    replace(BASE, name="window, planned", window_left=100, planner={"window_left": 100, "num_ctas": 3}),
]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched. Not their tensors, which a CUDA graph wants freed."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    names = list[str]()
    decode = importlib.import_module("attn_ops.kernels.cuda.decode")
    launch: Callable[..., None] = decode.launch

    def spy(one: Any, *args: Any, **kwargs: Any) -> None:
        names.append(one.kernel.function)
        launch(one, *args, **kwargs)

    monkeypatch.setattr(decode, "launch", spy)
    return names


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(case: Case, launches: list[str]) -> None:
    """The second call replays the launches of the first."""
    setup = Setup("decode", case, "cuda")
    for _ in range(2):
        setup.check_run("cuda")
    assert launches[0] == "decode"


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_captured_call_matches_oracle(case: Case, launches: list[str]) -> None:
    setup = Setup("decode", case, "cuda")
    setup.run("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [setup.run("cuda") for _ in range(3)]
    for _ in range(3):
        graph.replay()
    for result in results:
        setup.check(*result, **setup.tolerance("cuda"))


@pytest.mark.parametrize("exponent", [-100, -20, 20, 90])
def test_fp8_cache_with_a_bfloat16_query_of_any_magnitude(exponent: int, launches: list[str]) -> None:
    fields: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn, "sm_scale": 0.1 * 2.0**-exponent}
    setup = Setup("decode", replace(BASE, name="magnitude", **fields), "cuda")
    setup.q *= 2.0**exponent
    setup.check_run("cuda")


def test_a_fixed_split_size_gives_the_same_bits_in_every_batch(launches: list[str]) -> None:
    """The first request alone, and in a batch with others."""
    planner = {"fixed_split_size": 8}
    alone, batched = (
        Setup("decode", replace(BASE, kv_lens=lens, planner=planner), "cuda") for lens in ((3000,), (3000, 5, 900))
    )
    rows = []
    for setup in (alone, batched):
        setup.q[0] = alone.q[0]
        pages = setup.page_table[1][: -(-3000 // 16)].long()
        first = alone.page_table[1][: -(-3000 // 16)].long()
        setup.k[pages], setup.v[pages] = alone.k[first], alone.v[first]
        rows.append(setup.run("cuda")[0][0])
    assert torch.equal(*rows)


@pytest.mark.parametrize(("kv_lens", "heads"), [((4000,) * 40, (32, 8)), ((30000,), (14, 2)), ((128,) * 200, (8, 8))])
def test_the_same_bits_while_memory_is_busy(
    kv_lens: tuple[int, ...], heads: tuple[int, int], launches: list[str]
) -> None:
    """Tiles then arrive in no order."""
    setup, busy = Setup("decode", replace(BASE, kv_lens=kv_lens, heads=heads), "cuda"), torch.cuda.Stream()
    alone = setup.run("cuda")[0].clone()
    noise = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        with torch.cuda.stream(busy):
            noise.add_(1)
        results.append(setup.run("cuda")[0])
    torch.cuda.synchronize()
    assert all(torch.equal(alone, one) for one in results)
