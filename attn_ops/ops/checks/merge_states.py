"""Checks of the merging ops."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.errors import DTypeError, ShapeError, dtype_name
from attn_ops.ops.backends import Problem
from attn_ops.ops.checks.checker import OpChecker, memory_layout
from attn_ops.ops.options import FLOATS
from attn_ops.symbolic_sizes import agree


def _states(op: OpChecker, v: Tensor, s: Tensor, dims: str, like: Tensor | None, suffix: str = "") -> None:
    op.tensor(f"v{suffix}", v, f"[{dims}, head_dim]", FLOATS, like)
    op.tensor(f"s{suffix}", s, f"[{dims}]", (torch.float32,), v)
    if not agree(s.shape, v.shape[:-1]):
        op.fail(
            ShapeError,
            f"s{suffix} is {list(s.shape)}",
            f"{list(v.shape[:-1])}, the shape of v{suffix} less head_dim",
            "make the two agree",
        )


def _check_same_form(op: OpChecker, a: Tensor, b: Tensor, name_a: str, name_b: str) -> None:
    same_shape = agree(a.shape, b.shape)
    if not same_shape or a.dtype != b.dtype:
        op.fail(
            DTypeError if same_shape else ShapeError,
            f"{name_b} is {list(b.shape)} {dtype_name(b.dtype)}",
            f"{list(a.shape)} {dtype_name(a.dtype)} as {name_a}",
            "make the two agree",
        )


def _problem(op: OpChecker, *values: Tensor) -> Problem:
    v = values[0]
    layout = memory_layout(values, ())
    return Problem(op.name, v.device, v.dtype, v.dtype, head_dim_vo=int(v.shape[-1]), layout=layout)


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, *, backend: str = "auto") -> Problem:
    op = OpChecker("merge_state")
    _states(op, v_a, s_a, "rows, heads", None, "_a")
    _states(op, v_b, s_b, "rows, heads", v_a, "_b")
    _check_same_form(op, v_a, v_b, "v_a", "v_b")
    op.no_grad(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
    return _problem(op, v_a, v_b)


def merge_states(v: Tensor, s: Tensor, *, backend: str = "auto") -> Problem:
    op = OpChecker("merge_states")
    _states(op, v, s, "rows, states, heads", None)
    op.no_grad(v=v, s=s)
    return _problem(op, v)


def merge_state_in_place(
    v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None, *, backend: str = "auto"
) -> Problem:
    op = OpChecker("merge_state_in_place")
    _states(op, v, s, "rows, heads", None)
    _states(op, v_other, s_other, "rows, heads", v, "_other")
    _check_same_form(op, v, v_other, "v", "v_other")
    op.no_overlap("v", v)
    op.no_overlap("s", s)
    if mask is not None:
        op.tensor("mask", mask, "[rows]", (torch.bool, torch.uint8), v)
        op.size("mask", "rows", mask.shape[0], v.shape[0], "v")
    op.no_grad(v=v, s=s, v_other=v_other, s_other=s_other)
    return _problem(op, v, v_other)


def merge_states_varlen(v: Tensor, s: Tensor, indptr: Tensor, *, backend: str = "auto") -> Problem:
    op = OpChecker("merge_states_varlen")
    _states(op, v, s, "states, heads", None)
    op.indptr("indptr", indptr, "[rows + 1]", v)
    op.no_grad(v=v, s=s)
    return _problem(op, v)
