"""Calls of FlashAttention's functions: their batches, the plans of these, and the ops that run them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.call import AttentionCall
from attn_ops.eager.prepared_call import is_traced
from attn_ops.errors import ArgumentError, CapacityError, PageTableError, ShapeError, UnsupportedError, fail
from attn_ops.frontend.arguments import positive, ranked, required
from attn_ops.frontend.flash.metadata import BatchForm, Scheduled, SchedulerMetadata, check_given, shared
from attn_ops.frontend.flash.rotary import Rotary
from attn_ops.frontend.one_shot import BlockTables, RaggedLengths, block_table, dense_call, lengths, uniform_indptr
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.scales import ScaleFactors
from attn_ops.ops.options import FP8, AttentionOptions
from attn_ops.plan.page_table import INT32_MAX, cumulative, index, offsets, seen
from attn_ops.plan.page_table_checks import check_indices
from attn_ops.plan.resizable import PlanSpec

DENSE = "[batch, seqlen, num_heads, head_dim]"
VARLEN = "[tokens, num_heads, head_dim]"


class Result(NamedTuple):
    """The form of a result. ``shape`` of a dense query is ``(batch, seqlen)``, of others None."""

    shape: tuple[int, int] | None
    return_lse: bool
    out: Tensor | None = None

    def spec(self, q: Tensor) -> OutputSpec:
        """For a query of ``q``'s dtype: of an FP8 query the output is bfloat16, unless ``out`` has another dtype."""
        return OutputSpec(
            self.out,
            return_lse=self.return_lse,
            dtype=torch.bfloat16 if self.out is None and q.dtype in FP8 else None,
            lse_base="ln",
            lse_layout="HN" if self.shape is None else "NH",
            rows_shape=self.shape,
        )

    def of(self, result: Any) -> Any:
        """FlashAttention's layout of the LSE: ``[batch, heads, seqlen]``, or ``[heads, tokens]``."""
        if not self.return_lse or self.shape is None:
            return result
        out, lse = result
        return out, lse.unflatten(0, self.shape).transpose(1, 2).contiguous()


def _spec(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, **more: Any) -> PlanSpec:
    """Of any query, and keys whose last dimensions are ``[num_kv_heads, head_dim]``."""
    return PlanSpec(
        num_qo_heads=q.shape[-2],
        num_kv_heads=k.shape[-2],
        head_dim_qk=q.shape[-1],
        head_dim_vo=v.shape[-1],
        window_left=options.window_left,
        causal=options.causal,
        window_right=options.window_right,
        **more,
    )


def _nothing_appended(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(0, dtype=torch.int32, device=device), torch.empty(0, dtype=torch.int32, device=device)


# -------------------------------------------------------------------------------------------------- without a KV cache


def requests_of(where: str, name: str, cumulative: Tensor) -> int:
    """The requests of cumulative lengths ``[batch + 1]``."""
    requests = index(where, name, cumulative).shape[0] - 1
    if requests < 0:
        fail(ShapeError, where, f"{name} is [0]", "[batch + 1]", "pass cumulative lengths from 0")
    return requests


def dense_attention(
    where: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    scales: ScaleFactors,
    return_lse: bool,
    out: Tensor | None = None,
) -> Any:
    """``q [batch, seqlen_q, ...]`` over ``k, v [batch, seqlen_k, ...]``: ragged KV of equal lengths."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        ranked(where, name, t, DENSE)
    batch, q_len, kv_len, device = q.shape[0], q.shape[1], k.shape[1], q.device
    for name, t in (("k", k), ("v", v)):
        if t.shape[0] != batch or t.shape[1] != kv_len:
            fail(
                ShapeError,
                where,
                f"{name} is {list(t.shape)}",
                f"[{batch}, {kv_len}, ...], with the batch of q and the length of k",
                "make them agree",
            )
    positive(where, num_heads=q.shape[2])
    result = Result((batch, q_len), return_lse, out)
    rows = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    if batch == 1:
        call = dense_call(where, rows, options, result.spec(q), scales, kv_layout="NHD")
        return result.of(call.execute())
    spec = _spec(q, k, v, options, decode=False, paged=False, page_size=1)

    def make() -> SchedulerMetadata:
        qo_indptr, kv_indptr = (uniform_indptr(batch, length, device) for length in (q_len, kv_len))
        plan = RaggedLengths(spec, qo_indptr, kv_indptr, batch * q_len, batch * kv_len, kv_len).plan()
        form = BatchForm(batch, batch * q_len)
        return SchedulerMetadata(plan, form.as_shape_tensor(device), *_nothing_appended(device))

    metadata = shared(("dense", spec, batch, q_len, kv_len), (), device, make)
    source = Scheduled(metadata.plan, (q.shape[-1], v.shape[-1]))
    call = AttentionCall(where, "ragged_prefill", rows, source, options, result.spec(q), scales)
    return result.of(call.execute())


def varlen_attention(
    where: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    options: AttentionOptions,
    scales: ScaleFactors,
    return_lse: bool,
    out: Tensor | None = None,
) -> Any:
    """``q [total_q, ...]`` over ``k, v [total_k, ...]`` by cumulative lengths."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        ranked(where, name, t, VARLEN)
    positive(where, num_heads=q.shape[1])
    batch = requests_of(where, "cu_seqlens_q", cu_seqlens_q)
    device, result = q.device, Result(None, return_lse, out)
    spec = _spec(q, k, v, options, decode=False, paged=False, page_size=1)

    def make() -> SchedulerMetadata:
        qo_indptr = cumulative(where, "cu_seqlens_q", cu_seqlens_q, batch, "q", q)
        kv_indptr = cumulative(where, "cu_seqlens_k", cu_seqlens_k, batch, "k", k)
        plan = RaggedLengths(spec, qo_indptr, kv_indptr, q.shape[0], k.shape[0]).plan()
        form = BatchForm(batch, q.shape[0])
        return SchedulerMetadata(plan, form.as_shape_tensor(device), *_nothing_appended(device))

    key = ("varlen", spec, q.shape[0], k.shape[0])
    metadata = shared(key, (cu_seqlens_q, cu_seqlens_k), device, make)
    source = Scheduled(metadata.plan, (q.shape[-1], v.shape[-1]))
    call = AttentionCall(where, "ragged_prefill", (q, k, v), source, options, result.spec(q), scales)
    return call.execute()


# ------------------------------------------------------------------------------------------------------ with a KV cache


class CacheLengths(NamedTuple):
    """Lengths of the requests of a batch in their cache.

    seqlens     int ``[batch]``, or one number for all; None for the whole capacity. Of tokens before an append
    cumulative  int ``[batch + 1]``: lengths as differences, in the place of ``seqlens``
    """

    seqlens: Tensor | int | None
    cumulative: Tensor | None = None

    @classmethod
    def of(cls, where: str, name: str, seqlens: Any, cumulative: Tensor | None = None) -> CacheLengths:
        """Of an argument ``name``, a tensor, an integer of any type, or None."""
        taken = seqlens is None or isinstance(seqlens, Tensor | torch.SymInt | int)
        if not taken and not hasattr(seqlens, "__index__"):
            shown = f"{name} is {seqlens!r}, of type {type(seqlens).__name__}"
            fail(ArgumentError, where, shown, "a tensor, an integer or None", "pass whole tokens")
        return cls(seqlens if taken else operator.index(seqlens), cumulative)

    def key(self) -> Hashable:
        return None if isinstance(self.seqlens, Tensor) else self.seqlens

    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.seqlens if isinstance(self.seqlens, Tensor) else None, self.cumulative)

    def before(self, where: str, batch: int, capacity: int, device: torch.device) -> Tensor:
        """int32 ``[batch]`` on ``device``. Numbers on the host are checked against ``capacity``."""
        if self.cumulative is not None:
            given: Tensor = index(where, "cu_seqlens_k", self.cumulative).diff()
            return lengths(where, "cu_seqlens_k", given, batch, device, capacity)
        if isinstance(self.seqlens, Tensor):
            return lengths(where, "cache_seqlens", self.seqlens, batch, device, capacity)
        number = capacity if self.seqlens is None else self.seqlens
        if not 0 <= number <= capacity:
            fail(
                CapacityError,
                where,
                f"cache_seqlens is {number} and a request has room for {capacity} tokens",
                f"0 to {capacity}",
                "pass a larger cache or wider block_table",
            )
        return torch.full((batch,), number, dtype=torch.int32, device=device)


class CacheBatch(NamedTuple):
    """A batch over a KV cache, as ``flash_attn_with_kvcache`` describes it.

    spec          what to plan for
    table         int ``[batch, pages]``, the block table; ``[batch]``, one place of a dense cache each; None: in order
    requests      number of requests
    lengths       tokens in the cache
    rows          query rows of the batch
    cu_seqlens_q  int ``[batch + 1]``; None for the same number of rows per request
    appended      new tokens of the batch
    cu_new        int ``[batch + 1]``: their cumulative numbers; None for the same number per request
    places        pages, or rows of a dense cache, that ``table`` may name
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
    places: int = INT32_MAX

    @property
    def form(self) -> BatchForm:
        return BatchForm(self.requests, self.rows, self.appended)

    def block_table(self, where: str) -> Tensor:
        """int32 ``[batch, pages]`` on the device."""
        if self.table is None:
            return torch.arange(self.requests, dtype=torch.int32, device=self.device)[:, None]
        if self.table.dim() == 1:
            return index(where, "cache_batch_idx", self.table).to(self.device)[:, None]
        return block_table(where, "block_table", self.table, self.device)

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
        table = self.block_table(where)
        capacity, new = table.shape[1] * self.spec.page_size, _nothing_appended(self.device)
        self._check_number(where, capacity)
        after = self.after(where, capacity)
        if self.appended:
            new = torch.ops.attn.batch_indices_positions(self.new_indptr(where), after, self.appended)
        qo_indptr = None if self.spec.decode else self.qo_indptr(where)
        plan = BlockTables(self.spec, table.contiguous(), after, qo_indptr, self.rows).plan()
        return SchedulerMetadata(plan, self.form.as_shape_tensor(self.device), *new)

    def after(self, where: str, capacity: int) -> Tensor:
        """int32 ``[batch]``: the lengths after the append, which are checked on the host."""
        before = self.lengths.before(where, self.requests, capacity, self.device)
        if not self.appended:
            return before
        after = before + self.new_indptr(where).diff()
        return lengths(where, "cache_seqlens", after, self.requests, self.device, capacity)

    def check_places(self, where: str) -> None:
        """A table on the host names places of the cache, as far as tokens of known lengths are there.

        In every call: layers share a plan, and their caches may have different sizes.
        """
        given = [t for t in (self.table, self.cu_new, *self.lengths.tensors()) if t is not None]
        if self.table is None or is_traced() or not all(map(seen, given)):
            return
        host = self._replace(device=torch.device("cpu"))
        table = host.block_table(where)
        capacity = table.shape[1] * self.spec.page_size
        self._check_number(where, capacity)
        after = host.after(where, capacity)
        pages = -(-after // max(1, self.spec.page_size))
        wrong = (torch.arange(table.shape[1]) < pages[:, None]) & ((table < 0) | (table >= self.places))
        if wrong.any():
            b, i = wrong.nonzero()[0].tolist()
            paged = self.table.dim() == 2
            fail(
                PageTableError,
                where,
                f"block_table[{b}, {i}] is {int(table[b, i])}" if paged else f"cache_batch_idx[{b}] is {int(table[b])}",
                f"a {'page' if paged else 'row'} of the cache, 0 to {self.places - 1}",
                "pass numbers of this cache",
            )

    def _check_number(self, where: str, capacity: int) -> None:
        """A number of tokens is on the host, where the lengths after an append may not be."""
        if isinstance(self.lengths.seqlens, int) and self.cu_new is None:
            after = self.lengths.seqlens + self.appended // max(1, self.requests)
            if self.lengths.seqlens <= capacity < after:
                fail(
                    PageTableError,
                    where,
                    f"a request has {after} tokens and its row of the page table holds {capacity}",
                    f"at most {capacity}",
                    "pass a larger cache or wider block_table",
                )

    def metadata(self, where: str, given: Any) -> SchedulerMetadata:
        """``given``, which is checked, or shared or new metadata."""
        if given is not None:
            made = check_given(where, given, self.form, self.spec.decode)
            if seen(made.plan.kv_indices) and not is_traced():
                used = int(made.plan.kv_indptr[self.requests])
                check_indices(made.plan.kv_indices[:used], self.places, where)
            return made
        self.check_places(where)
        sizes = (self.spec, self.form, self.lengths.key())
        tensors = (self.table, self.cu_seqlens_q, self.cu_new, *self.lengths.tensors())
        return shared(("cache", sizes), tensors, self.device, lambda: self.make(where))


class CacheTensors(NamedTuple):
    """What a call attends to, as its op takes it, and what it appends.

    queries  ``[rows, num_heads, head_dim]``, one, or the two of MLA
    caches   keys and values, NHD; of MLA latents and rotary keys, of 3 dimensions
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
        """Of FlashAttention's arguments. ``qv`` is the latent query of MLA, whose values are the latents."""
        if qv is None:
            return cls("batch_decode" if decode else "batch_prefill", (q,), caches, new)
        kpe, ckv = (t.squeeze(-2) for t in caches)
        latents = None if new is None else (new[1].squeeze(-2), new[0].squeeze(-2))
        return cls("batch_mla", (qv, q), (ckv, kpe), latents)

    @property
    def head_dims(self) -> tuple[int, int]:
        width = sum(q.shape[-1] for q in self.queries)
        return width, self.caches[0 if self.op == "batch_mla" else 1].shape[-1]

    def append(self, metadata: SchedulerMetadata) -> None:
        assert self.new is not None
        op = torch.ops.attn.append_mla_kv if self.op == "batch_mla" else torch.ops.attn.append_kv
        table = metadata.plan.kv_indices, metadata.plan.kv_indptr
        op(*self.new, *self.caches, metadata.batch_indices, metadata.positions, *table)

    def attend(
        self, where: str, metadata: SchedulerMetadata, options: AttentionOptions, scales: ScaleFactors, result: Result
    ) -> Any:
        """Append the new tokens, and attend to the caches."""
        source = Scheduled(metadata.plan, self.head_dims)
        tensors = (*self.queries, *self.caches)
        call = AttentionCall(where, self.op, tensors, source, options, result.spec(tensors[0]), scales)
        if self.new is None:
            return result.of(call.execute())
        return result.of(call.execute_after(functools.partial(self.append, metadata)))


def rotate(
    where: str, rotary: Rotary, q: Tensor, k: Tensor, batch: CacheBatch, starts: Tensor, by_row: bool
) -> tuple[Tensor, Tensor]:
    """The query rows and the new keys at their positions.

    starts  int32 ``[batch]``: the position of each request's first new token
    by_row  row i of a request has position ``start + i``; otherwise all its rows have position ``start``
    """
    qo_indptr, new_indptr = batch.qo_indptr(where), batch.new_indptr(where)

    def places(indptr: Tensor, rows: int, steps: bool) -> Tensor:
        request, position = torch.ops.attn.batch_indices_positions(indptr, starts + indptr.diff(), rows)
        return position if steps else starts[request.clamp(min=0)]

    new = places(new_indptr, batch.appended, True)
    rotary.check(where, new)
    return rotary.apply(q, places(qo_indptr, batch.rows, by_row)), rotary.apply(k, new)


def one_of(where: str, **given: Any) -> tuple[str, Any]:
    """The name and the value of the one argument that is given, of several that exclude each other."""
    found = [(name, value) for name, value in given.items() if value is not None]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        fail(ArgumentError, where, f"{names} are both given", "one of them", "drop one")
    return found[0] if found else (next(iter(given)), None)


def check_table(where: str, name: str, table: Tensor | None) -> None:
    """The rank of a table is that of its name."""
    if table is not None:
        ranked(where, name, table, "[batch]" if name == "cache_batch_idx" else "[batch, max_pages_per_sequence]")


def cache_spec(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, options: AttentionOptions, *, decode: bool
) -> PlanSpec:
    """Of caches ``[places, page_size, num_kv_heads, head_dim]``. A decoded row has no keys after it."""
    return _spec(q, k, v, options, decode=decode, paged=True, page_size=k.shape[1])._replace(
        head_dim_qk=q.shape[-1] + (0 if qv is None else qv.shape[-1]),
        causal=options.causal and not decode,
        window_right=-1 if decode else options.window_right,
    )


def check_latent(where: str, q: Tensor, qv: Tensor | None, k_cache: Tensor, options: AttentionOptions) -> None:
    """Of a latent query and its cache, if there is one."""
    if qv is None:
        return
    if options.window_right >= 0:
        raise UnsupportedError(
            f"{where}: window_size has a right side of {options.window_right} with qv, which is not supported: MLA has "
            "no window on the right; pass causal=True or a right side of -1"
        )
    if qv.shape[:-1] != q.shape[:-1]:
        fail(ShapeError, where, f"qv is {list(qv.shape)}", f"{[*q.shape[:-1], 'head_dim_v']}, as q", "correct it")
    if k_cache.shape[2] != 1:
        fail(
            ShapeError,
            where,
            f"qv is given and k_cache has {k_cache.shape[2]} KV heads",
            "1, the latent that all heads share",
            "pass caches of one head",
        )


def new_tokens(
    where: str,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    requests: int,
) -> tuple[Tensor, Tensor] | None:
    """The tokens to append, ``[appended, num_kv_heads, head_dim]``."""
    if k is None and v is None:
        return None
    required(where, k=k, v=v, cache_seqlens=cache_seqlens)
    assert k is not None
    assert v is not None
    for name, t in (("k", k), ("v", v)):
        ranked(where, name, t, DENSE if cu_seqlens_k_new is None else VARLEN)
        if cu_seqlens_k_new is None and (t.shape[0] != requests or t.shape[1] != k.shape[1]):
            expected = f"[{requests}, {k.shape[1]}, ...], with the requests of q and the tokens of k"
            fail(ShapeError, where, f"{name} is {list(t.shape)}", expected, "make them agree")
    return (k, v) if cu_seqlens_k_new is not None else (k.flatten(0, 1), v.flatten(0, 1))


def unpack(where: str, name: str, packed: Tensor, parts: int, dims: str) -> tuple[Tensor, ...]:
    """Views of ``packed [..., parts, heads, head_dim]``."""
    ranked(where, name, packed, dims)
    if packed.shape[-3] != parts:
        fail(ShapeError, where, f"{name} is {list(packed.shape)}", dims, f"stack {parts} tensors in dimension -3")
    return packed.unbind(-3)
