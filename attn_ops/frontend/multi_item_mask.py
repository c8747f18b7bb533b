"""Multi-item scoring: items behind one prefix, each causal and none seeing another (docs/guide/masks.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.errors import ArgumentError, ShapeError
from attn_ops.frontend.arguments import fail, required
from attn_ops.plan.page_table import PageTable


def scoring_mask(
    where: str,
    prefix_len: Tensor | None,
    token_pos_in_items: Tensor | None,
    token_pos_in_items_len: int,
    masks: tuple[Tensor | None, Tensor | None],
    tables: PageTable,
    page_size: int,
    device: torch.device,
) -> Tensor | None:
    """bool ``[sum(qo_len * kv_len)]`` of a batch of items, or the first of ``masks``, other masks, without items.

    Args:
        prefix_len: int ``[batch]``, the tokens of each request before its first item.
        token_pos_in_items: int ``[batch * token_pos_in_items_len]``: for each token behind the prefix its distance from
            the delimiter before its item, 0 for the delimiter; what is left of a request's part is padding.
        token_pos_in_items_len: 0 for one request.
    """
    if prefix_len is None and token_pos_in_items is None:
        return masks[0]
    required(where, prefix_len_ptr=prefix_len, token_pos_in_items_ptr=token_pos_in_items)
    assert prefix_len is not None
    assert token_pos_in_items is not None
    if any(mask is not None for mask in masks):
        fail(ArgumentError, where, "items and a mask are both given", "one of them", "drop one")
    qo_lens, kv_lens = tables.lengths(page_size)
    prefixes = prefix_len.cpu().long().flatten()
    if prefixes.shape != kv_lens.shape:
        fail(
            ShapeError,
            where,
            f"prefix_len_ptr has length {prefixes.shape[0]}",
            f"{kv_lens.shape[0]}, one a request",
            "correct it",
        )
    places = token_pos_in_items.cpu().long().flatten()
    stride = token_pos_in_items_len or places.shape[0]
    parts = []
    for b, (rows, tokens, prefix) in enumerate(zip(*(t.tolist() for t in (qo_lens, kv_lens, prefixes)), strict=True)):
        place = places[b * stride : (b + 1) * stride]
        if place.shape[0] < tokens - prefix:
            fail(
                ShapeError,
                where,
                f"token_pos_in_items_ptr has {place.shape[0]} tokens of request {b}",
                f"{tokens - prefix}, those behind its prefix",
                "correct it, or token_pos_in_items_len",
            )
        parts.append(_visible(rows, tokens, prefix, place.to(device)).flatten())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool, device=device)


def _visible(rows: int, tokens: int, prefix: int, place: Tensor) -> Tensor:
    """bool ``[rows, tokens]``: the prefix, and of a row's own item what lies between its delimiter and itself."""
    key = torch.arange(tokens, device=place.device)
    position = key.new_tensor(range(tokens - rows, tokens))[:, None]
    padded = torch.cat((place, place.new_zeros(1)))
    delimiter = position - padded[(position - prefix).clamp(0, place.shape[0])]
    return (key <= position) & ((position < prefix) | (key < prefix) | (key > delimiter))
