"""Checks of the arguments of FlashAttention's functions over a KV cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attn_ops.errors import ArgumentError, ShapeError, fail, shape_of, unsupported
from attn_ops.frontend.arguments import ranked, required
from attn_ops.frontend.flash.calls import DENSE, VARLEN
from attn_ops.ops.options import AttentionOptions
from attn_ops.symbolic_sizes import agree, holds


def one_of(where: str, **given: Any) -> tuple[str, Any]:
    """The name and the value of the one argument that is given, of several that exclude each other."""
    found = [(name, value) for name, value in given.items() if value is not None]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        fail(ArgumentError, where, f"{names} are both given", "one of them", "drop one")
    return found[0] if found else (next(iter(given)), None)


def check_tables(where: str, name: str, table: Tensor | None, **by_request: Tensor | None) -> None:
    """Check the ranks of a block table, and of tensors ``[batch]``."""
    if table is not None:
        ranked(where, name, table, "[batch, max_pages_per_sequence]")
    for other, t in by_request.items():
        if t is not None:
            ranked(where, other, t, "[batch]")


def check_requests(
    where: str,
    requests: int,
    k_cache: Tensor,
    table_name: str,
    table: Tensor | None,
    cache_batch_idx: Tensor | None,
    *,
    planned: bool,
) -> None:
    """Raise unless each request has a row of the table or of the dense cache.

    ``planned``: the call has metadata, whose plan knows the rows of a dense cache.
    """
    name, rows_of = (table_name, table) if cache_batch_idx is None else ("cache_batch_idx", cache_batch_idx)
    if rows_of is not None:
        if not holds(rows_of.shape[0] == requests):
            expected = f"{int(requests)}, as q has requests"
            fail(ShapeError, where, f"{name} has {int(rows_of.shape[0])} rows", expected, "correct it")
    elif not planned and not holds(requests <= k_cache.shape[0]):
        fail(
            ShapeError,
            where,
            f"k_cache has {int(k_cache.shape[0])} rows for {int(requests)} requests",
            f"{int(requests)} or more, one per request",
            "pass a larger cache, or the row of each request in cache_batch_idx",
        )


def check_latent(
    where: str, q: Tensor, qv: Tensor | None, caches: tuple[Tensor, Tensor], options: AttentionOptions
) -> None:
    """Check a latent query, if there is one, and its caches."""
    if qv is None:
        return
    if options.window_right >= 0:
        unsupported(
            where,
            f"window_size has a right side of {options.window_right} with qv",
            "MLA has no window on the right; pass causal=True or a right side of -1",
        )
    if not agree(qv.shape[:-1], q.shape[:-1]):
        fail(ShapeError, where, f"qv is {shape_of(qv)}", f"{shape_of(q.shape[:-1])} and head_dim_v, as q", "correct it")
    for name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
        if cache.shape[2] != 1:
            fail(
                ShapeError,
                where,
                f"qv is given and {name} has {int(cache.shape[2])} KV heads",
                "1, the latent that all heads share",
                "pass caches of one head",
            )


def new_tokens(
    where: str,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    requests: int,
) -> tuple[Tensor, Tensor] | None:
    """The tokens to append, ``[appended, num_kv_heads, head_dim]``."""
    if k is None and v is None:
        return None
    k, v = required(where, k=k, v=v)
    required(where, cache_seqlens=cache_seqlens)
    for name, t in (("k", k), ("v", v)):
        ranked(where, name, t, DENSE if cu_seqlens_k_new is None else VARLEN)
        if cu_seqlens_k_new is None and not agree(t.shape[:2], (requests, k.shape[1])):
            expected = f"[{int(requests)}, {int(k.shape[1])}, ...], with the requests of q and the tokens of k"
            fail(ShapeError, where, f"{name} is {shape_of(t)}", expected, "make them agree")
    return (k, v) if cu_seqlens_k_new is not None else (k.flatten(0, 1), v.flatten(0, 1))
