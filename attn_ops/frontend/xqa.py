"""``xqa`` and ``xqa_mla``: decoding by a page table, with the arguments of FlashInfer's documentation and of 0.7.2."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.argument_checks import check_has_dimensions, integers
from attn_ops.errors import OptionError, ShapeError, fail, shape_of
from attn_ops.frontend.arguments import as_sinks, layout, ranked, refuse, required
from attn_ops.frontend.block_tables import TableNames, block_table, query_row_offsets
from attn_ops.frontend.kv_cache import paged, paged_sizes
from attn_ops.frontend.masks import check_tree_mask, most_rows
from attn_ops.frontend.one_shot import QUERY_DIMS, block_table_call, latent_call
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.scales import ScaleFactors
from attn_ops.ops.options import MAX_WINDOW, MLA_DIMS, AttentionOptions
from attn_ops.plan.page_table import cumulative, real, uniform_indptr
from attn_ops.symbolic_sizes import agree
from attn_ops.typed import typed


def _rows(where: str, q: Tensor, q_seq_len: int) -> tuple[Tensor, int]:
    """q as ``[rows, num_qo_heads, head_dim]``, and the query rows of each request."""
    integers(where, q_seq_len=q_seq_len)
    if q.dim() in (4, 5) and q.shape[1] != 1:
        fail(ShapeError, where, f"q has a beam of {int(q.shape[1])}", "1", "pass [batch, 1, ...]")
    if q.dim() == 5:
        if q_seq_len not in (1, q.shape[2]):
            fail(ShapeError, where, f"q_seq_len is {int(q_seq_len)}", f"{int(q.shape[2])} as q has", "correct one")
        return q.flatten(0, 2), q.shape[2]
    if q.dim() == 4:
        return q.flatten(0, 1), q_seq_len
    if q.dim() != 3:
        fail(
            ShapeError,
            where,
            f"q is {shape_of(q)}",
            "[batch, heads, dim], [batch, 1, heads, dim] or [batch, 1, q_seq_len, heads, dim]",
            "reshape it",
        )
    return q, q_seq_len


def _agree(where: str, **pairs: tuple[int | None, int]) -> None:
    """Raise unless sizes that are given as arguments are those of the tensors."""
    for name, (given, actual) in pairs.items():
        if given is None:
            continue
        integers(where, **{name: given})
        if given != actual:
            fail(ShapeError, where, f"{name} is {int(given)}", f"{int(actual)} as the tensors have", "correct one")


@typed
def xqa(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor | None = None,
    workspace_buffer: Tensor | None = None,
    semaphores: Tensor | None = None,
    num_kv_heads: int | None = None,
    page_size: int | None = None,
    sinks: Tensor | None = None,
    q_scale: float | Tensor = 1.0,
    kv_scale: float | Tensor = 1.0,
    sliding_win_size: int = 0,
    kv_layout: str = "NHD",
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
    rcp_out_scale: float = 1.0,
    q_seq_len: int = 1,
    mask: Tensor | None = None,
    *,
    q_cu_seq_lens: Tensor | None = None,
    k_sf_cache: Tensor | None = None,
    v_sf_cache: Tensor | None = None,
    head_dim: int | None = None,
) -> Tensor | None:
    """Decode a batch by a page table; logits are scaled by ``q_scale * kv_scale / sqrt(head_dim)``.

    Args:
        q: ``[batch, num_qo_heads, head_dim]``, ``[batch, 1, num_qo_heads, head_dim]`` or
            ``[batch, 1, q_seq_len, num_qo_heads, head_dim]``; several rows of a request are causal unless there is a
            ``mask``. With ``q_cu_seq_lens [batch + 1]``: ``[rows, num_qo_heads, head_dim]``.
        mask: uint16 or uint32 ``[batch, q_seq_len, words]``, or ``[rows, words]``: bit j of a row's words, the lowest
            first, says whether the row sees the token of row j. Every row sees all tokens before those of the rows.
        k_cache, v_cache: ``[pages, page_size, num_kv_heads, head_dim]`` (HND: heads before tokens). Each may be a 5-D
            tensor ``[pages, 2, ...]`` of keys and values.
        page_table: int ``[batch, max_pages_per_request]``. ``seq_lens``: int or uint32 ``[batch]`` or ``[batch, 1]``.
        output: filled, and None returned; without it the output is returned. FP8 is saturated.
        kv_scale: multiplies the output too, as ``rcp_out_scale`` does.
        sinks: ``[num_qo_heads]``, or ``[num_kv_heads, num_qo_heads // num_kv_heads]``.
        sliding_win_size: keys that a query sees, itself included; 0 for all.
        num_kv_heads, page_size, head_dim: checked against the tensors where given.
    """
    where = "xqa"
    refuse(where, k_sf_cache=k_sf_cache, v_sf_cache=v_sf_cache)
    required(where, k_cache=k_cache, v_cache=v_cache)
    check_has_dimensions(where, q=q, v_cache=v_cache)
    kv_layout = layout(where, kv_layout)
    k = paged(where, k_cache, kv_layout)[0] if k_cache.dim() == 5 else k_cache
    v = paged(where, v_cache, kv_layout)[1] if v_cache.dim() == 5 else v_cache
    tokens, heads = paged_sizes(where, k, kv_layout)
    _agree(where, num_kv_heads=(num_kv_heads, heads), page_size=(page_size, tokens), head_dim=(head_dim, q.shape[-1]))
    tables = block_table(where, "page_table", page_table, q.device)
    if q_cu_seq_lens is None:
        flat, q_len = _rows(where, q, q_seq_len)
        qo_indptr = query_row_offsets(where, flat.shape[0], tables.shape[0], q_len, q.device)
    else:
        ranked(where, "q", q, QUERY_DIMS)
        flat, qo_indptr = q, cumulative(where, "q_cu_seq_lens", q_cu_seq_lens, tables.shape[0], "q", q)
        q_len = 1 if mask is None else most_rows(q_cu_seq_lens)
    if mask is not None:
        check_tree_mask(where, mask, flat.shape[0], q_len)
    integers(where, sliding_win_size=sliding_win_size)
    if not 0 <= sliding_win_size <= MAX_WINDOW + 1:
        expected = f"1 to {MAX_WINDOW + 1} tokens, or 0 for no window"
        fail(OptionError, where, f"sliding_win_size is {sliding_win_size}", expected, "change it")
    window_left, sinks = sliding_win_size - 1, as_sinks(where, sinks, q.device)
    result = block_table_call(
        where,
        (flat, k, v),
        tables,
        seq_lens,
        qo_indptr,
        AttentionOptions(window_left=window_left, sinks=sinks, causal=True),
        OutputSpec(output, rows_shape=tuple(q.shape[:-2]), out_name="output"),
        ScaleFactors(
            {"q_scale": q_scale, "kv_scale": kv_scale}, {"kv_scale": kv_scale, "rcp_out_scale": rcp_out_scale}
        ),
        kv_layout=kv_layout,
        tree_mask=mask,
        names=TableNames("page_table"),
    ).execute()
    return result if output is None else None


def _latent_pages(where: str, name: str, cache: Tensor, page_size: int | None) -> Tensor:
    """A cache of one head as ``[pages, page_size, head_dim]``."""
    pages = cache.squeeze(2) if cache.dim() == 4 and cache.shape[2] == 1 else cache
    if pages.dim() == 2 and page_size and pages.shape[0] % page_size == 0:
        pages = torch.unflatten(pages, 0, (-1, page_size))
    if pages.dim() != 3:
        fail(ShapeError, where, f"{name} is {shape_of(cache)}", "[pages, page_size, head_dim]", "reshape it")
    return pages


def _are_columns(v_cache: Tensor, k_cache: Tensor) -> bool:
    """Whether the values are the first columns of the keys. Strides decide for traced tensors."""
    if v_cache is k_cache:
        return True
    if real(k_cache):
        return v_cache.data_ptr() == k_cache.data_ptr()
    return v_cache.shape[-1] < k_cache.shape[-1] and v_cache.stride() == k_cache.stride()


@typed
def xqa_mla(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor | None = None,
    workspace_buffer: Tensor | None = None,
    semaphores: Tensor | None = None,
    page_size: int | None = None,
    q_scale: float | Tensor = 1.0,
    kv_scale: float | Tensor = 1.0,
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
) -> Tensor | None:
    """Decode a batch over a latent cache; logits are scaled by ``q_scale * kv_scale``, softmax scale included.

    Args:
        q: ``[batch, num_heads, ckv + kpe]``, or with a beam of 1 as for :func:`xqa`.
        k_cache: ``[pages, page_size, ckv + kpe]``, or flat ``[pages * page_size, ckv + kpe]`` with ``page_size``.
            ``v_cache``: as ``k_cache``, with ``ckv`` columns; if it has all columns of ``k_cache``, ``ckv`` is 512 and
            the others are not read. If it is a view of the first columns of ``k_cache``, the kernel of MLA reads the
            latents once; otherwise a general kernel reads keys and values. Memory is not known while tracing:
            ``k_cache`` itself, or a narrower tensor with its strides, is then taken for such a view.
        q_scale: the softmax scale too, unlike in :func:`xqa`. ``kv_scale`` multiplies the output as well.
        page_table, seq_lens, output: as for :func:`xqa`; the output is ``[..., num_heads, ckv]``.
    """
    where = "xqa_mla"
    required(where, k_cache=k_cache, v_cache=v_cache)
    check_has_dimensions(where, k_cache=k_cache, v_cache=v_cache)
    ckv = v_cache.shape[-1] if v_cache.shape[-1] < k_cache.shape[-1] else MLA_DIMS[0]
    keys, values = (_latent_pages(where, *given, page_size) for given in (("k_cache", k_cache), ("v_cache", v_cache)))
    if keys.shape[2] <= ckv:
        expected = f"[pages, page_size, {int(ckv)} + kpe]"
        fail(ShapeError, where, f"k_cache is {shape_of(k_cache)}", expected, "reshape it")
    if not agree(values.shape[:2], keys.shape[:2]):
        expected = f"{shape_of([*keys.shape[:2], ckv])}, the pages of k_cache"
        fail(ShapeError, where, f"v_cache is {shape_of(v_cache)}", expected, "correct it")
    _agree(where, page_size=(page_size, keys.shape[1]))
    flat, q_len = _rows(where, q, 1)
    tables = block_table(where, "page_table", page_table, q.device)
    query_row_offsets(where, flat.shape[0], tables.shape[0], q_len, q.device)
    rows = uniform_indptr(tables.shape[0], q_len, q.device)
    options = AttentionOptions(sm_scale=1.0, causal=True)
    output_spec = OutputSpec(output, rows_shape=tuple(q.shape[:-2]), out_name="output")
    scales = ScaleFactors({"q_scale": q_scale, "kv_scale": kv_scale}, {"kv_scale": kv_scale})
    call = tables, seq_lens, rows, options, output_spec, scales
    names = TableNames("page_table")
    if _are_columns(v_cache, k_cache):
        latents = flat[..., :ckv], flat[..., ckv:], keys[..., :ckv], keys[..., ckv:]
        result = latent_call(where, latents, *call, names=names).execute()
    else:
        tensors = flat, keys[:, :, None], values[:, :, None, :ckv]
        result = block_table_call(where, tensors, *call, kv_layout="NHD", names=names).execute()
    return result if output is None else None
