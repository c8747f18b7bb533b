"""The triton backend on a GPU: every attention case, planning bit for bit, merging, appending."""

from __future__ import annotations

import math
import random

import pytest
import torch
from attn_ops.kernels import reference
from helpers.cases import DECODE, DECODE_OPTIONS, DECODE_SPECIAL, Case
from helpers.harness import Setup
from helpers.oracle import merge

import attn_ops

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("case", [*DECODE, *DECODE_SPECIAL, *DECODE_OPTIONS], ids=str)
def test_decode_matches_oracle(case: Case) -> None:
    setup = Setup("decode", case, "cuda")
    for _ in range(2):
        setup.check(*setup.run("triton"), **case.tolerance)
        assert not setup.planner.state.split_counters.any()


@pytest.mark.parametrize("case", [*DECODE, *DECODE_SPECIAL][::3], ids=str)
def test_captured_decode_matches_oracle(case: Case) -> None:
    """In a graph the merge is a kernel of its own, which the eager call has made ready."""
    setup = Setup("decode", case, "cuda")
    setup.run("triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = setup.run("triton")
    graph.replay()
    setup.check(*results, **case.tolerance)


@pytest.mark.parametrize("exponent", [-100, -20, 20, 90])
def test_fp8_cache_under_a_bfloat16_query_of_any_size(exponent: int) -> None:
    case = Case("wide", dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, sm_scale=0.1 * 2.0**-exponent)
    setup = Setup("decode", case, "cuda")
    setup.q.mul_(2.0**exponent)
    setup.check(*setup.run("triton"))


def test_fp8_cache_at_an_odd_address() -> None:
    """Values that cannot be read in pairs."""
    setup = Setup("decode", Case("odd", dtype=torch.float16, kv_dtype=torch.float8_e5m2), "cuda")
    shape = setup.v.shape
    memory = torch.full((setup.v.numel() + 1,), math.nan).to(setup.v.dtype).cuda()
    values = memory[1:].view(shape)
    values.copy_(setup.v)
    setup.v = values
    setup.check(*setup.run("triton"))


def _page_table(draw: random.Random, batch: int, page_size: int) -> tuple[torch.Tensor, ...]:
    longest = draw.choice([1, 30, 300, 3000, 100_000])
    lengths = [0 if draw.random() < 0.2 else draw.randint(1, longest) for _ in range(batch)]
    if draw.random() < 0.3:
        lengths = [longest] * batch
    pages = [-(-length // page_size) for length in lengths]
    last = [(length - 1) % page_size + 1 if length else -3 for length in lengths]
    indices = torch.tensor([draw.randrange(1000) for _ in range(min(sum(pages), 10_000) + 2)])
    return tuple(t.int() for t in (torch.tensor([0, *pages]).cumsum(0), indices, torch.tensor(last)))


@pytest.mark.parametrize("seed", range(60))
def test_plans_are_those_of_the_reference(seed: int) -> None:
    draw = random.Random(seed)
    max_batch = draw.choice([1, 3, 8, 64, 200, 1024, 3000])
    page_size, window = draw.choice([1, 3, 16, 64]), draw.choice([-1, -1, 0, 63, 500])
    kv_indptr, kv_indices, last = _page_table(draw, draw.randint(1, max_batch), page_size)
    if draw.random() < 0.2:
        kv_indptr += torch.randint(-3, 4, kv_indptr.shape).int()
    qo_lens = torch.tensor([draw.choice([0, 1, 7, 300]) for _ in last])
    qo_lens[0] = 1
    common = {"page_size": page_size, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "window_left": window}
    pages, rows = kv_indices.shape[0], int(qo_lens.sum())
    ctas = draw.choice([1, 2, 33, 66, 264])
    causal, tile_rows = draw.random() < 0.5, draw.choice([7, 32])
    qo_indptr = torch.cat((torch.zeros(1), qo_lens.cumsum(0))).int()
    for kind in ("decode", "prefill"):
        plans = []
        for backend, device in (("reference", "cpu"), ("triton", "cuda")):
            if kind == "decode":
                planner = attn_ops.DecodePlanner(max_batch, pages, num_ctas=ctas, device=device, **common)
                inputs = [kv_indptr, kv_indices, last]
            else:
                planner = attn_ops.PrefillPlanner(
                    max_batch, rows, pages, causal=causal, tile_rows=tile_rows, num_ctas=ctas, device=device, **common
                )
                inputs = [qo_indptr, kv_indptr, kv_indices, last]
            for t in planner.state:
                t.fill_(7)
            op = getattr(torch.ops.attn, f"plan_{kind}")
            op(*(t.to(device) for t in inputs), planner.state, backend=backend)
            plans.append(planner.state)
        for name, expected, actual in zip(plans[0]._fields, *plans, strict=True):
            assert torch.equal(expected, actual.cpu()), (kind, name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 8), (5, 3, 4, 64), (700, 2, 32, 128), (33, 70, 3, 80), (0, 2, 2, 16)], ids=str
)
def test_merge_states(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, states, heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(rows, states, heads, dim + 8, generator=generator).to(dtype)[..., :dim]
    s = torch.randn(rows, states, heads, generator=generator) * 5
    s[torch.rand(s.shape, generator=generator) < 0.3] = -math.inf
    v[s == -math.inf] = math.nan
    expected_v, expected_s = merge(v, s)
    results = [torch.ops.attn.merge_states(v.cuda(), s.cuda(), backend="triton")]
    if states == 2:
        parts = [t.cuda().unbind(1) for t in (v, s)]
        results.append(torch.ops.attn.merge_state(parts[0][0], parts[1][0], parts[0][1], parts[1][1], backend="triton"))
    for merged, sums in results:
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(merged.cpu().double(), expected_v, rtol=8 * eps, atol=8 * eps)
        torch.testing.assert_close(sums.cpu().double(), expected_s, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_append_skips_what_has_no_place(seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, dim_qk, dim_vo = draw.choice([1, 8, 40]), draw.choice([8, 128, 512]), draw.choice([8, 80, 512])
    page_size, layout, requests, pages = draw.choice([1, 3, 16]), draw.choice(["NHD", "HND"]), 3, 5
    capacity = requests * pages * page_size

    def cache(dim: int) -> torch.Tensor:
        middle = (page_size, heads) if layout == "NHD" else (heads, page_size)
        return torch.randn(requests * pages, *middle, dim + 8, generator=generator).bfloat16()[..., :dim]

    place = torch.randperm(capacity, generator=generator)[: draw.randint(0, capacity)]
    request, position = (place // (pages * page_size)).int(), (place % (pages * page_size)).int()
    skipped = torch.rand(place.shape, generator=generator)
    request[skipped < 0.2] = -1
    request[(skipped > 0.2) & (skipped < 0.3)] = requests + 5
    position[(skipped > 0.3) & (skipped < 0.4)] = 10_000
    kv_indices = torch.randperm(requests * pages, generator=generator).int()
    kv_indices[0] = 99
    tokens = [torch.randn(len(place), heads, dim, generator=generator).bfloat16() for dim in (dim_qk, dim_vo)]
    table = [request, position, kv_indices, torch.arange(requests + 1).int() * pages]
    expected = [cache(dim_qk), cache(dim_vo)]
    actual = [t.cuda() for t in expected]
    reference.append_kv(*tokens, *expected, *table, kv_layout=layout)
    torch.ops.attn.append_kv(
        *(t.cuda() for t in tokens), *actual, *(t.cuda() for t in table), kv_layout=layout, backend="triton"
    )
    for want, got in zip(expected, actual, strict=True):
        assert torch.equal(want, got.cpu())


@pytest.mark.parametrize("garbage", ["zeros", "random", "large", "negative"])
def test_garbage_plans_stay_in_bounds(garbage: str) -> None:
    """Nothing outside of the outputs and the workspace changes, and the launch ends."""
    setup = Setup("decode", Case("garbage", kv_lens=(100, 30, 7)), "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for field in setup.planner.state:
        if garbage == "random":
            field.random_(-50, 200, generator=generator)
        else:
            field.fill_({"zeros": 0, "large": 2**31 - 1, "negative": -(2**31)}[garbage])
    out, lse = setup.run("triton")
    torch.cuda.synchronize()
    if garbage == "zeros":
        assert not out.any()
        assert (lse == -math.inf).all()


def test_cache_of_more_than_two_billion_elements() -> None:
    page_size, heads, dim = 64, 8, 128
    pages = 2**31 // (page_size * heads * dim) + 40
    cache = torch.zeros(pages, page_size, heads, dim, dtype=torch.float16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    cache[-40:] = torch.randn(40, page_size, heads, dim, device="cuda", generator=generator).half()
    small = cache[-40:].clone()
    q = torch.randn(2, 16, dim, device="cuda", generator=generator).half()
    results = []
    for used, first in ((cache, pages - 40), (small, 0)):
        planner = attn_ops.DecodePlanner(
            2, 40, page_size=page_size, num_qo_heads=16, num_kv_heads=heads, head_dim=dim, device="cuda"
        )
        plan = planner.plan(torch.tensor([0, 15, 40]), torch.arange(40) + first, torch.tensor([3, 64]))
        results.append(torch.ops.attn.batch_decode(q, used, used, plan, planner.workspace, backend="triton")[0])
    assert torch.equal(*results)
