"""Decode of dense KV on Hopper: the host side of ``decode.cu`` with the macro ``DENSE``.

Requests have one query row each and equal numbers of keys, so that they need no plan.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attn_ops.gpu import num_sms
from attn_ops.kernels.cuda import decode
from attn_ops.kernels.cuda.kernel import Kernel, Specialization, TensorMap
from attn_ops.kernels.cuda.launch import launch
from attn_ops.kernels.cuda.operands import OUT_TYPES, ROPE_PARAMETERS, Columns, rope_arguments
from attn_ops.kernels.triton.prefill_call import Batch, Operands, attend_requests
from attn_ops.ops.cuda_kernels import DecodeKey
from attn_ops.ops.options import AttentionOptions, softmax_scale
from attn_ops.plan.equal_requests import EqualRequests, divide_rows


def _kernel(rope: bool, padded: bool) -> Kernel:
    """The kernel, which with ``rope`` rotates queries and keys and with ``padded`` pads heads, and its parameters."""
    return Kernel(
        "decode.cu",
        "decode",
        {
            "q": "pointer",
            **dict.fromkeys(("k", "v"), "map"),
            **dict.fromkeys(("sinks", "kv_scale", "out", "lse", "partial"), "pointer"),
            **dict.fromkeys(("scale", "cap"), "fp32"),
            **(ROPE_PARAMETERS if rope else {}),
            **dict.fromkeys(("window_left", "rows", "keys", "splits", "split_keys", "slots"), "i32"),
            **dict.fromkeys(("stride_q_row", "stride_q_head"), "i64"),
            **({"head_dim": "i32"} if padded else {}),
            **dict.fromkeys(("group", "query_type", "out_type"), "i32"),
        },
        writes=("out", "lse", "partial"),
        aligned=("q", "out"),
    )


KERNELS = {options: _kernel(*options) for options in decode.KERNELS}
"""Whether the kernel rotates queries and keys, and whether it pads heads -> kernel."""

SPECIALIZATIONS: dict[DecodeKey, Specialization] = {
    key: decode.specialization(KERNELS[key.rope, key.padded], key, DENSE=1) for key in decode.SPECIALIZATIONS
}


def _map(t: Tensor, strides: tuple[int, int, int], batch: EqualRequests, heads: int, key: DecodeKey) -> TensorMap:
    """The map of keys or values: a dimension each of requests, of the KV heads of a CTA, and of tokens.

    ``strides`` are those of :class:`Operands`, of which that of pages is unused.
    """
    _, token, head = strides
    columns = Columns.overlapping(t) if key.padded and not key.fp8 else Columns.of(t, padded=key.padded)
    rows, row = (key.kv_heads, head) if key.kv_heads > 1 else (columns.blocks, columns.step)  # of a token
    shape = batch.batch_size, heads // key.kv_heads, rows, batch.keys, columns.size
    step = batch.keys * token, key.kv_heads * head, row, token, 1
    boxes = 1, 1, rows, decode.tile_tokens(key.head_dim, key.kv_heads, key.fp8 is not None), columns.box
    return TensorMap(t, shape, step, boxes, columns.box * t.element_size())


def single_decode(
    x: Operands, batch_size: int, return_lse: bool, key: DecodeKey, o: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attention of ``batch_size`` requests of one query row each over equal numbers of dense keys."""
    num_heads, num_kv_heads = x.heads
    ctas = ctas_of_heads(num_kv_heads, key, x.q.device)
    batch = divide_rows(batch_size, x.kv_rows // batch_size, o.window_left, ctas, num_heads // num_kv_heads)
    return attend_requests(functools.partial(_launch_splits, key), x, batch, return_lse, o)


def ctas_of_heads(num_kv_heads: int, key: DecodeKey, device: torch.device) -> int:
    """CTAs that run at a time for the KV heads of one CTA."""
    return max(1, num_sms(device) * key.kv_heads // num_kv_heads)


def _launch_splits(
    key: DecodeKey,
    x: Operands,
    out: Tensor,
    lse: Tensor,
    batch: Batch,
    workspace: Tensor | None,
    o: AttentionOptions,
) -> None:
    """Launch the kernel of dense KV (:data:`attn_ops.kernels.triton.prefill_call.LaunchTiles`)."""
    assert isinstance(batch, EqualRequests)
    num_heads, num_kv_heads = x.heads
    launch(
        SPECIALIZATIONS[key],
        (num_kv_heads // key.kv_heads, torch.sym_min(batch.num_tiles, ctas_of_heads(num_kv_heads, key, x.q.device))),
        q=x.q,
        k=_map(x.k, x.k_strides, batch, num_kv_heads, key),
        v=_map(x.v, x.v_strides, batch, num_kv_heads, key),
        sinks=o.sinks,
        kv_scale=o.kv_scale,
        out=out,
        lse=lse if lse.dim() > 1 else None,
        partial=workspace,
        scale=softmax_scale(o.sm_scale, x.head_dims[0]),
        cap=o.logits_soft_cap,
        **rope_arguments(o),
        window_left=o.window_left,
        rows=batch.batch_size,
        keys=batch.keys,
        splits=batch.splits,
        split_keys=batch.split_keys,
        slots=batch.num_slots,
        stride_q_row=x.q.stride(0),
        stride_q_head=x.q.stride(1),
        **({"head_dim": x.head_dims[0]} if key.padded else {}),
        group=num_heads // num_kv_heads,
        query_type=OUT_TYPES[x.q.dtype],
        out_type=OUT_TYPES[out.dtype],
    )
