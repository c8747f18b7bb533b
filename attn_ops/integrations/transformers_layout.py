"""How layers of a step read transformers' cache of keys and values, and their plan: made by the first that needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from attn_ops.eager.prepared_call import is_traced
from attn_ops.integrations.transformers_masks import Kind
from attn_ops.integrations.transformers_plans import Caches, Lease, Places, plan

View = Callable[[Tensor, Tensor], Caches]


class Layout(NamedTuple):
    """What layers with caches of equal sizes and strides share in a step.

    caches    the caches as ``flash_attn_with_kvcache`` takes them
    keywords  its arguments that say which keys are visible: lengths, block table, mask and plan
    lease     of the plan
    """

    caches: View
    keywords: dict[str, Any]
    lease: Lease | None = None

    @classmethod
    def of(cls, query: Tensor, caches: Caches, mask: Tensor, kind: Kind, qv: Tensor | None) -> Layout:
        """Of a layer that is passed ``mask``, with bounds of this ``kind``."""
        keywords: dict[str, Any] = {"causal": kind.causal, "window_size": kind.window_size}
        begin, end = mask[:, 0, 0, 0], mask[:, 0, 1, 0]
        keywords["cache_seqlens"] = end - begin if kind.padded else end.contiguous()
        view: View = _dense
        places = None
        if kind.padded or not kind.partial:
            view, room, apart = _token_pages(*caches)
            places = Places(begin if kind.padded else None, room, apart)
        if not is_traced():
            made, lease = plan(query, caches, qv, places, keywords)
            return cls(view, keywords | made, lease)
        if places is not None:  # the compiler finds equal plans
            keywords["block_table"] = places.table(mask.shape[0], mask.device)
        return cls(view, keywords)


def _dense(key: Tensor, value: Tensor) -> Caches:
    return key.transpose(1, 2), value.transpose(1, 2)


def _token_pages(key: Tensor, value: Tensor) -> tuple[View, int, int]:
    """The view of caches as pages of one token, ``[pages, 1, num_kv_heads, head_dim]``, and ``room`` and ``apart`` of
    :class:`Places`."""
    if is_traced():  # the layout of an intermediate is the compiler's
        return _reshaped, key.shape[2], key.shape[2]
    apart = _tokens_apart(key)
    if apart is None or apart != _tokens_apart(value):
        view, room, apart = _token_pages(key.contiguous(), value.contiguous())
        return lambda key, value: view(key.contiguous(), value.contiguous()), room, apart
    # No copy: pages of other heads or requests lie between those of a request.
    room = min(_room(key), _room(value))
    number = (key.shape[0] - 1) * apart + room
    k_form, v_form = (
        ((number, 1, t.shape[1], t.shape[3]), (t.stride(2), t.stride(2), t.stride(1), 1)) for t in (key, value)
    )
    return lambda key, value: (key.as_strided(*k_form), value.as_strided(*v_form)), room, apart


def _reshaped(key: Tensor, value: Tensor) -> Caches:
    k, v = (t.transpose(1, 2).reshape(-1, 1, t.shape[1], t.shape[3]) for t in (key, value))
    return k, v


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
