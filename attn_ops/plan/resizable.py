"""Plans that grow: a planner is kept while batches fit it, and made larger, by powers of two, when one does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attn_ops.ops.inductor import mark_static
from attn_ops.plan.page_table import BatchSize, PageTable
from attn_ops.planner import TILE_ROWS, DecodePlanner, PrefillPlanner, rows_per_tile

FLOOR = BatchSize(batch=4, rows=64, pages=64, kv_len=256)
"""SizedPlanner in the smallest plan. ``reference`` computes on all of it, so it is modest."""


class PlanSpec(NamedTuple):
    """What a plan is made for beside its room; a change makes another plan.

    ``unsplit`` and ``fixed_split_size`` cut a request alike in every batch: not at all, or into pieces of so many
    pages. ``rows`` is how many query rows every request has, if that is one number.
    """

    decode: bool
    paged: bool
    page_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    window_left: int = -1
    causal: bool = False
    unsplit: bool = False
    fixed_split_size: int | None = None
    rows: int | None = None

    @property
    def tile_rows(self) -> int | None:
        """Rows in a prefill tile where they must not depend on the batch."""
        if not self.unsplit and self.fixed_split_size is None:
            return None
        return rows_per_tile(self.num_qo_heads, self.num_kv_heads, self.rows or TILE_ROWS)


class SizedPlanner(NamedTuple):
    """A planner, what it is for, and how much it holds."""

    shape: PlanSpec
    extent: BatchSize
    planner: DecodePlanner | PrefillPlanner


@dataclass
class ResizablePlan:
    """One planner at a time. ``storage`` holds fields of the plan that live in the caller's buffers.

    ``scratch``: planners keep their workspace, since the caller has none.
    """

    device: torch.device
    scratch: bool = False
    storage: dict[str, Tensor] | None = None
    held: SizedPlanner | None = None

    def fit(self, shape: PlanSpec, needed: BatchSize, fixed: BatchSize | None = None) -> SizedPlanner:
        """A plan with room: the held one, or one that :meth:`fill` will hold from then on.

        ``fixed`` is its exact room, in CUDA-graph mode.
        """
        held = self.held if self.held is not None and self.held.shape == shape else None
        extent = fixed
        if extent is None:
            have = FLOOR if held is None else held.extent
            extent = BatchSize(
                _grown(have.batch, needed.batch),
                _grown(have.rows, needed.rows),
                _grown(have.pages, needed.pages),
                None if have.kv_len is None or needed.kv_len is None else _grown(have.kv_len, needed.kv_len),
                _grown(have.pieces, needed.pieces),
            )
        if held is not None and held.extent == extent:
            return held
        return SizedPlanner(shape, extent, self._make(shape, extent))

    def check(self, room: SizedPlanner, tables: PageTable) -> None:
        """Raise what :meth:`fill` would, of a batch that is known to fit; nothing is written."""
        indptrs = {"kv_indptr": tables.kv_indptr}
        if tables.qo_indptr is not None:
            indptrs = {"qo_indptr": tables.qo_indptr, **indptrs}
        if tables.kv_indices is not None and tables.kv_last_page_len is not None:
            room.planner._inputs(None, indptrs, tables.kv_indices, tables.kv_last_page_len)

    def fill(self, room: SizedPlanner, tables: PageTable) -> None:
        """Plan the batch, and hold the planner."""
        planner = room.planner
        if isinstance(planner, DecodePlanner):
            assert tables.kv_indices is not None
            assert tables.kv_last_page_len is not None
            planner.plan(tables.kv_indptr, tables.kv_indices, tables.kv_last_page_len)
        else:
            assert tables.qo_indptr is not None
            planner.plan(tables.qo_indptr, tables.kv_indptr, tables.kv_indices, tables.kv_last_page_len)
        self.held = room

    def _make(self, shape: PlanSpec, extent: BatchSize) -> DecodePlanner | PrefillPlanner:
        planner: DecodePlanner | PrefillPlanner
        if shape.decode:
            planner = DecodePlanner(
                extent.batch,
                extent.pages,
                page_size=shape.page_size,
                num_qo_heads=shape.num_qo_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim_qk,
                head_dim_vo=shape.head_dim_vo,
                max_kv_len=extent.kv_len,
                window_left=shape.window_left,
                fixed_split_size=max(extent.pages, 1) if shape.unsplit else shape.fixed_split_size,
                device=self.device,
            )
        else:
            planner = PrefillPlanner(
                extent.batch,
                extent.rows,
                extent.pages if shape.paged else 0,
                page_size=shape.page_size,
                num_qo_heads=shape.num_qo_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim_qk,
                head_dim_vo=shape.head_dim_vo,
                max_kv_len=extent.kv_len,
                causal=shape.causal,
                window_left=shape.window_left,
                tile_rows=shape.tile_rows,
                num_ctas=0 if shape.unsplit else extent.pieces if shape.fixed_split_size else None,
                fixed_split_size=shape.fixed_split_size,
                device=self.device,
            )
        if not self.scratch:
            planner.workspace = planner.workspace.new_empty(0)
        if self.storage:
            planner.state = planner.state._replace(**self.storage)
            mark_static(*self.storage.values())
        return planner


def _grown(have: int, want: int) -> int:
    return have if want <= have else 1 << (want - 1).bit_length()
