"""Planners on the caller's memory: ``storage`` becomes fields of the plan and the workspace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.page_tables import int32, page_table
from torch import Tensor

from attn_ops import DecodePlanner, PrefillPlanner
from attn_ops.errors import (
    ArgumentError,
    ArgumentTypeError,
    AttnOpsError,
    CapacityError,
    DeviceError,
    DTypeError,
    ShapeError,
)
from attn_ops.plan.state import workspace_size

SIZES: dict[str, Any] = {"page_size": 16, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "num_ctas": 4}
LENGTHS = (300, 0, 17)


def _planner(kind: str, storage: dict[str, Tensor] | None = None) -> Any:
    if kind == "decode":
        return DecodePlanner(4, 40, storage=storage, **SIZES)
    return PrefillPlanner(4, 8, 40, storage=storage, **SIZES)


def _table(kind: str) -> list[Tensor]:
    return [*([] if kind == "decode" else [int32([0, 3, 3, 8])]), *page_table(LENGTHS, 16)]


def _storage(planner: Any) -> dict[str, Tensor]:
    """Memory for all of the plan and the workspace, with garbage in it."""
    fields = {name: torch.full_like(t, 7) for name, t in planner.state._asdict().items() if name != "problem"}
    return {**fields, "workspace": torch.full_like(planner.workspace, 7.0)}


each_kind = pytest.mark.parametrize("kind", ["decode", "prefill"])


@each_kind
def test_the_plan_is_made_in_storage(kind: str) -> None:
    expected = _planner(kind)
    storage = _storage(expected)
    planner = _planner(kind, storage)
    assert all(getattr(planner.state, name) is t for name, t in storage.items() if name != "workspace")
    assert planner.workspace is storage["workspace"]
    plan = planner.plan(*_table(kind))
    plan.kv_indices[int(plan.kv_indptr[-1]) :] = 0  # planning writes page numbers up to the last page
    assert all(map(torch.equal, plan, expected.plan(*_table(kind))))
    assert all(getattr(plan, name) is t for name, t in storage.items() if name != "workspace")


@each_kind
def test_storage_of_some_fields_leaves_the_others_to_the_planner(kind: str) -> None:
    kv_len = int32([7, 7, 7, 7])
    planner = _planner(kind, {"kv_len": kv_len})
    assert kv_len.tolist() == [7, 7, 7, 7], "storage was written before plan()"
    planner.plan(*_table(kind))
    assert kv_len.tolist() == [300, 0, 17, 0]
    assert planner.workspace.shape[0] == workspace_size(planner.state)


@each_kind
def test_attention_runs_on_storage(kind: str) -> None:
    owner, borrower = _planner(kind), _planner(kind, _storage(_planner(kind)))
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3 if kind == "decode" else 8, 4, 16, generator=generator)
    cache = torch.randn(2, 40, 16, 2, 16, generator=generator)
    op = torch.ops.attn.batch_decode if kind == "decode" else torch.ops.attn.batch_prefill
    results = [op(q, *cache, p.plan(*_table(kind)), p.workspace, return_lse=True) for p in (owner, borrower)]
    assert all(map(torch.equal, *results))


@each_kind
def test_the_workspace_may_be_larger_or_left_out(kind: str) -> None:
    needed = workspace_size(_planner(kind).state)
    assert needed
    for elements in (needed + 5, 0):
        workspace = torch.zeros(elements)
        assert _planner(kind, {"workspace": workspace}).workspace is workspace


@each_kind
def test_storage_may_be_slices_of_one_tensor(kind: str) -> None:
    one = torch.zeros(9, dtype=torch.int32)
    planner = _planner(kind, {"kv_indptr": one[4:], "kv_len": one[:4]})
    planner.plan(*_table(kind))
    assert one[4:].equal(planner.state.kv_indptr)
    assert one[:4].equal(planner.state.kv_len)
    assert one[:4].any()


def test_an_odd_number_of_splits_is_rounded_down() -> None:
    """A tile that is split has at least two splits."""
    sizes = {**SIZES, "num_ctas": 5}
    expected = PrefillPlanner(4, 8, 40, **SIZES)
    planner = PrefillPlanner(4, 8, 40, storage=_storage(expected), **sizes)
    assert [t.shape for t in planner.state] == [t.shape for t in expected.state]


SHARED = torch.zeros(999, dtype=torch.int32)

BAD: list[tuple[dict[str, Any], type[AttnOpsError], str]] = [
    ({"kv_length": int32([0] * 4)}, ArgumentError, r"\['kv_length'\]: there is no such field; expected .*kv_len.*; c"),
    ({"problem": int32([0] * 4)}, ArgumentError, r"\['problem'\]: there is no such field; expected .*kv_len.*; c"),
    ({"kv_len": [0] * 4}, ArgumentTypeError, r"\['kv_len'\]: it is of type list; expected a tensor; pass"),
    ({"kv_len": SHARED[1:5], "kv_indptr": SHARED[4:9]}, ArgumentError, r"\['kv_indptr'\]: it shares memory with sto"),
    ({"kv_indptr": SHARED[:5], "workspace": SHARED[4:].view(torch.float32)}, ArgumentError, r"\['workspace'\]: it sha"),
    ({"kv_len": torch.zeros(4, dtype=torch.int64)}, DTypeError, r"\['kv_len'\]: it is int64; expected int32; allocate"),
    (
        {"kv_len": torch.zeros(4, dtype=torch.int32, device="meta")},
        DeviceError,
        r"\['kv_len'\]: it is on meta; expected cpu, where the plan is; allocate",
    ),
    ({"kv_len": int32([0] * 8)[::2]}, ShapeError, r"\['kv_len'\]: it is \[4\] with strides \[2\]; expected a contig"),
    ({"kv_len": int32([0] * 3)}, ShapeError, r"\['kv_len'\]: it is \[3\]; expected \[4\]; allocate"),
    ({"kv_len": int32([0] * 5)}, ShapeError, r"\['kv_len'\]: it is \[5\]; expected \[4\]; allocate"),
    ({"kv_indptr": int32([0] * 4)}, ShapeError, r"\['kv_indptr'\]: it is \[4\]; expected \[5\]; allocate"),
    ({"work": torch.zeros(8, 7, dtype=torch.int32)}, ShapeError, r"\['work'\]: it is \[8, 7\]; expected \[\d+, 8\]; a"),
    ({"workspace": torch.zeros(999, dtype=torch.float16)}, DTypeError, r"\['workspace'\]: it is float16; expected f"),
    ({"workspace": torch.zeros(99, 99)}, ShapeError, r"\['workspace'\]: it is \[99, 99\] .*; expected a contiguous v"),
    (
        {"workspace": torch.zeros(99)},
        CapacityError,
        r"\['workspace'\]: it has 99 elements; expected at least \d+ .*; a",
    ),
]


@each_kind
@pytest.mark.parametrize(("storage", "error", "message"), BAD)
def test_bad_storage(kind: str, storage: dict[str, Tensor], error: type[AttnOpsError], message: str) -> None:
    with pytest.raises(error, match=f"^planner: storage{message}") as raised:
        _planner(kind, storage)
    assert type(raised.value) is error
