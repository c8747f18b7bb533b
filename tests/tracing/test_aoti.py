"""AOTInductor: packages of decode and plan steps, loaded in Python and in a C++ process without Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cpp_runner
from helpers import decoder as d
from torch import Tensor
from tracing.conftest import Package, check_decode_steps

import attn_ops


def _compile(module: torch.nn.Module, args: tuple[Any, ...], path: Path) -> str:
    program = torch.export.export(module, args)
    return torch._inductor.aoti_compile_and_package(program, package_path=str(path))


@pytest.mark.slow
def test_decode_step_of_a_dynamic_batch(decoder_package: Package, tmp_path: Path) -> None:
    check_decode_steps(decoder_package.path, decoder_package.planner, 3, tmp_path)


class PlanStep(torch.nn.Module):
    def forward(
        self, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, plan: attn_ops.DecodePlan
    ) -> None:
        torch.ops.attn.plan_decode(kv_indptr, kv_indices, kv_last_page_len, plan)


@pytest.mark.gpu
def test_plan_and_decode_in_cpp_on_a_gpu(tmp_path: Path) -> None:
    planner = d.planner("cuda")
    indptr, indices, last = (t.cuda() for t in d.page_table([5, 3, 9, 1]))
    padded = torch.zeros(d.PAGES, dtype=torch.int32, device="cuda")
    plan = planner.plan(indptr, padded, last)
    model = d.decoder().cuda()
    plan_package = _compile(PlanStep(), (indptr, padded, last, plan), tmp_path / "plan.pt2")
    package = _compile(model, (*d.inputs("cuda"), plan, planner.workspace), tmp_path / "decoder.pt2")

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
