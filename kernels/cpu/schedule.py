"""The calls of PyTorch's flash attention that compute a batch, by the numbers of its plan, which are read on the host.

A :class:`KernelCall` attends for a request, or for successive requests of equal sizes if it needs no mask. It depends
only on numbers, so the kernel calls of a small plan are kept by its numbers (:class:`Steps`): the layers of a model
share them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from attn_ops.eager.bounded_cache import BoundedCache
from attn_ops.eager.contents import contents
from attn_ops.plan.state import DecodePlan, PlanProblem, PrefillPlan

MAX_ELEMENTS = 1 << 20
"""Most elements of the keys of several requests that attend together: they stay in the cache of the CPU."""

MAX_NUMBERS = 2048
"""Most numbers of a plan whose steps are kept."""

MAX_PLANS = 64
"""Plans whose steps are kept. All are evicted at the limit."""


class KeyBounds(NamedTuple):
    """The options ``causal``, ``window_left`` and ``window_right``: -1 is no bound."""

    causal: bool
    left: int
    right: int


class Window(NamedTuple):
    """The keys that a row sees: ``position - left`` to ``position + right``, of ``length`` tokens."""

    length: int
    left: int
    right: int

    @classmethod
    def of(cls, bounds: KeyBounds, rows: int, length: int) -> Window:
        every = rows + length
        right = 0 if bounds.causal else every if bounds.right < 0 else bounds.right
        return cls(length, every if bounds.left < 0 else bounds.left, right)

    def keys(self, position: int) -> tuple[int, int]:
        """Half-open range of the keys that the row at ``position`` sees."""
        return max(0, position - self.left), min(self.length, position + self.right + 1)

    def seen(self, position: int, rows: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The keys of the first and of the last of ``rows`` rows from ``position`` on."""
        return self.keys(position), self.keys(position + rows - 1)

    def is_triangle(self, position: int, rows: int) -> bool:
        """Whether ``rows`` rows from ``position`` on see the keys up to their own: the kernel can hide the others."""
        return rows > 1 and position == 0 and self.seen(0, rows) == ((0, 1), (0, self.length))

    def mask(self, rows: int, keys: int, ahead: int) -> Tensor:
        """``[rows, keys]``: 0 for a key that a row sees, else -inf. The first row is ``ahead`` of the first key."""
        hidden = torch.full((rows, keys), -math.inf, dtype=torch.float32, device="cpu")
        return hidden.triu(ahead + self.right + 1) + hidden.tril(ahead - self.left - 1)


class Pages(NamedTuple):
    """The pages of a kernel call's requests, which all have the same number of pages.

    per_request  number of pages of each request
    numbers      page numbers of all requests; None for ragged KV, whose tokens are in order
    first        if pages are in order, page i of request r has the number ``first + r * stride + i``; else None
    """

    per_request: int
    numbers: Tensor | None
    first: int | None = None
    stride: int = 1


WHOLE = Pages(1, None, 0)
"""The keys of requests without a page table: page r has all those of request r."""


class KernelCall(NamedTuple):
    """Attention of successive query rows, each of which sees at least one key.

    first         the first query row, an index of the batch's rows
    rows          query rows of all requests
    requests      number of requests
    begin, end    half-open range of each request's tokens that its rows see
    position      position of each request's first row
    causal        whether each row sees exactly the keys up to its own, so that the kernel can hide later keys
    window        the keys that each row sees, if a mask must hide some keys; else None
    pages         the pages of the tokens, from the page of token ``begin`` on
    """

    first: int
    rows: int
    requests: int
    begin: int
    end: int
    position: int = 0
    causal: bool = False
    window: Window | None = None
    pages: Pages = WHOLE


@functools.lru_cache(maxsize=1024)
def of_request(rows: int, length: int, bounds: KeyBounds) -> KernelCall | None:
    """The kernel call of a request's rows, without leading rows that see no key; None if no row sees a key."""
    return _kernel_call(0, rows, 1, length - rows, length, bounds)


def _kernel_call(
    first: int, rows: int, requests: int, position: int, length: int, bounds: KeyBounds
) -> KernelCall | None:
    """The kernel call of ``rows`` rows of each request, from ``position`` on; None if no row sees a key."""
    window = Window.of(bounds, max(0, -position) + rows, length)
    without_keys = min(rows, max(0, -position - window.right))
    rows, first, position = rows - without_keys, first + without_keys, position + without_keys
    if not rows:
        return None
    (begin, first_end), (last_begin, end) = window.seen(position, rows)
    causal = window.is_triangle(position, rows)
    masked = not causal and (begin, first_end) != (last_begin, end)
    return KernelCall(first, rows * requests, requests, begin, end, position, causal, window if masked else None)


def of_requests(batch_size: int, rows: int, length: int, most_tokens: int, bounds: KeyBounds) -> Iterator[KernelCall]:
    """The kernel calls of requests of ``rows`` rows and ``length`` tokens, whose keys are :data:`WHOLE` pages.

    Rows that see no key are in no kernel call.
    """
    at_once = max(1, most_tokens // length) if rows == 1 or _attend_together(bounds, rows, length) else 1
    for first in range(0, batch_size, at_once):
        requests = min(at_once, batch_size - first)
        call = _kernel_call(first * rows, rows, requests, length - rows, length, bounds)
        if call is not None:
            yield call._replace(pages=Pages(1, None, first))


def _attend_together(bounds: KeyBounds, rows: int, length: int) -> bool:
    """Whether one call attends for several requests of ``rows`` rows and ``length`` tokens, as it needs no mask."""
    call = of_request(rows, length, bounds)
    return call is not None and call.rows == rows and call.window is None


def _groups(
    rows: Sequence[int], lengths: Sequence[int], num_rows: int, most_tokens: int, bounds: KeyBounds
) -> Iterator[range]:
    """Groups of successive requests that attend together. Requests without query rows or keys are in no group.

    A group of several requests has all its rows among the first ``num_rows``, and at most ``most_tokens`` tokens.
    """
    first = 0
    while first < len(lengths):
        end, count, length = first + 1, rows[first + 1] - rows[first], lengths[first]
        if count > 0 <= rows[first] and length > 0:
            if count == 1 or _attend_together(bounds, count, length):
                limit = min(len(lengths), first + most_tokens // length)
                while end < limit and rows[end + 1] == rows[end] + count <= num_rows and lengths[end] == length:
                    end += 1
            yield range(first, end)
        first = end


class Table(NamedTuple):
    """The page table of a plan. As in the reference, its entries and page numbers are not checked but clamped.

    Ragged KV has no ``numbers``: it is a cache of pages of one token, in order.
    """

    starts: Sequence[int]
    numbers: Tensor
    page_size: int
    num_pages: int

    def pages(self, requests: range, begin: int, end: int) -> Pages:
        """The pages of the tokens from ``begin`` to ``end`` of each request."""
        page = begin // self.page_size
        count, places = -(-end // self.page_size) - page, self.numbers.shape[0]
        begins = [start + page for start in self.starts[requests.start : requests.stop]]
        at, stop = begins[0], begins[0] + count * len(begins)
        in_row = len(begins) == 1 or begins == list(range(at, stop, count))
        if not in_row or not 0 <= at < stop <= (places or self.num_pages):
            index = (torch.tensor(begins, device="cpu")[:, None] + torch.arange(count, device="cpu")).flatten()
            index = self.numbers[index.clamp_(0, places - 1)] if places else index
            return Pages(count, index.clamp(0, self.num_pages - 1))
        if not places:
            return Pages(count, None, at, count)
        index = self.numbers[at:stop]
        numbers = index.tolist()
        if min(numbers) < 0 or max(numbers) >= self.num_pages:
            return Pages(count, index.clamp(0, self.num_pages - 1))
        first, stride = numbers[0], count if len(begins) == 1 else numbers[count] - numbers[0]
        in_order = stride > 0 and numbers == [
            number for at in range(first, first + stride * len(requests), stride) for number in range(at, at + count)
        ]
        return Pages(count, index.clone(), first if in_order else None, stride)


class BatchSizes(NamedTuple):
    """Sizes and options that calls of a key have in common, whatever the contents of their plans.

    num_rows     query rows. A plan may have more
    num_pages    pages of the cache
    page_size    tokens of a page
    max_kv_len   the most tokens of a request
    most_tokens  the most tokens of several requests that attend together
    bounds       bounds of the keys that a row sees
    """

    num_rows: int
    num_pages: int
    page_size: int
    max_kv_len: int
    most_tokens: int
    bounds: KeyBounds

    @classmethod
    def of(cls, problem: Tensor, num_rows: int, num_pages: int, bounds: KeyBounds) -> BatchSizes:
        p = PlanProblem.of(problem)
        most_tokens = MAX_ELEMENTS // (p.num_kv_heads * p.head_dim_qk)
        return cls(num_rows, num_pages, p.page_size, p.max_kv_len, most_tokens, bounds)


def of_plan(plan: DecodePlan | PrefillPlan, batch: BatchSizes) -> Iterator[KernelCall]:
    """The kernel calls of a plan. Rows that see no key are in no kernel call."""
    starts, numbers = plan.kv_indptr.tolist(), plan.kv_indices
    rows = tuple(plan.qo_indptr.tolist()) if isinstance(plan, PrefillPlan) else range(batch.num_rows + 1)
    if 0 < starts[-1] < numbers.shape[0]:  # later entries are unused
        numbers = numbers[: starts[-1]]
    table = Table(starts, numbers, batch.page_size, batch.num_pages)
    most = min(batch.max_kv_len, numbers.shape[0] * batch.page_size or batch.max_kv_len)
    lengths = [min(length, most) for length in plan.kv_len.tolist()[: len(rows) - 1]]
    for group in _groups(rows, lengths, batch.num_rows, batch.most_tokens, batch.bounds):
        first, count, length = rows[group.start], rows[group.start + 1] - rows[group.start], lengths[group.start]
        position = length - count
        if len(group) == 1:
            count = min(count, batch.num_rows - first)
        call = _kernel_call(first, count, len(group), position, length, batch.bounds) if count > 0 else None
        if call is not None:
            yield call._replace(pages=table.pages(group, call.begin, call.end))


T = TypeVar("T")

_KEPT: BoundedCache[Hashable, tuple[Any, ...]] = BoundedCache(MAX_PLANS)


class Steps(Generic[T]):
    """The steps of plans, for calls of a key: the results of ``make`` for each kernel call, kept by the plan's numbers.

    ``kind`` is the type of the plans.
    """

    def __init__(
        self, kind: type[DecodePlan | PrefillPlan], batch: BatchSizes, make: Callable[[KernelCall], T]
    ) -> None:
        self.kind, self.batch, self.make = kind, batch, make
        names = ("kv_indptr", "kv_len", *(("qo_indptr",) if kind is PrefillPlan else ()), "kv_indices")
        self.read = itemgetter(*map(kind._fields.index, names))

    def of(self, plan: Sequence[Tensor]) -> tuple[T, ...]:
        numbers = contents(self.read(plan), 4 * MAX_NUMBERS, True)
        if numbers is None:
            return self._make(plan)
        steps = _KEPT.get((self, numbers))
        if steps is None:
            with torch.inference_mode(False):  # calls outside of inference mode use them too
                steps = _KEPT.insert((self, numbers), self._make(plan))
        return steps

    def _make(self, plan: Sequence[Tensor]) -> tuple[T, ...]:
        return tuple(map(self.make, of_plan(self.kind(*plan), self.batch)))
