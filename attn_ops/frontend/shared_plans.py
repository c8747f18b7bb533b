"""Plans that calls share: made for a batch, and found again by the layers of a step.

A plan has copies of lengths and page tables, so it serves later calls only while these have not changed. The plan of a
call is one of these:

given          an argument of the call (:class:`~attn_ops.frontend.flash.metadata.SchedulerMetadata`)
host lengths   the plan of an earlier call whose lengths and tables had equal contents, which are compared on the host
GPU lengths    within :class:`SharedPlans`, the plan of an earlier call with the same tensors and version counters
otherwise      a new plan in every call, also in traced code, where Inductor lowers equal plans once
               (:mod:`attn_ops.ops.repeated_plans`)

What is shared is a plan, or a tuple of a plan and other tensors.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.eager.contents import contents
from attn_ops.eager.interposition import is_traced
from attn_ops.eager.op_call import Lookup, flatten_tensors
from attn_ops.frontend.call import AttentionCall, Planned
from attn_ops.frontend.call_plans import with_workspace
from attn_ops.gpu import current_stream, is_capturing
from attn_ops.ops.options import AttentionOptions
from attn_ops.plan.page_table import seen
from attn_ops.plan.state import DecodePlan, PrefillPlan

Shared = tuple[Any, ...]
"""A plan, or a tuple of a plan and other tensors."""

Make = Callable[[], Shared]


class _Entry(NamedTuple):
    """A shared value, the tensors that it was made from, and their version counters then."""

    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]
    value: Shared


class SharedPlans:
    """Context manager of one step: calls in it that pass the same tensors share one plan.

    The same tensors are the same Python objects. If PyTorch changes their contents, their version counters change, and
    the next call plans again. Writes that PyTorch does not see must not change lengths and page tables within the
    block: kernels launched on raw pointers, replays of CUDA graphs, writes through ``.data`` or NumPy, and any write to
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

    def find(self, key: Hashable, tensors: tuple[Tensor, ...], make: Make | None) -> Shared | None:
        """The value made from ``tensors`` by an earlier call, else the result of ``make``, or None without ``make``."""
        if is_capturing() != self._capturing:
            return make and make()
        key = (key, *map(id, tensors))
        versions = tuple([0 if t.is_inference() else t._version for t in tensors])
        entry = self._entries.get(key)
        if entry is None or entry.versions != versions:
            if make is None:
                return None
            entry = self._entries[key] = _Entry(tensors, versions, make())
        return entry.value


_scopes = threading.local()


def active_blocks() -> list[SharedPlans]:
    """The blocks that this thread is in."""
    if not hasattr(_scopes, "active"):
        _scopes.active = []
    active: list[SharedPlans] = _scopes.active
    return active


MAX_HOST_PLANS = 32
"""Plans of host lengths that a thread holds."""


class _HostEntry(NamedTuple):
    """A shared value, and the contents of the tensors that it was made from.

    ``cache_pages``: the fewest pages of a cache for which page tables of these contents have passed their checks.
    """

    contents: Hashable
    value: Shared
    cache_pages: int


class HostPlans:
    """Plans of batches whose lengths are on the host, by their contents. The least recently used is evicted first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[Hashable, _HostEntry] = OrderedDict()

    def find(self, key: Hashable, tensors: tuple[Tensor, ...], make: Make | None, cache_pages: int) -> Shared | None:
        """The value made from tensors of equal contents by an earlier call, else the result of ``make``.

        Sizes of ``tensors`` are in ``key``. Without ``make`` the result is None if there is no such value, or if its
        page table has only been checked for larger caches than ``cache_pages``.
        """
        entry, now = self.entries.get(key), contents(tensors)
        if entry is None or entry.contents != now:
            if make is None:
                return None
            with torch.inference_mode(False):  # the plan is also used outside of inference mode
                entry = _HostEntry(now, make(), cache_pages)
            self.entries[key] = entry
        elif cache_pages < entry.cache_pages:
            if make is None:
                return None
            entry = self.entries[key] = entry._replace(cache_pages=cache_pages)
        self.entries.move_to_end(key)
        if len(self.entries) > MAX_HOST_PLANS:
            self.entries.popitem(last=False)
        return entry.value


def host_plans() -> HostPlans:
    """The host plans of this thread."""
    try:
        held: HostPlans = _scopes.host
    except AttributeError:
        held = _scopes.host = HostPlans()
    return held


class SharedKey(NamedTuple):
    """What a shared plan depends on, and ``cache_pages``, on which only checks depend.

    key          all that the plan depends on, except the contents of the tensors and the stream
    tensors      lengths and page tables as the caller passed them
    device       device of the plan
    on_host      whether the contents of the tensors are compared
    cache_pages  pages of the cache, for which page tables among the tensors are checked
    """

    key: Hashable
    tensors: tuple[Tensor, ...]
    device: torch.device
    on_host: bool
    cache_pages: int = 0

    def find(self, make: Make | None = None) -> Shared | None:
        """The value made by an earlier call of the same batch, if one is found; else the result of ``make``."""
        stream = current_stream(self.device)
        if self.on_host:
            if is_capturing():
                return make and make()
            key = (self.key, stream, *[(t.shape, t.dtype) for t in self.tensors])
            return host_plans().find(key, self.tensors, make, self.cache_pages)
        active = active_blocks()
        return active[-1].find((self.key, stream), self.tensors, make) if active else make and make()

    def finder(self) -> Callable[[tuple[Tensor, ...]], Shared | None]:
        """:meth:`find` for other tensors of the same sizes and dtypes. It keeps no tensor."""
        if self.on_host and self.device.type == "cpu":
            key, cache_pages = (self.key, None, *[(t.shape, t.dtype) for t in self.tensors]), self.cache_pages

            def find(tensors: tuple[Tensor, ...]) -> Shared | None:
                return None if is_capturing() else host_plans().find(key, tensors, None, cache_pages)

            return find
        without = self._replace(tensors=())
        return lambda tensors: without._replace(tensors=tensors).find()


class Found(NamedTuple):
    """The plan of a call, and how later calls find theirs.

    value   the plan, or the metadata that has it
    by      the key of a shared plan, else None
    given   makes the lookup of later calls on the CPU, if ``value`` was an argument of the call
    replan  checks other tensors in place of those of ``by``, and plans for them; it keeps no tensor
    """

    value: Any
    by: SharedKey | None = None
    given: Callable[[], Lookup] | None = None
    replan: Callable[..., Shared] | None = None

    def lookup(self, on_cpu: bool) -> Lookup | None:
        """How later calls find their plan; None if they must run as written.

        With a cache on a GPU, calls check a page table on the host, so they run as written.
        """
        if self.given is not None and on_cpu:
            return self.given()
        by = self.by
        if by is None or (by.on_host and by.tensors and not on_cpu):
            return None
        found, replan, on_host = by.finder(), self.replan if on_cpu else None, by.on_host

        def find(*tensors: Tensor) -> list[Tensor] | None:
            value = found(tensors)
            if value is None and replan is not None:
                value = replan(*tensors)
            if value is None:
                return None
            first, *others = value
            return [*first, *others] if isinstance(first, tuple) else [first, *others]

        return Lookup(by.tensors, flatten_tensors((self.value,)), find, lambda: on_host or bool(active_blocks()))


class Scheduled(NamedTuple):
    """A plan source: a plan that exists already."""

    plan: DecodePlan | PrefillPlan
    head_dims: tuple[int, int]

    def check(self, call: AttentionCall) -> None:
        return None

    def resolve(self, options: AttentionOptions) -> tuple[Planned, AttentionOptions]:
        return with_workspace(self.plan), options


def shared(
    key: Hashable, tensors: Sequence[Tensor | None], device: torch.device, make: Make, cache_pages: int = 0
) -> Found:
    """The value made by an earlier call of the same batch, if one is found; else the result of ``make``.

    Args:
        key: all that the plan depends on, except the contents of ``tensors``.
        tensors: lengths and page tables as the caller passed them.
        device: device of the plan.
        make: makes the plan from the contents of ``tensors``.
        cache_pages: pages of the cache, for which the caller has checked the page tables.
    """
    if is_traced():
        return Found(make())
    given = tuple(t for t in tensors if t is not None)
    on_host = all(map(seen, given)) and device.type != "meta"
    by = SharedKey((key, device, *(t is None for t in tensors)), given, device, on_host, cache_pages)
    value = by.find(make)
    assert value is not None
    return Found(value, by)
