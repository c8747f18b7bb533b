"""``torch.export``: strict and non-strict, saved and loaded, with a dynamic batch, one node per op."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.fx.experimental._config
from expecttest import assert_expected_inline
from helpers import decoder as d
from torch.export import Dim

import attn_ops

DYNAMIC_BATCH = {
    "x": {0: Dim("batch", min=1, max=d.BATCH)},
    "first": {},
    "second": {},
    "plan": attn_ops.DecodePlan(*({} for _ in attn_ops.DecodePlan._fields)),
    "workspace": {},
}


def export(strict: bool = False, dynamic: bool = False) -> torch.export.ExportedProgram:
    planner = d.planner()
    plan = planner.plan(*d.page_table([5, 3, 9, 1]))
    shapes = DYNAMIC_BATCH if dynamic else None
    return torch.export.export(
        d.decoder(), (*d.inputs(), plan, planner.workspace), dynamic_shapes=shapes, strict=strict
    )


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
def test_export_save_load(strict: bool, dynamic: bool, tmp_path: Path) -> None:
    torch.export.save(export(strict, dynamic), tmp_path / "decoder.pt2")
    loaded = torch.export.load(tmp_path / "decoder.pt2").module()
    model, planner = d.decoder(), d.planner()
    for lengths in ([7, 0, 20, 2], [1, 48, 3, 9]):
        batch = 3 if dynamic else d.BATCH
        plan = planner.plan(*d.page_table(lengths[:batch]))
        x, *caches = d.inputs(batch=batch)
        eager_caches, loaded_caches = d.clone(tuple(caches)), d.clone(tuple(caches))
        expected = model(x, *eager_caches, plan, planner.workspace)
        torch.testing.assert_close(loaded(x, *loaded_caches, plan, planner.workspace), expected)
        for eager, other in zip(eager_caches, loaded_caches, strict=True):
            torch.testing.assert_close(other, eager)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_an_example_of_one_request_exports_dynamically(strict: bool) -> None:
    """By the recipe in docs/guide/export.md. Without it PyTorch specializes the batch to 1."""
    model, planner = d.decoder(), d.planner()
    plan = planner.plan(*d.page_table([5]))
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        args = (*d.inputs(batch=1), plan, planner.workspace)
        program = torch.export.export(model, args, dynamic_shapes=DYNAMIC_BATCH, strict=strict)
    for batch in (3, 1):
        plan = planner.plan(*d.page_table([5, 3, 9][:batch]))
        x, *caches = d.inputs(batch=batch)
        expected = model(x, *d.clone(tuple(caches)), plan, planner.workspace)
        torch.testing.assert_close(program.module()(x, *caches, plan, planner.workspace), expected)


def test_functional_graph_lists_mutated_inputs() -> None:
    """After decomposition to functional aten, the caches are outputs that the signature lists as mutated inputs."""
    program = export().run_decompositions()
    targets = {spec.target for spec in program.graph_signature.output_specs if "MUTATION" in spec.kind.name}
    assert targets == {"first", "second", "workspace"}


class Attention(torch.nn.Module):
    def forward(self, q, k, v, k_cache, v_cache, rows, plan, workspace):
        position = plan.kv_len[: q.shape[0]] - 1
        torch.ops.attn.append_kv(k, v, k_cache, v_cache, rows, position, plan.kv_indices, plan.kv_indptr)
        return torch.ops.attn.batch_decode(q, k_cache, v_cache, plan, workspace, return_lse=True)


def test_exported_graph_snapshot() -> None:
    planner = d.planner()
    plan = planner.plan(*d.page_table([5, 3, 9, 1]))
    cache = torch.zeros(d.PAGES, 2, d.PAGE, d.KV_HEADS, d.DIM)
    q = torch.zeros(d.BATCH, d.QO_HEADS, d.DIM)
    k = torch.zeros(d.BATCH, d.KV_HEADS, d.DIM)
    rows = torch.arange(d.BATCH, dtype=torch.int32)
    args = (q, k, k.clone(), cache[:, 0], cache[:, 1], rows, plan, planner.workspace)
    graph = torch.export.export(Attention(), args).graph
    calls = [f"{node.name} = {node.target}{node.args}{node.kwargs}" for node in graph.nodes if node.op != "placeholder"]
    assert_expected_inline(
        "\n".join(calls),
        """\
slice_1 = aten.slice.Tensor(plan_kv_len, 0, 0, 4){}
sub = aten.sub.Tensor(slice_1, 1){}
append_kv = attn.append_kv.default(k, v, k_cache, v_cache, rows, sub, plan_kv_indices, plan_kv_indptr){}
batch_decode = attn.batch_decode.default(q, k_cache, v_cache, [plan_problem, plan_kv_indptr, plan_kv_indices, plan_kv_len, plan_work, plan_cta_indptr, plan_merge_indptr, plan_split_counters], workspace){'return_lse': True}
getitem = <built-in function getitem>(batch_decode, 0){}
getitem_1 = <built-in function getitem>(batch_decode, 1){}
output = output((getitem, getitem_1),){}""",  # noqa: E501
    )
