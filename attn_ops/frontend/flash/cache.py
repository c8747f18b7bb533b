"""Batches of FlashAttention's functions over a KV cache, and their plans."""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.eager.checked_call import call_op
from attn_ops.eager.interposition import is_traced
from attn_ops.eager.recorded_calls import computed, constant
from attn_ops.errors import ArgumentTypeError, PageTableError, ShapeError, fail
from attn_ops.frontend.arguments import positive
from attn_ops.frontend.block_tables import block_table, check_block_table, lengths, too_long
from attn_ops.frontend.call_plans import BlockTables
from attn_ops.frontend.flash.chunks import PagedChunks, by_token, without_padding
from attn_ops.frontend.flash.metadata import (
    BatchForm,
    GivenMetadata,
    SchedulerMetadata,
    check_given,
    nothing_appended,
)
from attn_ops.frontend.shared_plans import Found, shared
from attn_ops.plan.page_table import index, offsets, seen, uniform_indptr
from attn_ops.plan.spec import PlanSpec
from attn_ops.plan.state import INT32_MAX
from attn_ops.symbolic_sizes import guard_or_true, holds


class CacheLengths(NamedTuple):
    """Tokens of each request in its cache, before an append.

    seqlens     int ``[batch]``, or one number for all requests; None for the whole capacity
    cumulative  int ``[batch + 1]``, whose differences are the lengths, in place of ``seqlens``
    name        name of the argument ``seqlens``
    """

    seqlens: Tensor | int | None
    cumulative: Tensor | None = None
    name: str = "cache_seqlens"

    @classmethod
    def of(cls, where: str, name: str, seqlens: Any, cumulative: Tensor | None = None) -> CacheLengths:
        """The lengths in an argument ``name``: a tensor, an integer of any type, or None."""
        taken = seqlens is None or isinstance(seqlens, Tensor | torch.SymInt | int)
        if isinstance(seqlens, bool) or not (taken or hasattr(seqlens, "__index__")):
            shown = f"{name} is {seqlens!r}, of type {type(seqlens).__name__}"
            fail(ArgumentTypeError, where, shown, "a tensor, an integer or None", "pass whole tokens")
        return cls(seqlens if taken else operator.index(seqlens), cumulative, name)

    def key(self) -> Hashable:
        return None if isinstance(self.seqlens, Tensor) else self.seqlens

    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.seqlens if isinstance(self.seqlens, Tensor) else None, self.cumulative)

    def before(self, where: str, batch: int, capacity: int, device: torch.device, table: str | None = None) -> Tensor:
        """int32 ``[batch]`` on ``device``. Lengths on the host are checked against the ``capacity`` of ``table``."""
        if self.cumulative is not None:
            given: Tensor = index(where, "cu_seqlens_k", self.cumulative).diff()
            return lengths(where, "cu_seqlens_k", given, batch, device, capacity, table)
        if isinstance(self.seqlens, Tensor):
            return lengths(where, self.name, self.seqlens, batch, device, capacity, table)
        number = capacity if self.seqlens is None else self.seqlens
        if number < 0:
            fail(PageTableError, where, f"{self.name} is {int(number)}", "0 or more tokens", "correct it")
        if number > capacity:
            too_long(where, number, capacity, table)
        return torch.full((batch,), number, dtype=torch.int32, device=device)


class CacheBatch(NamedTuple):
    """A batch over a KV cache, as ``flash_attn_with_kvcache`` describes it.

    spec             what to plan for, with the page size of the cache
    table            int ``[batch, pages]``, the block table; None for a dense cache, whose rows are pages
    requests         number of requests
    lengths          tokens in the cache
    rows             query rows of the batch
    cu_seqlens_q     int ``[batch + 1]``; None for the same number of rows per request
    appended         new tokens of the batch
    cu_new           int ``[batch + 1]``: cumulative new tokens; None for the same number per request
    cache_pages      pages, or rows of a dense cache, that ``table`` may name
    cache_batch_idx  int ``[batch]``: the row of the table, or of the dense cache, of each request; None: in order
    leftpad          int ``[batch]``: the index of a request's first token in its cache; None: 0
    chunk            keys of a chunk; a row sees only the keys of its own chunk; 0: no chunks
    table_name       name of the argument ``table``; None for a dense cache
    expected         the result of :func:`expected_keys`
    """

    spec: PlanSpec
    table: Tensor | None
    requests: int
    lengths: CacheLengths
    rows: int
    device: torch.device
    cu_seqlens_q: Tensor | None = None
    appended: int = 0
    cu_new: Tensor | None = None
    cache_pages: int = INT32_MAX
    cache_batch_idx: Tensor | None = None
    leftpad: Tensor | None = None
    chunk: int = 0
    table_name: str | None = None
    expected: int | None = None

    @property
    def form(self) -> BatchForm:
        given = map(int, self._given)
        return BatchForm(self.requests, self.rows, self.appended, self.chunk, self.spec.page_size, *given)

    @property
    def appends(self) -> bool:
        """Whether there are new tokens; True if contents of tensors decide it."""
        return guard_or_true(self.appended != 0)

    @property
    def _given(self) -> tuple[bool, bool, bool]:
        """Whether there are a block table, ``cache_batch_idx`` and left padding."""
        return self.table is not None, self.cache_batch_idx is not None, self.leftpad is not None

    def block_table(self, where: str) -> Tensor:
        """int32 ``[batch, pages]`` on the device."""
        rows = None
        if self.cache_batch_idx is not None:
            rows = lengths(where, "cache_batch_idx", self.cache_batch_idx, self.requests, self.device)
        if self.table is None:
            if rows is not None:
                return rows[:, None]
            return constant(torch.arange(self.requests, dtype=torch.int32, device=self.device)[:, None])
        name = self.table_name or "block_table"
        table = block_table(where, name, self.table, self.device).to(self.device)
        if rows is None and not holds(table.shape[0] == self.requests):
            expected = f"{int(self.requests)}, one per request"
            fail(ShapeError, where, f"{name} has {int(table.shape[0])} rows", expected, "correct it")
        return table if rows is None else table[rows.clamp(0, max(0, table.shape[0] - 1)).long()]

    def new_indptr(self, where: str) -> Tensor:
        """int32 ``[batch + 1]``: the appended tokens of each request."""
        if self.cu_new is not None:
            indptr = offsets(where, "cu_seqlens_k_new", self.cu_new, self.requests, "k", self.appended)
            return indptr.to(self.device)
        return uniform_indptr(self.requests, self.appended // max(1, self.requests), self.device)

    def qo_indptr(self, where: str) -> Tensor:
        """int32 ``[batch + 1]``: the query rows of each request."""
        if self.cu_seqlens_q is not None:
            return offsets(where, "cu_seqlens_q", self.cu_seqlens_q, self.requests, "q", self.rows).to(self.device)
        return uniform_indptr(self.requests, self.rows // max(1, self.requests), self.device)

    def make(self, where: str) -> SchedulerMetadata:
        """The plan of the batch, and where its new tokens are appended."""
        positive(where, **{"seqlen_cache" if self.table is None else "page_size": self.spec.page_size})
        table = self.block_table(where)
        capacity, new = table.shape[1] * self.spec.page_size, nothing_appended(self.device)
        self._check_number(where, capacity)
        after, spec = self.after(where, capacity), self.spec
        if self.form.by_tokens:
            table, spec = by_token(table, spec.page_size), spec._replace(page_size=1)
        held = after  # the op page_table limits lengths to the table
        if self.leftpad is not None or self.chunk:
            held = after.clamp(max=capacity)
        if self.leftpad is not None:
            leftpad = lengths(where, "cache_leftpad", self.leftpad, self.requests, self.device)
            table = without_padding(table, leftpad)
            after, held = (after - leftpad).clamp(min=0), (held - leftpad).clamp(min=0)
        if self.appends:
            new = call_op("batch_indices_positions", self.new_indptr(where), after, self.appended)
        qo_indptr, pages = None if spec.decode else self.qo_indptr(where), nothing_appended(self.device)
        if self.chunk:
            assert qo_indptr is not None
            if self.appends:
                kv_indptr, kv_indices, _ = call_op("page_table", table.contiguous(), held, spec.page_size)
                pages = kv_indices, kv_indptr
            qo_indptr, table, held = PagedChunks.of(qo_indptr, table, held, spec.page_size, self.chunk, self.rows)
        batch = BlockTables(spec, table.contiguous(), held, qo_indptr, self.rows, expected=self.expected)
        return SchedulerMetadata(batch.plan(), self.form.as_shape_tensor(self.device), *new, *pages)

    def unplanned(self, **missing: int) -> SchedulerMetadata:
        """Metadata with an empty plan: each call plans for itself. ``missing``: the form's flags that say why."""
        table = torch.empty((self.requests, 0), dtype=torch.int32, device=self.device)
        qo_indptr = None if self.spec.decode else uniform_indptr(self.requests, 0, self.device)
        plan = BlockTables(self.spec, table, table.new_zeros(self.requests), qo_indptr, self.rows).plan()
        return SchedulerMetadata.without_append(plan, self.form._replace(**missing), self.device)

    def after(self, where: str, capacity: int) -> Tensor:
        """int32 ``[batch]``: the lengths after the append. Lengths on the host are checked."""
        given = [t for t in (*self.lengths.tensors(), self.cu_new) if t is not None]
        on_host = len(given) > 0 and all(map(seen, given))
        batch = self._replace(device=torch.device("cpu")) if on_host else self
        before = batch.lengths.before(where, self.requests, capacity, batch.device, self.table_name)
        if not self.appends:
            return before.to(self.device)
        if self.cu_new is None:
            added = self.appended // max(1, self.requests)
            after = computed(lambda before: before + added, before)
        else:
            after = before + batch.new_indptr(where).diff()
        return lengths(where, "cache_seqlens", after, self.requests, self.device, capacity, self.table_name)

    def has_capacity(self, where: str) -> bool:
        """Whether the cache has capacity for the append. Lengths on a GPU are not read.

        Lengths before the append that exceed the capacity are an error.
        """
        capacity = self.spec.page_size * (1 if self.table is None else self.table.shape[-1])
        given = [t for t in (*self.lengths.tensors(), self.cu_new) if t is not None]
        if not self.appends or is_traced() or not all(map(seen, given)):
            return not self._overflow(capacity)
        host = self._replace(device=torch.device("cpu"))
        before = host.lengths.before(where, self.requests, capacity, host.device, self.table_name)
        return bool((before + host.new_indptr(where).diff() <= capacity).all())

    def check_places(self, where: str) -> None:
        """Raise unless the table names pages of the cache for all tokens, if table and lengths are on the host.

        This is checked in every call: layers share a plan, and their caches may have different sizes.
        """
        given = [t for t in (*self._tensors(), *self.lengths.tensors()) if t is not None]
        if not any(self._given) or is_traced() or not all(map(seen, given)):
            return
        host = self._replace(device=torch.device("cpu"))
        if self.cache_batch_idx is not None:
            rows, what = (self.cache_pages, "cache") if self.table is None else (self.table.shape[0], "block table")
            row = self.cache_batch_idx.long()  # PyTorch compares no uint32, and int16 only within its range
            wrong = (row < 0) | (row >= rows)
            if wrong.any():
                b = int(wrong.nonzero()[0])
                shown, expected = f"cache_batch_idx[{b}] is {int(row[b])}", f"0 to {rows - 1}"
                fail(PageTableError, where, shown, f"a row of the {what}, {expected}", f"pass rows of this {what}")
        table = host.block_table(where)
        capacity = table.shape[1] * self.spec.page_size
        self._check_number(where, capacity)
        after = host.after(where, capacity)
        padding, name = self._check_leftpad(where, host), self.table_name or "block_table"
        check_block_table(where, name, table, after[:, None], self.spec.page_size, self.cache_pages, padding)

    def _check_leftpad(self, where: str, host: CacheBatch) -> Tensor:
        """int32 ``[batch, 1]`` on the host: the left padding, which must not be longer than ``cache_seqlens``."""
        if self.leftpad is None:
            return torch.zeros(1, 1, dtype=torch.int32, device=host.device)
        leftpad = lengths(where, "cache_leftpad", self.leftpad, self.requests, host.device)
        before = host.lengths.before(where, self.requests, INT32_MAX, host.device)
        wrong = leftpad > before
        if wrong.any():
            b = int(wrong.nonzero()[0])
            shown, expected = f"cache_leftpad[{b}] is {int(leftpad[b])}", f"0 to {int(before[b])}, its cache_seqlens"
            fail(PageTableError, where, shown, expected, "pass the place of the first token")
        return leftpad[:, None]

    def _tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that place the tokens in the cache, apart from their lengths."""
        return self.table, self.cache_batch_idx, self.leftpad, self.cu_new

    def _lengths_and_tables(self) -> tuple[Tensor | None, ...]:
        return (*self._tensors(), self.cu_seqlens_q, *self.lengths.tensors())

    def _of(self, tensors: Iterable[Tensor | None]) -> CacheBatch:
        """The batch of other lengths and tables, in the order of :meth:`_lengths_and_tables`."""
        table, rows, leftpad, cu_new, cu_seqlens_q, seqlens, cumulative = tensors
        number = self.lengths.seqlens if type(self.lengths.seqlens) is int else seqlens
        return self._replace(
            table=table,
            lengths=self.lengths._replace(seqlens=number, cumulative=cumulative),
            cu_seqlens_q=cu_seqlens_q,
            cu_new=cu_new,
            cache_batch_idx=rows,
            leftpad=leftpad,
        )

    def _check_number(self, where: str, capacity: int) -> None:
        """Raise for a number of tokens that exceeds ``capacity`` after the append, even if tensors are on a device."""
        after = self._overflow(capacity)
        if after:
            too_long(where, after, capacity, self.table_name)

    def _overflow(self, capacity: int) -> int:
        """Tokens after the append if the append exceeds ``capacity``; 0 if it does not, or if no number gives them."""
        seqlens = self.lengths.seqlens
        if not isinstance(seqlens, int) or self.cu_new is not None:
            return 0
        after = seqlens + self.appended // max(1, self.requests)
        return after if seqlens <= capacity < after else 0

    def metadata(self, where: str, given: SchedulerMetadata | None) -> Found:
        """``given``, which is checked, or shared or new metadata.

        Given metadata that was made without a table of this call is ignored.
        """
        if given is not None:
            made = check_given(where, given, self.form, self.spec.decode)
            known = BatchForm.of(made)
            if not known.lacks_plan_for(self.form):
                checked = GivenMetadata(
                    where,
                    made.plan.kv_indptr.shape[0] - 1 if self.chunk else self.requests,
                    self.cache_pages * (self.spec.page_size if known.by_tokens else 1),
                    tuple(t for t in self._lengths_and_tables() if t is not None),
                )
                checked.check(made)
                return Found(made, given=functools.partial(checked.lookup, made))
        self.check_places(where)
        key = "cache", self.spec, self.form, self.lengths.key(), self.expected
        tensors = self._lengths_and_tables()
        cache_pages = self.cache_pages if any(self._given) else 0
        found = shared(key, tensors, self.device, lambda: self.make(where), cache_pages)
        if is_traced() or self.device.type != "cpu":
            return found
        present = [t is not None for t in self._lengths_and_tables()]
        without_tensors = self._of([None] * len(present))

        def replan(*tensors: Tensor) -> SchedulerMetadata:
            slots = iter(tensors)
            batch = without_tensors._of([next(slots) if is_present else None for is_present in present])
            made: SchedulerMetadata = batch.metadata(where, None).value
            return made

        return found._replace(replan=replan)
