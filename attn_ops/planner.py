"""Planners own the tensors of a plan and its workspace, and fill the plan for every batch.

Planning is eager and outside the graph. From CUDA tensors it launches one kernel and copies nothing to the host, so it
can be captured in a CUDA graph. Page tables on the host are accepted too, and checked there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attn_ops.eager.op_call import OpCall
from attn_ops.eager.prepared_call import prepared
from attn_ops.eager.startup import prepare
from attn_ops.errors import ArgumentError, CapacityError, OptionError, fail
from attn_ops.plan.context import ContextShard
from attn_ops.plan.page_table import kv_lengths
from attn_ops.plan.page_table_checks import check_indptr
from attn_ops.plan.plan_checks import MAX_CTAS_PER_HEAD, MAX_QUERY_ROWS, check_products
from attn_ops.plan.planner_base import (
    WORKSPACE,
    PlannerBase,
    check_storage,
    default_max_kv_len,
    in_range,
    planner_problem,
    rank_problem,
    validates,
)
from attn_ops.plan.query_tiles import count_splits
from attn_ops.plan.sizing import (
    ctas_per_head,
    default_tile_rows,
    is_large_batch,
    is_short_kv,
    max_splits_for,
    most_tiles,
    splits_per_head,
)
from attn_ops.plan.state import (
    DecodePlan,
    PlanProblem,
    PrefillPlan,
    allocate_decode,
    allocate_prefill,
    decode_shapes,
    full_tiles,
    num_partials,
    prefill_shapes,
)
from attn_ops.typed import typed


class DecodePlanner(PlannerBase):
    """Plans for ``torch.ops.attn.batch_decode``: one query row per request over a paged KV cache.

    Args:
        max_batch: capacity for requests.
        max_pages: capacity for pages, the entries of ``kv_indices`` over the whole batch.
        page_size: tokens in a page.
        num_qo_heads: query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: heads of the cache.
        head_dim: elements of a key, and of a value unless ``head_dim_vo`` is given.
        head_dim_vo: elements of a value and an output.
        max_kv_len: capacity for the KV tokens of one request; default as many as ``max_pages`` hold, rounded up to a
            power of two. It costs no memory. In compiled graphs and on CUDA the ``reference`` backend computes on that
            many tokens of every request, or on all that ``max_pages`` hold; the other backends compute on the tokens
            there are.
        window_left: plan for a sliding window, so that keys outside of it cost no work; -1 for no window.
        cache_pages: pages of the cache, against which plan() checks ``kv_indices`` if it checks contents.
        num_ctas: CTAs that divide the work of one KV head. Default: two CTAs per SM in all. On Hopper, for sizes that
            ``cuda.decode`` takes, one CTA per SM, with two KV heads if their number is even and ``head_dim`` is 64, or
            128 with ``fp8_cache``. Calls with ALiBi, a float32 query or RoPE over an FP8 cache, which the general
            kernel runs, are faster with two CTAs per SM.
        context: the part of every request's keys that this rank holds, if several ranks share them. The page table that
            plan() takes and the capacities are those of all ranks; the plan has this rank's pages.
        head_shards: ranks that the heads are divided over (:mod:`attn_ops.distributed`). The head counts are those of
            all ranks; CTAs and workspace are sized for the heads of one rank.
        fixed_split_size: split every request each ``fixed_split_size`` pages, rounded up to whole KV blocks of
            :data:`~attn_ops.plan.state.KV_BLOCK` tokens, whatever else is in the batch. The result of a request is
            then batch-invariant, bit for bit on the ``triton`` and ``cuda`` backends. None splits for load balance.
        fp8_cache: whether the cache is FP8, on which the default of ``num_ctas`` depends. A plan serves caches of any
            dtype, and is faster for this dtype.
        device: device of the plan; default torch's default device.
        storage: tensors that become fields of the plan, by the field's name, and under ``"workspace"`` the workspace.
            Nothing is allocated for them. A field is contiguous int32 of the shape that :class:`~attn_ops.DecodePlan`
            documents. The workspace is a contiguous float32 vector of at least ``workspace_size(plan)`` elements, or
            empty if every call is passed another workspace. All are on ``device``, share no memory and are written by
            plan(); their contents are undefined before the first plan().

    Attributes:
        state: the :class:`~attn_ops.DecodePlan`.
        workspace: float32 scratch memory, the op's next argument. Both keep their addresses as long as the planner
            lives.

    Raises:
        OptionError: a size is out of range, or ``context`` does not fit the page size or another option.
        ShapeError: the number of query heads is no multiple of that of KV heads; a tensor of ``storage`` has a wrong
            shape.
        CapacityError: the workspace of ``storage`` is too small.
        ArgumentError: a tensor of ``storage`` is no field, or shares memory with another tensor.
        DTypeError, DeviceError: a tensor of ``storage`` is of a wrong dtype or device.
    """

    state: DecodePlan

    @typed
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
        fp8_cache: bool = False,
        device: str | torch.device | None = None,
        storage: Mapping[str, Tensor] | None = None,
        context: ContextShard | None = None,
        head_shards: int = 1,
    ) -> None:
        self.context, storage = context, storage or {}
        in_range("max_batch", max_batch)
        in_range("max_pages", max_pages, least=0)
        in_range("cache_pages", cache_pages)
        in_range("num_ctas", num_ctas, most=MAX_CTAS_PER_HEAD)
        self.problem = planner_problem(
            fixed_split_size=fixed_split_size,
            window_left=window_left,
            page_size=page_size,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=head_dim,
            head_dim_vo=head_dim if head_dim_vo is None else head_dim_vo,
            max_kv_len=default_max_kv_len(max_pages, page_size) if max_kv_len is None else max_kv_len,
            tile_rows=1,
            context=context,
        )
        of_rank = rank_problem(self.problem, head_shards)
        self.max_pages, self.cache_pages = max_pages, cache_pages
        self.device = torch.empty(0, device=device).device
        prepare(self.device)
        if num_ctas is None:
            num_ctas = ctas_per_head(self.device, of_rank, fp8_cache)
        capacity = max_batch, max_pages, num_ctas
        shapes = decode_shapes(self.problem, *capacity)
        check_products("planner", self.problem, max_pages, shapes)
        fields = check_storage(storage, shapes, self.device)
        with torch.inference_mode(False):  # the plan is also written and read outside of inference mode
            plan = allocate_decode(self.problem, *capacity, self.device, storage=fields)
            self._own(plan, storage.get(WORKSPACE), of_rank)

    @typed
    def plan(
        self, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, *, validate: bool | None = None
    ) -> DecodePlan:
        """Fill the plan for a batch and return it: always the same tensors, with new contents.

        Args:
            kv_indptr: int ``[batch + 1]``; the pages of request b are ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``.
            kv_indices: int ``[pages]``, page numbers. Entries after those of the last request are not used. They need
                capacity only if the contents are not checked.
            kv_last_page_len: int ``[batch]``, tokens in each request's last page, 1 to ``page_size``.
            validate: check the contents too. Default: contents are checked only if all tensors are on the host. For
                CUDA tensors this synchronizes. Contents that are not checked are clamped on the device, so pages and
                query rows beyond the capacity are left out.

        Raises:
            CapacityError: the batch exceeds the plan's capacity; the message names the capacity that it needs.
            PageTableError: the contents are inconsistent; only if they are checked.
            OptionError: ``validate`` is True while the call is traced, where a page table has no contents.
            ShapeError: the lengths of the arguments do not agree.
            RankError: with ``validate=True`` and a group in ``context``: the ranks have different batches, a rank found
                an error, or a rank did not answer in time. Raised on all ranks.
        """
        self._fill(validate, kv_indptr, self._apart(kv_indices), kv_last_page_len)
        return self.state

    @typed
    def check(
        self, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, *, validate: bool | None = True
    ) -> None:
        """Raise what :meth:`plan` with this ``validate`` would raise for the contents, and write nothing.

        It reads contents from a device too, except with ``validate=None``.
        """
        self._check(validate, {"kv_indptr": kv_indptr}, kv_indices, kv_last_page_len)

    @prepared
    def _fill(self, validate: bool | None, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor) -> OpCall:
        self._check(validate, {"kv_indptr": kv_indptr}, kv_indices, kv_last_page_len)
        return self._planning("plan_decode", validate, kv_indptr, kv_indices, kv_last_page_len)


class PrefillPlanner(PlannerBase):
    """Plans for ``torch.ops.attn.batch_prefill`` and, with ``max_pages=0``, ``torch.ops.attn.ragged_prefill``.

    Args:
        max_batch: capacity for requests.
        max_tokens: capacity for query rows, over the whole batch.
        max_pages: capacity for pages, the entries of ``kv_indices`` over the whole batch; 0 for ragged KV.
        max_kv_len: capacity for the KV tokens of one request, as for :class:`DecodePlanner`; ragged KV requires it.
        causal: plan for causal attention, so that keys after a tile's rows cost no work.
        window_right: plan for a window on the right, so that keys after it cost no work; -1 for no window. It has no
            effect with ``causal``.
        tile_rows: query rows of a query tile; default 256 over the query heads per KV head, or fewer if ``max_tokens``
            is less than that per request. On Hopper 384 with heads of 64 to 96, and 768 with heads of 128 for large
            batches: ``max_tokens * num_qo_heads`` at least 1,536 for each SM, and 1,024 for each request and KV head.
            The capacities are best no larger than batches are.
        num_ctas: capacity for splits, the work items of one KV head that query tiles are split into for load balance.
            Unlike that of :class:`DecodePlanner` it is no number of CTAs. Planning assumes that the device computes
            half as many query tiles at a time, or two thirds with a head dim of values over 128. 0 never splits. The
            default depends on the device, and for MLA on Hopper on ``max_batch`` and ``max_tokens``, which are best no
            larger than batches are.
        fixed_split_size: as for :class:`DecodePlanner`, for every tile. The default of ``num_ctas`` is then the largest
            number of splits for ``max_tokens`` and ``max_kv_len``, and ``tile_rows`` does not depend on the capacities.
            A batch that needs more splits is refused if its lengths are on the host; with lengths on the device it is
            planned without splits.
        storage: as for :class:`DecodePlanner`, with the fields of :class:`~attn_ops.PrefillPlan`.
        context: as for :class:`DecodePlanner`; not with ragged KV.
        short_kv: plan for requests with few keys: ``num_ctas`` is 0 by default, and ``cuda.prefill`` runs 16-bit calls
            without a mask or positional encoding in another kernel, for heads of 64 and 128. Default on Hopper, unless
            ``num_ctas`` or ``fixed_split_size`` is given: up to a ``max_kv_len`` of 512 with heads of 64 and of 256
            with heads of 128; up to 1,024 with ``causal`` if ``max_tokens * num_qo_heads`` is at least 128 for each SM,
            or 192 with heads of 64, and at most four times as many. Not for large batches of heads of 128. Other calls,
            as over an FP8 cache, are run as with False, but without splits.

    The other arguments and attributes are those of :class:`DecodePlanner`.
    """

    state: PrefillPlan

    @typed
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
        storage: Mapping[str, Tensor] | None = None,
        window_right: int = -1,
        context: ContextShard | None = None,
        head_shards: int = 1,
        short_kv: bool | None = None,
    ) -> None:
        if max_pages == 0:
            _check_ragged(page_size, max_kv_len, context)
        self.context, storage = context, storage or {}
        in_range("max_batch", max_batch)
        in_range("max_tokens", max_tokens, most=MAX_QUERY_ROWS)
        in_range("max_pages", max_pages, least=0)
        in_range("cache_pages", cache_pages)
        in_range("num_ctas", num_ctas, least=0)
        self.device = torch.empty(0, device=device).device
        dims = head_dim, head_dim if head_dim_vo is None else head_dim_vo
        if tile_rows is None:
            size = None if fixed_split_size is not None else (max_batch, max_tokens)
            tile_rows = _tile_rows_of_capacity(self.device, num_qo_heads, num_kv_heads, dims, head_shards, size)
        self.problem = self._problem(
            fixed_split_size=fixed_split_size,
            window_left=window_left,
            causal=causal,
            window_right=window_right,
            page_size=page_size,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim_qk=dims[0],
            head_dim_vo=dims[1],
            max_kv_len=default_max_kv_len(max_pages, page_size) if max_kv_len is None else max_kv_len,
            tile_rows=tile_rows,
            context=context,
        )
        of_rank = rank_problem(self.problem, head_shards)
        if short_kv is None:
            balanced = num_ctas is None and fixed_split_size is None
            short_kv = balanced and self._is_short_kv(of_rank, max_batch, max_tokens)
        self.problem, of_rank = (p._replace(short_kv=int(short_kv)) for p in (self.problem, of_rank))
        self.max_tokens, self.max_pages, self.cache_pages = max_tokens, max_pages, cache_pages
        prepare(self.device)
        if num_ctas is None:
            longest = max_pages * page_size if max_kv_len is None else max_kv_len
            num_ctas = self._default_splits(of_rank, max_batch, longest)
        max_splits = num_ctas // 2 * 2
        shapes = prefill_shapes(max_batch, full_tiles(self.problem, max_tokens), max_pages, max_splits)
        check_products("planner", self.problem, max_pages, shapes)
        fields = check_storage(storage, shapes, self.device)
        with torch.inference_mode(False):  # the plan is also written and read outside of inference mode
            plan = allocate_prefill(
                self.problem, max_batch, max_tokens, max_pages, self.device, max_splits, storage=fields
            )
            self._own(plan, storage.get(WORKSPACE), of_rank)

    def _is_short_kv(self, p: PlanProblem, max_batch: int, max_tokens: int) -> bool:
        sizes = p.num_qo_heads, p.num_kv_heads, p.head_dims, max_batch, max_tokens, self.device
        return is_short_kv(*sizes, max_kv_len=p.max_kv_len, causal=p.ahead == 1)

    def _default_splits(self, of_rank: PlanProblem, max_batch: int, longest: int) -> int:
        """Splits for load balance on the device, or the most of a fixed size in requests of ``longest`` tokens."""
        if self.problem.split:
            return max_splits_for(self.problem, max_batch, self.max_tokens, longest)
        return splits_per_head(self.device, of_rank, most_tiles(of_rank, max_batch, self.max_tokens))

    def _problem(self, **arguments: Any) -> PlanProblem:
        """:func:`planner_problem`, to which a planner of block-sparse attention adds fields."""
        return planner_problem(**arguments)

    @typed
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

        ``qo_indptr``, int ``[batch + 1]``, has the offsets of each request's query rows. For ragged KV ``kv_indptr``
        has the offsets of its tokens, and ``kv_indices`` and ``kv_last_page_len`` are left out. The other arguments
        and the errors are those of :meth:`DecodePlanner.plan`.
        """
        kv_indices, kv_last_page_len = self._paged(kv_indptr, kv_indices, kv_last_page_len)
        self._fill(validate, qo_indptr, kv_indptr, self._apart(kv_indices), kv_last_page_len)
        return self.state

    @typed
    def check(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor | None = None,
        kv_last_page_len: Tensor | None = None,
        *,
        validate: bool | None = True,
    ) -> None:
        """Raise what :meth:`plan` with this ``validate`` would raise, as :meth:`DecodePlanner.check`."""
        indptrs = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr}
        self._check(validate, indptrs, *self._paged(kv_indptr, kv_indices, kv_last_page_len))

    def _paged(
        self, kv_indptr: Tensor, kv_indices: Tensor | None, kv_last_page_len: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """``kv_indices, kv_last_page_len`` of paged or ragged KV, which has pages of one token and no page numbers."""
        if (kv_indices is None) != (kv_last_page_len is None):
            given, other = "kv_indices", "kv_last_page_len"
            if kv_indices is None:
                given, other = other, given
            fail(
                ArgumentError,
                "plan",
                f"{given} is given without {other}",
                "both for paged KV, or neither for ragged KV",
                "pass the two together",
            )
        if kv_indices is not None and kv_last_page_len is not None:
            return kv_indices, kv_last_page_len
        if self.max_pages:
            fail(
                ArgumentError,
                "plan",
                "kv_indices and kv_last_page_len are missing",
                "both, since the planner was made for paged KV",
                "pass the two, or make the planner with max_pages=0",
            )
        return kv_indptr.new_zeros(0), torch.ones_like(kv_indptr[1:])

    @prepared
    def _fill(
        self, validate: bool | None, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor
    ) -> OpCall:
        self._check(validate, {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr}, kv_indices, kv_last_page_len)
        return self._planning("plan_prefill", validate, qo_indptr, kv_indptr, kv_indices, kv_last_page_len)

    def _check_rows(self, validate: bool | None, indptrs: dict[str, Tensor]) -> None:
        qo_indptr = indptrs["qo_indptr"]
        if not validates(validate, qo_indptr):
            return
        check_indptr("qo_indptr", qo_indptr)
        rows = int(qo_indptr[-1])
        if rows > self.max_tokens:
            fail(
                CapacityError,
                "plan",
                f"the batch has {rows} query rows and the plan capacity for {self.max_tokens}",
                f"max_tokens of at least {rows}",
                "make the planner with that max_tokens",
            )

    def _check_splits(self, validate: bool | None, indptrs: dict[str, Tensor], last: Tensor) -> None:
        qo_indptr, kv_indptr = indptrs["qo_indptr"], indptrs["kv_indptr"]
        if not self.problem.split or not validates(validate, qo_indptr, kv_indptr, last):
            return
        check_indptr("kv_indptr", kv_indptr)
        capacity = num_partials(self.state)
        kv_len = kv_lengths(kv_indptr.cpu().long().diff(), last.cpu(), self.problem.page_size)
        own = kv_len if self.context is None else self.context.owned_tokens(kv_len)
        needed = count_splits(self.problem, qo_indptr.cpu().long().diff(), own, kv_len)
        if needed > capacity:
            fail(
                CapacityError,
                "plan",
                f"the batch makes {needed} splits of {self.problem.split} tokens and the plan capacity for {capacity}",
                f"num_ctas of at least {needed}",
                "make the planner with that num_ctas, or with a larger fixed_split_size",
            )


def _check_ragged(page_size: int, max_kv_len: int | None, context: ContextShard | None) -> None:
    """Check the arguments of a planner for ragged KV."""
    if context is not None:
        fail(
            OptionError,
            "planner",
            "context with ragged KV (max_pages 0)",
            "a paged cache, whose pages the ranks share",
            "leave context out: every rank has all rows of ragged KV",
        )
    if page_size != 1 or max_kv_len is None:
        fail(
            OptionError,
            "planner",
            f"ragged KV (max_pages 0) with page_size {page_size} and max_kv_len {max_kv_len}",
            "page_size 1 and a number of tokens",
            "give max_kv_len, or max_pages for a paged cache",
        )


def _tile_rows_of_capacity(
    device: torch.device,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    head_shards: int,
    capacity: tuple[int, int] | None,
) -> int:
    """Query rows of a query tile by ``capacity``, requests and query rows; None: they must not depend on capacity."""
    shards = max(1, head_shards)
    rows, large = None, False
    if capacity is not None:
        max_batch, max_tokens = capacity
        rows = -(-max_tokens // max(1, max_batch))
        heads = num_qo_heads // shards, -(-num_kv_heads // shards)
        large = is_large_batch(*heads, head_dims, max_batch, max_tokens, device)
    return default_tile_rows(
        device, num_qo_heads // (shards if num_kv_heads == 1 else 1), num_kv_heads, head_dims, rows, large_batch=large
    )
