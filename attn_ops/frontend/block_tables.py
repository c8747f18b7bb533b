"""Block tables and lengths of calls without a prior plan(), converted to int32 and checked.

Lengths on the host are checked against the capacity of the table. If the table is on the host too, its page numbers are
checked against the cache. Tensors on a device are not read: a request that is longer than its row of the table ends
where the row does, and for a page number beyond the cache some page of the cache is read.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from attn_ops.errors import DTypeError, PageTableError, ShapeError, dtype_name, fail, shape_of
from attn_ops.frontend.arguments import given_tensor, required
from attn_ops.frontend.context import RankKeys
from attn_ops.plan.context import ContextShard
from attn_ops.plan.page_table import as_int32, seen, uniform_indptr
from attn_ops.plan.spec import PlanSpec
from attn_ops.symbolic_sizes import holds


class TableNames(NamedTuple):
    """Names of a function's arguments for the block tables, the lengths and, unless it is fixed, the layout."""

    table: str = "block_tables"
    lengths: str = "seq_lens"
    layout: str | None = "kv_layout"


USUAL_NAMES = TableNames()


def lengths(
    where: str,
    name: str,
    t: Tensor | None,
    batch: int,
    device: torch.device,
    capacity: int | None = None,
    table: str | None = "block_tables",
    each: str = "request",
    pages: str = "",
) -> Tensor:
    """int32 ``[batch]`` on ``device`` of the argument ``name``: lengths of any integer dtype and ``batch`` elements.

    Args:
        capacity: tokens that a row of the argument ``table`` has capacity for, or a row of a cache without a table.
        each: what has a length, in messages.
        pages: the end of a message on ``capacity``, such as how many tokens a page has.
    """
    t = given_tensor(where, name, t, device)
    if not holds(t.numel() == batch):
        fail(ShapeError, where, f"{name} is {shape_of(t)}", f"{shape_of([batch])}, one per {each}", "correct it")
    if t.is_floating_point() or t.dtype == torch.bool:
        fail(DTypeError, where, f"{name} is {dtype_name(t.dtype)}", "int32 or int64", "convert it")
    if t.dtype == torch.uint32 and not seen(t):
        t = t.view(torch.int32)
    if t.dtype in (torch.uint16, torch.uint32, torch.uint64):
        t = t.long()
    if seen(t) and batch and int(t.min()) < 0:
        fail(PageTableError, where, f"{name} has a length of {int(t.min())}", "0 or more", "correct it")
    if capacity is not None and seen(t) and batch and int(t.max()) > capacity:
        too_long(where, int(t.max()), capacity, table, pages)
    return as_int32(where, name, t.reshape(batch)).to(device).contiguous()


def too_long(where: str, tokens: int, capacity: int, table: str | None, pages: str = "") -> NoReturn:
    """Raise: a request does not fit its row of ``table``, or its row of a cache without a table."""
    holder, fix = ("its cache", "pass a larger cache") if table is None else (table, f"pass a wider {table}")
    shown = f"a request has {int(tokens)} tokens and {holder} capacity for {int(capacity)}{pages}"
    fail(PageTableError, where, shown, f"at most {int(capacity)}", fix)


def check_block_table(
    where: str, name: str, table: Tensor, tokens: Tensor, page_size: int, pages: int, first: Tensor
) -> None:
    """Raise unless ``table`` names pages 0 to ``pages - 1`` for tokens ``first`` to ``tokens - 1`` of each request.

    ``table [batch, width]``, ``tokens`` and ``first [batch, 1]`` or ``[1, 1]`` are on the host.
    """
    column, page_size = torch.arange(table.shape[1], device="cpu"), max(1, page_size)
    tokens, first = tokens.long(), first.long()
    used = (column < -(-tokens // page_size)) & (column >= first // page_size)
    wrong = used & ((table < 0) | (table >= pages))
    if wrong.any():
        b, i = wrong.nonzero()[0].tolist()
        expected = f"a page of the cache, 0 to {pages - 1}" if pages else "a page of the cache, which has none"
        fail(PageTableError, where, f"{name}[{b}, {i}] is {int(table[b, i])}", expected, "pass numbers of this cache")


def check_host_pages(
    where: str, name: str, table: Tensor, seq_lens: Tensor | None, page_size: int, pages: int, window_left: int = -1
) -> None:
    """:func:`check_block_table` of the pages that the last row of each request sees, if both tensors are on the host.

    Pages before its window may be free. Invalid lengths are not checked here.
    """
    if isinstance(seq_lens, Tensor) and seen(table) and seen(seq_lens) and seq_lens.numel() == table.shape[0]:
        tokens = seq_lens.reshape(-1, 1).long()
        first = tokens - 1 - window_left if window_left >= 0 else torch.zeros_like(tokens)
        check_block_table(where, name, table, tokens, page_size, pages, first)


def rank_keys(
    where: str,
    shard: ContextShard | None,
    kv_global: Tensor | None,
    added: int | Tensor,
    batch: int,
    device: torch.device,
    *,
    positioned: bool,
) -> RankKeys | None:
    """The keys of a call; None for all keys.

    Args:
        kv_global: ``causal_seqlens_kv_global``, of any integer dtype and device.
        added: query rows of each request that ``kv_global`` does not count, or their indptr.
    """
    if shard is None:
        return None
    name = "causal_seqlens_kv_global"
    if positioned:
        required(where, **{name: kv_global})
    if kv_global is None:
        return RankKeys(shard, None, positioned)
    rows = added.diff() if isinstance(added, Tensor) else added
    return RankKeys(shard, lengths(where, name, kv_global, batch, device) + rows, positioned)


def block_table(where: str, name: str, t: Tensor | None, device: torch.device) -> Tensor:
    """``t [batch, max_pages_per_request]``, of any integer dtype, as int32. It stays on its device."""
    t = given_tensor(where, name, t, device)
    if t.dim() != 2:
        fail(ShapeError, where, f"{name} is {shape_of(t)}", "[batch, max_pages_per_request]", "reshape it")
    return as_int32(where, name, t).contiguous()


def row_lengths(
    where: str,
    names: TableNames,
    tables: Tensor,
    seq_lens: Tensor | None,
    page_size: int,
    device: torch.device,
    pages: str = "",
) -> Tensor:
    """:func:`lengths` of the rows of ``tables``: on the host if both are, for :func:`on_device`."""
    if isinstance(seq_lens, Tensor) and seen(tables) and seen(seq_lens):
        device = tables.device
    capacity = tables.shape[1] * page_size
    return lengths(where, names.lengths, seq_lens, tables.shape[0], device, capacity, names.table, pages=pages)


def on_device(
    where: str,
    names: TableNames,
    tables: Tensor,
    seq_lens: Tensor,
    spec: PlanSpec,
    cache: Tensor,
    device: torch.device,
    keys: RankKeys | None,
) -> tuple[Tensor, Tensor]:
    """Block tables and lengths. Without ``keys``, tables on the host are checked against ``cache``."""
    if keys is None:
        check_host_pages(where, names.table, tables, seq_lens, spec.page_size, cache.shape[0], spec.window_left)
    return tables.to(device), seq_lens.to(device)


def query_row_offsets(where: str, rows: int, batch: int, q_len: int, device: torch.device) -> Tensor | None:
    """:func:`uniform_indptr` of a query of ``rows`` rows, checked; None for decode, one row per request."""
    if not holds(rows == batch * q_len):
        fail(
            ShapeError,
            where,
            f"the query has {int(rows)} rows for {int(batch)} requests",
            f"{int(batch * q_len)}, {int(q_len)} per request",
            "correct the query, or the number of rows of each request",
        )
    return None if q_len == 1 else uniform_indptr(batch, q_len, device)
