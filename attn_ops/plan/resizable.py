"""Resizable plans: keep a planner while batches fit, and make a larger one, by powers of two, when one does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.ops.options import MLA_HEAD_DIMS
from attn_ops.plan.page_table import BatchSize, PageTable
from attn_ops.plan.planner_base import WORKSPACE
from attn_ops.plan.sizing import general_ctas_per_head, power_of_two_from
from attn_ops.plan.spec import PlanSpec
from attn_ops.planner import DecodePlanner, PrefillPlanner

MIN_CAPACITY = BatchSize(batch=4, rows=64, pages=64, kv_len=256)
"""Capacity of the smallest plan. It is small, since the ``reference`` backend computes on all of it."""


def least_capacity(spec: PlanSpec) -> BatchSize:
    """Capacity of the smallest plan. For MLA it has one query row per request: their number decides on clusters."""
    return MIN_CAPACITY._replace(rows=MIN_CAPACITY.batch) if spec.head_dims == MLA_HEAD_DIMS else MIN_CAPACITY


class SizedPlanner(NamedTuple):
    """A planner with its spec and capacity."""

    spec: PlanSpec
    capacity: BatchSize
    planner: DecodePlanner | PrefillPlanner


@dataclass
class ResizablePlan:
    """Holds a planner, and replaces it by one of larger capacity when a batch does not fit.

    A batch is planned in two steps. :meth:`prepare` checks it and allocates, and changes neither the held plan nor any
    buffer of the caller. :meth:`commit` writes the plan and holds its planner.

    device         device of the plans
    own_workspace  planners allocate a workspace; otherwise the caller passes one to each call
    storage        fields of the plan that live in the caller's buffers, by name
    held           the planner of the last commit
    previous       the last planner before it that was for another spec, as when large and small batches alternate
    """

    device: torch.device
    own_workspace: bool = False
    storage: Mapping[str, Tensor] | None = None
    held: SizedPlanner | None = None
    previous: SizedPlanner | None = None

    def fit(self, spec: PlanSpec, needed: BatchSize, fixed: BatchSize | None = None) -> SizedPlanner:
        """A held planner that is for ``spec`` and has capacity for ``needed``, else a new planner.

        ``fixed`` is the exact capacity of the plan, in CUDA-graph mode.
        """
        spec = spec.of_batch(self.device, fixed or needed)
        # A planner that has had more keys is kept for short KV too: batches that fit it have its addresses.
        held = self._held_for(spec._replace(short_kv=False)) or self._held_for(spec)
        if held is not None:
            spec = held.spec
        capacity = fixed
        if capacity is None:
            have = least_capacity(spec) if held is None else held.capacity
            capacity = BatchSize(
                _resized(have.batch, needed.batch),
                _resized(have.rows, needed.rows),
                _resized(have.pages, needed.pages),
                None if have.kv_len is None or needed.kv_len is None else _resized(have.kv_len, needed.kv_len),
                _resized(have.splits, needed.splits),
            )
        if held is not None and held.capacity == capacity:
            return held
        return SizedPlanner(spec, capacity, self._make(spec, capacity))

    def _held_for(self, spec: PlanSpec) -> SizedPlanner | None:
        return next((sized for sized in (self.held, self.previous) if sized is not None and sized.spec == spec), None)

    def prepare(
        self, spec: PlanSpec, needed: BatchSize, table: PageTable, fixed: BatchSize | None = None
    ) -> SizedPlanner:
        """:meth:`fit` for a batch of size ``needed``, whose ``table`` is checked as far as it is on the host.

        Raises what :meth:`DecodePlanner.plan` or :meth:`PrefillPlanner.plan` would raise for the table's contents.
        """
        sized = self.fit(spec, needed, fixed)
        sized.planner.check(*_plan_arguments(sized, table), validate=None)
        return sized

    def commit(self, sized: SizedPlanner, table: PageTable) -> None:
        """Write the plan of a batch that :meth:`prepare` has checked, and hold its planner."""
        sized.planner.plan(*_plan_arguments(sized, table), validate=False)
        if self.held is not None and self.held.spec != sized.spec:
            self.previous = self.held
        self.held = sized

    def _make(self, spec: PlanSpec, capacity: BatchSize) -> DecodePlanner | PrefillPlanner:
        storage = dict(self.storage or {})
        if not self.own_workspace:
            storage[WORKSPACE] = torch.empty(0, dtype=torch.float32, device=self.device)
        shared: dict[str, Any] = {
            "page_size": spec.page_size,
            "num_qo_heads": spec.num_qo_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim_qk,
            "head_dim_vo": spec.head_dim_vo,
            "max_kv_len": capacity.kv_len,
            "window_left": spec.window_left,
            "device": self.device,
            "storage": storage,
        }
        if spec.decode:
            split_size = max(capacity.pages, 1) if spec.unsplit else spec.fixed_split_size
            ctas = general_ctas_per_head(self.device, spec.num_kv_heads) if spec.general_decode else None
            own: dict[str, Any] = {"fixed_split_size": split_size, "num_ctas": ctas, "fp8_cache": spec.fp8_decode}
            return DecodePlanner(capacity.batch, capacity.pages, **own, **shared)
        return PrefillPlanner(
            capacity.batch,
            capacity.rows,
            capacity.pages if spec.paged else 0,
            causal=spec.causal,
            window_right=spec.window_right,
            tile_rows=spec.tile_rows(self.device, -(-capacity.rows // capacity.batch)),
            num_ctas=0 if spec.unsplit else capacity.splits if spec.fixed_split_size else None,
            fixed_split_size=spec.fixed_split_size,
            short_kv=spec.short_kv,
            **shared,
        )


def _plan_arguments(sized: SizedPlanner, table: PageTable) -> tuple[Any, ...]:
    """The arguments of plan() and check() of the planner."""
    paged = (table.kv_indptr, table.kv_indices, table.kv_last_page_len)
    return paged if sized.spec.decode else (table.qo_indptr, *paged)


def _resized(have: int, needed: int) -> int:
    """``have`` if it is enough, else ``needed`` rounded up to a power of two."""
    return have if needed <= have else power_of_two_from(needed)
