"""Calls with plans and page tables that no planner makes: random extremes, plans of other batches, and cut plans.

A result means nothing then, but an op never accesses memory outside of its tensors, and always ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attn_ops.ops.schemas import SCHEMAS
from attn_ops.plan.state import DecodePlan, PrefillPlan

Arguments = dict[str, Any]

LEAST, MOST = -(2**31), 2**31 - 1
EXTREMES = (LEAST, LEAST + 3, LEAST + 100, -65, -1, 0, 0, 1, 2, 7, 64, 100, 300, MOST - 130, MOST - 15, MOST - 1, MOST)

TABLES: dict[str, tuple[str, ...]] = {
    "plan_decode": ("kv_indptr", "kv_indices", "kv_last_page_len"),
    "plan_prefill": ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"),
    "append_kv": ("batch_indices", "positions", "kv_indices", "kv_indptr"),
    "append_mla_kv": ("batch_indices", "positions", "kv_indices", "kv_indptr"),
    "batch_indices_positions": ("append_indptr", "seq_lens"),
    "seq_lens": ("kv_indptr", "kv_last_page_len"),
    "page_table": ("block_tables", "seq_lens"),
    "merge_states_varlen": ("indptr",),
    "segment_packbits": ("indptr",),
}
"""The arguments of each op whose contents are indices or lengths."""

PLANNED = tuple(op for op, schema in SCHEMAS.items() if "Tensor[] plan" in schema)
"""Ops that read a plan."""


def _fill(t: Tensor, generator: torch.Generator) -> None:
    """Half of the elements, or all of them, become extremes."""
    values = torch.tensor(EXTREMES, dtype=torch.int32)[torch.randint(len(EXTREMES), t.shape, generator=generator)]
    share = (0.1, 0.5, 1.0)[int(torch.randint(3, (), generator=generator))]
    changed = torch.rand(t.shape, generator=generator) < share
    t.copy_(torch.where(changed, values.to(t.dtype), t.cpu()))


def random_tables(op: str, kwargs: Arguments, seed: int) -> Arguments:
    """The arguments with random extremes in page tables and lengths."""
    generator = torch.Generator().manual_seed(seed)
    for name in TABLES.get(op, ()):
        kwargs[name] = kwargs[name].clone()
        _fill(kwargs[name], generator)
    return kwargs


def random_plan(kwargs: Arguments, seed: int) -> Arguments:
    """The arguments with random extremes in some fields of the plan, or in all."""
    generator = torch.Generator().manual_seed(seed)
    fields = [t for t in kwargs["plan"] if t.numel()]
    every = bool(torch.rand((), generator=generator) < 0.3)
    for t in fields:
        if every or torch.rand((), generator=generator) < 0.4:
            _fill(t, generator)
    return kwargs


def foreign_plan(kwargs: Arguments, other: Arguments) -> Arguments:
    """The arguments with the contents of the plan of ``other``, as far as they go; the rest is what it was."""
    for t, source in zip(kwargs["plan"], other["plan"], strict=True):
        count = min(t.numel(), source.numel())
        t.view(-1)[:count] = source.reshape(-1)[:count]
    return kwargs


def zero_plan(kwargs: Arguments) -> Arguments:
    for t in kwargs["plan"]:
        t.zero_()
    return kwargs


def cut_plans(kwargs: Arguments) -> Iterator[tuple[str, Arguments]]:
    """The arguments with each dimension of each field of the plan shorter by one, and empty."""
    plan: DecodePlan | PrefillPlan = kwargs["plan"]
    for name, t in plan._asdict().items():
        for d in range(t.dim()):
            for length in {max(t.shape[d] - 1, 0), 0} - {t.shape[d]}:
                cut = t.narrow(d, 0, length).clone() if name != "problem" else t.narrow(d, 0, length)
                yield f"{name}, dimension {d}: {length}", {**kwargs, "plan": plan._replace(**{name: cut})}
    workspace = kwargs["workspace"]
    for length in {workspace.shape[0] // 2, 0} - {workspace.shape[0]}:
        yield f"workspace: {length}", {**kwargs, "workspace": workspace[:length].clone()}
