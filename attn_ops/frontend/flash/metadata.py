"""``scheduler_metadata=`` of FlashAttention's calls: the plan of a batch, and the places of appended tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attn_ops.eager.interposition import is_traced
from attn_ops.eager.op_call import Lookup, flatten_tensors
from attn_ops.errors import ArgumentError, ArgumentTypeError, PlanError, fail
from attn_ops.plan.page_table import seen
from attn_ops.plan.page_table_checks import check_indices
from attn_ops.plan.state import DecodePlan, PrefillPlan
from attn_ops.symbolic_sizes import any_zero, holds


class SchedulerMetadata(NamedTuple):
    """The plan of a batch, and the places of the tokens that the step appends. All int32, on the query's device.

    plan           a :class:`~attn_ops.DecodePlan` or :class:`~attn_ops.PrefillPlan`
    form           ``[0, *BatchForm]``: no data; the shape is the form of the batch
    batch_indices  ``[appended tokens]``: the request of each token
    positions      ``[appended tokens]``: the position of each token
    kv_indices     page table of the appended tokens if the plan's requests are chunks; else empty: the plan has it
    kv_indptr      offsets of each request in ``kv_indices``
    """

    plan: DecodePlan | PrefillPlan
    form: Tensor
    batch_indices: Tensor
    positions: Tensor
    kv_indices: Tensor
    kv_indptr: Tensor

    @classmethod
    def without_append(cls, plan: DecodePlan | PrefillPlan, form: BatchForm, device: torch.device) -> SchedulerMetadata:
        """The metadata of a step that appends no tokens."""
        return cls(plan, form.as_shape_tensor(device), *nothing_appended(device), *nothing_appended(device))


def nothing_appended(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(0, dtype=torch.int32, device=device), torch.empty(0, dtype=torch.int32, device=device)


pytree._register_namedtuple(SchedulerMetadata, serialized_type_name="attn_ops.SchedulerMetadata")
torch.serialization.add_safe_globals([SchedulerMetadata])


class BatchForm(NamedTuple):
    """Sizes of a batch that the shapes of its plan do not give exactly, and flags, 0 or 1.

    rows         query rows of the batch
    appended     new tokens of the batch
    chunk        keys of a chunk, 0 without chunks
    page_size    of the cache, 0 without a cache. Pages of the plan have one token if requests begin within pages
    table        the metadata was made with a block table
    cache_rows   with ``cache_batch_idx``
    leftpad      with ``cache_leftpad``
    lacks_table  for a paged cache, without its block table
    unplanned    without the totals of varlen tensors, or for an append beyond the capacity of the cache

    The fields are sizes of a tensor. Graphs are specialized on sizes 0 and 1.
    """

    requests: int
    rows: int
    appended: int = 0
    chunk: int = 0
    page_size: int = 0
    table: int = 0
    cache_rows: int = 0
    leftpad: int = 0
    lacks_table: int = 0
    unplanned: int = 0

    @classmethod
    def of(cls, metadata: SchedulerMetadata) -> BatchForm:
        return cls(*metadata.form.shape[1:])

    def lacks_plan_for(self, batch: BatchForm) -> bool:
        """Whether calls of ``batch`` must plan for themselves: the metadata lacks a table, or what they append."""
        known = (self.table, batch.table), (self.cache_rows, batch.cache_rows), (self.leftpad, batch.leftpad)
        one_appends = any_zero(self.appended) != any_zero(batch.appended)
        return bool(self.unplanned) or any(made < wanted for made, wanted in known) or one_appends

    @property
    def by_tokens(self) -> bool:
        """Whether pages of the plan are of one token: requests, or their chunks, begin within pages of the cache."""
        return self.leftpad > 0 or (self.chunk > 0 and self.chunk % max(1, self.page_size) != 0)

    def as_shape_tensor(self, device: torch.device) -> Tensor:
        return torch.empty((0, *self), dtype=torch.int32, device=device)


def check_given(where: str, given: object, form: BatchForm, decode: bool) -> SchedulerMetadata:
    """``scheduler_metadata=`` of a call, which must have been made for a batch of this form."""
    if not isinstance(given, SchedulerMetadata):
        fail(
            ArgumentTypeError,
            where,
            f"scheduler_metadata is of type {type(given).__name__}",
            "a SchedulerMetadata",
            "make it with attn_ops.flash_attn.get_scheduler_metadata",
        )
    dims = list(given.form.shape) if isinstance(given.form, Tensor) else type(given.form).__name__
    if not isinstance(dims, list) or len(dims) != 1 + len(BatchForm._fields):
        fail(
            ArgumentError,
            where,
            f"form of scheduler_metadata is {dims}",
            "a tensor [0, requests, query rows, appended tokens, keys of a chunk, page size, 5 flags]",
            "make it with attn_ops.flash_attn.get_scheduler_metadata",
        )
    made = BatchForm.of(given)
    if made.lacks_table and not form.table:
        fail(
            ArgumentError,
            where,
            "scheduler_metadata was made without the block table",
            "block_table in the call, or in get_scheduler_metadata, so that all layers share the plan",
            "pass it",
        )
    for name, size, wanted in zip(_FORM, made, form, strict=False):
        if not made.lacks_plan_for(form) and not holds(size == wanted):
            fail(
                PlanError,
                where,
                f"scheduler_metadata was made for {int(size)} {_FORM[name]}",
                f"{int(wanted)}, which the tensors have",
                "make it for this batch",
            )
    if isinstance(given.plan, DecodePlan) != decode and not made.lacks_plan_for(form):
        rows = "one query row per request" if isinstance(given.plan, DecodePlan) else "cumulative query rows"
        fail(PlanError, where, f"scheduler_metadata was made for {rows}", "a plan of this query", "make it again")
    return given


_FORM = {
    "requests": "requests",
    "rows": "query rows",
    "appended": "appended tokens",
    "chunk": "keys of a chunk",
    "page_size": "tokens of a page",
}


class GivenMetadata(NamedTuple):
    """Checks the pages of metadata that a call is given, in each call, if they are on the host.

    requests  requests of the metadata's plan that the call reads
    pages     pages of the cache
    unread    lengths and tables of the call that are not read, since the metadata replaces them
    """

    where: str
    requests: int
    pages: int
    unread: tuple[Tensor, ...]

    def check(self, made: SchedulerMetadata) -> None:
        if seen(made.plan.kv_indices) and not is_traced():
            used = int(made.plan.kv_indptr[self.requests])
            check_indices(made.plan.kv_indices[:used], self.pages, self.where)

    def lookup(self, metadata: SchedulerMetadata) -> Lookup:
        """How later calls on the CPU find the tensors of their metadata among their arguments."""
        found, kind, given = flatten_tensors((metadata,)), type(metadata.plan), self._replace(unread=())
        size = len(metadata.plan)

        def find(*tensors: Tensor) -> Sequence[Tensor]:
            made = tensors[: len(tensors) - number_unread]
            given.check(SchedulerMetadata(kind(*made[:size]), *made[size:]))
            return made

        number_unread = len(self.unread)
        return Lookup((*found, *self.unread), found, find)
