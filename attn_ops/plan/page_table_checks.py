"""Checks of a page table's contents, for plans made from host data or with ``validate=True``."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.errors import CapacityError, PageTableError, ShapeError
from attn_ops.plan.state import PlanProblem


def check_indptr(name: str, indptr: Tensor, where: str = "plan", *, later: bool = False) -> None:
    """Cumulative lengths: starting at 0, or after it for the ``later`` requests of a batch, never decreasing."""
    if indptr.dim() != 1 or not indptr.numel():
        raise ShapeError(f"{where}: {name} is {list(indptr.shape)}; expected [batch + 1]; pass cumulative lengths")
    values = indptr.cpu().long()
    if int(values[0]) and not (later and int(values[0]) > 0):
        expected = "0 or more" if later else "0"
        raise PageTableError(
            f"{where}: {name} starts at {int(values[0])}; expected {expected}; pass cumulative lengths from 0"
        )
    falls = values.diff() < 0
    if falls.any():
        b = int(falls.int().argmax())
        raise PageTableError(
            f"{where}: {name} falls from {int(values[b])} to {int(values[b + 1])} at request {b}; expected values "
            "that never decrease; pass cumulative lengths"
        )


def check_entries(kv_indptr: Tensor, kv_indices: Tensor, where: str = "plan") -> None:
    """``kv_indptr``, which is well formed, ends in ``kv_indices``."""
    used = int(kv_indptr[-1])
    if used > kv_indices.shape[0]:
        raise PageTableError(
            f"{where}: kv_indptr ends at {used} and kv_indices has {kv_indices.shape[0]} entries; expected an entry "
            "for every page; pass all page numbers"
        )


def check_pages(
    problem: PlanProblem,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last: Tensor,
    max_pages: int,
    cache_pages: int | None,
) -> None:
    """Last pages, lengths and page numbers of a batch whose ``kv_indptr`` is known to be well formed.

    ``max_pages`` 0 means ragged KV, which has no page numbers. ``cache_pages`` None leaves only negative
    page numbers to be found.
    """
    indptr, last = kv_indptr.cpu().long(), last.cpu().long()
    pages = indptr.diff()
    if last.shape != pages.shape:
        raise ShapeError(
            f"plan: kv_last_page_len is {list(last.shape)}; expected [{pages.shape[0]}], one a request as in "
            "kv_indptr; make the two agree"
        )
    wrong = (pages > 0) & ((last < 1) | (last > problem.page_size))
    if wrong.any():
        b = int(wrong.int().argmax())
        raise PageTableError(
            f"plan: kv_last_page_len[{b}] is {int(last[b])}; expected 1 to page_size {problem.page_size}; a request "
            "whose last page is full has page_size there, an empty one has no page"
        )
    longest = int(torch.where(pages > 0, (pages - 1) * problem.page_size + last, 0).amax()) if pages.numel() else 0
    if longest > problem.max_kv_len:
        raise CapacityError(
            f"plan: a request has {longest} tokens and the plan room for {problem.max_kv_len}; expected max_kv_len "
            f"of at least {longest}; make the planner with that max_kv_len"
        )
    if max_pages:
        check_entries(indptr, kv_indices)
        _check_indices(kv_indices, int(indptr[-1]), max_pages, cache_pages)


def _check_indices(kv_indices: Tensor, used: int, max_pages: int, cache_pages: int | None) -> None:
    if used > max_pages:
        raise CapacityError(
            f"plan: the batch has {used} pages and the plan room for {max_pages}; expected max_pages of at least "
            f"{used}; make the planner with that max_pages"
        )
    listed = kv_indices[:used].cpu().long()
    bound = torch.iinfo(torch.int32).max if cache_pages is None else cache_pages
    wrong = (listed < 0) | (listed >= bound)
    if wrong.any():
        i = int(wrong.int().argmax())
        raise PageTableError(
            f"plan: kv_indices[{i}] is {int(listed[i])}; expected a page of the cache, 0 to {bound - 1}; pass page "
            "numbers of this cache"
        )
