"""The plan of a step for all its layers, under FlashAttention's name: ``get_scheduler_metadata``."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.argument_checks import integers, optional_integers
from attn_ops.errors import OptionError, fail
from attn_ops.frontend.arguments import positive
from attn_ops.frontend.flash import arguments
from attn_ops.frontend.flash.arguments import WindowSize
from attn_ops.frontend.flash.cache import CacheBatch, CacheLengths
from attn_ops.frontend.flash.cache_checks import check_tables, one_of
from attn_ops.frontend.flash.metadata import SchedulerMetadata
from attn_ops.frontend.flash.plan_spec import runs_decode
from attn_ops.frontend.plan_spec import paged_spec
from attn_ops.ops.options import AttentionOptions
from attn_ops.plan.plan_checks import check_groups
from attn_ops.plan.state import INT32_MAX
from attn_ops.typed import typed


@typed
def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: int | Tensor | None,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    block_table: Tensor | None = None,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    total_q: int | None = None,
    total_k_new: int | None = None,
    has_qv: bool = False,
    device: str | torch.device | None = None,
) -> SchedulerMetadata:
    """The plan of a step, for all its layers: their ``scheduler_metadata``.

    It holds copies of lengths and page table as they are now, so make it again in every step. Nothing is copied to the
    host. It traces: made inside a graph, it is a part of it; made outside, its tensors are inputs.

    Args:
        batch_size: requests.
        max_seqlen_q: query rows of each request, unless ``cu_seqlens_q``, int ``[batch + 1]``, gives them; ``total_q``
            are then the rows of ``q``. Without ``total_q`` each call plans for itself.
        max_seqlen_k: the size ``seqlen_cache`` of a dense cache; without effect for a paged one.
        headdim, headdim_v: of the keys and the values. ``has_qv``: for calls with ``qv`` of ``headdim_v``.
        cache_seqlens: tokens in the cache before the append, int ``[batch]`` or a number; None for a full cache.
        max_seqlen_k_new: tokens that each request appends, unless ``cu_seqlens_k_new``, int ``[batch + 1]``, gives
            them; ``total_k_new`` are then the rows of ``k``. Each call plans for itself without ``total_k_new``, if the
            append exceeds the capacity of the cache, and if either the metadata or the call is without an append.
        page_size, block_table: of a paged cache. A plan has the page table, which FlashAttention's metadata does not.
            Without ``block_table`` each call plans for itself. ``page_table`` is another name of ``block_table``.
        cache_batch_idx, cache_leftpad, attention_chunk: as in the calls.
        causal, window_size: as in the calls, or less restrictive.
        device: device of the plan; default that of the tensors among the arguments, else PyTorch's default.
        qkv_dtype: dtype of the cache. A plan for an FP8 cache serves caches of any dtype, and is faster for FP8.
        has_softcap, num_splits, pack_gqa, sm_margin: without effect.
    """
    where = "get_scheduler_metadata"
    chunk = arguments.chunk_of(where, attention_chunk)
    positive(where, batch_size=batch_size, num_heads_q=num_heads_q, num_heads_kv=num_heads_kv, headdim=headdim)
    check_groups(where, num_heads_q, num_heads_kv)
    max_seqlen_q, max_seqlen_k, max_seqlen_k_new = integers(
        where, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, max_seqlen_k_new=max_seqlen_k_new
    )
    headdim_v, page_size, total_q, total_k_new = optional_integers(
        where, headdim_v=headdim_v, page_size=page_size, total_q=total_q, total_k_new=total_k_new
    )
    totals = (
        _total(batch_size, max_seqlen_q, cu_seqlens_q, total_q),
        _total(batch_size, max_seqlen_k_new, cu_seqlens_k_new, total_k_new),
    )
    rows, appended = (0 if total is None else total for total in totals)
    if rows < 0 or appended < 0 or any(type(n) is int and n > INT32_MAX for n in (rows, appended)):
        numbers = f"{int(rows)} query rows and {int(appended)} appended tokens"
        change = "max_seqlen_q, total_q, max_seqlen_k_new"
        fail(OptionError, where, numbers, f"0 to {INT32_MAX}, an int32", f"change {change} or total_k_new")
    table_name, table = one_of(where, block_table=block_table, page_table=page_table)
    check_tables(where, table_name, table, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    options = AttentionOptions(**arguments.window(where, window_size, causal)._asdict())
    value_dim = headdim if headdim_v is None else headdim_v
    tensors = (cache_seqlens, table, cu_seqlens_q, cu_seqlens_k_new, cache_leftpad, cache_batch_idx)
    if device is None:
        device = next((t.device for t in tensors if isinstance(t, Tensor)), None) or torch.empty(0).device
    spec = paged_spec(
        max_seqlen_k if page_size is None else page_size,
        (num_heads_q, num_heads_kv),
        (headdim + (value_dim if has_qv else 0), value_dim),
        (qkv_dtype, qkv_dtype),
        options,
        decode=runs_decode(max_seqlen_q if cu_seqlens_q is None else None, has_qv, chunk),
    )
    batch = CacheBatch(
        spec=spec,
        table=table,
        requests=batch_size,
        lengths=CacheLengths.of(where, "cache_seqlens", cache_seqlens),
        rows=rows,
        device=torch.device(device),
        cu_seqlens_q=cu_seqlens_q,
        appended=appended,
        cu_new=cu_seqlens_k_new,
        cache_batch_idx=cache_batch_idx,
        leftpad=cache_leftpad,
        chunk=chunk,
        table_name=None if table is None else table_name,
    )
    lacks_table, lacks_totals = page_size is not None and table is None, None in totals
    if lacks_table or lacks_totals:
        return batch.unplanned(lacks_table=int(lacks_table), unplanned=int(lacks_totals))
    if not batch.has_capacity(where):
        return batch.unplanned(unplanned=1)
    batch.check_places(where)
    return batch.make(where)


def _total(batch_size: int, each: int, cu_seqlens: Tensor | None, total: int | None) -> int | None:
    """Rows of the batch: ``total``, or ``each`` per request. None if the contents of ``cu_seqlens`` decide."""
    if total is not None:
        return total
    return batch_size * each if cu_seqlens is None else None
