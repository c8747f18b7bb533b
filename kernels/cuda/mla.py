"""Multi-head latent attention on Hopper: the host side of ``mla.cu`` and ``mla_swap_ab.cu``."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.gpu import num_sms
from attn_ops.kernels.cuda.kernel import Kernel, Specialization, TensorMap
from attn_ops.kernels.cuda.launch import launch
from attn_ops.kernels.cuda.operands import COLUMNS, DTYPES, FP8_TYPES, OUT_TYPES, ROW_BYTES
from attn_ops.kernels.cuda.prefill import PACKED_ROWS
from attn_ops.kernels.triton.combine_prefill import combine_split_tiles
from attn_ops.kernels.triton.prefill_call import plan_arguments
from attn_ops.meta.outputs import batch_mla as allocate
from attn_ops.ops.cuda_kernels import (
    CUDA_MLA_PAGE,
    MlaKey,
    cuda_mla_keys,
    cuda_mla_swapped_rows,
    mla_by_tokens,
)
from attn_ops.ops.options import FP8, MLA_DIMS, AttentionOptions, mla_scale
from attn_ops.plan.sizing import cluster_splits_of, mla_cluster
from attn_ops.plan.state import PlanProblem, PrefillPlan, is_published, max_work_items, num_partials

LATENT, ROTARY = MLA_DIMS
"""Latent and rotary columns of a key."""

TILE = CUDA_MLA_PAGE
"""Tokens of a KV tile. TMA loads pages whose size is a multiple of ``TILE``; cp.async copies the tokens of others."""

CONVERTER_WARPS = 4
"""Warps that convert an FP8 KV tile, a quarter of its tokens each."""

QUERY_BOX_BLOCKS = 4
"""Blocks of 64 latent columns in a box of the queries."""

CACHE_STRIDES = ("stride_ckv_page", "stride_ckv_token", "stride_kpe_page", "stride_kpe_token")
"""Parameters of kernels that copy KV tiles by tokens. Strides are in elements."""


def _kernel(name: str, fp8: bool, by_tokens: bool) -> Kernel:
    """Kernel ``name``, for an FP8 or a 16-bit cache, whose KV tiles are copied by tokens or loaded by TMA."""
    parameters = {
        **dict.fromkeys(("q_nope", "q_pe"), "pointer"),
        **dict.fromkeys(("q_nope_map", "q_pe_map"), "map"),
        **dict.fromkeys(("ckv", "kpe"), "pointer" if by_tokens else "map"),
        **dict.fromkeys(("out", "lse", "partial", "qo_indptr", "kv_indices", "work"), "pointer"),
        "scale": "fp32",
        **dict.fromkeys(("rows", "num_pages", "max_pages", "max_items", "max_batch", "slots"), "i32"),
        **dict.fromkeys(("stride_q_row", "stride_q_head", "stride_qb_row", "stride_qb_head"), "i64"),
        **dict.fromkeys(("boxed", "heads"), "i32"),
        **(dict.fromkeys(CACHE_STRIDES, "i64") if by_tokens else {}),
        **dict.fromkeys(("page_size", "tile_rows", "num_items", "num_units", "causal", "early"), "i32"),
        **({"kv_type": "i32", "kv_scale": "pointer"} if fp8 else {}),
        "out_type": "i32",
    }
    caches = ("ckv", "kpe") if by_tokens else ()
    writes, aligned = ("out", "lse", "partial"), ("q_nope", "q_pe", *caches, "out")
    return Kernel(f"{name}.cu", name, parameters, writes=writes, aligned=aligned)


KERNELS = {
    (name, *cache): _kernel(name, *cache)
    for name in ("mla", "mla_swap_ab")
    for cache in itertools.product((False, True), repeat=2)
}
"""(name, whether the cache is FP8, whether KV tiles are copied by tokens) -> kernel."""

_TILE_BYTES, _ROW_BYTES = 2 * TILE * (LATENT + ROTARY), 2 * (LATENT + ROTARY)

SHARED_BYTES = 2 * _TILE_BYTES + PACKED_ROWS * _ROW_BYTES + 2048
"""Shared memory of ``mla.cu``: two KV tiles, the query tile, row maxima and sums, and barriers."""


def swapped_shared_bytes(packed_rows: int, splits: int) -> int:
    """Shared memory of ``mla_swap_ab.cu``: two KV tiles, the query tile, P, maxima or sums, results, and barriers.

    ``result`` bytes of a packed row are a staged half of its columns, or with two ``splits`` the results, maxima and
    sums that the other CTA of the cluster sends.
    """
    result = LATENT // 2 * 4 + (2 * 32 * 4 if splits > 1 else 16)
    used = 2 * _TILE_BYTES + packed_rows * (_ROW_BYTES + 2 * TILE + 16 + result) + 280
    return -(-used // 1024) * 1024


def _specialization(key: MlaKey) -> Specialization:
    kernel, unit_rows, splits, dtype, fp8, by_tokens = key
    macros = {"SPLITS": splits, "DTYPE": DTYPES[dtype]}
    macros |= ({"KV_FP8": 1} if fp8 else {}) | ({"KV_CP_ASYNC": 1} if by_tokens else {})
    if kernel == "mla":
        cluster, warpgroups, shared_bytes = unit_rows // PACKED_ROWS, 3, SHARED_BYTES
        macros["CLUSTER"] = cluster
    else:
        cluster, warpgroups, shared_bytes = 1, 2, swapped_shared_bytes(unit_rows, splits)
        macros["PACKED_ROWS"] = unit_rows
    return Specialization(
        KERNELS[kernel, fp8, by_tokens],
        macros,
        threads=128 * (warpgroups + fp8),
        shared_bytes=shared_bytes,
        cluster=(cluster * splits, 1, 1),
    )


SPECIALIZATIONS = {
    key: _specialization(key)
    for cache in itertools.product((False, True), repeat=2)
    for dtype in DTYPES
    for key in cuda_mla_keys(dtype, *cache)
}


class Units(NamedTuple):
    """How the packed rows of a work item are divided into units."""

    kernel: str
    rows: int  # packed rows of a unit
    blocks: int  # units of a work item

    @property
    def box_rows(self) -> int:
        """Packed rows of a CTA, which a box of queries has."""
        return PACKED_ROWS if self.kernel == "mla" else self.rows


def units_of(packed_rows: int, fp8: bool = False, by_tokens: bool = False) -> Units:
    """The units of a work item of ``packed_rows``: one with swapped operands for few rows, else units of ``mla.cu``."""
    for rows in cuda_mla_swapped_rows(fp8, by_tokens):
        if packed_rows <= rows:
            return Units("mla_swap_ab", rows, 1)
    unit_rows = PACKED_ROWS if by_tokens else mla_cluster(packed_rows) * PACKED_ROWS
    return Units("mla", unit_rows, -(-packed_rows // unit_rows))


def query_map(q: Tensor, packed_rows: int = PACKED_ROWS) -> tuple[TensorMap, bool]:
    """The map of queries ``[rows, heads, columns]``, and whether its box has ``packed_rows`` packed rows.

    It has if these are whole query rows, or heads of one query row. Otherwise the kernel does not load through the map.
    """
    rows, heads, columns = q.shape[0], int(q.shape[1]), int(q.shape[2])
    boxed = packed_rows % heads == 0 or heads % packed_rows == 0
    blocks = columns // COLUMNS
    box_rows = max(packed_rows // heads, 1) if boxed else 1
    box = min(blocks, QUERY_BOX_BLOCKS), box_rows, min(heads, packed_rows) if boxed else 1, COLUMNS
    return TensorMap(q, (blocks, rows, heads, COLUMNS), (COLUMNS, q.stride(0), q.stride(1), 1), box), boxed


def cache_map(cache: Tensor, itemsize: int = 2) -> TensorMap:
    """The map of ``cache [pages, page_size, columns]``.

    A box has 128 bytes of each token of a KV tile. Of FP8 rotary columns it has 64 bytes of each token of a converter
    warp.
    """
    columns = min(int(cache.shape[2]), ROW_BYTES // itemsize)
    tokens = TILE if columns * itemsize == ROW_BYTES else TILE // CONVERTER_WARPS
    return TensorMap(cache, tuple(cache.shape), tuple(cache.stride()), (1, tokens, columns), columns * itemsize)


def cache_arguments(ckv: Tensor, kpe: Tensor, by_tokens: bool) -> dict[str, Any]:
    """The arguments for the cache: tensor maps, or with ``by_tokens`` pointers and strides."""
    if not by_tokens:
        return {"ckv": cache_map(ckv, ckv.itemsize), "kpe": cache_map(kpe, kpe.itemsize)}
    strides = (*ckv.stride()[:2], *kpe.stride()[:2])
    return {"ckv": ckv, "kpe": kpe, **dict(zip(CACHE_STRIDES, strides, strict=True))}


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
    problem, rows, heads = PlanProblem.of(p.problem), q_nope.shape[0], int(q_nope.shape[1])
    by_tokens = mla_by_tokens(problem.page_size)
    sms, fp8 = num_sms(q_nope.device), ckv_cache.dtype in FP8
    units = units_of(problem.tile_rows * heads, fp8, by_tokens)
    key = MlaKey(units.kernel, units.rows, cluster_splits_of(sms, p), q_nope.dtype, fp8, by_tokens)
    specialization = SPECIALIZATIONS[key]
    cluster = specialization.cluster[0]
    num_items = max_work_items(p, rows)
    num_units = num_items * units.blocks
    q_nope_map, boxed = query_map(q_nope, units.box_rows)
    q_pe_map, _ = query_map(q_pe, units.box_rows)
    launch(
        specialization,
        (torch.sym_min(num_units, sms // cluster) * cluster,),
        q_nope=q_nope,
        q_pe=q_pe,
        q_nope_map=q_nope_map,
        q_pe_map=q_pe_map,
        **cache_arguments(ckv_cache, kpe_cache, by_tokens),
        out=out,
        lse=lse if lse.dim() > 1 else None,
        partial=workspace,
        **plan_arguments(p),
        scale=mla_scale(o.sm_scale),
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
        early=is_published(p.kv_len.shape[0]),
        **({"kv_type": FP8_TYPES[ckv_cache.dtype], "kv_scale": o.kv_scale} if fp8 else {}),
        out_type=0 if out.dtype == q_nope.dtype else OUT_TYPES[out.dtype],
    )
    if num_partials(p):
        scaled = units.kernel == "mla"
        combine_split_tiles(out, lse, workspace, None, p, scaled=scaled, launch_early=not scaled)
    return out, lse
