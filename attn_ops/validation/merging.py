"""Checks of the merging ops."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ShapeError
from ..registry import Problem
from .common import FLOATS, Op, dtype_name


def _states(op: Op, v: Tensor, s: Tensor, dims: str, like: Tensor | None, suffix: str = "") -> None:
    op.tensor(f"v{suffix}", v, f"[{dims}, head_dim]", FLOATS, like)
    op.tensor(f"s{suffix}", s, f"[{dims}]", (torch.float32,), v)
    if s.shape != v.shape[:-1]:
        op.fail(
            ShapeError,
            f"s{suffix} is {list(s.shape)}",
            f"{list(v.shape[:-1])}, the shape of v{suffix} less head_dim",
            "make the two agree",
        )


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, *, backend: str = "auto") -> Problem:
    op = Op("merge_state")
    _states(op, v_a, s_a, "rows, heads", None, "_a")
    _states(op, v_b, s_b, "rows, heads", v_a, "_b")
    if v_a.shape != v_b.shape or v_a.dtype != v_b.dtype:
        op.fail(
            ShapeError,
            f"v_b is {list(v_b.shape)} {dtype_name(v_b)}",
            f"{list(v_a.shape)} {dtype_name(v_a)} as v_a",
            "make the two agree",
        )
    op.no_grad(v_a=v_a, v_b=v_b)
    return Problem("merge_state", v_a.device.type, v_a.dtype, v_a.dtype, head_dim_vo=int(v_a.shape[-1]))


def merge_states(v: Tensor, s: Tensor, *, backend: str = "auto") -> Problem:
    op = Op("merge_states")
    _states(op, v, s, "rows, states, heads", None)
    op.no_grad(v=v)
    return Problem("merge_states", v.device.type, v.dtype, v.dtype, head_dim_vo=int(v.shape[-1]))
