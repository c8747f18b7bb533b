"""planner.plan() in a graph: page tables on the host are planned there, without a check of their contents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.page_tables import int32
from torch import Tensor, nn

import attn_ops
from attn_ops import errors

SIZES = {"page_size": 4, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16}
TABLE = int32([0, 2, 3]), int32([5, 1, 7]), int32([3, 4])
OTHER = int32([0, 1, 3]), int32([0, 2, 6]), int32([1, 2])


class Decode(nn.Module):
    def __init__(self, validate: bool | None = None, **options: Any) -> None:
        super().__init__()
        self.planner, self.validate = attn_ops.DecodePlanner(4, 8, cache_pages=8, **SIZES, **options), validate

    def forward(self, *table: Tensor) -> tuple[Tensor, Tensor]:
        plan = self.planner.plan(*table, validate=self.validate)
        return plan.kv_len.clone(), plan.work.clone()


class Prefill(nn.Module):
    def __init__(self, validate: bool | None = None, **options: Any) -> None:
        super().__init__()
        self.planner, self.validate = attn_ops.PrefillPlanner(4, 9, 8, cache_pages=8, **SIZES, **options), validate

    def forward(self, *table: Tensor) -> tuple[Tensor, Tensor]:
        plan = self.planner.plan(int32([0, 2, 5]), *table, validate=self.validate)
        return plan.kv_len.clone(), plan.work.clone()


STEPS = [
    pytest.param(Decode, {}, id="decode"),
    pytest.param(Decode, {"fixed_split_size": 16}, id="decode, fixed splits"),
    pytest.param(Prefill, {}, id="prefill"),
    pytest.param(Prefill, {"fixed_split_size": 16}, id="prefill, fixed splits"),
]


@pytest.mark.parametrize(("step", "options"), STEPS)
def test_compiled_plan_of_a_host_table(step: Any, options: dict[str, Any]) -> None:
    compiled = torch.compile(step(**options), fullgraph=True, backend="aot_eager")
    for i, table in enumerate((TABLE, OTHER)):
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            for got, want in zip(compiled(*table), step(**options)(*table), strict=True):
                assert torch.equal(got, want)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize(("step", "options"), STEPS)
def test_exported_plan_of_a_host_table(step: Any, options: dict[str, Any], strict: bool) -> None:
    program = torch.export.export(step(**options), TABLE, strict=strict)
    for table in (TABLE, OTHER):
        for got, want in zip(program.module()(*table), step(**options)(*table), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("step", [Decode, Prefill])
def test_sizes_are_checked_in_a_graph(step: Any) -> None:
    table = int32([0, *[9] * 5]), int32(range(9)), int32([1] * 5)
    with pytest.raises(Exception, match=r"requests and the plan capacity for 4|expected \[6\] for the 5 requests"):
        torch.compile(step(), fullgraph=True, backend="aot_eager")(*table)
    with pytest.raises(Exception, match="the batch has 9 pages and the plan capacity for 8"):
        torch.compile(step(), fullgraph=True, backend="aot_eager")(TABLE[0], int32(range(9)), TABLE[2])


@pytest.mark.parametrize("step", [Decode, Prefill])
def test_contents_of_a_traced_table_cannot_be_validated(step: Any) -> None:
    with pytest.raises(errors.OptionError, match="validate is True for a page table that is traced or fake"):
        torch.export.export(step(validate=True), TABLE, strict=False)
    with pytest.raises(Exception, match="validate is True for a page table that is traced or fake"):
        torch.compile(step(validate=True), fullgraph=True, backend="aot_eager")(*TABLE)


@pytest.mark.parametrize("step", [Decode, Prefill])
def test_eager_plan_of_a_host_table_is_still_validated(step: Any) -> None:
    with pytest.raises(errors.PageTableError, match="a page of the cache, 0 to 7"):
        step()(TABLE[0], int32([5, 8, 7]), TABLE[2])
