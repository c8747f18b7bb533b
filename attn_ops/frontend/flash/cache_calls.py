"""Calls of FlashAttention's functions over a KV cache: their tensors and ops."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attn_ops.eager.op_call import OpCall
from attn_ops.frontend.arguments import ranked, required
from attn_ops.frontend.block_tables import lengths
from attn_ops.frontend.call import AttentionCall
from attn_ops.frontend.flash.arguments import Descales
from attn_ops.frontend.flash.cache import CacheBatch, CacheLengths
from attn_ops.frontend.flash.cache_checks import check_latent
from attn_ops.frontend.flash.calls import PAGED_CACHE, check_heads, output_spec
from attn_ops.frontend.flash.metadata import (
    BatchForm,
    SchedulerMetadata,
)
from attn_ops.frontend.flash.plan_spec import cache_spec
from attn_ops.frontend.kv_cache import has_pages_in_a_row, pages_of_one
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.scales import ScaleFactors
from attn_ops.frontend.shared_plans import Found, Scheduled
from attn_ops.ops.options import AttentionOptions
from attn_ops.symbolic_sizes import has_static_value
from attn_ops.tracing import is_compiling


def _token_pages(where: str, name: str, cache: Tensor) -> Tensor:
    fix = "pass a contiguous cache, or pages that divide attention_chunk"
    return pages_of_one(where, name, cache, "for cache_leftpad or attention_chunk", fix)


def has_symbolic_pages(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether the page size is symbolic in a traced graph, and pages can be viewed as pages of one token.

    Kernels are compiled for a page size.
    """
    if not is_compiling():
        return False
    if has_static_value(k_cache.shape[1]) or k_cache.shape[:2] != v_cache.shape[:2]:
        return False
    return has_pages_in_a_row(k_cache) and has_pages_in_a_row(v_cache)


def as_token_pages(
    where: str, k_cache: Tensor, v_cache: Tensor, requests: int, rows: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Dense caches as pages of one token, and their block table. ``rows`` is ``cache_batch_idx``."""
    length, device = k_cache.shape[1], k_cache.device
    if rows is None:
        first = torch.arange(requests, dtype=torch.int32, device=device)
    else:
        first = lengths(where, "cache_batch_idx", rows, requests, device)
    table = first[:, None] * length + torch.arange(length, dtype=torch.int32, device=device)
    return _token_pages(where, "k_cache", k_cache), _token_pages(where, "v_cache", v_cache), table


class CacheArguments(NamedTuple):
    """FlashAttention's arguments that :class:`CacheTensors` may be views of."""

    q: Tensor
    qv: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None = None
    v: Tensor | None = None

    def in_order(self, op: str) -> list[Tensor]:
        """The queries, caches and new tokens that are given, in the order of ``op``."""
        given: tuple[Tensor | None, ...] = (self.q, self.k_cache, self.v_cache, self.k, self.v)
        if op == "batch_mla":
            given = (self.qv, self.q, self.v_cache, self.k_cache, self.v, self.k)
        return [t for t in given if t is not None]


class CacheTensors(NamedTuple):
    """The tensors of a call, as its op takes them, and the tokens that it appends.

    queries  one query ``[rows, num_heads, head_dim]``, or the two parts of an MLA query
    caches   keys and values, NHD; for MLA latents and rotary keys, ``[pages, page_size, head_dim]``
    new      tokens to append to each cache, ``[appended, ...]``
    """

    op: str
    queries: tuple[Tensor, ...]
    caches: tuple[Tensor, Tensor]
    new: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(
        cls,
        q: Tensor,
        qv: Tensor | None,
        caches: tuple[Tensor, Tensor],
        new: tuple[Tensor, Tensor] | None,
        decode: bool,
    ) -> CacheTensors:
        """From FlashAttention's arguments. ``qv`` is the latent query of MLA, whose values are the latents."""
        if qv is None:
            return cls("batch_decode" if decode else "batch_prefill", (q,), caches, new)
        kpe, ckv = (t.squeeze(-2) for t in caches)
        latents = None if new is None else (new[1].squeeze(-2), new[0].squeeze(-2))
        return cls("batch_mla", (qv, q), (ckv, kpe), latents)

    def for_plan(self, where: str, metadata: SchedulerMetadata, page_size: int) -> CacheTensors:
        """The caches by the pages of the plan, which may be of one token."""
        if page_size == 1 or not BatchForm.of(metadata).by_tokens:
            return self
        k, v = (_token_pages(where, "a cache", t) for t in self.caches)
        return self._replace(caches=(k, v))

    @property
    def head_dims(self) -> tuple[int, int]:
        width = sum(q.shape[-1] for q in self.queries)
        return width, self.caches[0 if self.op == "batch_mla" else 1].shape[-1]

    def append(self, metadata: SchedulerMetadata) -> OpCall | None:
        """The call that appends the new tokens, None without new tokens."""
        if self.new is None:
            return None
        op = "append_mla_kv" if self.op == "batch_mla" else "append_kv"
        pages = metadata if metadata.kv_indptr.shape[0] else metadata.plan
        table = pages.kv_indices, pages.kv_indptr
        return OpCall(op, (*self.new, *self.caches, metadata.batch_indices, metadata.positions, *table), {})

    def attend(
        self,
        where: str,
        found: Found,
        options: AttentionOptions,
        output: OutputSpec,
        scales: ScaleFactors,
        given: CacheArguments,
    ) -> AttentionCall:
        """The call that appends the new tokens and attends to the caches."""
        metadata: SchedulerMetadata = found.value
        source = Scheduled(metadata.plan, self.head_dims)
        tensors = (*self.queries, *self.caches)
        views = tuple(zip((*tensors, *(self.new or ())), given.in_order(self.op), strict=False))
        return AttentionCall(
            where,
            self.op,
            tensors,
            source,
            options,
            output,
            scales,
            views=views,
            append=self.append(metadata),
            lookup=found.lookup,
        )


def paged_varlen_attention(
    where: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    table: Tensor,
    options: AttentionOptions,
    descales: Descales,
    return_lse: bool,
    out: Tensor | None,
    scheduler_metadata: SchedulerMetadata | None,
    *,
    qv: Tensor | None,
    chunk: int,
    expected: int | None,
) -> AttentionCall:
    """``flash_attn_varlen_func`` of ``q [total_q, ...]`` over ``k, v [pages, page_size, ...]`` by a block table.

    ``expected`` is the result of :func:`expected_keys`.
    """
    if seqused_k is None:
        required(where, cu_seqlens_k=cu_seqlens_k)
    for name, t in (("k", k), ("v", v)):
        ranked(where, name, t, PAGED_CACHE)
    check_heads(where, q, k, v, qv)
    check_latent(where, q, qv, (k, v), options)
    batch = CacheBatch(
        spec=cache_spec(q, k, v, qv, options, decode=False),
        table=table,
        requests=table.shape[0],
        lengths=CacheLengths.of(where, "seqused_k", seqused_k, None if seqused_k is not None else cu_seqlens_k),
        rows=q.shape[0],
        device=q.device,
        cu_seqlens_q=cu_seqlens_q,
        cache_pages=k.shape[0],
        chunk=chunk,
        table_name="block_table",
        expected=expected,
    )
    found = batch.metadata(where, scheduler_metadata)
    tensors = CacheTensors.of(q, qv, (k, v), None, decode=False).for_plan(where, found.value, k.shape[1])
    scales = descales.of_rows(where, q, k, batch.requests, cu_seqlens_q)
    output = output_spec(tensors.queries[0], None, return_lse, out)
    return tensors.attend(where, found, options, output, scales, CacheArguments(q, qv, k, v))
