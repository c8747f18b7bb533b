"""Checks of the attention ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from attn_ops.errors import OptionError, PlanError, ShapeError
from attn_ops.ops.backends import MemoryLayout, Problem
from attn_ops.ops.checks.checker import OpChecker, Plan, caches, memory_layout
from attn_ops.ops.fp8_queries import QUERY
from attn_ops.ops.options import DENSE_DIMS, FLOATS, FP8, MLA_DIMS, AttentionOptions
from attn_ops.plan.plan_checks import MAX_KV_TOKENS, MAX_QUERY_ROWS
from attn_ops.plan.state import DecodePlan, PlanProblem, PrefillPlan, workspace_size
from attn_ops.symbolic_sizes import holds

CACHES = ("k_cache", "v_cache")


def _problem(
    op: OpChecker, q: Tensor, k: Tensor, options: AttentionOptions, layout: MemoryLayout, **sizes: int
) -> Problem:
    return Problem(
        op=op.name,
        device=q.device,
        dtype=q.dtype,
        kv_dtype=k.dtype,
        out_dtype=options.out_dtype or q.dtype,
        num_qo_heads=int(q.shape[1]),
        options=options.given(),
        pos_encoding=options.pos_encoding,
        layout=layout,
        **sizes,
    )


def _attention(
    op: OpChecker,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_size: int,
    num_kv_heads: int,
    options: AttentionOptions,
    names: tuple[str, str] = ("k", "v"),
) -> Problem:
    """The checks of every attention op after those of its keys and values. Returns the problem.

    ``page_size`` is 0 without pages. ``names`` are the op's names of ``k`` and ``v``.
    """
    op.heads(int(q.shape[1]), num_kv_heads)
    op.size(names[0], "head_dim", int(k.shape[-1]), int(q.shape[2]), "q")
    if int(q.shape[2]) < 1:
        op.fail(ShapeError, "q has head_dim 0", "at least 1", "pass queries and keys with elements")
    op.kv_dtype(**{"q": q, names[0]: k, names[1]: v})
    op.options(q, options)
    if options.pos_encoding == "ROPE_LLAMA" and int(q.shape[2]) % 2:
        op.fail(ShapeError, f"q has head_dim {q.shape[2]}", "an even one for ROPE_LLAMA", "pad the heads")
    op.no_grad(**{"q": q, names[0]: k, names[1]: v}, sinks=options.sinks, kv_scale=options.kv_scale)
    return _problem(
        op,
        q,
        k,
        options,
        memory_layout((q,), (k, v)),
        num_kv_heads=num_kv_heads,
        head_dim_qk=int(q.shape[2]),
        head_dim_vo=int(v.shape[-1]),
        page_size=page_size,
    )


def _planned(
    op: OpChecker,
    kind: type[Plan],
    problem: Problem,
    q: Tensor,
    plan: Sequence[Tensor],
    workspace: Tensor,
    options: AttentionOptions,
) -> tuple[Plan, Problem]:
    """Check that the plan is for this problem and the workspace is large enough. Returns the plan and the problem."""
    typed = op.plan(plan, kind, q)
    if kind is PrefillPlan:
        op.limit("q_nope" if op.name == "batch_mla" else "q", "query rows", q.shape[0], MAX_QUERY_ROWS)
    sizes = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo")
    op.planned_for(typed, page_size=problem.page_size or 1, **{size: getattr(problem, size) for size in sizes})
    op.covered(typed, options)
    op.without_sinks(typed, options)
    op.workspace(workspace, workspace_size(typed), q)
    return typed, replace(problem, context_ranks=PlanProblem.of(typed.problem).world)


def batch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Sequence[Tensor],
    workspace: Tensor,
    *,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    backend: str = "auto",
    **options: Any,
) -> Problem:
    op = OpChecker("batch_decode")
    o = AttentionOptions(**options, causal=True)
    op.tensor("q", q, "[batch, num_qo_heads, head_dim]", FLOATS, None)
    page_size, heads = caches(op, q, k_cache, v_cache, kv_layout)
    problem = _attention(op, q, k_cache, v_cache, page_size, heads, o, CACHES)
    typed, problem = _planned(op, DecodePlan, problem, q, plan, workspace, o)
    op.capacity(
        q.shape[0],
        typed.kv_len.shape[0],
        "q has {needed} rows and the plan capacity for {capacity} requests",
        "max_batch of at least {needed}",
        "make the planner with that max_batch",
    )
    return problem


def batch_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Sequence[Tensor],
    workspace: Tensor,
    *,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    backend: str = "auto",
    **options: Any,
) -> Problem:
    op = OpChecker("batch_prefill")
    o = AttentionOptions(**options)
    op.tensor("q", q, "[nnz_qo, num_qo_heads, head_dim]", (*FLOATS, QUERY), None)
    page_size, heads = caches(op, q, k_cache, v_cache, kv_layout)
    problem = _attention(op, q, k_cache, v_cache, page_size, heads, o, CACHES)
    return _planned(op, PrefillPlan, problem, q, plan, workspace, o)[1]


def _dense_kv(op: OpChecker, q: Tensor, k: Tensor, v: Tensor, kv_layout: str) -> int:
    """Check the query, and keys and values that are not paged. Returns the number of KV heads."""
    op.layout(kv_layout)
    dims = "[nnz_kv, num_kv_heads, head_dim]" if kv_layout == "NHD" else "[num_kv_heads, nnz_kv, head_dim]"
    op.tensor("q", q, "[nnz_qo, num_qo_heads, head_dim]", (*FLOATS, QUERY), None)
    op.tensor("k", k, dims, FLOATS + FP8, q)
    op.tensor("v", v, dims, FLOATS + FP8, q)
    for dim in (0, 1):
        op.size("v", f"dimension {dim}", v.shape[dim], k.shape[dim], "k")
    token, head = DENSE_DIMS[kv_layout]
    op.limit("k", "tokens", k.shape[token], MAX_KV_TOKENS)
    return int(k.shape[head])


def ragged_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Sequence[Tensor],
    workspace: Tensor,
    *,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    backend: str = "auto",
    **options: Any,
) -> Problem:
    op = OpChecker("ragged_prefill")
    o = AttentionOptions(**options)
    problem = _attention(op, q, k, v, 0, _dense_kv(op, q, k, v, kv_layout), o)
    typed, problem = _planned(op, PrefillPlan, problem, q, plan, workspace, o)
    if typed.kv_indices.shape[0]:
        op.fail(PlanError, "the plan is for a paged cache", "one for ragged KV", "make the planner with max_pages=0")
    return problem


def single_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch_size: int = 1,
    *,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    backend: str = "auto",
    **options: Any,
) -> Problem:
    op = OpChecker("single_prefill")
    o = AttentionOptions(**options)
    problem = _attention(op, q, k, v, 0, _dense_kv(op, q, k, v, kv_layout), o)
    op.limit("q", "query rows", q.shape[0], MAX_QUERY_ROWS)
    tokens = k.shape[DENSE_DIMS[kv_layout].token]
    if not holds(batch_size >= 1):
        op.fail(OptionError, f"batch_size is {batch_size}", "1 or more", "pass the number of requests")
    for name, dim, size in (("q", "query rows", q.shape[0]), ("k", "tokens", tokens)):
        if not holds(size % batch_size == 0):
            expected = f"a multiple of batch_size, {batch_size}"
            op.fail(ShapeError, f"{name} has {size} {dim}", expected, "pass requests of equal lengths, or make a plan")
    if o.mask is not None:
        bits = q.shape[0] * (tokens // batch_size)
        op.size("mask", "bytes", o.mask.shape[0], (bits + 7) // 8, "one bit for every pair of query row and key")
    return problem


def block_sparse_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Sequence[Tensor],
    workspace: Tensor,
    *,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    backend: str = "auto",
    **options: Any,
) -> Problem:
    op = OpChecker("block_sparse_prefill")
    o = AttentionOptions(**options)
    heads = _dense_kv(op, q, k, v, kv_layout)
    page_size = PlanProblem.of(op.plan(plan, PrefillPlan, q).problem).page_size
    problem = _attention(op, q, k, v, page_size, heads, o)
    typed, problem = _planned(op, PrefillPlan, problem, q, plan, workspace, o)
    if not typed.kv_indices.shape[0]:
        fix = "make the planner with BlockSparsePlanner"
        op.fail(PlanError, "the plan is for ragged KV", "one with a page for each block column", fix)
    tokens = k.shape[DENSE_DIMS[kv_layout].token]
    if tokens % page_size:
        op.fail(
            ShapeError,
            f"k has {tokens} tokens and the plan was made for pages of {page_size}",
            "whole pages",
            "pass all block columns, or make a planner for pages that divide the tokens",
        )
    _of_matrix(op, PlanProblem.of(typed.problem), tokens, o.causal and o.mask is None)
    return problem


def _of_matrix(op: OpChecker, planned: PlanProblem, tokens: int, causal: bool) -> None:
    """Raise unless a sparse planner's plan is for this number of keys and for ``causal``.

    Plans of wrappers have no ``matrix_keys``: the wrappers check both.
    """
    if not planned.matrix_keys:
        return
    if tokens != planned.matrix_keys:
        op.fail(
            ShapeError,
            f"k has {tokens} tokens and the plan was made for {planned.matrix_keys}",
            f"{planned.matrix_keys}, those of all heads that are requests",
            "pass all keys of the matrix, or make a planner for these",
        )
    if causal and not planned.placed:
        op.fail(
            PlanError,
            "causal is True and the plan was made without causal",
            "causal=False",
            "make the planner with causal=True",
        )
    if planned.placed and not causal:
        op.fail(
            PlanError,
            "the plan was made with causal and the call is not causal",
            "causal=True and no mask",
            "make the planner with causal=False",
        )


def batch_mla(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    plan: Sequence[Tensor],
    workspace: Tensor,
    *,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Any,
) -> Problem:
    op = OpChecker("batch_mla")
    o = AttentionOptions(**options)
    op.tensor("q_nope", q_nope, "[nnz_qo, num_heads, head_dim_ckv]", FLOATS, None)
    op.tensor("q_pe", q_pe, "[nnz_qo, num_heads, head_dim_kpe]", (q_nope.dtype,), q_nope)
    op.tensor("ckv_cache", ckv_cache, "[pages, page_size, head_dim_ckv]", FLOATS + FP8, q_nope)
    op.tensor("kpe_cache", kpe_cache, "[pages, page_size, head_dim_kpe]", FLOATS + FP8, q_nope)
    for dim in (0, 1):
        op.size("q_pe", f"dimension {dim}", q_pe.shape[dim], q_nope.shape[dim], "q_nope")
        op.size("kpe_cache", f"dimension {dim}", kpe_cache.shape[dim], ckv_cache.shape[dim], "ckv_cache")
    op.size("ckv_cache", "head_dim", int(ckv_cache.shape[2]), int(q_nope.shape[2]), "q_nope")
    op.size("kpe_cache", "head_dim", int(kpe_cache.shape[2]), int(q_pe.shape[2]), "q_pe")
    op.kv_dtype(q_nope=q_nope, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
    dims = int(q_nope.shape[2]), int(q_pe.shape[2])
    if o.sm_scale is None and dims != MLA_DIMS:
        op.fail(OptionError, f"sm_scale is None with head_dim {dims[0]} + {dims[1]}", "a number", "pass sm_scale")
    op.options(q_nope, o)
    op.no_grad(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache, kpe_cache=kpe_cache, sinks=o.sinks, kv_scale=o.kv_scale)
    problem = _problem(
        op,
        q_nope,
        ckv_cache,
        o,
        memory_layout((q_nope, q_pe), (ckv_cache, kpe_cache)),
        head_dim_qk=sum(dims),
        head_dim_vo=dims[0],
        page_size=int(ckv_cache.shape[1]),
    )
    return _planned(op, PrefillPlan, problem, q_nope, plan, workspace, o)[1]
