"""With programmatic dependent launch, attention reads the plan that the preceding kernel writes, not an older one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attn_ops

pytestmark = pytest.mark.gpu

BATCH, PAGES, REPLAYS, LAYERS = 4, 400, 30, 3
LENGTHS = ([5, 700, 1, 33], [6000, 0, 100, 2], [64, 0, 0, 0], [400, 1600, 400, 400], [1, 1, 1, 1], [0, 6400, 0, 0])

Step = tuple[Callable[..., object], Callable[[int], tuple[Tensor, ...]], int]
"""``(plan, run, page size)``; ``plan`` takes a page table, and ``run`` a layer, which has its own queries."""


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=torch.Generator("cuda").manual_seed(0))


def reference(op: str, state: tuple[Tensor, ...], *, compiled: bool) -> Callable[..., None]:
    """Plan with tensor operations, launched by PyTorch one by one or compiled by Inductor."""

    def plan(*table: Tensor) -> None:
        getattr(torch.ops.attn, op)(*table, list(state), backend="reference")

    return torch.compile(plan, fullgraph=True, dynamic=True) if compiled else plan


def decode(compiled: bool | None = None, **options: int) -> Step:
    heads = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    planner = attn_ops.DecodePlanner(BATCH, PAGES, page_size=16, device="cuda", **heads, **options)
    q, cache = random(LAYERS, BATCH, 32, 128), random(2, PAGES, 16, 8, 128)

    def run(layer: int) -> tuple[Tensor, ...]:
        return torch.ops.attn.batch_decode(q[layer], *cache, planner.state, planner.workspace, return_lse=True)

    return planner.plan if compiled is None else reference("plan_decode", planner.state, compiled=compiled), run, 16


def prefill() -> Step:
    heads = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    planner = attn_ops.PrefillPlanner(BATCH, BATCH, PAGES, page_size=16, device="cuda", causal=True, **heads)
    q, cache, qo_indptr = random(LAYERS, BATCH, 32, 128), random(2, PAGES, 16, 8, 128), rows()

    def run(layer: int) -> tuple[Tensor, ...]:
        options = {"causal": True, "return_lse": True}
        return torch.ops.attn.batch_prefill(q[layer], *cache, planner.state, planner.workspace, **options)

    return lambda *table: planner.plan(qo_indptr, *table), run, 16


def mla(heads: int = 128, page_size: int = 64, compiled: bool | None = None) -> Step:
    sizes = {"num_qo_heads": heads, "num_kv_heads": 1, "head_dim": 576, "head_dim_vo": 512, "page_size": page_size}
    pages = PAGES * 16 // page_size
    planner = attn_ops.PrefillPlanner(BATCH, BATCH, pages, device="cuda", **sizes)
    q_nope, q_pe = random(LAYERS, BATCH, heads, 576).split((512, 64), -1)
    caches = random(pages, page_size, 512), random(pages, page_size, 64)

    def run(layer: int) -> tuple[Tensor, ...]:
        queries = q_nope[layer], q_pe[layer]
        return torch.ops.attn.batch_mla(*queries, *caches, planner.state, planner.workspace, return_lse=True)

    plan, qo_indptr = planner.plan, rows()
    if compiled is not None:
        plan = reference("plan_prefill", planner.state, compiled=compiled)
    return lambda *table: plan(qo_indptr, *table), run, page_size


def rows() -> Tensor:
    return torch.arange(BATCH + 1, dtype=torch.int32, device="cuda")


def page_table(lengths: list[int], page_size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    pages = [-(-n // page_size) for n in lengths]
    indices = torch.randperm(PAGES * 16 // page_size, generator=torch.Generator().manual_seed(seed))[: sum(pages)]
    last = [(n - 1) % page_size + 1 for n in lengths]
    return tuple(  # type: ignore[return-value]
        torch.as_tensor(t).to("cuda", torch.int32) for t in (torch.tensor([0, *pages]).cumsum(0), indices, last)
    )


STEPS: dict[str, Callable[[], Step]] = {
    "decode": decode,
    "fixed": lambda: decode(fixed_split_size=8),
    "prefill": prefill,
    "mla": mla,
    "mla of 16 heads": lambda: mla(16),
    "mla of 32 heads, pages of 1": lambda: mla(32, page_size=1),
    "decode, reference": lambda: decode(compiled=False),
    "mla, reference": lambda: mla(compiled=False),
    "decode, compiled reference": lambda: decode(compiled=True),
    "mla, compiled reference": lambda: mla(compiled=True),
}


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_plans_and_runs_of_layers_alternate(make: Callable[[], Step]) -> None:
    """Layers share partial results: no kernel stores its own before the preceding layer has combined them."""
    plan, run, page_size = make()
    tables = [page_table(lengths, page_size, seed) for seed, lengths in enumerate(LENGTHS)]
    outs: list[tuple[Tensor, ...]] = []
    plan(*tables[0])
    alone, graph = [torch.cuda.CUDAGraph() for _ in range(LAYERS)], torch.cuda.CUDAGraph()
    for layer, one in enumerate(alone):
        run(layer)
        with torch.cuda.graph(one):
            outs.append(run(layer))
    expected = []
    for table in tables:
        plan(*table)
        for one, result in zip(alone, outs, strict=True):
            torch.cuda.synchronize()
            one.replay()
            torch.cuda.synchronize()
            expected.append([t.clone() for t in result])
    with torch.cuda.graph(graph):
        results = []
        for table in tables:
            plan(*table)
            results += [run(layer) for layer in range(LAYERS)]
    for _ in range(REPLAYS):
        for t in (t for result in results for t in result):
            t.fill_(float("nan"))
        graph.replay()
        for actual, wanted in zip(results, expected, strict=True):
            for a, b in zip(actual, wanted, strict=True):
                assert torch.equal(a, b)
