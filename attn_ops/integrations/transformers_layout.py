"""How layers of a step read transformers' cache of keys and values, and their plan: made by the first that needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from attn_ops.eager.interposition import is_traced
from attn_ops.flash_attn import flash_attn_with_kvcache
from attn_ops.integrations.transformers_masks import Kind
from attn_ops.integrations.transformers_plans import Caches, Lease, Places, plan

View = Callable[[Tensor, Tensor], Caches]


class Layout(NamedTuple):
    """What layers with caches of equal sizes and strides share in a step.

    caches    makes of keys and values the caches that ``flash_attn_with_kvcache`` takes
    keywords  its arguments that say which keys are visible: lengths, block table, mask and plan
    by_head   each KV head of a request is a request of its own, with its query heads
    lease     of the plan
    """

    caches: View
    keywords: dict[str, Any]
    by_head: bool = False
    lease: Lease | None = None

    @classmethod
    def of(cls, query: Tensor, caches: Caches, mask: Tensor, kind: Kind, options: dict[str, Any]) -> Layout:
        """The layout of a layer that is passed ``mask``, with bounds of this ``kind``."""
        qv = options.get("qv")
        shares_heads = qv is not None or options["s_aux"] is not None
        keywords: dict[str, Any] = {"causal": kind.causal, "window_size": kind.window_size}
        begin, end = mask[:, 0, 0].unbind(1)
        if is_traced() and (kind.padded or not kind.partial):
            return cls._traced(query, caches, begin, end, keywords, shares_heads)
        keywords["cache_seqlens"] = end - begin if kind.padded else end.contiguous()
        if is_traced():  # the compiler finds equal plans
            return cls(_dense, keywords)
        view: View = _dense
        places = None
        # A kernel for CUDA is compiled for the page size, which is that of the cache if its requests are pages.
        any_size = query.is_cuda and query.shape[2] == 1 and qv is None
        if kind.padded or not kind.partial or any_size:
            view, capacity, request_stride = _token_pages(*caches)
            places = Places(begin if kind.padded else None, capacity, request_stride)
        made, lease = plan(query, caches, qv, places, keywords)
        return cls(view, keywords | made, False, lease)

    @classmethod
    def _traced(
        cls,
        query: Tensor,
        caches: Caches,
        begin: Tensor,
        end: Tensor,
        keywords: dict[str, Any],
        shares_heads: bool,
    ) -> Layout:
        """Pages of one token, by views that copy nothing, whatever layout the compiler gives an intermediate: those of
        one head. With several rows, or sinks, which belong to all heads, pages are copied."""
        batch, num_kv_heads, tokens, _ = caches[0].shape
        by_head = query.shape[2] == 1 and num_kv_heads > 1 and not shares_heads
        if by_head:
            batch, begin, end = (batch * num_kv_heads, *(t.repeat_interleave(num_kv_heads) for t in (begin, end)))
        keywords["cache_seqlens"] = end - begin
        keywords["block_table"] = Places(begin, tokens, tokens).table(batch, query.device)
        return cls(_pages_of_heads if by_head else _reshaped, keywords, by_head)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """``[batch, rows, num_heads, head_dim]``"""
        k, v = self.caches(key, value)
        if not self.by_head:
            out: Tensor = flash_attn_with_kvcache(query.transpose(1, 2), k, v, **self.keywords, **options)
            return out
        batch, num_heads, _, head_dim = query.shape
        q = query.reshape(batch * key.shape[1], 1, num_heads // key.shape[1], head_dim)
        out = flash_attn_with_kvcache(q, k, v, **self.keywords, **options)
        return out.reshape(batch, 1, num_heads, out.shape[-1])


def _dense(key: Tensor, value: Tensor) -> Caches:
    return key.transpose(1, 2), value.transpose(1, 2)


def _token_pages(key: Tensor, value: Tensor) -> tuple[View, int, int]:
    """The view of caches as pages of one token, ``[pages, 1, num_kv_heads, head_dim]``.

    With it ``capacity`` and ``request_stride`` of :class:`Places`.
    """
    request_stride = _request_stride(key)
    if request_stride is None or request_stride != _request_stride(value):
        view, capacity, request_stride = _token_pages(_contiguous(key), _contiguous(value))
        return lambda key, value: view(_contiguous(key), _contiguous(value)), capacity, request_stride
    # No copy: pages of other heads or requests lie between those of a request.
    capacity = min(_capacity(key), _capacity(value))
    number = (key.shape[0] - 1) * request_stride + capacity
    k_form, v_form = (
        ((number, 1, t.shape[1], t.shape[3]), (t.stride(2), t.stride(2), t.stride(1), 1)) for t in (key, value)
    )
    return lambda key, value: (key.as_strided(*k_form), value.as_strided(*v_form)), capacity, request_stride


def _contiguous(t: Tensor) -> Tensor:
    """``t`` in contiguous memory, with the strides of it also in dimensions of size 1."""
    return t.contiguous().view(-1).view(t.shape)


def _pages_of_heads(key: Tensor, value: Tensor) -> Caches:
    return key.reshape(-1, 1, 1, key.shape[3]), value.reshape(-1, 1, 1, value.shape[3])


def _reshaped(key: Tensor, value: Tensor) -> Caches:
    k, v = (t.transpose(1, 2).reshape(-1, 1, t.shape[1], t.shape[3]) for t in (key, value))
    return k, v


def _request_stride(t: Tensor) -> int | None:
    """Tokens in memory from one request to the next, None if that is no whole number."""
    batch, token = t.stride(0), t.stride(2)
    return batch // token if t.stride(3) == 1 and token > 0 and batch % token == 0 else None


def _capacity(t: Tensor) -> int:
    """Tokens that each head has memory for: more than those in the view of a cache that grows in place."""
    batch, heads, tokens, head_dim = t.shape
    capacity = t.stride(1) // t.stride(2)
    last = (batch - 1) * t.stride(0) + (heads - 1) * t.stride(1) + (capacity - 1) * t.stride(2) + head_dim
    in_storage = (t.storage_offset() + last) * t.itemsize <= t.untyped_storage().nbytes()
    return capacity if capacity > tokens and in_storage else tokens
