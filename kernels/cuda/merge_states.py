"""Merge attention states: the host side of ``merge_states.cu``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_ops.kernels.cuda.kernel import Kernel, Specialization
from attn_ops.kernels.cuda.launch import launch
from attn_ops.meta.outputs import merge_state as allocate_merge_state
from attn_ops.meta.outputs import merge_states as allocate_merge_states
from attn_ops.ops.cuda_kernels import CUDA_MERGE_VECTORS, CUDA_VECTOR

THREADS = CUDA_MERGE_VECTORS
"""``kThreads`` of the source. A packed row (a row and a head) has at most this many Vectors, which one CTA merges."""

PART_STATES = 8
"""Fewest states of a part: ``kBatchOfFewRows`` of the source, whose loads are in flight together."""

MAX_THREADS = 1 << 17
"""Most threads of a launch whose states are divided into parts: about 1,000 per SM of a Hopper GPU."""

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""dtype -> the macro DTYPE."""

SIZES = {
    "packed_rows": "i64",
    **dict.fromkeys(("heads", "vectors"), "i32"),
    **dict.fromkeys(("of_heads", "of_vectors"), "i64"),
    "rows": "i32",
}
"""Parameters of all three kernels: the fields of ``Layout`` in the source, and ``rows``, the packed rows of a CTA."""

MERGE_STATES = Kernel(
    "merge_states.cu",
    "merge_states_kernel",
    {
        **dict.fromkeys(("v", "s", "out", "lse"), "pointer"),
        **SIZES,
        **dict.fromkeys(("states", "parts", "part_states"), "i32"),
        **dict.fromkeys(("stride_v_row", "stride_v_state", "stride_v_head", "stride_s_row", "stride_s_state"), "i64"),
    },
    writes=("out", "lse"),
    aligned=("v", "out"),
)

MERGE_STATE = Kernel(
    "merge_states.cu",
    "merge_state_kernel",
    {
        **dict.fromkeys(("v_a", "s_a", "v_b", "s_b", "out", "lse"), "pointer"),
        **SIZES,
        **dict.fromkeys(("stride_va_row", "stride_va_head", "stride_sa_row"), "i64"),
        **dict.fromkeys(("stride_vb_row", "stride_vb_head", "stride_sb_row"), "i64"),
    },
    writes=("out", "lse"),
    aligned=("v_a", "v_b", "out"),
)

MERGE_STATE_IN_PLACE = Kernel(
    "merge_states.cu",
    "merge_state_in_place_kernel",
    {
        **dict.fromkeys(("v", "s", "v_other", "s_other", "merged"), "pointer"),
        **SIZES,
        **dict.fromkeys(("stride_v_row", "stride_v_head", "stride_s_row"), "i64"),
        **dict.fromkeys(("stride_vo_row", "stride_vo_head", "stride_so_row"), "i64"),
    },
    writes=("v", "s"),
    aligned=("v", "v_other"),
)

KERNELS = {"merge_states": MERGE_STATES, "merge_state": MERGE_STATE, "merge_state_in_place": MERGE_STATE_IN_PLACE}

SPECIALIZATIONS = {
    (op, dtype): Specialization(kernel, {"DTYPE": number}, threads=THREADS)
    for op, kernel in KERNELS.items()
    for dtype, number in DTYPES.items()
}
"""(op, dtype) -> specialization."""


def _sizes(v: Tensor, parts: int = 1) -> tuple[tuple[Any], dict[str, Any]]:
    """The grid, and the arguments of :data:`SIZES`, for ``v [rows, ..., heads, head_dim]``.

    ``parts`` is the number of threads that share the states of a Vector.
    """
    heads, vectors = v.shape[-2], _vectors(v)
    rows, packed_rows = THREADS // vectors // parts, v.shape[0] * heads
    inverses = {"of_heads": -(-(1 << 32) // torch.sym_max(heads, 1)), "of_vectors": -(-(1 << 32) // vectors)}
    sizes = {"packed_rows": packed_rows, "heads": heads, "vectors": vectors, **inverses, "rows": rows}
    return ((packed_rows + rows - 1) // rows,), sizes


def _vectors(v: Tensor) -> int:
    """Vectors, 16 bytes each, of a packed row."""
    return int(v.shape[-1]) * v.itemsize // CUDA_VECTOR


def _parts(v: Tensor) -> int:
    """Parts of the states of a packed row, which different threads merge. More than one if there are few packed rows.

    One if sizes are symbolic.
    """
    packed_rows, states = v.shape[0] * v.shape[2], v.shape[1]
    if not (isinstance(packed_rows, int) and isinstance(states, int)):
        return 1
    vectors = _vectors(v)
    return max(min(states // PART_STATES, THREADS // vectors, MAX_THREADS // max(packed_rows * vectors, 1)), 1)


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    if v.shape[1] == 2:
        return merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    out, lse = allocate_merge_states(v, s)
    parts = _parts(v)
    grid, sizes = _sizes(v, parts)
    launch(
        SPECIALIZATIONS["merge_states", v.dtype],
        grid,
        v=v,
        s=s,
        out=out,
        lse=lse,
        states=v.shape[1],
        parts=parts,
        part_states=(v.shape[1] + parts - 1) // parts,
        stride_v_row=v.stride(0),
        stride_v_state=v.stride(1),
        stride_v_head=v.stride(2),
        stride_s_row=s.stride(0),
        stride_s_state=s.stride(1),
        **sizes,
    )
    return out, lse


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = allocate_merge_state(v_a, s_a)
    grid, sizes = _sizes(v_a)
    launch(
        SPECIALIZATIONS["merge_state", v_a.dtype],
        grid,
        v_a=v_a,
        s_a=s_a,
        v_b=v_b,
        s_b=s_b,
        out=out,
        lse=lse,
        stride_va_row=v_a.stride(0),
        stride_va_head=v_a.stride(1),
        stride_sa_row=s_a.stride(0),
        stride_vb_row=v_b.stride(0),
        stride_vb_head=v_b.stride(1),
        stride_sb_row=s_b.stride(0),
        **sizes,
    )
    return out, lse


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    grid, sizes = _sizes(v)
    launch(
        SPECIALIZATIONS["merge_state_in_place", v.dtype],
        grid,
        v=v,
        s=s,
        v_other=v_other,
        s_other=s_other,
        merged=mask,
        stride_v_row=v.stride(0),
        stride_v_head=v.stride(1),
        stride_s_row=s.stride(0),
        stride_vo_row=v_other.stride(0),
        stride_vo_head=v_other.stride(1),
        stride_so_row=s_other.stride(0),
        **sizes,
    )
