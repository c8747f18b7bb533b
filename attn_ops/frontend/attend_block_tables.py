"""Attention over block tables in one call, without a plan(): what ``trtllm_*``, ``cudnn_*`` and ``xqa`` do.

Lengths and pages may be on the query's device. The plan is made by ops inside the call, from shapes alone, so the
call traces. On host tensors lengths are checked against the table; on a GPU longer ones are cut off at its width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_ops.errors import DTypeError, PageTableError, ShapeError
from attn_ops.frontend import plan_in_call
from attn_ops.frontend.arguments import fail, positive, ranked, required
from attn_ops.frontend.base import as_sinks
from attn_ops.frontend.kv_cache import paged_sizes
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.scales import Scale, fold
from attn_ops.frontend.tree_mask import draft_mask
from attn_ops.plan.page_table import as_int32, seen
from attn_ops.plan.resizable import PlanSpec
from attn_ops.plan.state import PrefillPlan


def lengths(
    where: str, name: str, t: Tensor | None, batch: int, device: torch.device, capacity: int | None = None
) -> Tensor:
    """int32 ``[batch]`` of lengths of any integer dtype, which may have further dimensions of size 1.

    ``capacity``: tokens that a row of the page table has places for.
    """
    required(where, **{name: t})
    assert t is not None
    if t.numel() != batch:
        fail(ShapeError, where, f"{name} is {list(t.shape)}", f"[{batch}], one a request", "correct it")
    if t.is_floating_point() or t.dtype == torch.bool:
        fail(DTypeError, where, f"{name} is {str(t.dtype).removeprefix('torch.')}", "int32 or int64", "convert it")
    if t.dtype == torch.uint32:
        t = t.view(torch.int32)
    if t.dtype in (torch.uint16, torch.uint64):
        t = t.long()
    if seen(t) and batch and int(t.min()) < 0:
        fail(PageTableError, where, f"{name} has a length of {int(t.min())}", "0 or more", "correct it")
    if capacity is not None:
        check_fits(where, t, capacity)
    return t.reshape(batch).to(device, torch.int32)


def block_table(where: str, name: str, t: Tensor | None, device: torch.device) -> Tensor:
    """int32 ``[batch, max_pages_per_request]`` of any integer dtype."""
    required(where, **{name: t})
    assert t is not None
    if t.dim() != 2:
        fail(ShapeError, where, f"{name} is {list(t.shape)}", "[batch, max_pages_per_request]", "reshape it")
    return as_int32(where, name, t).to(device).contiguous()


def uniform_rows(where: str, rows: int, batch: int, q_len: int, device: torch.device) -> Tensor | None:
    """``qo_indptr`` of ``q_len`` query rows for every request; None where that is one, which is decoding."""
    if rows != batch * q_len:
        fail(
            ShapeError,
            where,
            f"the query has {rows} rows for {batch} requests",
            f"{batch * q_len}, {q_len} a request",
            "correct the query, or the number of rows a request has",
        )
    return None if q_len == 1 else torch.arange(batch + 1, dtype=torch.int32, device=device) * q_len


def check_fits(where: str, seq_lens: Tensor, capacity: int) -> None:
    """No request is longer than its row of pages, as far as that can be seen without waiting for a device."""
    if not seen(seq_lens) or not seq_lens.numel():
        return
    longest = int(seq_lens.max())
    if longest > capacity:
        fail(
            PageTableError,
            where,
            f"a request has {longest} tokens and its row of the page table places for {capacity}",
            f"at most {capacity}",
            "pass wider tables",
        )


def attend(
    where: str,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_layout: str,
    block_tables: Tensor,
    seq_lens: Tensor,
    output_spec: OutputSpec,
    *,
    qo_indptr: Tensor | None,
    causal: bool,
    sm_scale: float | None,
    logit_scales: dict[str, Scale],
    value_scales: dict[str, Scale],
    window_left: int = -1,
    sinks: Any = None,
    draft: Tensor | None = None,
    backend: str = "auto",
) -> Any:
    """``q [rows, num_qo_heads, head_dim]``; ``qo_indptr`` None for decoding, one row a request.

    ``draft`` says which of a request's last tokens each of its rows sees (:mod:`.drafts`), in the place of ``causal``.
    """
    ranked(where, "the query", q, "[rows, num_qo_heads, head_dim]")
    positive(where, num_qo_heads=q.shape[1])
    if draft is not None and qo_indptr is None:
        qo_indptr = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    causal = causal and draft is None
    page_size, num_kv_heads = paged_sizes(where, k_cache, kv_layout)
    shape = PlanSpec(
        decode=qo_indptr is None,
        paged=True,
        page_size=page_size,
        num_qo_heads=q.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim_qk=q.shape[2],
        head_dim_vo=v_cache.shape[-1],
        window_left=window_left,
        causal=causal and qo_indptr is not None,
    )
    capacity = block_tables.shape[1] * page_size
    seq_lens = lengths(where, "seq_lens", seq_lens, block_tables.shape[0], q.device, capacity)
    options: dict[str, Any] = {"window_left": window_left, "kv_layout": kv_layout, "backend": backend}
    if not shape.decode:
        options["causal"] = causal
    output_spec.check(where, q, shape.head_dim_vo)
    scales = fold(where, sm_scale, q.shape[2], q.device, logit_scales, value_scales)
    plan = plan_in_call.plan_block_tables(shape, block_tables, seq_lens, qo_indptr, q.shape[0])
    if draft is not None:
        assert isinstance(plan, PrefillPlan)
        options["mask"] = draft_mask(draft, plan, capacity)
    op = torch.ops.attn.batch_decode if shape.decode else torch.ops.attn.batch_prefill
    out, lse = op(
        q,
        k_cache,
        v_cache,
        plan,
        plan_in_call.scratch(plan),
        sm_scale=scales.sm_scale,
        kv_scale=scales.kv_scale,
        sinks=as_sinks(where, sinks, q.device),
        return_lse=output_spec.needs_lse,
        **options,
    )
    return output_spec.finalize(out, lse, scales.output)
