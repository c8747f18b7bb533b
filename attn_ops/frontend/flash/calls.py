"""Calls of FlashAttention's functions: the form of results, and the calls without a KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.argument_checks import check_has_dimensions
from attn_ops.eager.op_call import Executable, MappedCall
from attn_ops.errors import DTypeError, ShapeError, dtype_name, fail, shape_of
from attn_ops.frontend.arguments import positive, ranked
from attn_ops.frontend.autocast import joined
from attn_ops.frontend.call import AttentionCall
from attn_ops.frontend.call_plans import RaggedLengths
from attn_ops.frontend.flash.arguments import Descales
from attn_ops.frontend.flash.chunks import ragged_chunks
from attn_ops.frontend.one_shot import dense_call
from attn_ops.frontend.outputs import OutputSpec, dtype_without_scale
from attn_ops.frontend.plan_spec import ragged_spec
from attn_ops.frontend.shared_plans import Scheduled, shared
from attn_ops.ops.options import AttentionOptions
from attn_ops.plan.page_table import cumulative, index, uniform_indptr
from attn_ops.plan.plan_checks import check_groups
from attn_ops.plan.spec import PlanSpec
from attn_ops.plan.state import DecodePlan, PrefillPlan
from attn_ops.symbolic_sizes import agree, any_zero, at_most, holds, statically_known_true

DENSE = "[batch, seqlen, num_heads, head_dim]"
VARLEN = "[tokens, num_heads, head_dim]"
DENSE_CACHE = "[batch_cache, seqlen_cache, num_kv_heads, head_dim]"
PAGED_CACHE = "[pages, page_size, num_kv_heads, head_dim]"


def output_spec(q: Tensor, rows_shape: tuple[int, int] | None, return_lse: bool, out: Tensor | None) -> OutputSpec:
    """The form of a result: LSEs are natural, ``[batch, heads, seqlen]``, or ``[heads, tokens]`` of a packed query.

    ``rows_shape`` is ``(batch, seqlen)`` of a dense query ``q``, None for a packed one.
    """
    dtype = dtype_without_scale(q, out)
    return OutputSpec(out, None, return_lse, dtype, lse_base="ln", lse_layout="HN", rows_shape=rows_shape)


def with_probabilities(call: Executable) -> Executable:
    """A call with LSE that returns ``(out, lse, None)``, as FlashAttention 2 with ``return_attn_probs``.

    FlashAttention 2 returns probabilities only with dropout, for tests.
    """
    return MappedCall(call, lambda result: (*result, None))


# -------------------------------------------------------------------------------------------------- without a KV cache


def check_heads(where: str, q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> None:
    """Raise for ``[..., heads, head_dim]`` without elements, or KV heads that do not divide the query heads evenly."""
    check_has_dimensions(where, qv=qv)
    latent = 0 if qv is None else qv.shape[-1]
    positive(where, num_heads=q.shape[-2], head_dim=q.shape[-1] + latent, head_dim_v=v.shape[-1])
    check_groups(where, q.shape[-2], k.shape[-2])


def requests_of(where: str, name: str, cumulative: Tensor) -> int:
    """The requests of cumulative lengths ``[batch + 1]``."""
    requests = index(where, name, cumulative).shape[0] - 1
    if not holds(requests >= 0):
        fail(ShapeError, where, f"{name} is [0]", "[batch + 1]", "pass cumulative lengths from 0")
    return requests


def with_latents(where: str, q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor]:
    """The query and the keys of logits ``q k + qv v``: both parts side by side."""
    if qv is None:
        return q, k
    if not agree(qv.shape, (*q.shape[:-1], v.shape[-1])):
        expected = f"{shape_of([*q.shape[:-1], v.shape[-1]])}, as q and the head dim of v"
        fail(ShapeError, where, f"qv is {shape_of(qv)}", expected, "correct it")
    for name, part, whole in (("qv", qv, q), ("v", v, k)):
        if part.dtype != whole.dtype:
            expected = f"{dtype_name(whole.dtype)}, as {'q' if whole is q else 'k'}"
            fail(DTypeError, where, f"{name} is {dtype_name(part.dtype)} with qv", expected, "convert it")
    if not agree(v.shape[:-1], k.shape[:-1]):
        fail(ShapeError, where, f"v is {shape_of(v)}", f"{shape_of([*k.shape[:-1], v.shape[-1]])}, as k", "correct it")
    return joined(torch.cat, (q, qv), -1), joined(torch.cat, (k, v), -1)


def ragged_plan(
    spec: PlanSpec,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    rows: int,
    keys: int,
    max_kv_len: int,
    chunk: int,
    expected: int | None = None,
) -> DecodePlan | PrefillPlan:
    """The plan of a batch over ragged keys. With ``chunk`` a row sees only the keys of its own chunk.

    ``expected`` is as in :class:`RaggedLengths`.
    """
    if chunk:
        qo_indptr, kv_indptr = ragged_chunks(qo_indptr, kv_indptr, chunk, keys)
        max_kv_len = at_most(max_kv_len, chunk)
    return RaggedLengths(spec, qo_indptr, kv_indptr, rows, keys, max_kv_len, expected).plan()


def dense_attention(
    where: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    descales: Descales,
    return_lse: bool,
    out: Tensor | None = None,
    *,
    qv: Tensor | None = None,
    chunk: int = 0,
) -> AttentionCall:
    """``q [batch, seqlen_q, ...]`` over ``k, v [batch, seqlen_k, ...]``: without a plan, unless there are chunks."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        ranked(where, name, t, DENSE)
    batch, q_len, kv_len, device = q.shape[0], q.shape[1], k.shape[1], q.device
    for name, t in (("k", k), ("v", v)):
        if not agree(t.shape[:2], (batch, kv_len)):
            fail(
                ShapeError,
                where,
                f"{name} is {shape_of(t)}",
                f"[{int(batch)}, {int(kv_len)}, ...], with the batch of q and the length of k",
                "make them agree",
            )
    check_heads(where, q, k, v, qv)
    q, k = with_latents(where, q, k, v, qv)
    output = output_spec(q, (batch, q_len), return_lse, out)
    rows = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    views = tuple(zip(rows, (q, k, v), strict=True))
    scales = descales.of_rows(where, rows[0], k, batch)
    if not chunk:
        size = 1 if any_zero(batch) else batch
        return dense_call(where, rows, options, output, scales, batch_size=size)._replace(views=views)
    spec = ragged_spec(q, k, v, options)

    def make() -> DecodePlan | PrefillPlan:
        qo_indptr = uniform_indptr(batch, q_len, device)
        same = statically_known_true(q_len == kv_len)
        kv_indptr = qo_indptr if same else uniform_indptr(batch, kv_len, device)
        return ragged_plan(spec, qo_indptr, kv_indptr, batch * q_len, batch * kv_len, kv_len, chunk)

    found = shared(("dense", spec, batch, q_len, kv_len, chunk), (), device, make)
    source = Scheduled(found.value, (q.shape[-1], v.shape[-1]))
    return AttentionCall(
        where, "ragged_prefill", rows, source, options, output, scales, views=views, lookup=found.lookup
    )


def varlen_attention(
    where: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    options: AttentionOptions,
    descales: Descales,
    return_lse: bool,
    out: Tensor | None = None,
    *,
    qv: Tensor | None = None,
    chunk: int = 0,
    expected: int | None = None,
) -> AttentionCall:
    """``q [total_q, ...]`` over ``k, v [total_k, ...]`` by cumulative lengths.

    ``expected`` is as in :class:`RaggedLengths`.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        ranked(where, name, t, VARLEN)
    check_heads(where, q, k, v, qv)
    batch = requests_of(where, "cu_seqlens_q", cu_seqlens_q)
    q, k = with_latents(where, q, k, v, qv)
    spec = ragged_spec(q, k, v, options)
    scales = descales.of_rows(where, q, k, batch, cu_seqlens_q)

    def make() -> DecodePlan | PrefillPlan:
        qo_indptr = cumulative(where, "cu_seqlens_q", cu_seqlens_q, batch, "q", q)
        kv_indptr = cumulative(where, "cu_seqlens_k", cu_seqlens_k, batch, "k", k)
        return ragged_plan(spec, qo_indptr, kv_indptr, q.shape[0], k.shape[0], k.shape[0], chunk, expected)

    key = ("varlen", spec, q.shape[0], k.shape[0], chunk, expected)
    found = shared(key, (cu_seqlens_q, cu_seqlens_k), q.device, make)
    source, output = Scheduled(found.value, (q.shape[-1], v.shape[-1])), output_spec(q, None, return_lse, out)
    return AttentionCall(where, "ragged_prefill", (q, k, v), source, options, output, scales, lookup=found.lookup)


def unpack(where: str, name: str, packed: Tensor, parts: int, dims: str) -> tuple[Tensor, ...]:
    """Views of ``packed [..., parts, heads, head_dim]``."""
    ranked(where, name, packed, dims)
    if packed.shape[-3] != parts:
        fail(ShapeError, where, f"{name} is {shape_of(packed)}", dims, f"stack {parts} tensors in dimension -3")
    return packed.unbind(-3)


def unpack_qkv(where: str, qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, ...]:
    """Views of ``qkv [..., 3, heads, head_dim]``, or of ``[..., num_heads_q + 2 * num_kv_heads, head_dim]``."""
    if qkv.dim() != 4 or num_heads_q is None:
        return unpack(where, "qkv", qkv, 3, "[batch, seqlen, 3, num_heads, head_dim]")
    positive(where, num_heads_q=num_heads_q)
    kv_heads = qkv.shape[2] - num_heads_q
    if kv_heads < 2 or kv_heads % 2:
        expected = f"heads in dimension 2: {num_heads_q} of queries, then the same number of keys and of values"
        fail(ShapeError, where, f"qkv is {shape_of(qkv)}", expected, "correct qkv or num_heads_q")
    return qkv.split([num_heads_q, kv_heads // 2, kv_heads // 2], 2)
