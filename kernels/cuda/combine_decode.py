"""Combine of decode: the host side of ``combine_decode.cu``."""

from __future__ import annotations

from attn_ops.kernels.cuda.kernel import Kernel, Specialization
from attn_ops.kernels.cuda.launch import launch
from attn_ops.kernels.cuda.operands import OUT_TYPES
from torch import Tensor

from attn_ops.plan.state import DecodePlan, PlanProblem, num_slots

KERNEL = Kernel(
    "combine_decode.cu",
    "combine_decode",
    {
        **dict.fromkeys(("out", "lse", "partial", "sinks", "kv_len", "merge_indptr"), "pointer"),
        **dict.fromkeys(("rows", "max_batch", "slots", "heads", "dim", "lanes", "out_type"), "i32"),
    },
    writes=("out", "lse"),
    aligned=("out",),
)

SPECIALIZATIONS = {(): Specialization(KERNEL, {}, threads=32)}
"""One for all calls."""

MAX_WARPS = 512
"""Warps of a launch. When no row is split each of them takes time to find that out."""

LANES, FEW_ROWS_LANES = 16, 8
"""Lanes that share a partial result, with four columns each."""

FEW_ELEMENTS = 8192
"""Elements of an output that is divided among more warps. Splits of a fixed size are always added in the same order."""


def combine_split_rows(out: Tensor, lse: Tensor, workspace: Tensor, sinks: Tensor | None, plan: DecodePlan) -> None:
    """Write the rows that the plan splits, and zeros to the rows of empty requests."""
    rows, heads, dim = out.shape
    max_batch = plan.kv_len.shape[0]
    few = max_batch * heads * dim <= FEW_ELEMENTS and not PlanProblem.of(plan.problem).split
    lanes = FEW_ROWS_LANES if few else LANES
    launch(
        SPECIALIZATIONS[()],
        (min(max_batch * heads * (dim // (4 * lanes)), MAX_WARPS),),
        out=out,
        lse=lse if lse.dim() > 1 else None,
        partial=workspace,
        sinks=sinks,
        kv_len=plan.kv_len,
        merge_indptr=plan.merge_indptr,
        rows=rows,
        max_batch=max_batch,
        slots=num_slots(plan),
        heads=heads,
        dim=dim,
        lanes=lanes,
        out_type=OUT_TYPES[out.dtype],
    )
