"""The CUDA MLA kernel against the oracle, in graphs, and while memory is busy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.calls import positional
from helpers.mla_cases import Mla, check
from helpers.page_tables import indptr, page_table
from helpers.tensors import shifted
from torch import Tensor

import attn_ops
from attn_ops.ops.inductor import mark_static

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

BASE = Mla(
    "base", (1, 1, 0, 1), (70, 300, 0, 1000), (512, 64), heads=128, page_size=64, dtype=torch.bfloat16, sm_scale=None
)
"""Two CTAs in each cluster, tiles in which the KV ends, and a request without tokens."""

WHOLE: dict[str, Any] = {"planner": {"num_ctas": 0}}
SPLIT: dict[str, Any] = {"planner": {"num_ctas": 12}}
FP8: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn}
ROWS: dict[str, Any] = {"qo_lens": (3, 1, 70), "kv_lens": (200, 2, 310), "causal": True}

CASES = [
    BASE,
    *(replace(BASE, name=f"{heads} heads", heads=heads) for heads in (1, 3, 16, 20, 32, 64, 80, 192, 256)),
    *(
        replace(BASE, name=f"{heads} heads, {name}", heads=heads, **options)
        for heads in (16, 128)
        for name, options in {
            "whole": WHOLE,
            "split": SPLIT,
            "float16": {"dtype": torch.float16},
            "pages of 128": {"page_size": 128},
            "pages of 192, packed": {"page_size": 192, "packed": True},
            "whole tiles": {"kv_lens": (64, 128, 0, 192), **WHOLE},
            "one token": {"kv_lens": (1, 1, 0, 1)},
            "all but one token": {"kv_lens": (63, 127, 0, 191), **WHOLE},
            "one more token": {"kv_lens": (65, 129, 0, 193), **WHOLE},
            "no tokens": {"kv_lens": (0, 0, 0, 0)},
            "large logits": {"sm_scale": 5.0},
            "rows": {**ROWS, "causal": False},
            "causal": ROWS,
            "causal, packed": {**ROWS, "packed": True, "page_size": 128},
            "causal, split": {"qo_lens": (4, 1, 2, 0), "kv_lens": (900, 0, 700, 50), "causal": True, **SPLIT},
            "causal, more rows than tokens": {"qo_lens": (5, 9), "kv_lens": (3, 70), "causal": True},
            "tiles of one row": {**ROWS, "planner": {"tile_rows": 1}},
            "tiles of three rows": {**ROWS, "planner": {"tile_rows": 3}},
            "fixed split": {
                "qo_lens": (8, 6),
                "kv_lens": (130, 195),
                "causal": True,
                "planner": {"tile_rows": 8, "fixed_split_size": 1},
            },
            "float32 output": {"out_dtype": torch.float32},
            "FP8 output": {"out_dtype": torch.float8_e4m3fn},
            "many units": {"qo_lens": (1,) * 150, "kv_lens": tuple(range(0, 600, 4)), **WHOLE},
        }.items()
    ),
    *(replace(BASE, name=f"FP8, {heads} heads", heads=heads, **FP8) for heads in (1, 16, 20, 64, 80, 128, 192)),
    *(
        replace(BASE, name=f"FP8, {heads} heads, {name}", **FP8 | {"heads": heads} | options)
        for heads in (16, 64, 128)
        for name, options in {
            "whole": WHOLE,
            "split": SPLIT,
            "scales": {"kv_scale": (0.5, 3.0)},
            "e5m2": {"kv_dtype": torch.float8_e5m2, "dtype": torch.float16},
            "pages of 192, packed": {"page_size": 192, "packed": True},
            "whole tiles": {"kv_lens": (64, 128, 0, 192), **WHOLE},
            "all but one token": {"kv_lens": (63, 127, 0, 191), **WHOLE},
            "no tokens": {"kv_lens": (0, 0, 0, 0)},
            "causal": ROWS,
            "tiles of three rows": {**ROWS, "heads": 5 * heads // 16, "planner": {"tile_rows": 3}},
            "many units": {"qo_lens": (1,) * 150, "kv_lens": tuple(range(0, 600, 4)), **WHOLE},
        }.items()
    ),
]


BY_TOKENS = [
    replace(case, name=f"pages of {size}, {case}", page_size=size)
    for i, case in enumerate(c for c in CASES if "pages" not in c.name)
    for size in ((1, 3, 16, 100)[i % 4],)
]
"""Page sizes that are not multiples of a KV tile."""


@pytest.mark.parametrize("case", BY_TOKENS, ids=str)
def test_pages_of_any_size_match_oracle(case: Mla, launches: list[Any]) -> None:
    check(case, "cuda", "cuda")
    assert all(dict(one.macros)["KV_CP_ASYNC"] for one in launches)
    assert launches


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(case: Mla, launches: list[Any]) -> None:
    check(case, "cuda", "cuda")
    assert launches


@pytest.mark.parametrize(
    ("heads", "cluster", "splits"), [(16, None, 2), (64, 1, 2), (128, 2, 1), (192, 1, 2), (256, 2, 1)]
)
def test_two_ctas_share_tiles_or_divide_them(heads: int, cluster: int | None, splits: int, launches: list[Any]) -> None:
    """They divide them if one would have no rows of its own, and not in a plan that splits nothing."""
    check(replace(BASE, heads=heads, planner={"tile_rows": 1}), "cuda", "cuda")
    check(replace(BASE, heads=heads, planner={"tile_rows": 1, "num_ctas": 0}), "cuda", "cuda")
    macros = [dict(one.macros) for one in launches]
    assert {(m.get("CLUSTER"), m["SPLITS"]) for m in macros} == {(cluster, splits), (cluster, 1)}


@pytest.mark.parametrize("heads", [16, 48, 128])
def test_rows_beyond_the_batch_are_zero(heads: int, launches: list[Any]) -> None:
    sizes = {"page_size": 64, "num_qo_heads": heads, "num_kv_heads": 1, "head_dim": 576, "head_dim_vo": 512}
    planner = attn_ops.PrefillPlanner(4, 90, 30, **sizes, device="cuda")
    plan = planner.plan(indptr((1, 1)), *page_table((100, 70), 64))
    q_nope, q_pe = torch.ones(90, heads, 576, device="cuda", dtype=torch.bfloat16).split((512, 64), -1)
    ckv, kpe = torch.ones(30, 64, 576, device="cuda", dtype=torch.bfloat16).split((512, 64), -1)
    tensors = q_nope, q_pe, ckv, kpe
    out, lse = torch.ops.attn.batch_mla(*tensors, plan, planner.workspace, return_lse=True, backend="cuda")
    assert out[2:].eq(0).all()
    assert lse[2:].eq(-torch.inf).all()
    assert out[:2].eq(1).all()
    none = torch.ops.attn.batch_mla(
        *(t[:0] for t in tensors[:2]), *tensors[2:], plan, planner.workspace, backend="cuda"
    )
    assert none[0].shape == (0, heads, 512)
    torch.cuda.synchronize()
    assert launches


class Decode:
    """A step of one row for each of ``batch`` requests of ``tokens`` tokens."""

    def __init__(self, batch: int, tokens: int, heads: int, kv_dtype: torch.dtype = torch.bfloat16) -> None:
        page_size, device = 64, "cuda"
        pages = batch * -(-tokens // page_size)
        sizes = {"num_qo_heads": heads, "num_kv_heads": 1, "head_dim": 576, "head_dim_vo": 512}
        self.planner = attn_ops.PrefillPlanner(batch, batch, pages, page_size=page_size, **sizes, device=device)
        self.planner.plan(indptr((1,) * batch), *page_table((tokens,) * batch, page_size))
        q_nope, q_pe = torch.randn(batch, heads, 576, device=device, dtype=torch.bfloat16).split((512, 64), -1)
        ckv, kpe = (
            torch.randn(pages, page_size, columns, device=device, dtype=torch.bfloat16).to(kv_dtype)
            for columns in (512, 64)
        )
        self.tensors = {"q_nope": q_nope, "q_pe": q_pe, "ckv_cache": ckv, "kpe_cache": kpe}

    def arguments(self) -> dict[str, Any]:
        return {**self.tensors, "plan": self.planner.state, "workspace": self.planner.workspace}

    def run(self, **changes: Any) -> Tensor:
        return torch.ops.attn.batch_mla(**self.arguments() | changes, backend="cuda")[0]


@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "kv_dtype"),
    [
        (40, 4000, 128, torch.bfloat16),
        (300, 700, 128, torch.bfloat16),
        (64, 3001, 16, torch.bfloat16),
        (64, 3001, 16, torch.float8_e4m3fn),
        (7, 9000, 80, torch.bfloat16),
    ],
)
def test_the_same_bits_while_memory_is_busy(
    batch: int, tokens: int, heads: int, kv_dtype: torch.dtype, launches: list[Any]
) -> None:
    """Tiles then arrive in no order, and consumers and CTAs wait for each other in every order."""
    step, busy = Decode(batch, tokens, heads, kv_dtype), torch.cuda.Stream()
    alone = step.run()
    noise = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    results = []
    for _ in range(50):
        with torch.cuda.stream(busy):
            noise.add_(1)
        results.append(step.run())
    torch.cuda.synchronize()
    assert all(torch.equal(alone, out) for out in results)
    assert launches


@pytest.mark.parametrize("heads", [16, 128])
def test_a_cuda_graph_runs_new_plans(heads: int, launches: list[Any]) -> None:
    """A captured call, after the plan's tensors have changed, gives what an eager call gives."""
    step = Decode(6, 1500, heads)
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step.run()
    for lengths in ((1500, 3, 700, 64, 0, 1), (1,) * 6, (1000,) * 6):
        step.planner.plan(indptr((1,) * 6), *page_table(lengths, 64))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, step.run())
    assert launches


@pytest.mark.parametrize("shift", ["plan", "workspace"])
def test_plan_and_workspace_may_lie_at_any_multiple_of_four_bytes(shift: str, launches: list[Any]) -> None:
    step = Decode(3, 3000, 128)

    plan, workspace = step.planner.state, step.planner.workspace
    changed = type(plan)(*map(shifted, plan)) if shift == "plan" else shifted(workspace)
    assert (changed.work if shift == "plan" else changed).data_ptr() % 8
    out, expected = step.run(**{shift: changed}), step.run()
    torch.testing.assert_close(out, expected)  # the combine kernel adds splits in another order
    if shift == "workspace":
        assert torch.equal(changed.view(torch.int32), workspace.view(torch.int32))
    assert launches


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_graphs_call_the_op(mode: str | None, launches: list[Any]) -> None:
    torch._dynamo.reset()
    step = Decode(3, 500, 128)
    expected = step.run()
    mark_static(*step.planner.state, step.planner.workspace)
    inputs, options = positional("batch_mla", step.arguments())

    def call(*args: Any) -> Any:
        return torch.ops.attn.batch_mla(args[0] * 1, *args[1:], **options, backend="cuda")[0]

    compiled = torch.compile(call, fullgraph=True, mode=mode)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(compiled(*inputs).clone(), expected)
    assert launches
