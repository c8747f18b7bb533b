"""One-shot calls: attention without a prior plan(). The call plans and attends, and traces."""

from __future__ import annotations

from torch import Tensor

from attn_ops.frontend.arguments import positive, ranked
from attn_ops.frontend.block_tables import USUAL_NAMES, TableNames, on_device, row_lengths
from attn_ops.frontend.call import AttentionCall, Unplanned
from attn_ops.frontend.call_plans import BlockTables, RaggedLengths
from attn_ops.frontend.context import RankKeys
from attn_ops.frontend.kv_cache import paged_sizes
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.plan_spec import paged_spec, ragged_spec
from attn_ops.frontend.scales import ScaleFactors
from attn_ops.ops.options import AttentionOptions
from attn_ops.plan.page_table import uniform_indptr
from attn_ops.plan.plan_checks import check_groups
from attn_ops.plan.spec import PlanSpec

QUERY_DIMS, RAGGED_DIMS = "[rows, num_qo_heads, head_dim]", "[rows, heads, head_dim]"


def check_dense(where: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check the ranks and sizes of a request's tensors, on which calls and masks rely."""
    ranked(where, "q", q, "[qo_len, num_qo_heads, head_dim]")
    for name, t in (("k", k), ("v", v)):
        ranked(where, name, t, "[kv_len, num_kv_heads, head_dim]")
    positive(where, num_qo_heads=q.shape[1], head_dim=q.shape[2])


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
    expected: int | None = None,
) -> AttentionCall:
    """``(q [rows, num_qo_heads, head_dim], k_cache, v_cache)`` by block tables; ``qo_indptr`` None for decode.

    ``expected`` is as in :class:`BlockTables`.
    """
    q, k_cache, v_cache = tensors
    ranked(where, "the query", q, QUERY_DIMS)
    positive(where, num_qo_heads=q.shape[1])
    if tree_mask is not None:
        options = options._replace(causal=False)
        if qo_indptr is None:
            qo_indptr = uniform_indptr(q.shape[0], 1, q.device)
    page_size, num_kv_heads = paged_sizes(where, k_cache, kv_layout)
    heads, head_dims, dtypes = (q.shape[1], num_kv_heads), (q.shape[2], v_cache.shape[-1]), (q.dtype, v_cache.dtype)
    spec = paged_spec(page_size, heads, head_dims, dtypes, options, decode=qo_indptr is None)
    if tree_mask is not None:
        spec = spec._replace(plain=False)
    pages = f", in pages of {page_size}" + (f" by {names.layout} {kv_layout!r}" if names.layout else "")
    seq_lens = row_lengths(where, names, block_tables, seq_lens, page_size, q.device, pages)
    check_groups(where, q.shape[1], num_kv_heads, "repeat or regroup the heads, or name the other kv_layout")
    block_tables, seq_lens = on_device(where, names, block_tables, seq_lens, spec, k_cache, q.device, keys)
    batch = BlockTables(spec, block_tables, seq_lens, qo_indptr, q.shape[0], tree_mask, keys, expected)
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

    ``sparse``: the tables have the tokens of each query row, and their numbers are not checked.
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
    seq_lens = row_lengths(where, names, block_tables, seq_lens, spec.page_size, q_nope.device)
    if not sparse:
        block_tables, seq_lens = on_device(where, names, block_tables, seq_lens, spec, ckv, q_nope.device, keys)
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
    expected: int | None = None,
) -> AttentionCall:
    """``(q [nnz_qo, num_qo_heads, head_dim], k, v [nnz_kv, num_kv_heads, head_dim])``; both indptr int32.

    ``expected`` is as in :class:`RaggedLengths`.
    """
    q, k, v = tensors
    for name, t in (("the query", q), ("the key", k), ("the value", v)):
        ranked(where, name, t, RAGGED_DIMS)
    positive(where, num_qo_heads=q.shape[1])
    check_groups(where, q.shape[1], k.shape[1])
    spec = ragged_spec(q, k, v, options)
    batch = RaggedLengths(spec, qo_indptr, kv_indptr, q.shape[0], k.shape[0], expected=expected)
    return AttentionCall(where, "ragged_prefill", tensors, batch, options, output, scales, "NHD", backend)


def dense_call(
    where: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    options: AttentionOptions,
    output: OutputSpec,
    scales: ScaleFactors,
    *,
    batch_size: int = 1,
    kv_layout: str = "NHD",
    backend: str = "auto",
) -> AttentionCall:
    """Requests of equal lengths, one after another in ``(q [rows, num_qo_heads, head_dim], k, v [keys, ...])``.

    ``k, v [keys, num_kv_heads, head_dim]`` have heads first if ``kv_layout`` is HND.
    """
    if options.mask is not None:
        options = options._replace(causal=False)  # the mask replaces it
    source = Unplanned((tensors[0].shape[-1], tensors[2].shape[-1]), batch_size)
    return AttentionCall(where, "single_prefill", tensors, source, options, output, scales, kv_layout, backend)
