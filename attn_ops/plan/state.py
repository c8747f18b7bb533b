"""Plan state: what a kernel needs to know about a batch, as tensors of fixed capacity.

A plan is made outside the graph (:mod:`attn_ops.planner`, or the ops ``attn::plan_*``) and read
inside it. It is one object to the user, a ``Tensor[]`` to the dispatcher, a pytree to export, and a
run of plain inputs to an AOTInductor package, which takes its fields in order.

CUDA-graph contract: re-planning writes new contents into the same tensors. Shapes and addresses never
change, so a captured graph or compiled function replays with the new lengths and never recompiles.

An all-zero plan is valid and means "no work".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

KV_BLOCK = 64
"""Tokens in the unit that work is measured and cut in; a cut falls on a multiple of it."""

WORK_FIELDS = ("row", "rows", "kv_begin", "kv_end", "position", "page_start", "slot", "request")
"""Columns of a work item, int32.

row, rows    first query row of the tile, and how many
kv_begin/end half-open range of the request's KV tokens to read
position     position in the request's KV sequence of the tile's first row
page_start   offset in ``kv_indices`` of the request's first page
slot         where in the workspace the partial result goes; -1 when the item covers its whole tile
request      index in the batch
"""


CTAS_PER_SM = 2
"""Programs on a multiprocessor that decode's work is cut for, and its tiles leave room for."""

IMBALANCE_DENOM = 16
"""A share of decode's work may be longer than the mean by one part in ``IMBALANCE_DENOM`` where that saves a cut."""

LENGTH_BUCKETS = 32
"""Classes of KV extent that prefill tiles are ordered by."""

MIN_SPLIT_BLOCKS = 2
"""Units in the shortest piece that a prefill tile is split into for balance."""

SPLIT_TILE_FIELDS = ("row", "rows", "slot", "slots")
"""Columns of ``PrefillPlan.split_tiles``, int32."""


class PlanProblem(NamedTuple):
    """What a plan was made for: the sizes of ``plan.problem`` after its leading 0."""

    page_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    max_kv_len: int
    tile_rows: int
    window: int = 0
    causal: int = 0
    split: int = 0

    # max_kv_len  tokens a request may have; what `reference` reads of each one
    # tile_rows   query rows in a work item, 1 for decode
    # window      keys that a query row may see, itself included, 0 for all: window_left + 1
    # causal      1 where work stops at the causal bound
    # split       KV tokens in every piece but a request's or a tile's last, 0 where work is cut for balance

    @staticmethod
    def of(problem: Tensor) -> PlanProblem:
        return PlanProblem(*(int(size) for size in problem.shape[1:]))

    def as_shape_tensor(self, device: torch.device) -> Tensor:
        """The tensor of no elements that carries these numbers through tracing and export in its shape.

        Its strides are 0, since those of a contiguous one would multiply to more than int64 holds.
        """
        return torch.empty((0, *[1] * len(self)), dtype=torch.int32, device=device).expand(0, *self)


def split_tokens(fixed_split_size: int | None, page_size: int) -> int:
    """``PlanProblem.split`` for pieces of so many pages: their tokens, rounded up to whole units."""
    return 0 if fixed_split_size is None else -(-fixed_split_size * page_size // KV_BLOCK) * KV_BLOCK


# No field's name starts with another field's: torch.export's guards replace them textually.
class DecodePlan(NamedTuple):
    """One query row per request over a paged KV cache. All int32, on the device of the query.

    problem       ``[0, *PlanProblem]``: no data, its shape says what the plan was made for
    kv_indptr     ``[max_batch + 1]``: pages of request b are ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``
    kv_indices    ``[max_pages]``: page numbers
    kv_len        ``[max_batch]``: tokens of each request, 0 for an empty one and beyond the batch
    work          ``[max_batch + num_ctas, 8]``: items of :data:`WORK_FIELDS`; with pieces of a fixed size as many as
                  ``max_pages`` make in place of ``num_ctas``
    cta_indptr   ``[num_ctas + 1]``: CTA c of each KV head does ``work[cta_indptr[c]:cta_indptr[c + 1]]``
    merge_indptr  ``[max_batch + 1]``: workspace slots to merge into row b, none where nothing was split
    split_counters ``[num_slots, num_qo_heads]``: while an op runs, the finished splits of a row, at its first slot;
                  0 before and after
    """

    problem: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len: Tensor
    work: Tensor
    cta_indptr: Tensor
    merge_indptr: Tensor
    split_counters: Tensor


class PrefillPlan(NamedTuple):
    """Any number of query rows per request, over paged KV, or ragged KV (page size 1, no page table).

    problem       ``[0, *PlanProblem]``
    qo_indptr     ``[max_batch + 1]``: query rows of request b
    kv_indptr     ``[max_batch + 1]``: pages of request b; tokens where the KV is ragged
    kv_indices    ``[max_pages]``: page numbers; ``[0]`` where the KV is ragged
    kv_len        ``[max_batch]``: tokens of each request
    work          ``[max_tiles + max_splits, 8]``: items of :data:`WORK_FIELDS`, longest first, zero rows past the last
    split_tiles   ``[max_splits // 2, 4]``: the tiles whose KV was split over several items, as their first row, rows,
                  first slot and number of slots; zeros past the last
    """

    problem: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len: Tensor
    work: Tensor
    split_tiles: Tensor


for _plan in (DecodePlan, PrefillPlan):
    pytree._register_namedtuple(_plan, serialized_type_name=f"attn_ops.{_plan.__name__}")
# torch.export.load reads a program's example inputs, plans among them, with weights_only.
torch.serialization.add_safe_globals([DecodePlan, PrefillPlan])


def allocate_decode(
    problem: PlanProblem,
    max_batch: int,
    max_pages: int,
    num_ctas: int,
    device: torch.device,
    make: Callable[..., Tensor] = torch.zeros,
) -> DecodePlan:
    """A plan of this capacity, all zero; with ``torch.empty`` one that is planned before anything reads it.

    Traceable: a graph may make, fill and use a plan of its own.
    """

    def new(*shape: int) -> Tensor:
        return make(shape, dtype=torch.int32, device=device)

    return DecodePlan(
        problem=problem.as_shape_tensor(device),
        kv_indptr=new(max_batch + 1),
        kv_indices=new(max_pages),
        kv_len=new(max_batch),
        work=new(max_batch + (_max_whole_splits(problem, max_pages) if problem.split else num_ctas), len(WORK_FIELDS)),
        cta_indptr=new(num_ctas + 1),
        merge_indptr=new(max_batch + 1),
        split_counters=new(_slots(problem, max_batch, max_pages, num_ctas), problem.num_qo_heads),
    )


def allocate_prefill(
    problem: PlanProblem,
    max_batch: int,
    max_tokens: int,
    max_pages: int,
    device: torch.device,
    max_splits: int = 0,
    make: Callable[..., Tensor] = torch.zeros,
) -> PrefillPlan:
    """As :func:`allocate_decode`, with room for ``max_tokens`` query rows; ``max_pages`` 0 for ragged KV.

    ``max_splits`` is how many items there may be of tiles that are split.
    """

    def new(*shape: int) -> Tensor:
        return make(shape, dtype=torch.int32, device=device)

    tiles = (max_tokens + problem.tile_rows - 1) // problem.tile_rows + max_batch
    return PrefillPlan(
        problem=problem.as_shape_tensor(device),
        qo_indptr=new(max_batch + 1),
        kv_indptr=new(max_batch + 1),
        kv_indices=new(max_pages),
        kv_len=new(max_batch),
        work=new(tiles + max_splits, len(WORK_FIELDS)),
        split_tiles=new(max_splits // 2, len(SPLIT_TILE_FIELDS)),
    )


def _max_whole_splits(problem: PlanProblem, max_pages: int) -> int:
    """Pieces of the fixed size in all pages; a batch has at most one more for each of its requests."""
    return max_pages * problem.page_size // problem.split


def _slots(problem: PlanProblem, max_batch: int, max_pages: int, num_ctas: int) -> int:
    """Every cut between CTAs makes at most two pieces. Of a fixed size are those of requests longer than one."""
    if problem.split:
        whole = _max_whole_splits(problem, max_pages)
        return whole + min(max_batch, whole)
    return 2 * (num_ctas - 1)


def num_slots(plan: DecodePlan) -> int:
    """Partial results that a plan can ask for."""
    return int(plan.split_counters.shape[0])


def num_partials(plan: PrefillPlan) -> int:
    """Partial results that a plan can ask for."""
    return 2 * int(plan.split_tiles.shape[0])


def workspace_size(plan: DecodePlan | PrefillPlan) -> int:
    """float32 elements of workspace that an attention op needs for this plan."""
    problem = PlanProblem.of(plan.problem)
    slots = num_partials(plan) * problem.tile_rows if isinstance(plan, PrefillPlan) else num_slots(plan)
    return slots * problem.num_qo_heads * (problem.head_dim_vo + 1)
