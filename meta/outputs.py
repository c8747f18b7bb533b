"""Output allocation, shared by every real and every fake implementation.

``OUTPUTS[op](*args, **kwargs)`` takes the op's arguments and returns its outputs, uninitialised. The
result of an op that only mutates is ``None``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, return_lse: bool = False, **__: Any) -> tuple[Tensor, Tensor]:
    """``out [rows, num_qo_heads, head_dim_vo]`` as q, ``lse [rows, num_qo_heads]`` float32 or ``[0]``."""
    rows, heads, _dim = q.shape
    out = q.new_empty((rows, heads, v.shape[-1]))
    lse = q.new_empty((rows, heads) if return_lse else (0,), dtype=torch.float32)
    return out, lse


def merge_state(v_a: Tensor, s_a: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return v_a.new_empty(v_a.shape), s_a.new_empty(s_a.shape)


def merge_states(v: Tensor, s: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    rows, _states, heads, dim = v.shape
    return v.new_empty((rows, heads, dim)), s.new_empty((rows, heads))


def nothing(*_: Any, **__: Any) -> None:
    return None


OUTPUTS: dict[str, Callable[..., Any]] = {
    "plan_decode": nothing,
    "plan_prefill": nothing,
    "batch_decode": attention,
    "batch_prefill": attention,
    "ragged_prefill": attention,
    "single_prefill": attention,
    "append_kv": nothing,
    "merge_state": merge_state,
    "merge_states": merge_states,
}
