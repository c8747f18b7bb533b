"""Output allocation, shared by every real and every fake implementation of an op.

``OUTPUTS[op](*args, **kwargs)`` takes the op's arguments and returns its outputs, uninitialized, or ``None`` for an op
that only mutates its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *_: Any,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    **__: Any,
) -> tuple[Tensor, Tensor]:
    """``out [rows, num_qo_heads, head_dim_vo]`` in ``out_dtype``; float32 ``lse [rows, num_qo_heads]``, or ``[0]``."""
    rows, heads, _dim = q.shape
    out = q.new_empty((rows, heads, v.shape[-1]), dtype=q.dtype if out_dtype is None else out_dtype)
    lse = q.new_empty((rows, heads) if return_lse else (0,), dtype=torch.float32)
    return out, lse


def merge_state(v_a: Tensor, s_a: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """``v [rows, heads, dim]`` and float32 ``s [rows, heads]``, as the arguments."""
    return v_a.new_empty(v_a.shape), s_a.new_empty(s_a.shape)


def merge_states(v: Tensor, s: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """``v [rows, heads, dim]`` and ``s [rows, heads]`` of ``v [rows, states, heads, dim]``."""
    rows, _states, heads, dim = v.shape
    return v.new_empty((rows, heads, dim)), s.new_empty((rows, heads))


def merge_states_varlen(v: Tensor, s: Tensor, indptr: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """``v [rows, heads, dim]`` and ``s [rows, heads]`` of ``v [states, heads, dim]`` and ``indptr [rows + 1]``."""
    rows = indptr.shape[0] - 1
    return v.new_empty((rows, *v.shape[1:])), s.new_empty((rows, *s.shape[1:]))


def batch_mla(
    q_nope: Tensor, *_: Any, return_lse: bool = False, out_dtype: torch.dtype | None = None, **__: Any
) -> tuple[Tensor, Tensor]:
    """``out [rows, num_heads, head_dim_ckv]``, and ``lse`` as in :func:`attention`."""
    return attention(q_nope, q_nope, q_nope, return_lse=return_lse, out_dtype=out_dtype)


def batch_indices_positions(append_indptr: Tensor, seq_lens: Tensor, nnz: int, **_: Any) -> tuple[Tensor, Tensor]:
    """``batch_indices [nnz]`` and ``positions [nnz]``."""
    return append_indptr.new_empty(nnz), append_indptr.new_empty(nnz)


def seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int, **_: Any) -> Tensor:
    """``[batch]``."""
    return kv_last_page_len.new_empty(kv_last_page_len.shape)


def page_table(block_tables: Tensor, seq_lens: Tensor, page_size: int, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``kv_indptr [batch + 1]``, ``kv_indices [batch * max_pages_per_request]``, ``kv_last_page_len [batch]``."""
    batch, max_pages = block_tables.shape
    empty = block_tables.new_empty
    return empty(batch + 1), empty(batch * max_pages), empty(batch)


def block_sparse_table(
    block_mask: Tensor, row_indptr: Tensor, col_indptr: Tensor, page_size: int, max_pages: int, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``kv_indptr [batch + 1]``, ``kv_indices [max_pages]``, ``kv_last_page_len [batch]``, ``positions [batch]``."""
    heads, block_rows, _cols = block_mask.shape
    batch, empty = heads * block_rows, row_indptr.new_empty
    return empty(batch + 1), empty(max_pages), empty(batch), empty(batch)


def shard_page_table(
    kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """``kv_indptr``, ``kv_indices`` and ``kv_last_page_len`` as the arguments."""
    indptr, indices, last_page_len = (t.new_empty(t.shape) for t in (kv_indptr, kv_indices, kv_last_page_len))
    return indptr, indices, last_page_len


def packbits(x: Tensor, **_: Any) -> Tensor:
    """uint8 ``[bytes]``."""
    return x.new_empty((x.shape[0] + 7) // 8, dtype=torch.uint8)


def segment_packbits(x: Tensor, indptr: Tensor, num_bytes: int, **_: Any) -> tuple[Tensor, Tensor]:
    """uint8 ``[num_bytes]`` and ``byte_indptr [segments + 1]``."""
    return x.new_empty(num_bytes, dtype=torch.uint8), indptr.new_empty(indptr.shape)


def no_outputs(*_: Any, **__: Any) -> None:
    return None


OUTPUTS: dict[str, Callable[..., Any]] = {
    "plan_decode": no_outputs,
    "plan_prefill": no_outputs,
    "batch_decode": attention,
    "batch_prefill": attention,
    "ragged_prefill": attention,
    "single_prefill": attention,
    "block_sparse_prefill": attention,
    "batch_mla": batch_mla,
    "append_kv": no_outputs,
    "append_mla_kv": no_outputs,
    "batch_indices_positions": batch_indices_positions,
    "seq_lens": seq_lens,
    "page_table": page_table,
    "block_sparse_table": block_sparse_table,
    "shard_page_table": shard_page_table,
    "merge_state": merge_state,
    "merge_states": merge_states,
    "merge_state_in_place": no_outputs,
    "merge_states_varlen": merge_states_varlen,
    "packbits": packbits,
    "segment_packbits": segment_packbits,
}
