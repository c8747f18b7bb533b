"""``torch.library.opcheck`` of every op: schema, fake implementation and tracing agree with the real one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.calls import arguments, positional

from attn_ops.ops.schemas import SCHEMAS

PAGED: tuple[dict[str, Any], ...] = (
    {},
    {"kv_layout": "HND", "storage": "fused", "dtype": torch.bfloat16, "sinks": 1.0, "window_left": 9, "causal": True},
    {"head_dims": (64, 32), "page_size": 1, "logits_soft_cap": 3.0, "pos_encoding": "ALIBI", "padding": 2},
    {"window_left": 9, "window_right": 5, "planner": {"window_right": 7}},
)
RAGGED: tuple[dict[str, Any], ...] = (
    {},
    {"kv_layout": "HND", "storage": "padded", "dtype": torch.float16, "sinks": 1.0, "pos_encoding": "ROPE_LLAMA"},
    {"masked": 0.5, "head_dims": (64, 32)},
    {"window_left": 9, "window_right": 5},
)
STATES: tuple[dict[str, Any], ...] = ({}, {"dtype": torch.float16, "head_dims": (16, 24)})
VARIATIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "batch_decode": tuple({k: v for k, v in p.items() if k != "causal"} for p in PAGED[:3]),
    "batch_prefill": PAGED,
    "ragged_prefill": RAGGED,
    "single_prefill": RAGGED,
    "block_sparse_prefill": (
        {},
        {"causal": True, "kv_layout": "HND", "dtype": torch.bfloat16, "sinks": 1.0, "page_size": 3},
    ),
    "batch_mla": ({}, {"causal": True, "dtype": torch.bfloat16}),
    "append_kv": ({}, {"kv_layout": "HND", "storage": "fused", "dtype": torch.bfloat16}, {"storage": "padded"}),
    **dict.fromkeys(("merge_state", "merge_states", "merge_state_in_place", "merge_states_varlen"), STATES),
    "append_mla_kv": STATES[:1],
}

CASES = [(op, changes) for op in SCHEMAS for changes in VARIATIONS.get(op, ({},))]


@pytest.mark.parametrize(("op", "changes"), CASES, ids=[f"{op}-{i}" for i, (op, _) in enumerate(CASES)])
def test_opcheck(op: str, changes: dict[str, Any]) -> None:
    kwargs = arguments(op, **changes)
    if "workspace" in kwargs:
        kwargs["workspace"].zero_()
    torch.library.opcheck(getattr(torch.ops.attn, op).default, *positional(op, kwargs))


@pytest.mark.parametrize(
    "op", [op for op in SCHEMAS if op.startswith(("batch_d", "batch_p", "block_sparse_p", "ragged", "single"))]
)
def test_opcheck_without_lse(op: str) -> None:
    kwargs = arguments(op) | {"return_lse": False}
    if "workspace" in kwargs:
        kwargs["workspace"].zero_()
    torch.library.opcheck(getattr(torch.ops.attn, op).default, *positional(op, kwargs))
