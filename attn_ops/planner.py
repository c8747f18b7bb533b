"""Planners own a plan's buffers and fill them again in place for every batch.

Planning is eager and outside the graph. From CUDA tensors it launches one kernel and copies nothing
back to the host, so it can be captured in a CUDA graph; lengths that are already on the host are
accepted too, and checked there at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from attn_ops.eager.prepared_call import PreparedMethods, prepared
from attn_ops.eager.startup import prepare
from attn_ops.errors import ArgumentError, CapacityError, OptionError, ShapeError
from attn_ops.ops.inductor import mark_static
from attn_ops.ops.options import WIDEST_WINDOW
from attn_ops.plan.page_table_checks import check_indptr, check_pages
from attn_ops.plan.sizing import count_splits, max_splits_for
from attn_ops.plan.state import (
    CTAS_PER_SM,
    DecodePlan,
    PlanProblem,
    PrefillPlan,
    allocate_decode,
    allocate_prefill,
    num_partials,
    split_tokens,
    workspace_size,
)

CTA_MULTIPLE = 8
"""Shares are a multiple of this, if that many, so that batches of 2^n requests often need no cut."""

TILE_ROWS = 256
"""Query rows times query heads per KV head in a prefill tile, and what it has at least."""
MIN_TILE_ROWS = 64

LARGE_HEAD_DIM = 256
"""Heads wider than this leave room for so few rows as a tile has at least in a CTA."""

WORKSPACE_BYTES = 20 << 20
"""Most memory for the partial results of split prefill tiles."""

MIN_VALUES = {"window_left": -1, "window": 0, "causal": 0, "max_pages": 0, "split": 0}
"""The least of what need not be positive."""


def _problem(capacities: dict[str, int], fixed_split_size: int | None, **sizes: int) -> PlanProblem:
    if fixed_split_size is not None:
        capacities = {**capacities, "fixed_split_size": fixed_split_size}
    sizes["split"] = split_tokens(fixed_split_size, sizes["page_size"])
    problem = PlanProblem(**sizes)
    at_least = dict.fromkeys((*sizes, *capacities), 1) | MIN_VALUES
    for name, value in {**capacities, **sizes}.items():
        if value < at_least[name]:
            raise OptionError(f"planner: {name} is {value}; expected at least {at_least[name]}; make it larger")
    if problem.window > WIDEST_WINDOW + 1:
        raise OptionError(
            f"planner: window_left is {problem.window - 1}; expected 0 or more tokens, at most "
            f"{WIDEST_WINDOW}, or -1 for no window; change it"
        )
    if problem.num_qo_heads % problem.num_kv_heads:
        raise ShapeError(
            f"planner: {problem.num_qo_heads} query heads do not share {problem.num_kv_heads} KV heads evenly; "
            "expected a query head count that is a multiple of the KV head count; repeat or regroup the heads"
        )
    return problem


def _on_host(t: Tensor) -> bool:
    return t.device.type == "cpu" and not isinstance(t, FakeTensor)


class _Planner:
    """Brings page tables to the plan's device and dtype, checked on the way if they are on the host."""

    problem: PlanProblem
    max_pages: int
    cache_pages: int | None
    device: torch.device
    state: Sequence[Tensor]

    def __init__(self) -> None:
        self._prepared_methods = PreparedMethods()

    def _own(self, plan: DecodePlan | PrefillPlan) -> None:
        self.state = plan
        self.workspace = torch.zeros(workspace_size(plan), dtype=torch.float32, device=self.device)
        mark_static(*plan, self.workspace)

    def _cache_key(self) -> int | None:
        return 0 if self.device.type == "cuda" else None

    def _owned_tensors(self) -> Sequence[Tensor]:
        return self.state

    def _inputs(self, validate: bool | None, indptrs: dict[str, Tensor], indices: Tensor, last: Tensor) -> list[Tensor]:
        tensors = [*indptrs.values(), indices, last]
        if validate or (validate is None and all(map(_on_host, tensors))):
            for name, indptr in indptrs.items():
                check_indptr(name, indptr)
            check_pages(self.problem, indptrs["kv_indptr"], indices, last, self.max_pages, self.cache_pages)
        return [t.to(self.device, torch.int32, non_blocking=True) for t in tensors]


class DecodePlanner(_Planner):
    """Plans for ``torch.ops.attn.batch_decode``: one query row per request over a paged KV cache.

    Args:
        max_batch: requests the plan has room for.
        max_pages: entries of ``kv_indices`` the plan has room for, over the whole batch.
        page_size: tokens in a page.
        num_qo_heads: query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: heads of the cache.
        head_dim: size of a key, and of a value unless ``head_dim_vo`` is given.
        max_kv_len: tokens one request may have; default as many as ``max_pages`` hold. Costs no memory:
            the ``reference`` backend reads this many places of every request, but what there is in eager calls on the
            CPU, as the others always do.
        window_left: plan for a sliding window, so that keys outside of it count as no work; -1 for none.
        cache_pages: pages of the cache, which a validating plan checks ``kv_indices`` against.
        num_ctas: shares to cut the work of one KV head into; default by the device.
        fixed_split_size: split each request every so many pages, rounded up to whole KV blocks of
            :data:`~attn_ops.plan.state.KV_BLOCK` tokens, whatever else is in the batch. Its result is then the same in
            every batch, bit for bit on the ``triton`` backend. None cuts for balance.
        device: where the plan lives; default torch's default device.

    Attributes:
        state: the :class:`~attn_ops.DecodePlan`. ``workspace``: float32 scratch memory, the op's next
            argument. Both keep their addresses for the planner's life.
    """

    state: DecodePlan

    def __init__(
        self,
        max_batch: int,
        max_pages: int,
        *,
        page_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_vo: int | None = None,
        max_kv_len: int | None = None,
        window_left: int = -1,
        cache_pages: int | None = None,
        num_ctas: int | None = None,
        fixed_split_size: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__()
        self.problem = _problem(
            {"max_batch": max_batch, "max_pages": max_pages, "window_left": window_left, "num_ctas": num_ctas or 1},
            fixed_split_size,
            page_size=page_size,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim,
            head_dim_vo=head_dim_vo or head_dim,
            max_kv_len=max_kv_len or max(max_pages, 1) * page_size,
            tile_rows=1,
            window=window_left + 1,
        )
        self.max_pages, self.cache_pages = max_pages, cache_pages
        self.device = torch.empty(0, device=device).device
        prepare(self.device)
        shares = num_ctas or ctas_per_head(self.device, num_kv_heads)
        with torch.inference_mode(False):  # plans and calls are made outside of it too
            self._own(allocate_decode(self.problem, max_batch, max_pages, shares, self.device))

    def plan(
        self, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, *, validate: bool | None = None
    ) -> DecodePlan:
        """Fill the plan for a batch and return it: always the same tensors, with new contents.

        Args:
            kv_indptr: int ``[batch + 1]``, pages of request b are ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``.
            kv_indices: int ``[pages]``, page numbers.
            kv_last_page_len: int ``[batch]``, tokens in each request's last page, 1 to ``page_size``.
            validate: check the contents too. Default: where everything is on the host. On CUDA tensors
                this synchronises; without it out-of-range entries are clamped on the device.

        Raises:
            CapacityError: the batch does not fit; the message names the capacity that would.
            PageTableError: the contents are inconsistent (validating plans only).
        """
        self._fill(validate, kv_indptr, kv_indices, kv_last_page_len)
        return self.state

    @prepared
    def _fill(self, validate: bool | None, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor) -> None:
        inputs = self._inputs(validate, {"kv_indptr": kv_indptr}, kv_indices, kv_last_page_len)
        torch.ops.attn.plan_decode(*inputs, self.state)


class PrefillPlanner(_Planner):
    """Plans for ``torch.ops.attn.batch_prefill`` and, with ``max_pages=0``, ``torch.ops.attn.ragged_prefill``.

    Args:
        max_batch: requests the plan has room for.
        max_tokens: query rows the plan has room for, over the whole batch.
        max_pages: entries of ``kv_indices`` the plan has room for; 0 for ragged KV.
        max_kv_len: tokens one request may have, as for :class:`DecodePlanner`; ragged KV needs it given.
        causal: plan for causal attention, so that keys after a tile's rows count as no work.
        tile_rows: query rows in a work item; default 256 over the query heads per KV head, or fewer where
            ``max_tokens`` are not that many per request.
        num_ctas: pieces to split few and long tiles of one KV head into; 0 never splits; default by the device.
        fixed_split_size: as for :class:`DecodePlanner`, of every tile. ``num_ctas`` is then how many pieces the plan
            has room for, by default the most that ``max_tokens`` and ``max_kv_len`` make, and ``tile_rows`` does not
            depend on the capacities. A batch that needs more pieces is refused where its lengths are on the host;
            from lengths on the device it is planned without splits.

    The other arguments and attributes are those of :class:`DecodePlanner`.
    """

    state: PrefillPlan

    def __init__(
        self,
        max_batch: int,
        max_tokens: int,
        max_pages: int,
        *,
        page_size: int = 1,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_vo: int | None = None,
        max_kv_len: int | None = None,
        causal: bool = False,
        window_left: int = -1,
        cache_pages: int | None = None,
        tile_rows: int | None = None,
        num_ctas: int | None = None,
        fixed_split_size: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        if max_pages == 0 and (page_size != 1 or max_kv_len is None):
            raise OptionError(
                f"planner: ragged KV (max_pages 0) with page_size {page_size} and max_kv_len {max_kv_len}; expected "
                "page_size 1 and a number of tokens; give max_kv_len, or max_pages for a paged cache"
            )
        rows = TILE_ROWS if fixed_split_size is not None else -(-max_tokens // max(1, max_batch))
        super().__init__()
        self.problem = _problem(
            {"max_batch": max_batch, "max_tokens": max_tokens, "max_pages": max_pages, "window_left": window_left},
            fixed_split_size,
            page_size=page_size,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim,
            head_dim_vo=head_dim_vo or head_dim,
            max_kv_len=max_kv_len or max_pages * page_size,
            tile_rows=tile_rows or rows_per_tile(num_qo_heads, num_kv_heads, rows),
            window=window_left + 1,
            causal=int(causal),
        )
        self.max_tokens, self.max_pages, self.cache_pages = max_tokens, max_pages, cache_pages
        self.device = torch.empty(0, device=device).device
        prepare(self.device)
        pieces = num_ctas
        if pieces is None:
            pieces = splits_per_head(self.device, self.problem)
            if self.problem.split:
                pieces = max_splits_for(self.problem, max_batch, max_tokens)
        with torch.inference_mode(False):  # plans and calls are made outside of it too
            self._own(allocate_prefill(self.problem, max_batch, max_tokens, max_pages, self.device, pieces))

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor | None = None,
        kv_last_page_len: Tensor | None = None,
        *,
        validate: bool | None = None,
    ) -> PrefillPlan:
        """Fill the plan for a batch and return it: always the same tensors, with new contents.

        ``qo_indptr`` int ``[batch + 1]`` holds the cumulative query rows. For ragged KV ``kv_indptr`` holds
        the cumulative tokens and the next two are left out. The rest is as in :meth:`DecodePlanner.plan`.
        """
        if (kv_indices is None) != (kv_last_page_len is None):
            given, other = "kv_indices", "kv_last_page_len"
            if kv_indices is None:
                given, other = other, given
            raise ArgumentError(
                f"plan: {given} is given without {other}; expected both for paged KV, or neither for ragged KV; "
                "pass the two together"
            )
        if kv_indices is None or kv_last_page_len is None:
            if self.max_pages:
                raise ArgumentError(
                    "plan: kv_indices and kv_last_page_len are missing; expected both, since the planner was made for "
                    "paged KV; pass the two, or make the planner with max_pages=0"
                )
            kv_indices = kv_indptr.new_zeros(0)
            kv_last_page_len = torch.ones_like(kv_indptr[1:])
        self._fill(validate, qo_indptr, kv_indptr, kv_indices, kv_last_page_len)
        return self.state

    @prepared
    def _fill(
        self, validate: bool | None, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor
    ) -> None:
        if validate or (validate is None and not qo_indptr.is_cuda):
            self._check_rows(qo_indptr)
            if self.problem.split and (validate or not (kv_indptr.is_cuda or kv_last_page_len.is_cuda)):
                self._check_pieces(qo_indptr, kv_indptr, kv_last_page_len)
        indptrs = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr}
        inputs = self._inputs(validate, indptrs, kv_indices, kv_last_page_len)
        torch.ops.attn.plan_prefill(*inputs, self.state)

    def _check_rows(self, qo_indptr: Tensor) -> None:
        check_indptr("qo_indptr", qo_indptr)
        rows = int(qo_indptr[-1])
        if rows > self.max_tokens:
            raise CapacityError(
                f"plan: the batch has {rows} query rows and the plan room for {self.max_tokens}; expected max_tokens "
                f"of at least {rows}; make the planner with that max_tokens"
            )

    def _check_pieces(self, qo_indptr: Tensor, kv_indptr: Tensor, last: Tensor) -> None:
        pages, room = kv_indptr.cpu().long().diff(), num_partials(self.state)
        kv_len = torch.where(pages > 0, (pages - 1) * self.problem.page_size + last.cpu(), 0)
        needed = count_splits(self.problem, qo_indptr.cpu().long().diff(), kv_len)
        if needed > room:
            raise CapacityError(
                f"plan: the batch needs room for {needed} pieces of {self.problem.split} tokens and the plan has room "
                f"for {room}; expected num_ctas of at least {needed}; make the planner with that num_ctas, or with a "
                "larger fixed_split_size"
            )


def rows_per_tile(num_qo_heads: int, num_kv_heads: int, rows: int = TILE_ROWS) -> int:
    """Query rows in a prefill tile unless a planner names another number; ``rows`` is how many a request has."""
    group = max(1, num_qo_heads // max(1, num_kv_heads))  # sizes are checked later, with a message
    pairs = min(TILE_ROWS, max(MIN_TILE_ROWS, 1 << (rows * group - 1).bit_length()))
    return max(1, pairs // group)


def splits_per_head(device: torch.device, problem: PlanProblem) -> int:
    """Pieces that the prefill tiles of one KV head are split into, so that they fill the device once.

    A tile of wide heads takes several CTAs, which split its KV alike.
    """
    if device.type != "cuda":
        return 0
    pairs = problem.tile_rows * problem.num_qo_heads // problem.num_kv_heads
    wide = max(problem.head_dim_qk, problem.head_dim_vo) > LARGE_HEAD_DIM
    ctas = problem.num_kv_heads * (-(-pairs // MIN_TILE_ROWS) if wide else 1)
    slots = torch.cuda.get_device_properties(device).multi_processor_count
    slots *= 1 if wide or pairs > MIN_TILE_ROWS else CTAS_PER_SM
    slot_bytes = 4 * problem.tile_rows * problem.num_qo_heads * (problem.head_dim_vo + 1)
    return max(1, min(slots // ctas, WORKSPACE_BYTES // slot_bytes)) // 2 * 2


def ctas_per_head(device: torch.device, num_kv_heads: int) -> int:
    """Shares that the decode work of one KV head is cut into unless a planner names another number."""
    if device.type != "cuda":
        return 1
    shares = torch.cuda.get_device_properties(device).multi_processor_count * CTAS_PER_SM // num_kv_heads
    return max(1, shares // CTA_MULTIPLE * CTA_MULTIPLE or shares)
