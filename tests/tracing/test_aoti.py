"""AOTInductor: packaged decode and plan steps in Python, and in a C++ process without Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import cpp_runner
from helpers import decoder as d
from tracing.test_export import DYNAMIC_BATCH

import attn_ops


def _package(tmp_path: Path, dynamic: bool) -> str:
    planner = d.planner()
    plan = planner.plan(*d.page_table([5, 3, 9, 1]))
    shapes = DYNAMIC_BATCH if dynamic else None
    program = torch.export.export(d.decoder(), (*d.inputs(), plan, planner.workspace), dynamic_shapes=shapes)
    return torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "decoder.pt2"))


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed batch", "dynamic batch"])
def test_decode_step_in_python_and_cpp(dynamic: bool, tmp_path: Path):
    package = _package(tmp_path, dynamic)
    loaded = torch._inductor.aoti_load_package(package)
    model, planner = d.decoder(), d.planner()
    for lengths in ([7, 0, 20, 2], [1, 48, 3, 9], [0, 0, 0, 0]):
        batch = 3 if dynamic else d.BATCH
        plan = planner.plan(*d.page_table(lengths[:batch]))
        x, *caches = d.inputs(batch=batch)
        eager, python, cpp = (d.clone(tuple(caches)) for _ in range(3))
        expected = model(x, *eager, plan, planner.workspace)
        torch.testing.assert_close(loaded(x, *python, plan, planner.workspace), expected)
        (result,), mutated = cpp_runner.run(package, [x, *cpp, *plan, planner.workspace], tmp_path)
        torch.testing.assert_close(result, expected)
        for want, in_python, in_cpp in zip(eager, python, mutated[1:3], strict=True):
            torch.testing.assert_close(in_python, want)
            torch.testing.assert_close(in_cpp, want)


class PlanStep(torch.nn.Module):
    def forward(self, kv_indptr, kv_indices, kv_last_page_len, plan):
        torch.ops.attn.plan_decode(kv_indptr, kv_indices, kv_last_page_len, plan)
        return plan.kv_len.sum()


def test_plan_step_in_cpp(tmp_path: Path):
    """A C++ engine plans without Python: the packaged plan op fills the plan that it is given."""
    planner = d.planner()
    indptr, indices, last = d.page_table([5, 3, 9, 1])
    padded = torch.zeros(d.PAGES, dtype=torch.int32)
    padded[: indices.shape[0]] = indices
    args = (indptr, padded, last, planner.plan(indptr, padded, last))
    program = torch.export.export(PlanStep(), args)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "plan.pt2"))

    indptr, indices, last = d.page_table([7, 0, 20, 2])
    padded[: indices.shape[0]] = indices
    expected = attn_ops.DecodePlan(*d.clone(planner.plan(indptr, padded, last)))
    blank = [torch.zeros_like(field) for field in expected]
    _, mutated = cpp_runner.run(package, [indptr, padded, last, *blank], tmp_path)
    for field, want, got in zip(expected._fields, expected, mutated[3:], strict=True):
        assert torch.equal(got, want), field
