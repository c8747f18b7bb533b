"""Merge attention states: the host side of ``merge_states.cu``."""

from __future__ import annotations

from typing import Any

import torch
from attn_ops.kernels.cuda.kernel import Kernel, Specialization
from attn_ops.kernels.cuda.launch import launch
from attn_ops.meta.outputs import merge_state as allocate_merge_state
from attn_ops.meta.outputs import merge_states as allocate_merge_states
from torch import Tensor

THREADS = 128
"""``kThreads`` of the source. A row of a head has at most so many vectors."""

VECTOR_BYTES = 16

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""dtype -> the macro DTYPE."""

SIZES = {"packed_rows": "i64", "heads": "i32", "vectors": "i32"}

MERGE_STATES = Kernel(
    "merge_states.cu",
    "merge_states_kernel",
    {
        **dict.fromkeys(("v", "s", "out", "lse"), "pointer"),
        "packed_rows": "i64",
        **dict.fromkeys(("states", "heads", "vectors"), "i32"),
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
"""By op and dtype."""


def _sizes(v: Tensor) -> tuple[tuple[Any], dict[str, Any]]:
    """The grid, and the arguments of :data:`SIZES`, for ``v [rows, ..., heads, head_dim]``."""
    heads, dim = v.shape[-2:]
    vectors = int(dim) * v.itemsize // VECTOR_BYTES
    rows_of_cta = THREADS // vectors
    packed_rows = v.shape[0] * heads
    grid = ((packed_rows + rows_of_cta - 1) // rows_of_cta,)
    return grid, {"packed_rows": packed_rows, "heads": heads, "vectors": vectors}


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    if v.shape[1] == 2:  # with all loads in registers: no fixed number of copies in flight, of which most are for none
        return merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    out, lse = allocate_merge_states(v, s)
    grid, sizes = _sizes(v)
    launch(
        SPECIALIZATIONS["merge_states", v.dtype],
        grid,
        v=v,
        s=s,
        out=out,
        lse=lse,
        states=v.shape[1],
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
