"""One-shot calls: attention without a prior plan(). The call plans and attends, and traces.

Lengths on the host are checked against the table, and a table on the host with them against the cache. Elsewhere, where
neither is read, a request that is longer than its row of the table has as many tokens as the row has places, and for a
page number beyond the cache a page of the cache is read.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from attn_ops.call import AttentionCall, Unplanned
from attn_ops.errors import DTypeError, PageTableError, ShapeError, dtype_name, fail, shape_of
from attn_ops.frontend.arguments import computed_dtype, given_tensor, positive, ranked, required
from attn_ops.frontend.call_plans import BlockTables, RaggedLengths, splits_pay
from attn_ops.frontend.context import RankKeys
from attn_ops.frontend.kv_cache import paged_sizes
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.scales import ScaleFactors
from attn_ops.frontend.shared_plans import FoundCall, Scheduled, shared
from attn_ops.ops.options import FP8, AttentionOptions
from attn_ops.ops.unsupported import needs_general_decode
from attn_ops.plan.context import ContextShard
from attn_ops.plan.page_table import as_int32, seen, uniform_indptr
from attn_ops.plan.plan_checks import check_groups
from attn_ops.plan.resizable import PlanSpec
from attn_ops.plan.state import DecodePlan, PrefillPlan

QUERY_DIMS, RAGGED_DIMS = "[rows, num_qo_heads, head_dim]", "[rows, heads, head_dim]"


class TableNames(NamedTuple):
    """The arguments of a function that have the block tables, the lengths and, unless it is fixed, the layout."""

    table: str = "block_tables"
    lengths: str = "seq_lens"
    layout: str | None = "kv_layout"


USUAL_NAMES = TableNames()


# ------------------------------------------------------------------------------------- arguments of one-shot functions


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
    """int32 ``[batch]`` of lengths of any integer dtype, one per ``each``, which may have any further dimensions.

    ``capacity``: the most tokens that a row of ``table``, an argument, holds, or of a cache without a table. ``pages``
    says of how many tokens its pages are, and why.
    """
    t = given_tensor(where, name, t, device)
    if t.numel() != batch:
        fail(ShapeError, where, f"{name} is {shape_of(t)}", f"[{batch}], one per {each}", "correct it")
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
    """A request does not fit its row of ``table``, or of a cache without a table."""
    holder, fix = ("its cache", "pass a larger cache") if table is None else (table, f"pass a wider {table}")
    shown = f"a request has {tokens} tokens and {holder} capacity for {capacity}{pages}"
    fail(PageTableError, where, shown, f"at most {capacity}", fix)


def check_pages(
    where: str, name: str, table: Tensor, tokens: Tensor, page_size: int, pages: int, first: Tensor
) -> None:
    """A block table on the host names ``pages`` of the cache where tokens ``first`` to ``tokens`` of a request are.

    Both are ``[batch, 1]`` or ``[1, 1]``, on the host.
    """
    column, page_size = torch.arange(table.shape[1], device="cpu"), max(1, page_size)
    used = (column < -(-tokens // page_size)) & (column >= first // page_size)
    wrong = used & ((table < 0) | (table >= pages))
    if wrong.any():
        b, i = wrong.nonzero()[0].tolist()
        expected = f"a page of the cache, 0 to {pages - 1}" if pages else "a page of the cache, which has none"
        fail(PageTableError, where, f"{name}[{b}, {i}] is {int(table[b, i])}", expected, "pass numbers of this cache")


def check_host_pages(
    where: str, name: str, table: Tensor, seq_lens: Any, page_size: int, pages: int, window_left: int = -1
) -> None:
    """:func:`check_pages` of a table and lengths that are both on the host, as far as the last row of a request sees.

    Pages before its window may be free. Lengths that the call refuses are left to it.
    """
    if isinstance(seq_lens, Tensor) and seen(table) and seen(seq_lens) and seq_lens.numel() == table.shape[0]:
        tokens = seq_lens.reshape(-1, 1).long()
        first = tokens - 1 - window_left if window_left >= 0 else torch.zeros_like(tokens)
        check_pages(where, name, table, tokens, page_size, pages, first)


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
        added: query rows of each request that it does not count, or their indptr.
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
    """int32 ``[batch, max_pages_per_request]`` of any integer dtype, for ``device``, to which it is not moved."""
    t = given_tensor(where, name, t, device)
    if t.dim() != 2:
        fail(ShapeError, where, f"{name} is {shape_of(t)}", "[batch, max_pages_per_request]", "reshape it")
    return as_int32(where, name, t).contiguous()


def _row_lengths(
    where: str, names: TableNames, tables: Tensor, seq_lens: Any, page_size: int, device: torch.device, pages: str = ""
) -> Tensor:
    """:func:`lengths` of the rows of ``tables``: on the host if both are, for :func:`_on_device`."""
    if isinstance(seq_lens, Tensor) and seen(tables) and seen(seq_lens):
        device = tables.device
    capacity = tables.shape[1] * page_size
    return lengths(where, names.lengths, seq_lens, tables.shape[0], device, capacity, names.table, pages=pages)


def _on_device(
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


def uniform_rows(where: str, rows: int, batch: int, q_len: int, device: torch.device) -> Tensor | None:
    """:func:`uniform_indptr` of a query of so many ``rows``; None for one row per request, which is decode."""
    if rows != batch * q_len:
        fail(
            ShapeError,
            where,
            f"the query has {rows} rows for {batch} requests",
            f"{batch * q_len}, {q_len} per request",
            "correct the query, or the number of rows of each request",
        )
    return None if q_len == 1 else uniform_indptr(batch, q_len, device)


def check_dense(where: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Ranks and sizes of one request that calls and masks rely on."""
    ranked(where, "q", q, "[qo_len, num_qo_heads, head_dim]")
    for name, t in (("k", k), ("v", v)):
        ranked(where, name, t, "[kv_len, num_kv_heads, head_dim]")
    positive(where, num_qo_heads=q.shape[1], head_dim=q.shape[2])


# ----------------------------------------------------------------------------------------------------------- the calls


def block_table_call(
    where: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    block_tables: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor | None,
    options: AttentionOptions,
    output: OutputSpec,
    scales: ScaleFactors,
    *,
    kv_layout: str,
    backend: str = "auto",
    tree_mask: Tensor | None = None,
    keys: RankKeys | None = None,
    names: TableNames = USUAL_NAMES,
) -> AttentionCall:
    """``(q [rows, num_qo_heads, head_dim], k_cache, v_cache)`` by block tables; ``qo_indptr`` None for decode."""
    q, k_cache, v_cache = tensors
    ranked(where, "the query", q, QUERY_DIMS)
    positive(where, num_qo_heads=q.shape[1])
    if tree_mask is not None:
        options = options._replace(causal=False)
        if qo_indptr is None:
            qo_indptr = uniform_indptr(q.shape[0], 1, q.device)
    page_size, num_kv_heads = paged_sizes(where, k_cache, kv_layout)
    general = needs_general_decode(computed_dtype(q.dtype, v_cache.dtype), options.pos_encoding)
    spec = PlanSpec(
        decode=qo_indptr is None,
        paged=True,
        page_size=page_size,
        num_qo_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim_qk=q.shape[2],
        head_dim_vo=v_cache.shape[-1],
        window_left=options.window_left,
        causal=options.causal and qo_indptr is not None,
        general_decode=general and qo_indptr is None,
    )
    pages = f", in pages of {page_size}" + (f" by {names.layout} {kv_layout!r}" if names.layout else "")
    seq_lens = _row_lengths(where, names, block_tables, seq_lens, page_size, q.device, pages)
    check_groups(where, q.shape[1], num_kv_heads, "repeat or regroup the heads, or name the other kv_layout")
    on_device = _on_device(where, names, block_tables, seq_lens, spec, k_cache, q.device, keys)
    batch = BlockTables(spec, *on_device, qo_indptr, q.shape[0], tree_mask, keys)
    op = "batch_decode" if spec.decode else "batch_prefill"
    return AttentionCall(where, op, tensors, batch, options, output, scales, kv_layout, backend)


def latent_call(
    where: str,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    block_tables: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    options: AttentionOptions,
    output: OutputSpec,
    scales: ScaleFactors,
    keys: RankKeys | None = None,
    names: TableNames = USUAL_NAMES,
    sparse: bool = False,
) -> AttentionCall:
    """MLA of ``(q_nope, q_pe, ckv_cache, kpe_cache)`` by block tables; ``options`` has an ``sm_scale``.

    ``sparse``: the tables are of the tokens of each row, whose numbers are not checked.
    """
    q_nope, q_pe, ckv, kpe = tensors
    for name, t in (("q_nope", q_nope), ("q_pe", q_pe)):
        ranked(where, name, t, "[rows, num_heads, head_dim]")
    for name, t in (("ckv_cache", ckv), ("kpe_cache", kpe)):
        ranked(where, name, t, "[pages, page_size, head_dim]")
    positive(where, num_heads=q_nope.shape[1])
    spec = PlanSpec(
        decode=False,
        paged=True,
        page_size=ckv.shape[1],
        num_qo_heads=q_nope.shape[1],
        num_kv_heads=1,
        head_dim_qk=q_nope.shape[2] + q_pe.shape[2],
        head_dim_vo=q_nope.shape[2],
        causal=options.causal,
    )
    seq_lens = _row_lengths(where, names, block_tables, seq_lens, spec.page_size, q_nope.device)
    if not sparse:
        block_tables, seq_lens = _on_device(where, names, block_tables, seq_lens, spec, ckv, q_nope.device, keys)
    batch = BlockTables(spec, block_tables, seq_lens, qo_indptr, q_nope.shape[0], keys=keys)
    return AttentionCall(where, "batch_mla", tensors, batch, options, output, scales)


def ragged_call(
    where: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    options: AttentionOptions,
    output: OutputSpec,
    scales: ScaleFactors,
    *,
    backend: str = "auto",
) -> AttentionCall:
    """``(q [nnz_qo, num_qo_heads, head_dim], k, v [nnz_kv, num_kv_heads, head_dim])``; both indptr int32."""
    q, k, v = tensors
    for name, t in (("the query", q), ("the key", k), ("the value", v)):
        ranked(where, name, t, RAGGED_DIMS)
    positive(where, num_qo_heads=q.shape[1])
    check_groups(where, q.shape[1], k.shape[1])
    spec = PlanSpec(
        decode=False,
        paged=False,
        page_size=1,
        num_qo_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim_qk=q.shape[2],
        head_dim_vo=v.shape[-1],
        window_left=options.window_left,
        causal=options.causal,
    )
    batch = RaggedLengths(spec, qo_indptr, kv_indptr, q.shape[0], k.shape[0])
    return AttentionCall(where, "ragged_prefill", tensors, batch, options, output, scales, "NHD", backend)


def unplanned_call(
    where: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    options: AttentionOptions,
    output: OutputSpec,
    scales: ScaleFactors,
    *,
    kv_layout: str = "NHD",
    backend: str = "auto",
) -> AttentionCall:
    """One request, as for :func:`dense_call`, whose keys are not split."""
    source = Unplanned((tensors[0].shape[-1], tensors[2].shape[-1]))
    return AttentionCall(where, "single_prefill", tensors, source, options, output, scales, kv_layout, backend)


def dense_call(
    where: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    options: AttentionOptions,
    output: OutputSpec,
    scales: ScaleFactors,
    *,
    kv_layout: str,
    backend: str = "auto",
) -> AttentionCall | FoundCall:
    """One request: ``(q [qo_len, num_qo_heads, head_dim], k, v [kv_len, num_kv_heads, head_dim])``, HND heads first.

    Few query rows over many keys are planned, so that their keys are split over the device. Calls of the same sizes,
    as of the layers of a model, share the plan.
    """
    q, *kv = tensors
    k, v = kv if kv_layout == "NHD" else (t.transpose(0, 1) for t in kv)
    if options.mask is not None:
        options = options._replace(causal=False)  # which the mask replaces
    rows, kv_len, device = q.shape[0], k.shape[0], q.device
    form: dict[str, Any] = {
        "page_size": 1,
        "num_qo_heads": q.shape[1],
        "num_kv_heads": k.shape[1],
        "head_dim_qk": q.shape[2],
        "head_dim_vo": v.shape[2],
        "window_left": options.window_left,
    }
    spec = PlanSpec(decode=False, paged=False, causal=options.causal, window_right=options.window_right, **form)
    if k.shape[:2] != v.shape[:2] or not splits_pay(spec, rows, kv_len, device):
        return unplanned_call(where, tensors, options, output, scales, kv_layout=kv_layout, backend=backend)
    decode = rows == 1 and options.mask is None and q.dtype not in FP8 and backend == "auto"
    if decode:
        spec = PlanSpec(decode=True, paged=True, **form)  # pages of one token, which the general kernel alone takes
        options = options._replace(causal=False, window_right=-1)  # its position is that of the last key

    def make() -> DecodePlan | PrefillPlan:
        kv_indptr = uniform_indptr(1, kv_len, device)
        batch: BlockTables | RaggedLengths
        if decode:
            pages = torch.arange(kv_len, dtype=torch.int32, device=device)[None]
            batch = BlockTables(spec, pages, kv_indptr[1:], None, rows)
        else:
            batch = RaggedLengths(spec, uniform_indptr(1, rows, device), kv_indptr, rows, kv_len)
        return batch.plan()

    found = shared(("one request", spec, rows, kv_len), (), device, make)
    source = Scheduled(found.value, (q.shape[2], v.shape[2]))
    op, tensors = ("batch_decode", (q, k[:, None], v[:, None])) if decode else ("ragged_prefill", (q, k, v))
    call = AttentionCall(where, op, tensors, source, options, output, scales, "NHD", backend)
    return FoundCall(call, found, tuple(zip(tensors[1:], kv, strict=True)))
