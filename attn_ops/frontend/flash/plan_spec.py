"""Plan specs of FlashAttention's calls, and of the metadata that is made for them.

The two must be equal, except for a float32 query over an FP8 cache: metadata knows only the dtype of the cache.
"""

from __future__ import annotations

from torch import Tensor

from attn_ops.frontend.plan_spec import paged_spec
from attn_ops.ops.options import AttentionOptions
from attn_ops.plan.spec import PlanSpec
from attn_ops.symbolic_sizes import guard_or_false


def runs_decode(seqlen_q: int | None, has_qv: bool, chunk: int) -> bool:
    """Whether a call runs ``batch_decode``: one row of each request, None for rows by ``cu_seqlens_q``."""
    return seqlen_q is not None and not has_qv and not chunk and guard_or_false(seqlen_q == 1)


def cache_spec(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, options: AttentionOptions, *, decode: bool
) -> PlanSpec:
    """:func:`paged_spec` of caches ``[pages, page_size, num_kv_heads, head_dim]``."""
    heads, head_dims = (q.shape[-2], k.shape[-2]), (q.shape[-1] + (0 if qv is None else qv.shape[-1]), v.shape[-1])
    return paged_spec(k.shape[1], heads, head_dims, (q.dtype, k.dtype), options, decode=decode)
