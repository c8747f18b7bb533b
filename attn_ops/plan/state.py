"""Plan state: the schedule of a batch as int32 tensors of fixed capacity.

A plan is made outside the graph (:mod:`attn_ops.planner`, or the ops ``attn::plan_*``) and read inside it. It is one
object to the user, a ``Tensor[]`` to the dispatcher and a pytree to export. An AOTInductor package takes its fields as
inputs, in order.

CUDA-graph contract: planning writes new contents into the same tensors. Shapes and addresses never change, so a
captured graph or compiled function replays with the new lengths and never recompiles.

An all-zero plan is valid and means "no work".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attn_ops.tracing import is_compiling

INT32_MAX = torch.iinfo(torch.int32).max
"""The largest length, position or page number."""

KV_BLOCK = 64
"""KV tokens in a KV block, the granularity of scheduling: every split point is a multiple of it."""

WORK_FIELDS = ("row", "rows", "kv_begin", "kv_end", "position", "page_start", "slot", "request")
"""Columns of a work item, int32.

row, rows         first query row of the query tile, and number of query rows
kv_begin, kv_end  half-open range of the request's KV tokens
position          position of the tile's first row in the request's KV sequence, on all ranks together
page_start        offset in ``kv_indices`` of the request's first page
slot              workspace slot of the partial result; -1 if the item covers all KV of its tile
request           index of the request in the batch
"""

CTAS_PER_SM = 2
"""CTAs per SM of the general decode kernel. Its tiles leave shared memory for as many."""

IMBALANCE_DENOM = 16
"""Decode: a CTA may get up to ``1 / IMBALANCE_DENOM`` more work than the mean if that avoids a split."""

LENGTH_BUCKETS = 32
"""Prefill: number of length classes by which work items are ordered, longest first."""

MIN_SPLIT_BLOCKS = 2
"""Prefill: KV blocks in the shortest split that is made for load balance, except the last split of a tile."""

BALANCE_WAVES = 16
"""Prefill: with so many waves of query tiles no tile is split for load balance, unless one exceeds the work per CTA."""

SPLIT_CANDIDATES = 32
"""Prefill: numbers of splits of the longest tile that the planner compares: (4 + j % 4) 2^(j // 4) / 4, 1 to 224."""

BLOCK_COST, ITEM_COST, COMBINE_COST = 16, 32, 24
"""Prefill: times by which the planner compares splits, in 1/16 of the time of a KV block in one CTA. They are of a KV
block, of a work item apart from its KV blocks, and of a launch of the combine kernel. A slot costs 1 for each CTA that
writes it.
"""

MAX_COST = 1 << 56
"""Prefill: more than any time that the planner compares."""

MAX_PUBLISHED_REQUESTS = 32768
"""Requests of the largest plan that a kernel writes and publishes: its schedule fits in the shared memory of a CTA.

Larger plans are written by tensor operations, which publish nothing.
"""


def is_published(max_batch: int) -> bool:
    """Whether a kernel writes plans of this capacity and publishes them, so that other kernels may read them early."""
    return bool(max_batch <= MAX_PUBLISHED_REQUESTS)


SPLIT_TILE_FIELDS = ("row", "rows", "slot", "slots")
"""Columns of ``PrefillPlan.split_tiles``, int32: first query row, query rows, first slot, number of slots."""


class PlanProblem(NamedTuple):
    """The problem that a plan was made for. ``plan.problem`` has these numbers as its sizes, after a leading 0.

    page_size     tokens in a page; 1 for ragged KV
    num_qo_heads  query heads
    num_kv_heads  KV heads
    head_dim_qk   elements of a query and a key
    head_dim_vo   elements of a value and an output
    max_kv_len    largest number of KV tokens of a request. The ``reference`` backend computes on that many. Kernels are
                  compiled for all other numbers, not for this one
    tile_rows     query rows of a query tile; 1 for decode
    window        keys that a query row sees, its own position included: ``window_left + 1``; 0 for no window
    ahead         keys that a query row sees from its own position on, that included: ``window_right + 1``, 1 for causal
                  attention; 0 for no bound
    split         KV tokens of a split if splits have a fixed size, a multiple of ``KV_BLOCK``; else 0
    rank          rank of this process, if each of several ranks holds a part of every request's keys
    world         number of ranks that hold the keys; 1 if this process holds all keys
    interleave    tokens that a rank holds in a row; 0 if ``world`` is 1
    matrix_keys   keys of the block-sparse matrix that a sparse planner was made for, keys of all heads if KV heads are
                  requests; 0 for other plans
    placed        1 if a sparse planner gives rows the positions of a causal matrix; else 0
    short_kv      1 if the requests have few keys, for which there is another CUDA prefill kernel; else 0. By default no
                  request is split then
    """

    page_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    max_kv_len: int
    tile_rows: int
    window: int = 0
    ahead: int = 0
    split: int = 0
    rank: int = 0
    world: int = 1
    interleave: int = 0
    matrix_keys: int = 0
    placed: int = 0
    short_kv: int = 0

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.head_dim_qk, self.head_dim_vo

    @classmethod
    def of_options(
        cls, *, window_left: int, causal: bool, window_right: int, fixed_split_size: int | None, **sizes: int
    ) -> PlanProblem:
        """The problem of these sizes, by the names of the fields, and of the options of a planner."""
        return cls(
            **sizes,
            window=window_left + 1,
            ahead=keys_ahead(causal, window_right),
            split=0 if fixed_split_size is None else -(-fixed_split_size * sizes["page_size"] // KV_BLOCK) * KV_BLOCK,
        )

    @staticmethod
    def of(problem: Tensor) -> PlanProblem:
        """The problem in the shape of ``plan.problem``. In graphs ``max_kv_len`` may be symbolic."""
        shape, at = problem.shape, 1 + _MAX_KV_LEN
        if not is_compiling() and type(problem) is Tensor:  # sizes are integers
            return PlanProblem(*shape[1:])
        numbers = [*map(int, shape[1:at]), shape[at], *map(int, shape[at + 1 :])]
        return PlanProblem(*numbers)

    def sharded_heads(self) -> dict[str, int]:
        """The head counts that are divided over ranks: a single KV head is on every rank."""
        heads = {"num_qo_heads": self.num_qo_heads, "num_kv_heads": self.num_kv_heads}
        return {name: count for name, count in heads.items() if name == "num_qo_heads" or count > 1}

    def shard(self, ranks: int) -> PlanProblem:
        """The problem of one of ``ranks`` ranks, which divide :meth:`sharded_heads` evenly."""
        return self._replace(**{name: count // ranks for name, count in self.sharded_heads().items()})

    def as_shape_tensor(self, device: torch.device) -> Tensor:
        """int32 ``[0, *self]``: a tensor without elements, whose shape passes through tracing and export.

        Its strides are 0, since contiguous strides would overflow int64.
        """
        return torch.empty((0, *[1] * len(self)), dtype=torch.int32, device=device).expand(0, *self)


_MAX_KV_LEN = PlanProblem._fields.index("max_kv_len")


def keys_ahead(causal: bool, window_right: int) -> int:
    """``PlanProblem.ahead``: the keys that a row sees from its own position on, 0 for all."""
    return int(causal) or window_right + 1


# No field's name starts with another field's: torch.export's guards replace them textually.
class DecodePlan(NamedTuple):
    """Plan for one query row per request over a paged KV cache. All fields are int32, on the device of the query.

    problem         ``[0, *PlanProblem]``: no data; the shape says what the plan was made for
    kv_indptr       ``[max_batch + 1]``: the pages of request b are ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``
    kv_indices      ``[max_pages]``: page numbers
    kv_len          ``[max_batch]``: KV tokens of each request, 0 if it is empty or beyond the batch, or if none of a
                    rank's tokens is in the window
    work            ``[max_batch + num_ctas, 8]``: work items, columns :data:`WORK_FIELDS`. With a fixed split size
                    ``[max_batch + max_splits, 8]``, where ``max_splits`` is the number of splits in ``max_pages``
    cta_indptr      ``[num_ctas + 1]``: CTA c of each KV head runs ``work[cta_indptr[c]:cta_indptr[c + 1]]``
    merge_indptr    ``[max_batch + 1]``: the slots to combine into row b, none if the request was not split
    split_counters  ``[num_slots, num_qo_heads]``: number of finished splits of a row, at its first slot, while an op
                    runs; 0 before and after
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
    """Plan for any number of query rows per request, over paged KV or ragged KV (page size 1, no page numbers).

    problem      ``[0, *PlanProblem]``: no data; the shape says what the plan was made for
    qo_indptr    ``[max_batch + 1]``: the query rows of request b are ``qo_indptr[b]`` to ``qo_indptr[b + 1]``
    kv_indptr    ``[max_batch + 1]``: offsets of each request's pages; of its tokens if the KV is ragged
    kv_indices   ``[max_pages]``: page numbers; ``[0]`` if the KV is ragged
    kv_len       ``[max_batch]``: KV tokens of each request
    work         ``[max_tiles + max_splits, 8]``: work items, columns :data:`WORK_FIELDS`, longest first, then zeros
    split_tiles  ``[max_splits // 2, 4]``: the query tiles whose KV was split, columns :data:`SPLIT_TILE_FIELDS`, then
                 zeros
    queue        ``[2]``: the next unit of work while an op runs, 0 before and after; the number of work items
    """

    problem: Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len: Tensor
    work: Tensor
    split_tiles: Tensor
    queue: Tensor


PLANS = (DecodePlan, PrefillPlan)

for _plan in PLANS:
    pytree._register_namedtuple(_plan, serialized_type_name=f"attn_ops.{_plan.__name__}")
# torch.export.load reads a program's example inputs, plans among them, with weights_only.
torch.serialization.add_safe_globals(list(PLANS))


def decode_shapes(problem: PlanProblem, max_batch: int, max_pages: int, num_ctas: int) -> dict[str, tuple[int, ...]]:
    """Shape of each field of a :class:`DecodePlan` except ``problem``, for these capacities."""
    max_splits = _max_whole_splits(problem, max_pages) if problem.split else num_ctas
    return {
        "kv_indptr": (max_batch + 1,),
        "kv_indices": (max_pages,),
        "kv_len": (max_batch,),
        "work": (max_batch + max_splits, len(WORK_FIELDS)),
        "cta_indptr": (num_ctas + 1,),
        "merge_indptr": (max_batch + 1,),
        "split_counters": (_num_slots(problem, max_batch, max_pages, num_ctas), problem.num_qo_heads),
    }


def full_tiles(problem: PlanProblem, rows: int) -> int:
    """Query tiles of one request with ``rows`` query rows."""
    return (rows + problem.tile_rows - 1) // problem.tile_rows


def prefill_shapes(max_batch: int, num_full_tiles: int, max_pages: int, max_splits: int) -> dict[str, tuple[int, ...]]:
    """Shape of each field of a :class:`PrefillPlan` except ``problem``, for these capacities.

    ``num_full_tiles`` query tiles hold the query rows of one request; a batch has at most one more tile per request.
    ``max_splits`` is even.
    """
    return {
        "qo_indptr": (max_batch + 1,),
        "kv_indptr": (max_batch + 1,),
        "kv_indices": (max_pages,),
        "kv_len": (max_batch,),
        "work": (num_full_tiles + max_batch + max_splits, len(WORK_FIELDS)),
        "split_tiles": (max_splits // 2, len(SPLIT_TILE_FIELDS)),
        "queue": (2,),
    }


def allocate_decode(
    problem: PlanProblem,
    max_batch: int,
    max_pages: int,
    num_ctas: int,
    device: torch.device,
    make: Callable[..., Tensor] = torch.zeros,
    storage: Mapping[str, Tensor] | None = None,
) -> DecodePlan:
    """A plan of this capacity, all zero. ``make=torch.empty`` leaves it uninitialized, to be planned before use.

    Fields named in ``storage`` are those tensors. Traceable: a graph may allocate, fill and use a plan of its own.
    """
    shapes = decode_shapes(problem, max_batch, max_pages, num_ctas)
    return DecodePlan(problem.as_shape_tensor(device), **_allocate(shapes, device, make, storage or {}))


def allocate_prefill(
    problem: PlanProblem,
    max_batch: int,
    max_tokens: int,
    max_pages: int,
    device: torch.device,
    max_splits: int = 0,
    make: Callable[..., Tensor] = torch.zeros,
    storage: Mapping[str, Tensor] | None = None,
) -> PrefillPlan:
    """As :func:`allocate_decode`, for ``max_tokens`` query rows. ``max_pages`` is 0 for ragged KV.

    ``max_splits`` is the capacity for splits: work items, and slots, of tiles with more than one split. An odd number
    is rounded down, since such a tile has at least two splits.
    """
    shapes = prefill_shapes(max_batch, full_tiles(problem, max_tokens), max_pages, max_splits // 2 * 2)
    return PrefillPlan(problem.as_shape_tensor(device), **_allocate(shapes, device, make, storage or {}))


def _allocate(
    shapes: dict[str, tuple[int, ...]],
    device: torch.device,
    make: Callable[..., Tensor],
    storage: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    return {
        field: storage[field] if field in storage else make(shape, dtype=torch.int32, device=device)
        for field, shape in shapes.items()
    }


def _max_whole_splits(problem: PlanProblem, max_pages: int) -> int:
    """Splits of the fixed size in ``max_pages`` pages. A batch has at most one more per request."""
    return max_pages * problem.page_size // problem.split


def _num_slots(problem: PlanProblem, max_batch: int, max_pages: int, num_ctas: int) -> int:
    """Slots of a decode plan: two per split point between CTAs; with a fixed split size one per split."""
    if problem.split:
        whole = _max_whole_splits(problem, max_pages)
        return whole + min(max_batch, whole)
    return 2 * (num_ctas - 1)


def num_slots(plan: DecodePlan) -> int:
    """Workspace slots of a decode plan: the most partial results that a batch makes."""
    return int(plan.split_counters.shape[0])


def num_partials(plan: PrefillPlan) -> int:
    """Workspace slots of a prefill plan: the most partial results, each of a whole tile, that a batch makes."""
    return 2 * int(plan.split_tiles.shape[0])


def max_work_items(plan: PrefillPlan, rows: int) -> int:
    """The most work items of a batch with ``rows`` query rows in all: its query tiles, and those that splits add."""
    return full_tiles(PlanProblem.of(plan.problem), rows) + plan.kv_len.shape[0] + num_partials(plan)


def workspace_size(plan: DecodePlan | PrefillPlan) -> int:
    """float32 elements of workspace that an attention op needs for this plan."""
    problem = PlanProblem.of(plan.problem)
    slots = num_partials(plan) * problem.tile_rows if isinstance(plan, PrefillPlan) else num_slots(plan)
    return slots * problem.num_qo_heads * (problem.head_dim_vo + 1)
