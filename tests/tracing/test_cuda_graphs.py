"""Decode steps on a GPU that are captured or compiled once and replayed with other lengths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import attn_ops

pytestmark = pytest.mark.gpu

BATCH, PAGE, QO_HEADS, KV_HEADS, DIM, PAGES = 4, 16, 8, 2, 64, 200
LENGTHS = ([5, 700, 1, 33], [64, 0, 1500, 2], [0, 0, 0, 0], [400, 400, 400, 400])


class Step:
    """Tensors with fixed addresses, as an engine has them."""

    def __init__(self) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", generator=generator).bfloat16()

        self.q = random(BATCH, QO_HEADS, DIM)
        self.cache = random(PAGES, 2, PAGE, KV_HEADS, DIM)
        self.new = random(2, BATCH, KV_HEADS, DIM)
        self.planner = attn_ops.DecodePlanner(
            BATCH, PAGES, page_size=PAGE, num_qo_heads=QO_HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, device="cuda"
        )
        self.kv_indptr = torch.zeros(BATCH + 1, dtype=torch.int32, device="cuda")
        self.kv_indices = torch.randperm(PAGES, device="cuda", generator=generator).int()
        self.last = torch.ones(BATCH, dtype=torch.int32, device="cuda")

    def set_lengths(self, lengths: list[int]) -> None:
        pages = [-(-n // PAGE) for n in lengths]
        self.kv_indptr.copy_(torch.tensor([0, *pages]).cumsum(0))
        self.last.copy_(torch.tensor([(n - 1) % PAGE + 1 for n in lengths]))

    def plan(self) -> attn_ops.DecodePlan:
        return self.planner.plan(self.kv_indptr, self.kv_indices, self.last)

    def expected(self) -> tuple[Tensor, Tensor]:
        plan = self.planner.state
        return torch.ops.attn.batch_decode(
            self.q,
            self.cache[:, 0],
            self.cache[:, 1],
            plan,
            self.planner.workspace,
            return_lse=True,
            backend="reference",
        )


def _decode(q: Tensor, cache: Tensor, plan: attn_ops.DecodePlan, workspace: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.attn.batch_decode(q, cache[:, 0], cache[:, 1], plan, workspace, return_lse=True, backend="triton")


def _check(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(actual[0].float(), expected[0].float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-4, atol=1e-4)


def test_eager_step_never_synchronizes() -> None:
    step = Step()
    step.set_lengths(LENGTHS[0])
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            result = _decode(step.q, step.cache, step.plan(), step.planner.workspace)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    _check(result, step.expected())


def test_captured_plan_and_decode_follow_the_lengths() -> None:
    step = Step()
    step.set_lengths(LENGTHS[0])
    _decode(step.q, step.cache, step.plan(), step.planner.workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = _decode(step.q, step.cache, step.plan(), step.planner.workspace)
    for lengths in LENGTHS:
        step.set_lengths(lengths)
        graph.replay()
        _check(result, step.expected())


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_compiled_decode_follows_the_lengths(mode: str | None, dynamic: bool | None) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = Step()
    torch._dynamo.mark_static_address(step.cache, guard=False)
    compiled = torch.compile(_decode, fullgraph=True, mode=mode, dynamic=dynamic)
    with torch.no_grad():
        for lengths in (*LENGTHS, *LENGTHS):
            step.set_lengths(lengths)
            plan = step.plan()
            torch.compiler.cudagraph_mark_step_begin()
            _check(compiled(step.q, step.cache, plan, step.planner.workspace), step.expected())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_compiled_append_and_merge() -> None:
    torch._dynamo.reset()
    step = Step()

    def append_then_decode(
        new: Tensor, cache: Tensor, plan: attn_ops.DecodePlan, workspace: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = torch.arange(BATCH, dtype=torch.int32, device="cuda")
        k, v = cache[:, 0], cache[:, 1]
        torch.ops.attn.append_kv(new[0], new[1], k, v, rows, plan.kv_len[:BATCH] - 1, plan.kv_indices, plan.kv_indptr)
        out, lse = torch.ops.attn.batch_decode(step.q, k, v, plan, workspace, return_lse=True)
        return torch.ops.attn.merge_state(out, lse, out, lse)

    step.set_lengths(LENGTHS[0])
    plan, before = step.plan(), step.cache.clone()
    with torch.no_grad():
        expected = append_then_decode(step.new, before, plan, step.planner.workspace)
        compiled = torch.compile(append_then_decode, fullgraph=True)
        actual = compiled(step.new, step.cache, plan, step.planner.workspace)
    _check(actual, expected)
    assert torch.equal(step.cache, before)


def test_a_package_compiles(tmp_path) -> None:
    """Only compiled: Python and the package would have to share one C++ runtime to load it here."""

    class Module(torch.nn.Module):
        def forward(
            self, q: Tensor, cache: Tensor, plan: attn_ops.DecodePlan, workspace: Tensor
        ) -> tuple[Tensor, Tensor]:
            return _decode(q, cache, plan, workspace)

    step = Step()
    step.set_lengths(LENGTHS[0])
    args = (step.q, step.cache, step.plan(), step.planner.workspace)
    with torch.no_grad():
        program = torch.export.export(Module(), args)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "decode.pt2"))
    assert path.endswith(".pt2")
