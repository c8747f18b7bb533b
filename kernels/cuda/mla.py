"""Multi-head latent attention on Hopper: the host side of ``mla.cu``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from attn_ops.kernels.cuda.kernel import Kernel, Specialization, TensorMap, num_sms
from attn_ops.kernels.cuda.launch import launch
from attn_ops.kernels.cuda.operands import COLUMNS, DTYPES, OUT_TYPES
from attn_ops.kernels.cuda.prefill import PACKED_ROWS
from attn_ops.kernels.triton.combine_prefill import combine_split_tiles
from attn_ops.kernels.triton.prefill_call import plan_arguments
from attn_ops.meta.outputs import batch_mla as allocate
from torch import Tensor

from attn_ops.ops.options import MLA_SM_SCALE, AttentionOptions
from attn_ops.ops.unsupported import CUDA_MLA_CLUSTERS
from attn_ops.plan.state import MAX_PUBLISHED_REQUESTS, PlanProblem, PrefillPlan, num_partials

LATENT, ROTARY = 512, 64
"""Columns of the two parts of a key."""

TILE = 64
"""Tokens of a KV tile. Page sizes are multiples of it."""

QUERY_BOX_BLOCKS = 4
"""Blocks of 64 latent columns in a box of the queries."""

SHARED_BYTES = 3 * 2 * PACKED_ROWS * (LATENT + ROTARY) + 2048
"""The query tile, two KV tiles, and what consumers exchange, with barriers."""

KERNEL = Kernel(
    "mla.cu",
    "mla",
    {
        **dict.fromkeys(("q_nope", "q_pe"), "pointer"),
        **dict.fromkeys(("q_nope_map", "q_pe_map", "ckv", "kpe"), "map"),
        **dict.fromkeys(("out", "lse", "partial", "qo_indptr", "kv_indices", "work"), "pointer"),
        "scale": "fp32",
        **dict.fromkeys(("rows", "num_pages", "max_pages", "max_items", "max_batch", "slots"), "i32"),
        **dict.fromkeys(("stride_q_row", "stride_q_head", "stride_qb_row", "stride_qb_head"), "i64"),
        **dict.fromkeys(("boxed", "heads", "page_size", "tile_rows", "num_items", "num_units"), "i32"),
        **dict.fromkeys(("causal", "early", "out_type"), "i32"),
    },
    writes=("out", "lse", "partial"),
    aligned=("q_nope", "q_pe", "out"),
)

SPECIALIZATIONS = {
    (cluster, dtype): Specialization(
        KERNEL,
        {"CLUSTER": cluster, "DTYPE": number},
        threads=384,
        shared_bytes=SHARED_BYTES,
        cluster=(cluster, 1, 1),
    )
    for cluster in CUDA_MLA_CLUSTERS
    for dtype, number in DTYPES.items()
}
"""By CTAs of a cluster, and dtype."""


class Units(NamedTuple):
    """How the packed rows of work items are divided."""

    cluster: int  # CTAs of a unit
    blocks: int  # units of a work item


def units_of(packed_rows: int) -> Units:
    """Two CTAs share the KV tiles of a unit, unless one of them would be left without rows."""
    ctas = -(-packed_rows // PACKED_ROWS)
    cluster = 1 if ctas % 2 else 2
    return Units(cluster, ctas // cluster)


def query_map(q: Tensor) -> tuple[TensorMap, bool]:
    """The map of queries ``[rows, heads, columns]``, and whether its box is 64 packed rows.

    It is if these are whole rows, or heads of one row.
    """
    rows, heads, columns = q.shape
    boxed = PACKED_ROWS % heads == 0 or heads % PACKED_ROWS == 0
    blocks = columns // COLUMNS
    box_rows = max(PACKED_ROWS // heads, 1) if boxed else 1
    box = min(blocks, QUERY_BOX_BLOCKS), box_rows, min(heads, PACKED_ROWS) if boxed else 1, COLUMNS
    return TensorMap(q, (blocks, rows, heads, COLUMNS), (COLUMNS, q.stride(0), q.stride(1), 1), box), boxed


def cache_map(cache: Tensor) -> TensorMap:
    """The map of ``cache [pages, page_size, columns]``. Its boxes are 64 columns of a KV tile."""
    return TensorMap(cache, tuple(cache.shape), tuple(cache.stride()), (1, TILE, COLUMNS))


def batch_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    plan: list[Tensor],
    workspace: Tensor,
    *,
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    o, p = AttentionOptions(**options), PrefillPlan(*plan)
    out, lse = allocate(q_nope, return_lse=return_lse, out_dtype=o.out_dtype)
    problem, partials = PlanProblem.of(p.problem), num_partials(p)
    rows, heads, max_batch = q_nope.shape[0], int(q_nope.shape[1]), p.kv_len.shape[0]
    cluster, blocks = units_of(problem.tile_rows * heads)
    num_items = (rows + problem.tile_rows - 1) // problem.tile_rows + max_batch + partials
    num_units = num_items * blocks
    q_nope_map, boxed = query_map(q_nope)
    q_pe_map, _ = query_map(q_pe)
    launch(
        SPECIALIZATIONS[cluster, q_nope.dtype],
        (torch.sym_min(num_units, num_sms(q_nope.device) // cluster) * cluster,),
        q_nope=q_nope,
        q_pe=q_pe,
        q_nope_map=q_nope_map,
        q_pe_map=q_pe_map,
        ckv=cache_map(ckv_cache),
        kpe=cache_map(kpe_cache),
        out=out,
        lse=lse if lse.dim() > 1 else None,
        partial=workspace,
        **plan_arguments(p),
        scale=MLA_SM_SCALE if o.sm_scale is None else o.sm_scale,
        rows=rows,
        num_pages=ckv_cache.shape[0],
        stride_q_row=q_nope.stride(0),
        stride_q_head=q_nope.stride(1),
        stride_qb_row=q_pe.stride(0),
        stride_qb_head=q_pe.stride(1),
        boxed=boxed,
        heads=heads,
        page_size=problem.page_size,
        tile_rows=problem.tile_rows,
        num_items=num_items,
        num_units=num_units,
        causal=o.causal,
        early=bool(max_batch <= MAX_PUBLISHED_REQUESTS),
        out_type=0 if out.dtype == q_nope.dtype else OUT_TYPES[out.dtype],
    )
    if partials:
        combine_split_tiles(out, lse, workspace, None, p)
    return out, lse
