"""Plan specs of FlashAttention's calls, and of the metadata that is made for them.

The two must be equal, except for a float32 query over an FP8 cache: metadata knows the dtype of the cache alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.frontend.arguments import computed_dtype
from attn_ops.frontend.flash.arguments import Window
from attn_ops.ops.options import FP8, AttentionOptions
from attn_ops.ops.unsupported import needs_general_decode
from attn_ops.plan.resizable import PlanSpec


def runs_decode(seqlen_q: int | None, has_qv: bool, chunk: int) -> bool:
    """Whether a call runs ``batch_decode``: one row of each request, None for rows by ``cu_seqlens_q``."""
    if seqlen_q is None or has_qv or chunk:
        return False
    if seqlen_q == 1:  # noqa: SIM103  a branch: a condition on traced sizes is no bool
        return True
    return False


def spec_of_sizes(
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    page_size: int,
    window: Window | AttentionOptions,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    decode: bool,
) -> PlanSpec:
    """The spec of calls over a KV cache. A decoded row has no keys after it.

    Args:
        heads: query heads and KV heads.
        head_dims: of keys, both parts of MLA together, and of values.
        q_dtype: dtype of the query; that of the cache if it is not known.
        kv_dtype: dtype of the cache.
    """
    general = needs_general_decode(computed_dtype(q_dtype, kv_dtype), kv_dtype, "NONE", head_dims[1])
    return PlanSpec(
        decode=decode,
        paged=True,
        page_size=page_size,
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim_qk=head_dims[0],
        head_dim_vo=head_dims[1],
        window_left=window.window_left,
        causal=window.causal and not decode,
        window_right=-1 if decode else window.window_right,
        general_decode=decode and general,
        fp8_decode=decode and kv_dtype in FP8,
    )


def cache_spec(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, options: AttentionOptions, *, decode: bool
) -> PlanSpec:
    """:func:`spec_of_sizes` of caches ``[pages, page_size, num_kv_heads, head_dim]``."""
    head_dims = q.shape[-1] + (0 if qv is None else qv.shape[-1]), v.shape[-1]
    return spec_of_sizes((q.shape[-2], k.shape[-2]), head_dims, k.shape[1], options, q.dtype, k.dtype, decode=decode)
