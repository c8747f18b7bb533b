"""A small valid call of every op, as keyword arguments, for tests of ops that are not about results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import attn_ops
from attn_ops.ops.schemas import SCHEMAS
from helpers.cases import DECODE_BASE, PREFILL_BASE, Case
from helpers.harness import Setup
from helpers.oracle import PagedBatch
from helpers.page_tables import indptr, int32, page_table

Arguments = dict[str, Any]


def arguments(op: str, **changes: Any) -> Arguments:
    """Keyword arguments of ``op``; ``changes`` are fields of :class:`~cases.Case`. Fresh tensors every time."""
    make, base = MAKERS[op]
    return make(replace(base, **changes))


def schema(op: str) -> torch.FunctionSchema:
    return getattr(torch.ops.attn, op).default._schema


def positional(op: str, kwargs: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    """The same call as ``(args, kwargs)``, with keywords for what the schema has after its star."""
    names = [a.name for a in schema(op).arguments if not a.kwarg_only and a.name in kwargs]
    return tuple(kwargs[name] for name in names), {k: v for k, v in kwargs.items() if k not in names}


def written(op: str, kwargs: Arguments) -> list[Tensor]:
    """The tensors that the op may write by its schema."""
    names = [a.name for a in schema(op).arguments if a.is_write]
    return [t for name in names for t in torch.utils._pytree.tree_leaves(kwargs[name]) if isinstance(t, Tensor)]


def observed(op: str, kwargs: Arguments, result: Any) -> list[Tensor]:
    """The results of a call, and the arguments that it wrote, without the workspace."""
    outputs = [t for t in torch.utils._pytree.tree_leaves(result) if t is not None]
    return [*outputs, *(t for t in written(op, kwargs) if t is not kwargs.get("workspace"))]


def _attention(kind: str) -> Callable[[Case], Arguments]:
    return lambda case: Setup(kind, case).arguments


def _plan(kind: str) -> Callable[[Case], Arguments]:
    names: tuple[str, ...] = ("kv_indptr", "kv_indices", "kv_last_page_len")
    names = names if kind == "decode" else ("qo_indptr", *names)

    def make(case: Case) -> Arguments:
        setup = Setup(kind, case)
        return {**dict(zip(names, setup.plan_inputs, strict=True)), "plan": setup.planner.state}

    return make


def _single(case: Case) -> Arguments:
    """The only request of a ragged batch, without the padding behind it."""
    ragged = Setup("ragged", case).arguments
    del ragged["plan"], ragged["workspace"]
    (rows,), (tokens,) = case.qo_lens, case.kv_lens
    used = slice(tokens) if case.kv_layout == "NHD" else (slice(None), slice(tokens))
    mask = None if ragged["mask"] is None else ragged["mask"][: -(-rows * tokens // 8)]
    return {**ragged, "k": ragged["k"][used], "v": ragged["v"][used], "mask": mask}


def _mla(case: Case) -> Arguments:
    table, (heads, _), (width, ckv) = page_table(case.kv_lens, case.page_size), case.heads, case.head_dims
    sizes = {"page_size": case.page_size, "num_qo_heads": heads, "num_kv_heads": 1, "head_dim": width}
    planner = attn_ops.PrefillPlanner(
        len(case.kv_lens), sum(case.qo_lens), len(table[1]), head_dim_vo=ckv, **(sizes | case.planner)
    )
    q = torch.randn(sum(case.qo_lens), heads, width).to(case.dtype)
    cache = torch.randn(len(table[1]), case.page_size, width).to(case.kv_dtype or case.dtype)
    return {
        "q_nope": q[..., :ckv],
        "q_pe": q[..., ckv:],
        "ckv_cache": cache[..., :ckv],
        "kpe_cache": cache[..., ckv:],
        "plan": planner.plan(indptr(case.qo_lens), *table),
        "workspace": planner.workspace,
        "sm_scale": 0.2,
        "causal": case.causal,
        "return_lse": True,
        **({} if case.kv_scale is None else {"kv_scale": torch.tensor(case.kv_scale)}),
    }


def _places(case: Case) -> Arguments:
    """Three tokens: two written, one skipped."""
    kv_indptr, kv_indices, _ = page_table(case.kv_lens, case.page_size)
    return {
        "batch_indices": int32([0, -1, 2]),
        "positions": int32([case.kv_lens[0] - 1, 5, 17]),
        "kv_indices": kv_indices,
        "kv_indptr": kv_indptr,
    }


def block_map(case: Case, rows: int, cols: int) -> Tensor:
    """bool ``[rows, cols]``, another for other lengths, with the same number of blocks."""
    generator = torch.Generator().manual_seed(sum(i * n for i, n in enumerate(case.kv_lens)))
    return (torch.randperm(rows * cols, generator=generator) < rows * cols // 2).view(rows, cols)


def _block_sparse(case: Case) -> Arguments:
    """41 query rows over 6 block columns, in blocks of 8 rows by ``page_size`` keys. Unused keys are NaN."""
    rows, keys, (heads, kv_heads), (dim, dim_vo) = 41, 6 * case.page_size, case.heads, case.head_dims
    sizes: Arguments = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "head_dim_vo": dim_vo}
    planner = attn_ops.BlockSparsePlanner(rows, keys, 8, case.page_size, 18, causal=case.causal, **sizes)
    selected = block_map(case, 6, 6)
    selected[:, 1] = False
    steps, indices = selected.sum(1).tolist(), selected.nonzero()[:, 1].int()
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(keys, kv_heads, d, generator=generator) for d in case.head_dims)
    for t in (k, v):
        t[case.page_size : 2 * case.page_size] = torch.nan
    q = torch.randn(rows, heads, dim, generator=generator).to(case.dtype)
    k, v = (t.to(case.dtype) if case.kv_layout == "NHD" else t.to(case.dtype).transpose(0, 1) for t in (k, v))
    return {
        "q": q,
        "k": k,
        "v": v,
        "plan": planner.plan(indptr(steps), indices),
        "workspace": planner.workspace,
        "kv_layout": case.kv_layout,
        "causal": case.causal,
        "sinks": torch.randn(heads, generator=generator) * case.sinks if case.sinks else None,
        "logits_soft_cap": case.logits_soft_cap,
        "return_lse": True,
    }


def _append(case: Case) -> Arguments:
    generator = torch.Generator().manual_seed(0)
    heads, (dim, dim_vo) = case.heads[1], case.head_dims
    sizes = (case.page_size, heads, dim, dim_vo, case.kv_layout, case.dtype, "cpu", case.storage, generator)
    batch = PagedBatch(case.kv_lens, *sizes)
    for memory in batch.memory:
        memory.zero_()
    return {
        "k": torch.randn(3, heads, dim, generator=generator).to(case.dtype),
        "v": torch.randn(3, heads, dim_vo, generator=generator).to(case.dtype),
        "k_cache": batch.k_cache,
        "v_cache": batch.v_cache,
        **_places(case),
        "kv_layout": case.kv_layout,
    }


def _append_mla(case: Case) -> Arguments:
    cache = torch.zeros(20, case.page_size, 40, dtype=case.dtype)
    new = torch.randn(3, 40).to(case.dtype)
    caches = {"ckv_cache": cache[..., :32], "kpe_cache": cache[..., 32:].clone()}
    return {"ckv": new[:, :32], "kpe": new[:, 32:], **caches, **_places(case)}


def _states(case: Case, *shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(*shape, case.head_dims[1], generator=generator).to(case.dtype)
    return v, torch.randn(*shape, generator=generator)


def _named(*names: str) -> Callable[[Case], Arguments]:
    """States ``[5, 4]`` under pairs of names, or ``[5, 3, 4]`` for a single pair."""

    def make(case: Case) -> Arguments:
        shape = (5, 4) if len(names) > 2 else (5, 3, 4)
        states = [_states(case, *shape, seed=i) for i in range(len(names) // 2)]
        return dict(zip(names, [t for state in states for t in state], strict=True))

    return make


def _varlen(case: Case) -> Arguments:
    v, s = _states(case, 5, 4)
    return {"v": v, "s": s, "indptr": int32([0, 2, 2, 5])}


def _constant(**kwargs: Any) -> Callable[[Case], Arguments]:
    return lambda case: {k: v.clone() if isinstance(v, Tensor) else v for k, v in kwargs.items()}


BITS = torch.tensor([True, False, True] * 5)
MLA_BASE = replace(PREFILL_BASE, heads=(3, 1), head_dims=(40, 32))
SINGLE_BASE = replace(PREFILL_BASE, qo_lens=(5,), kv_lens=(37,))

MAKERS: dict[str, tuple[Callable[[Case], Arguments], Case]] = {
    "plan_decode": (_plan("decode"), DECODE_BASE),
    "plan_prefill": (_plan("prefill"), PREFILL_BASE),
    "batch_decode": (_attention("decode"), DECODE_BASE),
    "batch_prefill": (_attention("prefill"), PREFILL_BASE),
    "ragged_prefill": (_attention("ragged"), PREFILL_BASE),
    "single_prefill": (_single, SINGLE_BASE),
    "block_sparse_prefill": (_block_sparse, PREFILL_BASE),
    "block_sparse_table": (
        _constant(
            block_mask=torch.tensor([[[True, False, True], [False, True, True]]]),
            row_indptr=int32([[0, 3, 5]]),
            col_indptr=int32([[0, 4, 8, 10]]),
            page_size=2,
            max_pages=9,
            causal=True,
        ),
        DECODE_BASE,
    ),
    "batch_mla": (_mla, MLA_BASE),
    "append_kv": (_append, DECODE_BASE),
    "append_mla_kv": (_append_mla, DECODE_BASE),
    "batch_indices_positions": (
        _constant(append_indptr=int32([0, 3, 3, 5]), seq_lens=int32([7, 2, 2]), nnz=6),
        DECODE_BASE,
    ),
    "seq_lens": (_constant(kv_indptr=int32([0, 3, 3]), kv_last_page_len=int32([7, 2]), page_size=16), DECODE_BASE),
    "page_table": (_constant(block_tables=int32([[3, 4], [5, 6]]), seq_lens=int32([17, 2]), page_size=16), DECODE_BASE),
    "shard_page_table": (
        _constant(
            kv_indptr=int32([0, 5, 5, 7]),
            kv_indices=int32([6, 2, 3, 1, 9, 4, 5]),
            kv_last_page_len=int32([7, 0, 16]),
            page_size=16,
            rank=1,
            world=2,
            interleave=32,
        ),
        DECODE_BASE,
    ),
    "merge_state": (_named("v_a", "s_a", "v_b", "s_b"), DECODE_BASE),
    "merge_states": (_named("v", "s"), DECODE_BASE),
    "merge_state_in_place": (_named("v", "s", "v_other", "s_other"), DECODE_BASE),
    "merge_states_varlen": (_varlen, DECODE_BASE),
    "packbits": (_constant(x=BITS), DECODE_BASE),
    "segment_packbits": (_constant(x=BITS, indptr=int32([0, 9, 15]), num_bytes=3), DECODE_BASE),
}

assert MAKERS.keys() == SCHEMAS.keys(), "every op has a call here"
