"""Every op exported, saved, packaged and run with other lengths: no value of the example becomes a constant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.calls import BITS, arguments, written
from helpers.cases import DECODE_BASE, PREFILL_BASE
from helpers.page_tables import int32
from helpers.tracing import BROKEN_GATHER
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attn_ops.ops.schemas import SCHEMAS

Inputs = dict[str, dict[str, Any]]

FAMILIES: dict[str, tuple[str, ...]] = {
    "decode": ("plan_decode", "append_kv", "batch_decode"),
    "paged prefill": ("plan_prefill", "batch_prefill"),
    "others": (
        "ragged_prefill",
        "block_sparse_prefill",
        "single_prefill",
        "append_mla_kv",
        "batch_mla",
        "batch_indices_positions",
        "seq_lens",
        "page_table",
        "shard_page_table",
        "block_sparse_table",
        "packbits",
        "segment_packbits",
        "merge_state",
        "merge_states",
        "merge_state_in_place",
        "merge_states_varlen",
    ),
}
"""Ops that are exported in one program, since each program that is compiled costs seconds."""

OPTIONS: dict[str, dict[str, Any]] = {
    "batch_decode": {"window_left": 20, "sinks": 1.0, "dtype": torch.bfloat16},
    "batch_prefill": {"masked": 0.5, "window_right": 3, "sinks": 1.0},
    "ragged_prefill": {"causal": True, "window_left": 20, "pos_encoding": "ROPE_LLAMA"},
    "single_prefill": {"window_left": 20, "window_right": 3, "logits_soft_cap": 5.0},
    "block_sparse_prefill": {"causal": True, "sinks": 1.0},
    "batch_mla": {"causal": True},
}

# The lengths in another order, so that every tensor keeps its shape.
RELENGTHENED = {"kv_lens": DECODE_BASE.kv_lens[::-1], "qo_lens": PREFILL_BASE.qo_lens[::-1]}
UNPLANNED: dict[str, dict[str, Tensor]] = {
    "single_prefill": {},
    "batch_indices_positions": {"append_indptr": int32([0, 1, 4, 6]), "seq_lens": int32([4, 9, 3])},
    "seq_lens": {"kv_indptr": int32([0, 1, 4]), "kv_last_page_len": int32([3, 16])},
    "page_table": {"block_tables": int32([[9, 2], [7, 1]]), "seq_lens": int32([5, 32])},
    "block_sparse_table": {"block_mask": torch.tensor([[[False, True, True], [True, False, True]]])},
    "shard_page_table": {
        "kv_indptr": int32([0, 1, 6, 7]),
        "kv_indices": int32([1, 2, 8, 7, 6, 5, 4]),
        "kv_last_page_len": int32([3, 9, 1]),
    },
    "merge_state": {},
    "merge_states": {},
    "merge_state_in_place": {},
    "merge_states_varlen": {"indptr": int32([0, 1, 5, 5])},
    "packbits": {"x": ~BITS},
    "segment_packbits": {"x": ~BITS, "indptr": int32([0, 4, 15])},
}
"""What to change in calls of ops without lengths. Their floating-point tensors are rolled by one row."""


def example(op: str) -> dict[str, Any]:
    return arguments(op, **OPTIONS.get(op, {}))


def other(op: str) -> dict[str, Any]:
    """A call with the same shapes and other values in every tensor."""
    if op not in UNPLANNED:
        return arguments(op, **OPTIONS.get(op, {}), **RELENGTHENED)
    call = {k: t.roll(1, 0) if isinstance(t, Tensor) and t.is_floating_point() else t for k, t in example(op).items()}
    return call | UNPLANNED[op]


def is_option(value: Any) -> bool:
    return value is None or isinstance(value, str | bool | int | float)


class Family(nn.Module):
    """Calls each op with its tensors, which are inputs, and with the options of the example."""

    def __init__(self, examples: Inputs) -> None:
        super().__init__()
        self.options = {op: {k: v for k, v in call.items() if is_option(v)} for op, call in examples.items()}

    def forward(self, tensors: Inputs) -> dict[str, Any]:
        results = {op: getattr(torch.ops.attn, op)(**given, **self.options[op]) for op, given in tensors.items()}
        return {op: result for op, result in results.items() if result is not None}


def tensors(calls: Inputs) -> Inputs:
    return {op: {k: v for k, v in call.items() if not is_option(v)} for op, call in calls.items()}


def copy(t: Tensor) -> Tensor:
    """A copy with the strides of ``t``, which a package expects."""
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t)


def check(step: Any, eager: nn.Module, inputs: Inputs) -> None:
    """``step`` returns what ``eager`` returns, and writes the same values to its inputs."""
    mine, theirs = (pytree.tree_map(copy, inputs) for _ in range(2))
    expected, actual = eager(mine), step(theirs)
    for op, want in expected.items():
        torch.testing.assert_close(actual[op], want, msg=lambda m, op=op: f"{op}: {m}")
    assert actual.keys() == expected.keys()
    for op in inputs:
        for i, (want, got) in enumerate(zip(written(op, mine[op]), written(op, theirs[op]), strict=True)):
            if want is not mine[op].get("workspace"):
                torch.testing.assert_close(got, want, equal_nan=True, msg=lambda m, op=op, i=i: f"{op}[{i}]: {m}")


def _family(name: str) -> tuple[Family, Inputs, Inputs]:
    examples = {op: example(op) for op in FAMILIES[name]}
    return Family(examples), tensors(examples), tensors({op: other(op) for op in FAMILIES[name]})


def test_every_op_has_a_family() -> None:
    assert sorted(op for ops in FAMILIES.values() for op in ops) == sorted(SCHEMAS)


@pytest.mark.parametrize("op", SCHEMAS)
def test_the_other_call_has_another_result(op: str) -> None:
    """Otherwise a program whose results are constants would pass."""
    calls = [example(op), other(op)]
    outcomes = [pytree.tree_leaves((getattr(torch.ops.attn, op)(**call), written(op, call))) for call in calls]
    assert not all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True) if a is not None)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", FAMILIES)
def test_export_save_load(name: str, strict: bool, tmp_path: Path) -> None:
    eager, given, changed = _family(name)
    torch.export.save(torch.export.export(eager, (given,), strict=strict), tmp_path / "family.pt2")
    check(torch.export.load(tmp_path / "family.pt2").module(), eager, changed)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_aoti_package(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The other families have vector code in ``test_compile`` and ``test_symbolic_sizes``."""
    if name == "paged prefill":
        request.applymarker(BROKEN_GATHER)
    if name == "others":
        request.getfixturevalue("vector_code")
    eager, given, changed = _family(name)
    program = torch.export.export(eager, (given,))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "family.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    for inputs in (given, changed):
        check(loaded, eager, inputs)
