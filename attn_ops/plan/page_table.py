"""Page tables as callers pass them, and the batch size that a plan for them needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from attn_ops.eager.interposition import is_recorded
from attn_ops.eager.recorded_calls import constant
from attn_ops.errors import ArgumentTypeError, DTypeError, PageTableError, ShapeError, dtype_name, fail, shape_of
from attn_ops.plan.page_table_checks import INTEGERS, check_entries, check_indptr
from attn_ops.symbolic_sizes import holds
from attn_ops.tracing import is_compiling


def real(t: Tensor) -> bool:
    """Whether ``t`` has contents: it is not traced and not fake."""
    return not is_compiling() and not isinstance(t, FakeTensor) and not is_recorded()


def seen(t: Tensor) -> bool:
    """Whether the contents of ``t`` can be read without synchronizing with a device."""
    return real(t) and t.device.type == "cpu"


class BatchSize(NamedTuple):
    """The sizes of a batch that a plan needs capacity for, or the capacity of a plan.

    batch   requests
    rows    query rows of all requests
    pages   pages of all requests, 0 for ragged KV
    kv_len  KV tokens of the longest request; None if lengths were not read: then only the pages bound it
    splits  splits of a fixed size, over all query tiles of a prefill
    keys    KV tokens of all requests for ragged KV, which need no capacity
    """

    batch: int
    rows: int
    pages: int
    kv_len: int | None
    splits: int = 0
    keys: int = 0


class PageTable(NamedTuple):
    """The page table of one batch. All int32, on any device.

    kv_indptr         ``[batch + 1]``: the pages of request b are ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``
    kv_indices        ``[pages]``: page numbers; None for ragged KV, where ``kv_indptr`` counts tokens
    kv_last_page_len  ``[batch]``: tokens in the last page of each request; None for ragged KV
    qo_indptr         ``[batch + 1]``: offsets of each request's query rows; None for one query row per request
    """

    kv_indptr: Tensor
    kv_indices: Tensor | None
    kv_last_page_len: Tensor | None
    qo_indptr: Tensor | None = None

    @classmethod
    def of(
        cls,
        where: str,
        kv_indptr: Tensor,
        kv_indices: Tensor | None = None,
        kv_last_page_len: Tensor | None = None,
        qo_indptr: Tensor | None = None,
    ) -> PageTable:
        """A page table of tensors of any integer dtype.

        Raises:
            ArgumentTypeError: an argument is not a tensor.
            ShapeError: a rank is not 1, or the lengths do not agree.
            DTypeError: a dtype is not an integer dtype.
            PageTableError: a number on the host does not fit int32.
        """
        optional = {"kv_indices": kv_indices, "kv_last_page_len": kv_last_page_len, "qo_indptr": qo_indptr}
        tables = cls(
            index(where, "kv_indptr", kv_indptr),
            *(None if t is None else index(where, name, t) for name, t in optional.items()),
        )
        batch = tables.kv_indptr.shape[0] - 1
        if batch < 0:
            fail(ShapeError, where, "kv_indptr is [0]", "[batch + 1], which is [1] for no requests", "pass one 0")
        for name, t, length in (
            ("kv_last_page_len", tables.kv_last_page_len, batch),
            ("qo_indptr", tables.qo_indptr, batch + 1),
        ):
            if t is not None and t.shape[0] != length:
                fail(ShapeError, where, f"{name} has length {t.shape[0]}", f"{length} as kv_indptr has", "correct it")
        return tables

    def measured(self, page_size: int) -> tuple[PageTable, BatchSize]:
        """The page table without page numbers that no request uses, and its batch size. Copies lengths to the host.

        Unused page numbers precede the first request if ``kv_indptr`` does not start at 0, as for the later requests
        of a larger batch.
        """
        tables, (kv_indptr, qo_indptr) = self, self._host_indptrs()
        if self.kv_indices is not None:
            check_entries(kv_indptr, self.kv_indices)
            first = int(kv_indptr[0])
            if first:
                tables = self._replace(kv_indptr=self.kv_indptr - first, kv_indices=self.kv_indices[first:])
                kv_indptr = kv_indptr - first
        steps, batch, rows = kv_indptr.long().diff(), kv_indptr.shape[0] - 1, kv_indptr.shape[0] - 1
        if qo_indptr is not None:
            rows = int(qo_indptr[-1])
        if tables.kv_indices is None:
            return tables, BatchSize(batch, rows, 0, _largest(steps), keys=int(kv_indptr[-1]))
        used = int(kv_indptr[-1])
        assert self.kv_last_page_len is not None
        kv_len = _largest(kv_lengths(steps, self.kv_last_page_len.cpu(), page_size))
        return tables._replace(kv_indices=tables.kv_indices[:used]), BatchSize(batch, rows, used, kv_len)

    def bounded(self) -> tuple[PageTable, BatchSize]:
        """The page table and the largest batch size that its shapes allow, for one query row per request.

        Reads no contents, so it does not synchronize.
        """
        assert self.kv_indices is not None
        batch, pages = self.kv_indptr.shape[0] - 1, self.kv_indices.shape[0]
        return self, BatchSize(batch, batch, pages, None)

    def lengths(self, page_size: int) -> tuple[Tensor, Tensor]:
        """``(qo_len, kv_len)``, int64 ``[batch]`` on the host: query rows and KV tokens of each request."""
        kv_indptr, qo_indptr = self._host_indptrs()
        kv_steps = kv_indptr.long().diff()
        qo = torch.ones_like(kv_steps) if qo_indptr is None else qo_indptr.long().diff()
        if self.kv_last_page_len is None:
            return qo, kv_steps
        return qo, kv_lengths(kv_steps, self.kv_last_page_len.cpu(), page_size)

    def _host_indptrs(self) -> tuple[Tensor, Tensor | None]:
        """``kv_indptr`` and ``qo_indptr`` on the host, checked."""
        kv_indptr = self.kv_indptr.cpu()
        check_indptr("kv_indptr", kv_indptr, later=self.kv_indices is not None)
        if self.qo_indptr is None:
            return kv_indptr, None
        qo_indptr = self.qo_indptr.cpu()
        check_indptr("qo_indptr", qo_indptr)
        return kv_indptr, qo_indptr


def kv_lengths(pages: Tensor, last_page_len: Tensor, page_size: int) -> Tensor:
    """KV tokens of requests with these numbers of ``pages``. Lengths out of range are clamped, as in planning."""
    return torch.where(pages > 0, (pages - 1) * page_size + last_page_len.clamp(1, page_size), 0)


def _largest(lengths: Tensor) -> int:
    return int(lengths.amax()) if lengths.numel() else 0


def index(where: str, name: str, t: Tensor) -> Tensor:
    """``t``, a vector of any integer dtype and stride, as contiguous int32."""
    if not isinstance(t, Tensor):
        fail(
            ArgumentTypeError, where, f"{name} is of type {type(t).__name__}", "an int32 tensor", "make a tensor of it"
        )
    if t.dim() != 1:
        fail(ShapeError, where, f"{name} is {shape_of(t)}", "one dimension", f"reshape {name}")
    return as_int32(where, name, t).contiguous()


def as_int32(where: str, name: str, t: Tensor) -> Tensor:
    """``t`` of any integer dtype as int32. Raises PageTableError for numbers on the host that do not fit."""
    if t.dtype not in INTEGERS:
        fail(DTypeError, where, f"{name} is {dtype_name(t.dtype)}", "int32 or int64", "convert it")
    small = t.to(torch.int32)
    if t.dtype != torch.int32 and seen(t) and not torch.equal(small, t):
        fail(PageTableError, where, f"{name} has a number beyond int32", "numbers of pages or tokens", "correct it")
    return small


def cumulative(where: str, name: str, t: Tensor, batch: int, rows_name: str, rows: Tensor) -> Tensor:
    """Cumulative lengths ``t`` as int32 ``[batch + 1]`` on the device of ``rows [n, ...]``, which they index."""
    return offsets(where, name, t, batch, rows_name, rows.shape[0]).to(rows.device).contiguous()


def offsets(where: str, name: str, t: Tensor, batch: int, rows_name: str, rows: int) -> Tensor:
    """Cumulative lengths ``t`` as int32 ``[batch + 1]``, which index the ``rows`` rows of the tensor ``rows_name``.

    Contents on the host are checked: no length is negative, and the last offset is at most ``rows``.
    """
    if t.dtype == torch.uint32:
        t = t.long() if seen(t) else t.view(torch.int32)
    indptr = index(where, name, t)
    if not holds(indptr.shape[0] == batch + 1):
        fail(
            ShapeError,
            where,
            f"{name} is {shape_of(indptr)}",
            f"{shape_of([batch + 1])}, for the {int(batch)} requests of the batch",
            "make the two agree",
        )
    if seen(t):
        check_indptr(name, indptr, where)
        if int(indptr[-1]) > rows:
            fail(
                ShapeError,
                where,
                f"{rows_name} has {rows} rows",
                f"{int(indptr[-1])} or more, where {name} ends",
                "pass the rows of all requests",
            )
    return indptr


def uniform_indptr(batch: int, q_len: int, device: torch.device) -> Tensor:
    """int32 ``[batch + 1]``: ``qo_indptr`` of ``q_len`` query rows per request."""
    if is_compiling():  # Inductor of PyTorch 2.13 cannot simplify indices computed from an arange
        steps = torch.nn.functional.pad(torch.full((batch,), q_len, dtype=torch.int32, device=device), (1, 0))
        return steps.cumsum(0, dtype=torch.int32)
    if isinstance(q_len, int) and q_len > 0:  # one kernel
        return constant(torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32, device=device))
    return constant(torch.arange(batch + 1, dtype=torch.int32, device=device) * q_len)


def ragged_pages(kv_indptr: Tensor) -> tuple[Tensor, Tensor]:
    """``kv_indices`` and ``kv_last_page_len`` of ragged keys for the planning ops: pages of one token.

    The last page is never shorter, so planning does not use the second, a view, which costs no kernel.
    """
    return kv_indptr.new_zeros(0), kv_indptr[1:]


def by_length(where: str, kv_indptr: Tensor, kv_indices: Tensor, kv_len: Tensor, page_size: int) -> PageTable:
    """The page table of requests whose lengths are given in tokens, ``kv_len [batch]``.

    ``kv_indptr`` may have more than ``batch + 1`` entries, of which the first are read. A request may have more pages
    than its tokens need. The page numbers in use are packed, so that the last page of a request has its last token.
    """
    indptr, indices, lengths = (
        index(where, name, t)
        for name, t in (("kv_indptr", kv_indptr), ("kv_indices", kv_indices), ("kv_len_arr", kv_len))
    )
    batch = lengths.shape[0]
    if indptr.shape[0] <= batch:
        fail(
            ShapeError,
            where,
            f"kv_indptr has length {indptr.shape[0]}",
            f"{batch + 1} or more for the {batch} requests of kv_len_arr",
            "make the two agree",
        )
    indptr = indptr[: batch + 1]
    if seen(indptr):
        check_indptr("kv_indptr", indptr, where, later=True)
        check_entries(indptr, indices, where)
    if seen(lengths) and batch and int(lengths.min()) < 0:
        b = int(lengths.argmin())
        fail(PageTableError, where, f"kv_len_arr[{b}] is {int(lengths[b])}", "0 or more tokens", "correct it")
    lengths, indices = lengths.to(indptr.device).long(), indices.to(indptr.device)
    held = indptr.diff()
    needed = (lengths + page_size - 1) // page_size
    if seen(indptr) and bool((needed > held).any()):
        b = int((needed > held).int().argmax())
        fail(
            PageTableError,
            where,
            f"request {b} has {int(lengths[b])} tokens and {int(held[b])} pages of {page_size}",
            f"{int(needed[b])} pages",
            "pass the pages of all tokens",
        )
    pages = torch.where(held > 0, needed, 0)
    ends = pages.cumsum(0)
    compact = torch.cat((ends.new_zeros(1), ends)).to(torch.int32)
    if indices.numel() and pages.numel():
        place = torch.arange(indices.shape[0], device=indptr.device)
        request = torch.searchsorted(ends, place, right=True).clamp(max=pages.shape[0] - 1)
        source = indptr[request] + place - compact[request]
        indices = indices[source.clamp(0, indices.shape[0] - 1)]
    last = torch.where(pages > 0, (lengths - 1) % page_size + 1, 0)
    return PageTable(compact, indices, last.to(torch.int32))
