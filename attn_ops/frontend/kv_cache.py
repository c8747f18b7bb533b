"""KV caches in the forms that callers hold them, as the views that the ops take (docs/guide/layouts.md)."""

from __future__ import annotations

from torch import Tensor

from attn_ops.errors import ArgumentTypeError, ShapeError, fail, shape_of
from attn_ops.ops.options import FP8, LAYOUTS, PAGED_DIMS

PagedCache = Tensor | tuple[Tensor, Tensor] | list[Tensor]


def paged(where: str, cache: PagedCache, kv_layout: str, *, may_be_shared: bool = False) -> tuple[Tensor, Tensor]:
    """``(keys, values)``, 4-D views in ``kv_layout``.

    One tensor has keys at ``[:, 0]`` and values at ``[:, 1]``; a pair, tuple or list, has one tensor each. Without a
    dimension for the tokens of a page (one 4-D tensor, or a pair of 3-D ones) the page size is 1. If the cache
    ``may_be_shared``, one tensor ``[pages, 1, ...]`` of 5 dimensions has keys that are the values.
    """
    if isinstance(cache, Tensor):
        shared = may_be_shared and cache.dim() == 5 and cache.shape[1] == 1
        if cache.dim() not in (4, 5) or (cache.shape[1] != 2 and not shared):
            fail(
                ShapeError,
                where,
                f"the KV cache is one tensor {shape_of(cache)}",
                f"[pages, {'1 or ' if may_be_shared else ''}2, ...] of 5 dimensions, or of 4 for page size 1",
                "pass such a tensor, or the pair (k_cache, v_cache)",
            )
        k, v = cache[:, 0], cache[:, 0 if shared else 1]
    elif isinstance(cache, tuple | list):
        if len(cache) != 2:
            fail(ShapeError, where, f"the KV cache has {len(cache)} parts", "2, keys and values", "pass a pair")
        k, v = cache
    else:
        kind = type(cache).__name__
        fail(
            ArgumentTypeError, where, f"the KV cache is of type {kind}", "a tensor, or a pair of them", "pass the cache"
        )
    return _with_page(k, kv_layout), _with_page(v, kv_layout)


def _with_page(cache: Tensor, kv_layout: str) -> Tensor:
    if cache.dim() != 3:
        return cache
    return cache.unsqueeze(PAGED_DIMS[kv_layout].token)


def paged_sizes(where: str, cache: Tensor, kv_layout: str) -> tuple[int, int]:
    """``(page_size, num_kv_heads)`` of a 4-D cache."""
    if cache.dim() != 4:
        fail(ShapeError, where, f"a KV cache is {shape_of(cache)}", LAYOUTS[kv_layout], "view it in this shape")
    token, head = PAGED_DIMS[kv_layout]
    return cache.shape[token], cache.shape[head]


def latent(where: str, cache: PagedCache, head_dim_ckv: int) -> tuple[Tensor, Tensor]:
    """``(ckv, kpe)`` of an MLA cache, packed ``[pages, page_size, ckv + kpe]`` or a pair.

    A packed cache may have a dimension of size 1 before or after the tokens of a page.
    """
    if not isinstance(cache, Tensor):
        if len(cache) != 2:
            fail(ShapeError, where, f"the MLA cache has {len(cache)} parts", "2, ckv and kpe", "pass a pair")
        return cache[0], cache[1]
    if cache.dim() == 4 and 1 in (cache.shape[1], cache.shape[2]):
        cache = cache.squeeze(1 if cache.shape[1] == 1 else 2)
    if cache.dim() != 3 or cache.shape[2] < head_dim_ckv:
        fail(
            ShapeError,
            where,
            f"the packed MLA cache is {shape_of(cache)}",
            f"[pages, page_size, {int(head_dim_ckv)} + head_dim_kpe]",
            "pass such a tensor, or the pair (ckv_cache, kpe_cache)",
        )
    return cache[..., :head_dim_ckv], cache[..., head_dim_ckv:]


def values_for(k: Tensor, v: Tensor) -> Tensor:
    """``v``, or a copy in the dtype of ``k`` if only the values are FP8: ops take one dtype, and this is exact."""
    return v.to(k.dtype) if v.dtype in FP8 and k.dtype not in FP8 else v


def has_pages_in_a_row(cache: Tensor) -> bool:
    """Whether pages follow each other without gaps."""
    return cache.shape[0] <= 1 or cache.stride(0) == cache.shape[1] * cache.stride(1)


def pages_of_one(where: str, name: str, cache: Tensor, reason: str, fix: str) -> Tensor:
    """``cache [pages, page_size, ...]`` as pages of one token, in the same memory."""
    if cache.shape[1] != 1 and not has_pages_in_a_row(cache):
        expected = f"pages without gaps, of {int(cache.shape[1] * cache.stride(1))}, {reason}"
        fail(ShapeError, where, f"{name} has strides {shape_of(cache.stride())}", expected, fix)
    return cache.flatten(0, 1).unsqueeze(1)
