"""Page tables, and writing new tokens into a paged cache. All of it runs on any device and traces."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.argument_checks import check_no_overlap, integers
from attn_ops.errors import ArgumentError, DeviceError, PageTableError, dtype_name, fail, shape_of
from attn_ops.frontend.arguments import layout, required
from attn_ops.frontend.kv_cache import PagedCache, paged
from attn_ops.frontend.outputs import check_apart
from attn_ops.plan.page_table import index, seen
from attn_ops.plan.page_table_checks import check_indptr, check_last_page_len
from attn_ops.plan.state import INT32_MAX
from attn_ops.typed import typed

__all__ = ["append_paged_kv_cache", "append_paged_mla_kv_cache", "get_batch_indices_positions", "get_seq_lens"]


@typed
def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Request and position of every appended token.

    Args:
        append_indptr: int ``[batch + 1]``, cumulative appended tokens.
        seq_lens: int ``[batch]``, lengths **after** the append.
        nnz: rows of the result; those past ``append_indptr[-1]`` get -1.
        batch_indices, positions: int32 ``[nnz]`` to fill and return.
    """
    where = "get_batch_indices_positions"
    integers(where, nnz=nnz)
    indptr = index(where, "append_indptr", append_indptr)
    lengths = index(where, "seq_lens", seq_lens).to(indptr.device)
    if seen(indptr):
        check_indptr("append_indptr", indptr, where, later=True)
    found = torch.ops.attn.batch_indices_positions(indptr, lengths, nnz)
    given = {"batch_indices": batch_indices, "positions": positions}
    for name, buffer in given.items():
        if buffer is None:
            continue
        if buffer.dtype != torch.int32 or tuple(buffer.shape) != (nnz,):
            fail(
                ArgumentError,
                where,
                f"{name} is {dtype_name(buffer.dtype)} {shape_of(buffer)}",
                f"int32 {shape_of([nnz])}",
                "pass such a buffer, or none",
            )
        if buffer.is_meta and not indptr.is_meta:
            expected = f"{indptr.device}, where append_indptr is"
            fail(DeviceError, where, f"{name} is on meta, without contents", expected, "move it")
        check_no_overlap(where, name, buffer, f"or pass no {name}")
    if batch_indices is not None and positions is not None:
        check_apart(where, "batch_indices", batch_indices, "positions", positions)
    first, second = (t if buffer is None else buffer.copy_(t) for t, buffer in zip(found, given.values(), strict=True))
    return first, second


def _range(x: Tensor) -> tuple[int, int]:
    """The smallest and the largest element, 0 and 0 for an empty tensor."""
    least, most = x.aminmax() if x.numel() else (0, 0)
    return int(least), int(most)


@typed
def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """int32 ``[batch]``, tokens of each request: ``(pages - 1) * page_size + last``, 0 where there is no page."""
    where = "get_seq_lens"
    integers(where, page_size=page_size)
    indptr = index(where, "kv_indptr", kv_indptr)
    last = index(where, "kv_last_page_len", kv_last_page_len)
    if seen(indptr):
        # Whole tensors are tested first: the functions that raise the errors loop over the numbers.
        if indptr.dim() != 1 or indptr.shape[0] < 2:
            check_indptr("kv_indptr", indptr, where, later=True)
        pages = indptr.long().diff()
        fewest, longest = _range(pages)
        if fewest < 0 or _range(indptr)[0] < 0:
            check_indptr("kv_indptr", indptr, where, later=True)
        if longest * page_size > INT32_MAX:
            fail(
                PageTableError,
                where,
                f"a request of {longest} pages of page_size {page_size} has up to {longest * page_size} tokens",
                f"at most {INT32_MAX}, an int32",
                "correct kv_indptr or page_size",
            )
        shortest, fullest = _range(last) if seen(last) and last.shape == pages.shape else (1, 1)
        if not 1 <= shortest <= fullest <= page_size and page_size > 0:
            for b in ((pages > 0) & ((last < 1) | (last > page_size))).nonzero()[:1].flatten().tolist():
                check_last_page_len(b, int(pages[b]), int(last[b]), page_size, where)
    return torch.ops.attn.seq_lens(indptr, last.to(indptr.device), page_size)


@typed
def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: PagedCache,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write tokens to their places in the cache, in place.

    Args:
        append_key, append_value: ``[nnz, num_kv_heads, head_dim]``, of the cache's dtype.
        batch_indices, positions: int ``[nnz]``, as :func:`get_batch_indices_positions` gives them. A row whose request
            is -1 is skipped.
        paged_kv_cache: one tensor or a pair, as for the wrappers.
        kv_indices, kv_indptr: the page table **after** the append. ``kv_last_page_len`` is not needed.
    """
    where = "append_paged_kv_cache"
    k_cache, v_cache = paged(where, paged_kv_cache, layout(where, kv_layout))
    places = _places(where, append_key, batch_indices, positions, kv_indices, kv_indptr)
    torch.ops.attn.append_kv(append_key, append_value, k_cache, v_cache, *places, kv_layout=kv_layout)


@typed
def append_paged_mla_kv_cache(
    append_ckv: Tensor | None,
    append_kpe: Tensor | None,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Write latent tokens, in place: ``append_ckv [nnz, ckv]`` and ``append_kpe [nnz, kpe]``, or only one of them.

    Caches are ``[pages, page_size, dim]``; a part whose cache is None is not written. The other arguments are as for
    :func:`append_paged_kv_cache`.
    """
    where = "append_paged_mla_kv_cache"
    given = {"append_ckv": (append_ckv, ckv_cache), "append_kpe": (append_kpe, kpe_cache)}
    parts: list[tuple[Tensor, Tensor]] = []
    for name, (tokens, cache) in given.items():
        if cache is not None:
            (new,) = required(where, **{name: tokens})
            parts.append((new, cache))
    if len(parts) == 1:
        # The op writes two parts: the second one has width 0.
        new, cache = parts[0]
        parts.append((new[:, :0], cache[..., :0]))
    if parts:
        (ckv, ckv_pages), (kpe, kpe_pages) = parts
        places = _places(where, ckv, batch_indices, positions, kv_indices, kv_indptr)
        torch.ops.attn.append_mla_kv(ckv, kpe, ckv_pages, kpe_pages, *places)


def _places(
    where: str, new: Tensor, batch_indices: Tensor, positions: Tensor, kv_indices: Tensor, kv_indptr: Tensor
) -> tuple[Tensor, ...]:
    named = {
        "batch_indices": batch_indices,
        "positions": positions,
        "kv_indices": kv_indices,
        "kv_indptr": kv_indptr,
    }
    return tuple(index(where, name, t).to(new.device) for name, t in named.items())
