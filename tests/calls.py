"""A small valid call of every op, as keyword arguments, for tests that are about ops and not about numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from cases import DECODE_BASE, PREFILL_BASE, Case
from harness import Setup
from oracle import PagedBatch

BASES = {
    "batch_decode": ("decode", DECODE_BASE),
    "batch_prefill": ("prefill", PREFILL_BASE),
    "ragged_prefill": ("ragged", PREFILL_BASE),
    "plan_decode": ("decode", DECODE_BASE),
    "plan_prefill": ("prefill", PREFILL_BASE),
}


def arguments(op: str, **changes: Any) -> dict[str, Any]:
    """Keyword arguments of ``op``; ``changes`` are fields of :class:`~cases.Case`. Fresh tensors every time."""
    if op in BASES:
        kind, base = BASES[op]
        setup = Setup(kind, replace(base, **changes))
        if not op.startswith("plan"):
            return setup.arguments
        names = ("kv_indptr", "kv_indices", "kv_last_page_len")
        names = names if op == "plan_decode" else ("qo_indptr", *names)
        return {**dict(zip(names, setup.plan_inputs, strict=True)), "plan": setup.planner.state}
    return (append if op == "append_kv" else MERGES[op])(replace(DECODE_BASE, **changes))


def append(case: Case) -> dict[str, Any]:
    """Three tokens: two written, one skipped."""
    generator = torch.Generator().manual_seed(0)
    heads, (dim, dim_vo) = case.heads[1], case.head_dims
    batch = PagedBatch(
        case.kv_lens,
        case.page_size,
        heads,
        dim,
        dim_vo,
        case.kv_layout,
        case.dtype,
        "cpu",
        case.storage,
        generator,
    )
    for memory in batch.memory:
        memory.zero_()
    return {
        "k": torch.randn(3, heads, dim, generator=generator).to(case.dtype),
        "v": torch.randn(3, heads, dim_vo, generator=generator).to(case.dtype),
        "k_cache": batch.k_cache,
        "v_cache": batch.v_cache,
        "batch_indices": torch.tensor([0, -1, 2], dtype=torch.int32),
        "positions": torch.tensor([36, 5, 17], dtype=torch.int32),
        "kv_indices": batch.kv_indices,
        "kv_indptr": batch.kv_indptr,
        "kv_layout": case.kv_layout,
    }


def _states(case: Case, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shape))
    v = torch.randn(*shape, case.head_dims[1], generator=generator).to(case.dtype)
    return v, torch.randn(*shape, generator=generator)


def _merge_state(case: Case) -> dict[str, Any]:
    (v_a, s_a), (v_b, s_b) = _states(case, 5, 4), _states(case, 5, 4)
    return {"v_a": v_a, "s_a": s_a, "v_b": v_b.flip(0), "s_b": s_b.flip(0)}


def _merge_states(case: Case) -> dict[str, Any]:
    v, s = _states(case, 5, 3, 4)
    return {"v": v, "s": s}


MERGES = {"merge_state": _merge_state, "merge_states": _merge_states}
