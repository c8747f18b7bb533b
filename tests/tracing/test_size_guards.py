"""Exported programs and packages refuse sizes beyond those that they were exported for, and write nothing then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import cpp_runner
from helpers import decoder as d
from torch import Tensor
from torch.export import Dim
from tracing.conftest import Package

import attn_ops

MAX_BATCH, LENGTHS = 6, [5, 3, 9, 1, 0, 20, 7]
TOO_MANY = (
    "batch_decode: q has 7 rows and the plan capacity for 6 requests; expected max_batch of at least 7; "
    "make the planner with that max_batch"
)
FIXED = attn_ops.DecodePlan(*({} for _ in attn_ops.DecodePlan._fields))


def _refused(package: str, inputs: list[Tensor], message: str, folder: Path | None = None) -> None:
    """In Python and, in ``folder``, in a C++ process; no input is written."""
    copies = [t.clone() for t in inputs]
    with pytest.raises(RuntimeError) as raised:
        torch._inductor.aoti_load_package(package)(*inputs)
    if torch.__version__ >= "2.13":  # before, the loader prints the message and raises another
        assert message in str(raised.value)
    left = inputs
    if folder is not None:
        text, left = cpp_runner.refusal(package, inputs, folder)
        assert message in text
    for position, (before, python, cpp) in enumerate(zip(copies, inputs, left, strict=True)):
        assert torch.equal(before, python), position
        assert torch.equal(before, cpp), position


@pytest.mark.slow
def test_decode_step_refuses_more_requests_than_the_plan_has_room_for(decoder_package: Package, tmp_path: Path) -> None:
    package, planner, model = decoder_package.path, decoder_package.planner, d.decoder()
    plan = planner.plan(*d.page_table(LENGTHS[:4]))
    shapes = {"x": {0: Dim("batch", min=1, max=MAX_BATCH)}, "first": {}, "second": {}, "plan": FIXED, "workspace": {}}
    program = torch.export.export(model, (*d.inputs(), plan, planner.workspace), dynamic_shapes=shapes)

    x, *caches = d.inputs(batch=7)
    with pytest.raises(AssertionError, match="<= 6"):
        program.module()(x, *caches, plan, planner.workspace)
    with pytest.raises(RuntimeError, match="<= 6, but got 7"):
        program.module(check_guards=False)(x, *caches, plan, planner.workspace)
    _refused(package, [x, *d.inputs(batch=7)[1:], *plan, planner.workspace], TOO_MANY, tmp_path)

    short = [*plan[:4], plan.work[:-1], *plan[5:]]
    message = f"package: size 0 of input 7 is {plan.work.shape[0] - 1}; expected {plan.work.shape[0]}; pass tensors"
    _refused(package, [*d.inputs(), *short, planner.workspace], message, tmp_path)
    strided = [t.expand(2, -1, -1, -1, -1, -1)[1].transpose(0, 1).contiguous().transpose(0, 1) for t in caches]
    _refused(package, [d.inputs()[0], *strided, *plan, planner.workspace], "package: stride 0 of input 1 is ")
    shared = [t[:, :1].expand(t.shape) for t in caches]  # keys and values in one place, in a dimension of size 2
    _refused(package, [d.inputs()[0], *shared, *plan, planner.workspace], "package: stride 1 of input 1 is 0; expected")
    _refused(
        package,
        [d.inputs()[0].double(), *caches, *plan, planner.workspace],
        "package: the dtype number of input 0",
    )

    loaded = torch._inductor.aoti_load_package(package)
    for batch in (6, 2, 1):
        plan = planner.plan(*d.page_table(LENGTHS[:batch]))
        x, *caches = d.inputs(batch=batch)
        eager, python = d.clone(tuple(caches)), d.clone(tuple(caches))
        expected = model(x, *eager, plan, planner.workspace)
        torch.testing.assert_close(loaded(x, *python, plan, planner.workspace), expected)
        if batch == MAX_BATCH:
            (result,), _ = cpp_runner.run(package, [x, *caches, *plan, planner.workspace], tmp_path)
            torch.testing.assert_close(result, expected)


class PlanStep(torch.nn.Module):
    def forward(
        self, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, plan: attn_ops.DecodePlan
    ) -> Tensor:
        torch.ops.attn.plan_decode(kv_indptr, kv_indices, kv_last_page_len, plan)
        return plan.kv_len.sum()


@pytest.mark.slow
def test_plan_step_fills_a_plan_and_refuses_a_page_table_beyond_its_capacity(tmp_path: Path) -> None:
    planner = d.planner(max_batch=MAX_BATCH)
    batch, pages = Dim("batch", min=1, max=MAX_BATCH), Dim("pages", min=1, max=d.PAGES)
    shapes = {"kv_indptr": {0: batch + 1}, "kv_indices": {0: pages}, "kv_last_page_len": {0: batch}, "plan": FIXED}
    table = d.page_table(LENGTHS[:4])
    program = torch.export.export(PlanStep(), (*table, planner.state), dynamic_shapes=shapes)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "plan.pt2"))

    requests = "plan_decode: the batch has 7 requests and the plan capacity for 6; expected max_batch of at least 7"
    _refused(package, [*d.page_table(LENGTHS), *planner.state], requests, tmp_path)
    indptr, indices, last = table
    pages = "plan_decode: the batch has 129 pages and the plan capacity for 128; expected max_pages of at least 129"
    many = torch.zeros(d.PAGES + 1, dtype=torch.int32)
    _refused(package, [indptr, many, last, *planner.state], pages, tmp_path)
    message = "package: size 0 of input 2 is 3; expected 4"
    _refused(package, [indptr, indices, last[:3], *planner.state], message)

    table = d.page_table(LENGTHS[:6])
    padded = torch.zeros(d.PAGES, dtype=torch.int32)
    padded[: len(indices)] = indices
    for fits in (table, (indptr, padded, last)):
        expected = attn_ops.DecodePlan(*d.clone(planner.plan(*fits)))
        blank = [torch.zeros_like(field) for field in expected]
        (total,), mutated = cpp_runner.run(package, [*fits, *blank], tmp_path)
        assert total == expected.kv_len.sum()
        for field, want, got in zip(expected._fields, expected, mutated[3:], strict=True):
            assert torch.equal(got, want), field


class FirstRows(torch.nn.Module):
    def forward(self, v: Tensor, s: Tensor) -> Tensor:
        return torch.ops.attn.merge_state(v[:8], s[:8], v[:8], s[:8])[0]


@pytest.mark.slow
def test_package_refuses_sizes_below_the_minimum_of_a_dimension(tmp_path: Path) -> None:
    rows = Dim("rows", min=8, max=64)
    inputs = torch.randn(12, 4, 16), torch.randn(12, 4)
    program = torch.export.export(FirstRows(), inputs, dynamic_shapes={"v": {0: rows}, "s": {0: rows}})
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "rows.pt2"))

    for size in (7, 4, 0):
        message = f"package: size 0 of input 0 is {size}; expected at least 8; pass tensors"
        _refused(package, [t[:size] for t in inputs], message, tmp_path)
    loaded = torch._inductor.aoti_load_package(package)
    for size in (8, 12):
        torch.testing.assert_close(loaded(*(t[:size] for t in inputs)), inputs[0][:8])


class AllRows(torch.nn.Module):
    def forward(self, v: Tensor, s: Tensor) -> Tensor:
        return torch.ops.attn.merge_state(v, s, v, s)[0]


@pytest.mark.slow
@pytest.mark.parametrize("least", [1, 3])
def test_package_runs_one_request_of_several_rows(least: int, tmp_path: Path) -> None:
    """The smallest size that PyTorch takes for ``batch`` is no minimum, also where a size is a multiple of it."""
    batch = Dim("batch", min=least, max=16)
    inputs = torch.randn(12, 4, 16), torch.randn(12, 4)
    program = torch.export.export(AllRows(), inputs, dynamic_shapes={"v": {0: 4 * batch}, "s": {0: 4 * batch}})
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "rows.pt2"))

    loaded = torch._inductor.aoti_load_package(package)
    for size in (4, 12, 0):
        torch.testing.assert_close(loaded(*(t[:size] for t in inputs)), inputs[0][:size])
    long = [t.repeat(6, *[1] * (t.dim() - 1)) for t in inputs]
    _refused(package, [t[:68] for t in long], "package: size 0 of input 0 is 68; expected at most 64; pass tensors")


@pytest.mark.slow
def test_package_refuses_sizes_below_the_minimum_of_a_derived_dimension(tmp_path: Path) -> None:
    batch = Dim("batch", min=5, max=16)
    inputs = torch.randn(24, 4, 16), torch.randn(24, 4)
    program = torch.export.export(AllRows(), inputs, dynamic_shapes={"v": {0: 4 * batch}, "s": {0: 4 * batch}})
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "rows.pt2"))

    message = "package: size 0 of input 0 is 16; expected at least 20; pass tensors"
    _refused(package, [t[:16] for t in inputs], message)
