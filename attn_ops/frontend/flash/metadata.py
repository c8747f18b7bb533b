"""Plans of FlashAttention's calls: made for a batch, and shared by the layers of a step.

A plan holds copies of lengths and page tables, so it may be used again only while these have not changed:

given          ``scheduler_metadata=`` of the call, made by ``get_scheduler_metadata``
host lengths   the plan of an earlier call of equal contents, which are compared; they are on the host
GPU lengths    within :class:`SharedPlans`, the plan of an earlier call with the same tensors and version counters
otherwise      a new plan in every call, as in traced code, of which Inductor lowers equal plans once
               (:mod:`attn_ops.ops.repeated_plans`)
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from attn_ops.call import AttentionCall, Planned
from attn_ops.eager.contents import contents
from attn_ops.eager.interposition import is_traced
from attn_ops.eager.prepared_call import Lookup, OpCall, current_stream, flatten_tensors
from attn_ops.errors import ArgumentError, PlanError, fail
from attn_ops.frontend.call_plans import with_workspace
from attn_ops.ops.options import AttentionOptions
from attn_ops.plan.page_table import seen
from attn_ops.plan.page_table_checks import check_indices
from attn_ops.plan.state import DecodePlan, PrefillPlan


class SchedulerMetadata(NamedTuple):
    """The plan of a batch, and the places of the tokens that the step appends. All int32, on the query's device.

    plan           a :class:`~attn_ops.DecodePlan` or :class:`~attn_ops.PrefillPlan`
    form           ``[0, *BatchForm]``: no data; the shape says what batch this is for
    batch_indices  ``[appended tokens]``: the request of each token
    positions      ``[appended tokens]``: its position
    kv_indices     page table of the appended tokens, where the requests of the plan are chunks; else empty: the plan's
    kv_indptr      offsets of each request in it
    """

    plan: DecodePlan | PrefillPlan
    form: Tensor
    batch_indices: Tensor
    positions: Tensor
    kv_indices: Tensor
    kv_indptr: Tensor

    @classmethod
    def without_append(cls, plan: DecodePlan | PrefillPlan, form: BatchForm, device: torch.device) -> SchedulerMetadata:
        """Of a step that appends no tokens."""
        return cls(plan, form.as_shape_tensor(device), *nothing_appended(device), *nothing_appended(device))


def nothing_appended(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(0, dtype=torch.int32, device=device), torch.empty(0, dtype=torch.int32, device=device)


pytree._register_namedtuple(SchedulerMetadata, serialized_type_name="attn_ops.SchedulerMetadata")
torch.serialization.add_safe_globals([SchedulerMetadata])


PAGES, ROWS, LEFTPAD, MISSING, NO_TOTALS, NO_CAPACITY = 1, 2, 4, 8, 16, 32
"""Flags of what places the tokens of a batch in the cache, apart from their lengths: a block table,
``cache_batch_idx``, ``cache_leftpad``, a block table that the calls alone have, totals of varlen tensors that the calls
alone have, and an append beyond the capacity of the cache. Plain integers, which trace."""


class BatchForm(NamedTuple):
    """What a plan's own shapes do not tell exactly: sizes of its batch and of the cache's pages, and what it knows.

    ``page_size``: of the cache, 0 without one. The plan's pages are of one token if requests begin within pages.
    """

    requests: int
    rows: int
    appended: int = 0
    chunk: int = 0
    page_size: int = 0
    tables: int = 0

    @classmethod
    def of(cls, metadata: SchedulerMetadata) -> BatchForm:
        return cls(*metadata.form.shape[1:])

    def plans_for_others(self, batch: BatchForm) -> bool:
        """Whether calls of ``batch`` plan for themselves: what they append, or where, the metadata does not know."""
        if self.tables & (NO_TOTALS | NO_CAPACITY):
            return True
        knows_tables = (self.tables & batch.tables) == batch.tables  # Dynamo does not trace ~ of a size
        one_appends = self.appended != batch.appended and (self.appended == 0 or batch.appended == 0)
        return not knows_tables or one_appends

    def as_shape_tensor(self, device: torch.device) -> Tensor:
        return torch.empty((0, *self), dtype=torch.int32, device=device)


class Scheduled(NamedTuple):
    """A plan source: a plan that exists already."""

    plan: DecodePlan | PrefillPlan
    head_dims: tuple[int, int]

    def check(self, call: AttentionCall) -> None:
        return None

    def resolve(self, options: AttentionOptions) -> tuple[Planned, AttentionOptions]:
        return with_workspace(self.plan), options


def check_given(where: str, given: object, form: BatchForm, decode: bool) -> SchedulerMetadata:
    """``scheduler_metadata=`` of a call, which must have been made for a batch of this form."""
    if not isinstance(given, SchedulerMetadata):
        fail(
            ArgumentError,
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
            "a tensor [0, requests, query rows, appended tokens, keys of a chunk, page size, tables]",
            "make it with attn_ops.flash_attn.get_scheduler_metadata",
        )
    made = BatchForm.of(given)
    if made.tables & MISSING and not form.tables & PAGES:
        fail(
            ArgumentError,
            where,
            "scheduler_metadata was made without the block table",
            "block_table in the call, or in get_scheduler_metadata, so that all layers share the plan",
            "pass it",
        )
    for name, size, wanted in zip(_FORM, made, form, strict=False):
        if size != wanted and not made.plans_for_others(form):
            fail(
                PlanError,
                where,
                f"scheduler_metadata was made for {size} {_FORM[name]}",
                f"{wanted}, which the tensors have",
                "make it for this batch",
            )
    if isinstance(given.plan, DecodePlan) != decode:
        rows = "one query row per request" if isinstance(given.plan, DecodePlan) else "cumulative query rows"
        fail(PlanError, where, f"scheduler_metadata was made for {rows}", "a plan of this query", "make it for it")
    return given


_FORM = {
    "requests": "requests",
    "rows": "query rows",
    "appended": "appended tokens",
    "chunk": "keys of a chunk",
    "page_size": "tokens of a page",
}

Make = Callable[[], SchedulerMetadata]


class _Entry(NamedTuple):
    """Shared metadata: ``tensors`` are those it was made from, ``versions`` their version counters."""

    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]
    metadata: SchedulerMetadata


class SharedPlans:
    """Context manager of one step: calls in it that pass the same tensors share one plan.

    The same tensors are the same Python objects. A change of their contents by PyTorch is noticed, by their version
    counters, and plans again. What PyTorch does not see must not change lengths and page tables within the block:
    kernels launched on raw pointers, replays of CUDA graphs, writes through ``.data`` or NumPy, and any write to
    tensors that were made in inference mode, which have no version counters.

    Plans live until the block ends. An object may be entered again, also in one block within another; :meth:`clear`
    drops its plans. Blocks belong to a thread. A block that captures a CUDA graph must begin within the capture:
    otherwise calls in the capture plan for themselves. Traced code does too.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}
        self._capturing = False

    def __enter__(self) -> SharedPlans:
        capturing = is_capturing()
        if capturing != self._capturing:
            self.clear()
        self._capturing = capturing
        active_blocks().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        active_blocks().pop()
        if self not in active_blocks():
            self.clear()

    def clear(self) -> None:
        """Drop the plans."""
        self._entries.clear()

    def find(self, key: Hashable, tensors: tuple[Tensor, ...], make: Make | None) -> SchedulerMetadata | None:
        """The metadata of ``tensors``, which :class:`SharedKey` calls with; what ``make`` returns if there is none."""
        if is_capturing() != self._capturing:
            return make and make()
        key = (key, *map(id, tensors))
        versions = tuple([0 if t.is_inference() else t._version for t in tensors])
        entry = self._entries.get(key)
        if entry is None or entry.versions != versions:
            if make is None:
                return None
            entry = self._entries[key] = _Entry(tensors, versions, make())
        return entry.metadata


_scopes = threading.local()


def active_blocks() -> list[SharedPlans]:
    """The blocks that this thread is in."""
    if not hasattr(_scopes, "active"):
        _scopes.active = []
    active: list[SharedPlans] = _scopes.active
    return active


def is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


MAX_HOST_PLANS = 32
"""Plans of host lengths that a thread holds."""


class _HostEntry(NamedTuple):
    """Metadata that was made from tensors of these contents.

    ``places``: the fewest places of a cache for which tables of these contents have passed their checks.
    """

    contents: Hashable
    metadata: SchedulerMetadata
    places: int


class HostPlans:
    """Plans of batches whose lengths are on the host, by their contents. The least recently used goes first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[Hashable, _HostEntry] = OrderedDict()

    def find(
        self, key: Hashable, tensors: tuple[Tensor, ...], make: Make | None, places: int
    ) -> SchedulerMetadata | None:
        """The metadata of ``tensors``, whose sizes are in the ``key``; what ``make`` returns if there is none.

        Without ``make`` only that of a call whose tables would pass the checks for as few ``places``.
        """
        entry, now = self.entries.get(key), contents(tensors)
        if entry is None or entry.contents != now:
            if make is None:
                return None
            with torch.inference_mode(False):  # the plan is also used outside of inference mode
                entry = _HostEntry(now, make(), places)
            self.entries[key] = entry
        elif places < entry.places:
            if make is None:
                return None
            entry = self.entries[key] = entry._replace(places=places)
        self.entries.move_to_end(key)
        if len(self.entries) > MAX_HOST_PLANS:
            self.entries.popitem(last=False)
        return entry.metadata


def host_plans() -> HostPlans:
    """Those of this thread."""
    try:
        held: HostPlans = _scopes.host
    except AttributeError:
        held = _scopes.host = HostPlans()
    return held


class SharedKey(NamedTuple):
    """What metadata depends on, so that calls may share it.

    key      all but the contents of the tensors, and the stream
    tensors  lengths and page tables as the caller passed them
    device   of the plan
    on_host  the contents of the tensors are compared
    places   that the tables among them may name; no part of what the metadata depends on
    """

    key: Hashable
    tensors: tuple[Tensor, ...]
    device: torch.device
    on_host: bool
    places: int = 0

    def find(self, make: Make | None = None) -> SchedulerMetadata | None:
        """The metadata of an earlier call of the same batch, if that is certain; else what ``make`` returns."""
        stream = current_stream(self.device)
        if self.on_host:
            if is_capturing():
                return make and make()
            key = (self.key, stream, *[(t.shape, t.dtype) for t in self.tensors])
            return host_plans().find(key, self.tensors, make, self.places)
        active = active_blocks()
        return active[-1].find((self.key, stream), self.tensors, make) if active else make and make()

    def finder(self) -> Callable[[tuple[Tensor, ...]], SchedulerMetadata | None]:
        """:meth:`find` for other tensors of the same sizes and dtypes. It keeps no tensor."""
        if self.on_host and self.device.type == "cpu":
            key, places = (self.key, None, *[(t.shape, t.dtype) for t in self.tensors]), self.places

            def find(tensors: tuple[Tensor, ...]) -> SchedulerMetadata | None:
                return None if is_capturing() else host_plans().find(key, tensors, None, places)

            return find
        without = self._replace(tensors=())
        return lambda tensors: without._replace(tensors=tensors).find()


class GivenMetadata(NamedTuple):
    """Metadata that a call was given, whose pages are checked in each call if they are on the host.

    requests  of the metadata that the call reads
    pages     of the cache
    unread    lengths and tables of the call that the metadata takes the place of
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
        """How later calls, on the CPU, take theirs from their arguments."""
        found, kind, given = flatten_tensors((metadata,)), type(metadata.plan), self._replace(unread=())
        size = len(metadata.plan)

        def find(*tensors: Tensor) -> Sequence[Tensor]:
            made = tensors[: len(tensors) - number_unread]
            given.check(SchedulerMetadata(kind(*made[:size]), *made[size:]))
            return made

        number_unread = len(self.unread)
        return Lookup((*found, *self.unread), found, find)


class Found(NamedTuple):
    """The metadata of a call: ``given``, or what it was found by; neither if it was made for this call alone.

    replan  checks and plans for other tensors in the place of those of ``by``, and keeps none
    """

    metadata: SchedulerMetadata
    by: SharedKey | None = None
    given: GivenMetadata | None = None
    replan: Callable[..., SchedulerMetadata] | None = None

    def lookup(self, on_cpu: bool) -> Lookup | None:
        """How later calls find the metadata. A table on the host is checked in each call with a cache on a GPU."""
        if self.given is not None and on_cpu:
            return self.given.lookup(self.metadata)
        by = self.by
        if by is None or (by.on_host and by.tensors and not on_cpu):
            return None
        found, replan = by.finder(), self.replan if on_cpu else None

        def find(*tensors: Tensor) -> list[Tensor] | None:
            metadata = found(tensors)
            if metadata is None and replan is not None:
                metadata = replan(*tensors)
            return None if metadata is None else [*metadata.plan, *metadata[1:]]

        return Lookup(by.tensors, flatten_tensors((self.metadata,)), find)


class FoundCall(NamedTuple):
    """A call whose plan is that of ``found``.

    views  those of :class:`OpCall`
    """

    call: AttentionCall
    found: Found
    views: tuple[tuple[Tensor, Tensor], ...] = ()

    def execute(self) -> Any:
        return self.call.execute()

    def op_call(self) -> OpCall:
        op_call, on_cpu = self.call.op_call(), not self.call.tensors[0].is_cuda
        return op_call._replace(scratch=op_call.args[-1:], views=self.views, lookup=self.found.lookup(on_cpu))


def shared(key: Hashable, tensors: Sequence[Tensor | None], device: torch.device, make: Make, places: int = 0) -> Found:
    """What ``make`` returns, or returned for the same batch if that is certain.

    Args:
        key: all that the metadata depends on beside the contents of ``tensors``.
        tensors: lengths and page tables as the caller passed them; None has no contents.
        device: of the plan.
        make: reads ``tensors`` alone.
        places: of the cache, for which the caller has checked the tables.
    """
    if is_traced():
        return Found(make())
    given = tuple(t for t in tensors if t is not None)
    on_host = all(map(seen, given)) and device.type != "meta"
    by = SharedKey((key, device, *(t is None for t in tensors)), given, device, on_host, places)
    metadata = by.find(make)
    assert metadata is not None
    return Found(metadata, by)
