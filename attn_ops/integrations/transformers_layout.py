"""How layers of a step read transformers' cache of keys and values, and their plan: made by the first that needs it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.eager.prepared_call import is_traced
from attn_ops.flash_attn import get_scheduler_metadata
from attn_ops.integrations.transformers_masks import Kind

WIDTH = 256
"""Tokens that the width of a page table is rounded up to, so that the plans of many steps have one size."""

Caches = tuple[Tensor, Tensor]
"""Keys and values: of transformers ``[batch, num_kv_heads, tokens, head_dim]``."""


class Layout(NamedTuple):
    """What layers with caches of equal sizes and strides share in a step.

    caches    the caches as ``flash_attn_with_kvcache`` takes them
    keywords  its arguments that say which keys are visible: lengths, block table, mask and plan
    """

    caches: Callable[[Tensor, Tensor], Caches]
    keywords: dict[str, Any]

    @classmethod
    def of(cls, query: Tensor, caches: Caches, mask: Tensor, kind: Kind, qv: Tensor | None) -> Layout:
        """Of a layer that is passed ``mask``, with bounds of this ``kind``."""
        if kind.partial and not kind.padded:
            view, pages = _dense, {"cache_seqlens": mask[:, 0, 1, 0].contiguous()}
        else:
            view, apart = _token_pages(*caches)
            pages = _page_table(mask, caches[0].shape[2], apart)
        keywords: dict[str, Any] = {"causal": kind.causal, "window_size": kind.window_size, **pages}
        if not is_traced():  # the compiler finds equal plans
            keywords["scheduler_metadata"] = _plan(query, *caches, qv, keywords)
        return cls(view, keywords)


def _plan(query: Tensor, key: Tensor, value: Tensor, qv: Tensor | None, keywords: dict[str, Any]) -> Any:
    batch, num_heads, rows, head_dim = query.shape
    return get_scheduler_metadata(
        batch,
        rows,
        key.shape[2],
        num_heads,
        key.shape[1],
        head_dim,
        headdim_v=value.shape[3],
        page_size=1 if "block_table" in keywords else None,
        has_qv=qv is not None,
        device=query.device,
        **keywords,
    )


def _page_table(mask: Tensor, capacity: int, apart: int) -> dict[str, Tensor]:
    """Pages of one token from the first key to the last, of requests so many tokens ``apart`` in memory."""
    width = -(-capacity // WIDTH) * WIDTH if mask.is_cuda and not is_traced() else capacity
    begin, end = mask[:, 0].squeeze(-1).unbind(1)
    tokens = torch.arange(width, dtype=torch.int32, device=mask.device) + begin[:, None]
    requests = torch.arange(mask.shape[0], dtype=torch.int32, device=mask.device)[:, None]
    return {"block_table": tokens.clamp(max=capacity - 1) + requests * apart, "cache_seqlens": end - begin}


def _dense(key: Tensor, value: Tensor) -> Caches:
    return key.transpose(1, 2), value.transpose(1, 2)


def _token_pages(key: Tensor, value: Tensor) -> tuple[Callable[[Tensor, Tensor], Caches], int]:
    """The view of caches as pages of one token, ``[pages, 1, num_kv_heads, head_dim]``, and the number of pages from
    one request to the next."""
    if is_traced():  # the layout of an intermediate is the compiler's
        return _reshaped, key.shape[2]
    apart = _tokens_apart(key)
    if apart is None or apart != _tokens_apart(value):
        view, apart = _token_pages(key.contiguous(), value.contiguous())
        return lambda key, value: view(key.contiguous(), value.contiguous()), apart
    # No copy: pages of other heads or requests lie between those of a request.
    number = (key.shape[0] - 1) * apart + key.shape[2]
    forms = (((number, 1, t.shape[1], t.shape[3]), (t.stride(2), t.stride(2), t.stride(1), 1)) for t in (key, value))
    return functools.partial(_strided, *forms), apart


def _reshaped(key: Tensor, value: Tensor) -> Caches:
    k, v = (t.transpose(1, 2).reshape(-1, 1, t.shape[1], t.shape[3]) for t in (key, value))
    return k, v


def _strided(key_form: tuple[Any, Any], value_form: tuple[Any, Any], key: Tensor, value: Tensor) -> Caches:
    return key.as_strided(*key_form), value.as_strided(*value_form)


def _tokens_apart(t: Tensor) -> int | None:
    """Tokens in memory from one request to the next, None if that is no whole number."""
    batch, token = t.stride(0), t.stride(2)
    return batch // token if t.stride(3) == 1 and token > 0 and batch % token == 0 else None


def _room(t: Tensor) -> int:
    """Tokens that each head has memory for: more than those in the view of a cache that grows in place."""
    batch, heads, tokens, head_dim = t.shape
    room = t.stride(1) // t.stride(2)
    last = (batch - 1) * t.stride(0) + (heads - 1) * t.stride(1) + (room - 1) * t.stride(2) + head_dim
    in_storage = (t.storage_offset() + last) * t.itemsize <= t.untyped_storage().nbytes()
    return room if room > tokens and in_storage else tokens
