"""Merging attention states: ``v`` an average of values, ``s`` the base-2 LSE of the keys it is over."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.errors import DTypeError
from attn_ops.frontend.arguments import fail
from attn_ops.plan.page_table import index


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Of two sets of keys, the state over both: ``v [rows, heads, head_dim]``, ``s [rows, heads]``.

    Two empty states, LSE -inf, give 0 and -inf.
    """
    return torch.ops.attn.merge_state(v_a, s_a.float(), v_b, s_b.float())


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """:func:`merge_state` into ``v`` and float32 ``s``.

    ``mask [rows]``, bool or uint8 of any stride, leaves rows out where it is False.
    """
    if s.dtype != torch.float32:
        fail(
            DTypeError,
            "merge_state_in_place",
            f"s is {str(s.dtype).removeprefix('torch.')}",
            "float32, since it is written",
            "convert it first",
        )
    torch.ops.attn.merge_state_in_place(v, s, v_other, s_other.float(), None if mask is None else mask.contiguous())


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Over the second dimension: ``v [rows, states, heads, head_dim]``, ``s [rows, states, heads]``."""
    return torch.ops.attn.merge_states(v, s.float())


def variable_length_merge_states(v: Tensor, s: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor]:
    """Row r of the result merges states ``indptr[r]`` to ``indptr[r + 1]`` of ``v [states, heads, head_dim]``."""
    offsets = index("variable_length_merge_states", "indptr", indptr).to(v.device)
    return torch.ops.attn.merge_states_varlen(v, s.float(), offsets)
