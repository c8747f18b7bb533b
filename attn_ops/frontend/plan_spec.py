"""Plan specs from the arguments of plan(), and from tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_ops.argument_checks import integers
from attn_ops.errors import ArgumentError, OptionError, fail
from attn_ops.frontend.arguments import computed_dtype, positive, renamed, required
from attn_ops.ops.options import FP8, AttentionOptions
from attn_ops.ops.unsupported import is_plain_prefill, needs_general_decode
from attn_ops.plan.spec import PlanSpec


def prefill_spec(
    where: str,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int | None,
    head_dim_qk: int | None,
    head_dim_vo: Any = None,
    page_size: int | None = 1,
    before_mask: str = "page_size",
) -> PlanSpec:
    """The spec of a prefill. ``head_dim`` is an alias of ``head_dim_qk``; ragged KV has ``page_size`` 1.

    ``before_mask``: the argument that a mask followed by position in earlier releases of FlashInfer, for the message.
    """
    dim = renamed(where, "head_dim", head_dim, "head_dim_qk", head_dim_qk)
    dim, page_size = required(where, head_dim_qk=dim, page_size=page_size)
    if isinstance(head_dim_vo, Tensor):
        fail(ArgumentError, where, "head_dim_vo is a tensor", "an integer", f"pass what follows {before_mask} by name")
    positive(where, page_size=page_size)
    return PlanSpec(
        decode=False,
        paged=True,
        page_size=page_size,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=dim,
        head_dim_vo=dim if head_dim_vo is None else head_dim_vo,
    )


def paged_spec(
    page_size: int,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    options: AttentionOptions,
    *,
    decode: bool,
) -> PlanSpec:
    """The spec of calls over a paged cache. A decoded row has no keys after it.

    Args:
        heads: query heads and KV heads.
        head_dims: of keys, both parts of MLA together, and of values.
        dtypes: of the query, or of the cache where that of the query is not known, and of the cache.
        options: those of the calls, of which windows, ``causal`` and the positional encoding count.
    """
    q_dtype, kv_dtype = dtypes
    dtype, encoding = computed_dtype(q_dtype, kv_dtype), options.pos_encoding
    general = needs_general_decode(dtype, kv_dtype, encoding, head_dims[1])
    return PlanSpec(
        decode=decode,
        paged=True,
        page_size=page_size,
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim_qk=head_dims[0],
        head_dim_vo=head_dims[1],
        window_left=options.window_left,
        causal=options.causal and not decode,
        window_right=-1 if decode else options.window_right,
        plain=is_plain_prefill(dtype, kv_dtype, encoding, options.mask is not None),
        general_decode=decode and general,
        fp8_decode=decode and kv_dtype in FP8,
    )


def ragged_spec(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> PlanSpec:
    """The spec of ragged or dense tensors ``[..., heads, head_dim]``."""
    return PlanSpec(
        decode=False,
        paged=False,
        page_size=1,
        num_qo_heads=q.shape[-2],
        num_kv_heads=k.shape[-2],
        head_dim_qk=q.shape[-1],
        head_dim_vo=v.shape[-1],
        window_left=options.window_left,
        causal=options.causal,
        window_right=options.window_right,
        plain=is_plain_prefill(q.dtype, k.dtype, options.pos_encoding, options.mask is not None),
    )


def splitting(where: str, fixed_split_size: int | None, disable_split_kv: bool) -> dict[str, Any]:
    """``unsplit`` and ``fixed_split_size`` of a spec; -1 means None, and ``disable_split_kv`` takes precedence."""
    size = None if fixed_split_size == -1 else fixed_split_size
    if size is not None:
        integers(where, fixed_split_size=size)
        if size < 1:
            fail(OptionError, where, f"fixed_split_size is {size}", "1 page or more, or None", "change it")
        positive(where, fixed_split_size=size)
    return {"unsplit": disable_split_kv, "fixed_split_size": None if disable_split_kv else size}
