"""The call of the decode kernel: its tile, its arguments and its launches."""

from __future__ import annotations

import math
from typing import Any

import triton
from torch import Tensor

from attn_ops.kernels.triton.combine_decode import combine_split_rows
from attn_ops.kernels.triton.config_decode import decode_tile, min_shared_for_even_spread, short_stages
from attn_ops.kernels.triton.config_tuned import tuned
from attn_ops.kernels.triton.context import shard_of
from attn_ops.kernels.triton.decode import Features, Shape, Strides, Tile, decode_kernel
from attn_ops.kernels.triton.fp8 import readable_in_pairs
from attn_ops.kernels.triton.launch import is_eager, launch
from attn_ops.kernels.triton.pdl import read_plan_early
from attn_ops.meta.outputs import attention as allocate
from attn_ops.ops.options import PAGED_DIMS, AttentionOptions, softmax_scale
from attn_ops.plan.state import DecodePlan, PlanProblem, num_slots

COMBINE_STEP_ELEMENTS = 16384
"""Elements of partial results that the last program of a row loads in one step; half as many for 16 heads and more."""


def batch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: list[Tensor],
    workspace: Tensor,
    *,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """``(out [rows, num_qo_heads, head_dim_vo], lse [rows, num_qo_heads] or [0])``; the op's schema has the options."""
    p, o = DecodePlan(*plan), AttentionOptions(**options)
    problem = PlanProblem.of(p.problem)
    out, lse = allocate(q, k_cache, v_cache, return_lse=return_lse, out_dtype=o.out_dtype)
    max_batch, num_ctas = p.kv_len.shape[0], p.cta_indptr.shape[0] - 1
    group, dims = problem.num_qo_heads // problem.num_kv_heads, (problem.head_dim_qk, problem.head_dim_vo)
    rope = o.pos_encoding == "ROPE_LLAMA"
    short = short_stages(k_cache.dtype, p.kv_indices.shape[0] * problem.page_size, num_ctas)
    tile = decode_tile(q.device, q.dtype, *dims, group, k_cache.dtype, rope, short)
    if not rope:
        tile = tuned(tile, "decode", q.device, q.dtype, k_cache.dtype, *dims, group, problem.page_size)
    step_elements = COMBINE_STEP_ELEMENTS if tile.heads < 16 else COMBINE_STEP_ELEMENTS // 2
    splits_per_step = max(1, step_elements // (tile.heads * tile.dim_vo))
    pdl, eager = read_plan_early(q, max_batch), is_eager(q)
    programs = num_ctas * problem.num_kv_heads * triton.cdiv(group, tile.heads)
    min_shared = min_shared_for_even_spread(q.device, programs) if pdl and isinstance(programs, int) else 0
    writes = ("out", "lse", "partial")  # and split_counters with COMBINE, which is not traced
    launched = tile.options._replace(launch_pdl=pdl, min_shared=min_shared, writes=writes)
    arguments = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "out": out,
        "lse": lse,
        "partial": workspace,
        **_plan_arguments(p),
        **_option_arguments(o, problem),
        **_strides(q, k_cache, v_cache, kv_layout),
        "rows": q.shape[0],
        "num_pages": k_cache.shape[0],
        "FEATURES": Features(
            CAP=bool(o.logits_soft_cap > 0),
            WINDOW=bool(o.window_left >= 0),
            SINKS=o.sinks is not None,
            KV_SCALE=o.kv_scale is not None,
            ROPE=rope,
            ALIBI=o.pos_encoding == "ALIBI",
            LOG2_HEADS=problem.num_qo_heads.bit_length() - 1,
            LSE=return_lse,
            FP8_PAIRS=readable_in_pairs(v_cache),
        ),
        "TILE": Tile(tile.kv, tile.heads, tile.dim_qk, tile.dim_vo),
        "BLOCK_REQUESTS": triton.next_power_of_2(triton.cdiv(max_batch, num_ctas)),
        "SPLITS_PER_STEP": splits_per_step,
        "PDL": pdl,
    }
    launch(decode_kernel, (programs,), launched, **arguments, COMBINE=eager)
    if not eager:
        combine_split_rows(out, lse, workspace, o.sinks, p, return_lse)
    return out, lse


def _plan_arguments(p: DecodePlan) -> dict[str, Any]:
    return {
        "split_counters": p.split_counters,
        "kv_indices": p.kv_indices,
        "kv_len": p.kv_len,
        "work": p.work,
        "cta_indptr": p.cta_indptr,
        "merge_indptr": p.merge_indptr,
        "max_batch": p.kv_len.shape[0],
        "max_pages": p.kv_indices.shape[0],
        "max_items": p.work.shape[0],
        "slots": num_slots(p),
    }


def _option_arguments(o: AttentionOptions, problem: PlanProblem) -> dict[str, Any]:
    """Options with a value, and the sizes of the problem, in which positions may have to be known."""
    dims, positional = (problem.head_dim_qk, problem.head_dim_vo), o.pos_encoding != "NONE" or o.window_left >= 0
    group = problem.num_qo_heads // problem.num_kv_heads
    return {
        "sinks": o.sinks,
        "kv_scale": o.kv_scale,
        "scale": softmax_scale(o.sm_scale, problem.head_dim_qk),
        "cap": o.logits_soft_cap,
        "window_left": o.window_left,
        "log2_theta": math.log2(o.rope_theta),
        "inverse_rope_scale": 1 / o.rope_scale,
        "SHAPE": Shape(problem.num_kv_heads, group, *dims, problem.page_size, *shard_of(problem, positional)),
    }


def _strides(q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_layout: str) -> dict[str, Any]:
    token, head = PAGED_DIMS[kv_layout]
    strides = (
        *(q.stride(0), q.stride(1)),
        *(k_cache.stride(0), k_cache.stride(token)),
        *(v_cache.stride(0), v_cache.stride(token)),
    )
    return {
        "stride_k_head": k_cache.stride(head),
        "stride_v_head": v_cache.stride(head) // (2 if readable_in_pairs(v_cache) else 1),
        "STRIDES": Strides(*map(int, strides)),
    }
