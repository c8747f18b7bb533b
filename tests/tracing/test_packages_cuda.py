"""AOTInductor packages with Triton kernels in a C++ process: no Python, no attn_ops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import cpp_runner
from helpers import decoder as d

import attn_ops

pytestmark = pytest.mark.gpu


class PlanStep(torch.nn.Module):
    def forward(self, kv_indptr, kv_indices, kv_last_page_len, plan):
        torch.ops.attn.plan_decode(kv_indptr, kv_indices, kv_last_page_len, plan)


def _package(module: torch.nn.Module, args: tuple, path: Path) -> str:
    return torch._inductor.aoti_compile_and_package(torch.export.export(module, args), package_path=str(path))


@torch.no_grad()
def test_plan_and_decode_in_cpp(tmp_path: Path):
    planner = d.planner("cuda")
    indptr, indices, last = (t.cuda() for t in d.page_table([5, 3, 9, 1]))
    padded = torch.zeros(d.PAGES, dtype=torch.int32, device="cuda")
    plan = planner.plan(indptr, padded, last)
    model = d.decoder().cuda()
    plan_package = _package(PlanStep(), (indptr, padded, last, plan), tmp_path / "plan.pt2")
    package = _package(model, (*d.inputs("cuda"), plan, planner.workspace), tmp_path / "decoder.pt2")

    for lengths in ([7, 0, 20, 2], [48, 1, 3, 9], [0, 0, 0, 0]):
        indptr, indices, last = (t.cuda() for t in d.page_table(lengths))
        padded[: indices.shape[0]] = indices
        blank = [torch.zeros_like(field) for field in plan]
        _, planned = cpp_runner.run(plan_package, [indptr, padded, last, *blank], tmp_path)
        expected_plan = planner.plan(indptr, padded, last)
        for field, want, got in zip(attn_ops.DecodePlan._fields, expected_plan, planned[3:], strict=True):
            assert torch.equal(got, want.cpu()), field

        x, *caches = d.inputs("cuda")
        eager = d.clone(tuple(caches))
        expected = model(x, *eager, expected_plan, planner.workspace)
        inputs = [x, *caches, *(t.cuda() for t in planned[3:]), planner.workspace]
        (out,), mutated = cpp_runner.run(package, inputs, tmp_path)
        torch.testing.assert_close(out, expected.cpu(), rtol=1e-3, atol=1e-3)
        for want, got in zip(eager, mutated[1:3], strict=True):
            torch.testing.assert_close(got, want.cpu(), rtol=1e-3, atol=1e-3)
