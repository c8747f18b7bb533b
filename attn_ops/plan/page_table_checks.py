"""Checks of page tables: dtypes and shapes in every call, contents if they are on the host or with ``validate=True``.

Checks of contents copy them to the host. Every check raises before anything is written.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from attn_ops.errors import CapacityError, DTypeError, PageTableError, ShapeError, dtype_name, fail, shape_of
from attn_ops.plan.state import INT32_MAX, PlanProblem
from attn_ops.symbolic_sizes import holds

INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
"""dtypes of page tables and lengths."""


def check_table(indptrs: dict[str, Tensor], kv_indices: Tensor, last: Tensor) -> None:
    """Check dtypes and shapes, with the same messages for traced and eager calls.

    ``last [batch]`` is ``kv_last_page_len``. ``indptrs`` has ``kv_indptr`` and, for prefill, ``qo_indptr``.
    """
    for name, t in {**indptrs, "kv_indices": kv_indices, "kv_last_page_len": last}.items():
        if t.dtype not in INTEGERS:
            fail(DTypeError, "plan", f"{name} is {dtype_name(t.dtype)}", "an integer dtype", "convert it")
    for name, indptr in indptrs.items():
        _check_cumulative(name, indptr, "plan")
    if kv_indices.dim() != 1:
        fail(ShapeError, "plan", f"kv_indices is {shape_of(kv_indices)}", "[pages]", "pass a vector of page numbers")
    batch = indptrs["kv_indptr"].shape[0] - 1
    of_requests = {**{name: (t, batch + 1) for name, t in indptrs.items()}, "kv_last_page_len": (last, batch)}
    for name, (t, length) in of_requests.items():
        if t.dim() != 1 or not holds(t.shape[0] == length):
            expected = f"[{length}] for the {batch} requests of kv_indptr"
            fail(ShapeError, "plan", f"{name} is {shape_of(t)}", expected, "make the two agree")


def check_indptr(name: str, indptr: Tensor, where: str = "plan", *, later: bool = False) -> None:
    """Raise unless ``indptr [batch + 1]`` starts at 0, or with ``later`` above 0, never decreases and fits in int32.

    ``later``: the requests may be the later ones of a larger batch.
    """
    _check_cumulative(name, indptr, where)
    values = indptr.tolist()
    if values[0] and not (later and values[0] > 0):
        fail(
            PageTableError,
            where,
            f"{name} starts at {values[0]}",
            "0 or more" if later else "0",
            "pass cumulative lengths from 0",
        )
    for b, (value, following) in enumerate(pairwise(values)):
        if following < value:
            fail(
                PageTableError,
                where,
                f"{name} falls from {value} to {following} at request {b}",
                "values that never decrease",
                "pass cumulative lengths",
            )
    if values[-1] > INT32_MAX:  # plans have int32
        fail(PageTableError, where, f"{name} ends at {values[-1]}", f"at most {INT32_MAX}", "split the batch")


def _check_cumulative(name: str, indptr: Tensor, where: str) -> None:
    if indptr.dim() != 1 or not holds(indptr.shape[0] > 0):
        fail(ShapeError, where, f"{name} is {shape_of(indptr)}", "[batch + 1]", "pass cumulative lengths")


def check_entries(kv_indptr: Tensor, kv_indices: Tensor, where: str = "plan") -> None:
    """Raise if ``kv_indptr``, which is valid, ends beyond ``kv_indices``."""
    used = int(kv_indptr[-1])
    if used > kv_indices.shape[0]:
        fail(
            PageTableError,
            where,
            f"kv_indptr ends at {used} and kv_indices has {kv_indices.shape[0]} entries",
            "an entry for every page",
            "pass all page numbers",
        )


def check_last_page_len(b: int, pages: int, tokens: int, page_size: int, where: str = "plan") -> None:
    """Raise unless the last of the ``pages`` of request ``b``, if it has any, has 1 to ``page_size`` tokens."""
    if pages > 0 and not 1 <= tokens <= page_size:
        fail(
            PageTableError,
            where,
            f"kv_last_page_len[{b}] is {tokens}",
            f"1 to page_size {page_size}",
            "a request whose last page is full has page_size there, an empty one has no page",
        )


def check_pages(
    problem: PlanProblem,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last: Tensor,
    max_pages: int,
    cache_pages: int | None,
) -> None:
    """Check last page lengths, request lengths and page numbers of a batch whose ``kv_indptr`` is valid.

    ``last [batch]`` is ``kv_last_page_len``. ``max_pages`` 0 means ragged KV, which has no page numbers.
    ``cache_pages`` is as for :func:`check_indices`.
    """
    indptr = kv_indptr.tolist()
    pages = [end - begin for begin, end in pairwise(indptr)]
    longest = 0
    for b, (count, tokens) in enumerate(zip(pages, last.tolist(), strict=True)):
        check_last_page_len(b, count, tokens, problem.page_size)
        if count > 0:
            longest = max(longest, (count - 1) * problem.page_size + tokens)
    used = indptr[-1]
    if max_pages:
        check_entries(kv_indptr, kv_indices)
        if used > max_pages:  # before the length of a request, which more pages may allow
            fail(
                CapacityError,
                "plan",
                f"the batch has {used} pages and the plan capacity for {max_pages}",
                f"max_pages of at least {used}",
                "make the planner with that max_pages",
            )
    if longest > problem.max_kv_len:
        fail(
            CapacityError,
            "plan",
            f"a request has {longest} tokens and the plan capacity for {problem.max_kv_len}",
            f"max_kv_len of at least {longest}",
            "make the planner with that max_kv_len",
        )
    if max_pages:
        check_indices(kv_indices[:used], cache_pages)


def check_indices(kv_indices: Tensor, cache_pages: int | None, where: str = "plan") -> None:
    """Raise unless the page numbers are 0 to ``cache_pages - 1``; None, a cache of unknown size: 0 or more."""
    listed = kv_indices.cpu().long()
    bound = INT32_MAX if cache_pages is None else cache_pages
    least, most = listed.aminmax() if listed.numel() else (0, 0)
    if least < 0 or most >= bound:
        i = int(((listed < 0) | (listed >= bound)).int().argmax())
        fail(
            PageTableError,
            where,
            f"kv_indices[{i}] is {int(listed[i])}",
            f"a page of the cache, 0 to {bound - 1}",
            "pass page numbers of this cache",
        )
