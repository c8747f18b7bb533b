"""Masks of FlashInfer's calls, as the packed custom masks that the ops read (docs/guide/masks.md).

A packed mask has little-endian bits and whole bytes per request. Three forms are converted to it: a custom mask, a tree
mask of draft tokens (speculative decoding), and the items of multi-item scoring.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_ops.errors import (
    CapacityError,
    DTypeError,
    PageTableError,
    ShapeError,
    dtype_name,
    fail,
    shape_of,
)
from attn_ops.frontend.arguments import required
from attn_ops.gpu import is_capturing
from attn_ops.plan.page_table import PageTable, real, seen
from attn_ops.plan.state import PrefillPlan
from attn_ops.symbolic_sizes import holds


def packed_mask(
    where: str,
    custom_mask: Tensor | None,
    packed_custom_mask: Tensor | None,
    qo_len: Tensor,
    kv_len: Tensor,
    device: torch.device,
    exact: bool = True,
) -> Tensor | None:
    """The packed mask, uint8 ``[bytes]``, of a batch with the given host lengths, or None without a mask.

    ``packed_custom_mask`` takes precedence. Unless ``exact``, ``custom_mask`` may be longer than the batch needs.
    """
    bits = qo_len * kv_len
    if packed_custom_mask is not None:
        return _packed(where, packed_custom_mask, device, int(((bits + 7) // 8).sum()))
    if custom_mask is None:
        return None
    if not exact and custom_mask.dim() == 1:
        custom_mask = custom_mask[: int(bits.sum())]
    _check_bools(where, custom_mask, int(bits.sum()))
    return pack(where, custom_mask.to(device), bits)


def packed_mask_by_plan(
    where: str, custom_mask: Tensor | None, packed_custom_mask: Tensor | None, plan: PrefillPlan, device: torch.device
) -> Tensor | None:
    """:func:`packed_mask` for the requests of a plan, whose lengths are not read while tracing or capturing."""
    qo_len, kv_len = plan.qo_indptr.diff(), plan.kv_len
    if real(kv_len) and not (kv_len.is_cuda and is_capturing()):
        return packed_mask(where, custom_mask, packed_custom_mask, qo_len.cpu().long(), kv_len.cpu().long(), device)
    if packed_custom_mask is not None:
        return _packed(where, packed_custom_mask, device)
    if custom_mask is None:
        return None
    _check_bools(where, custom_mask)
    most = (custom_mask.shape[0] + 7) // 8 + kv_len.shape[0]
    return pack(where, custom_mask.to(device), qo_len.long() * kv_len, most)


def packed_single_mask(
    where: str,
    custom_mask: Tensor | None,
    packed_custom_mask: Tensor | None,
    qo_len: int,
    kv_len: int,
    device: torch.device,
) -> Tensor | None:
    """:func:`packed_mask` for one request, whose lengths may be symbolic."""
    if packed_custom_mask is not None:
        return _packed(where, packed_custom_mask, device, (qo_len * kv_len + 7) // 8)
    if custom_mask is None:
        return None
    custom_mask = custom_mask.flatten().contiguous()
    _check_bools(where, custom_mask, qo_len * kv_len)
    return torch.ops.attn.packbits(custom_mask.to(device).bool(), bitorder="little")


def pack(where: str, mask: Tensor, bits: Tensor, size: int | None = None) -> Tensor:
    """``mask [sum(bits)]`` packed by request, in ``size`` bytes; None: the bytes that ``bits``, on the host, need."""
    if mask.shape[0] >= 1 << 31:
        fail(
            CapacityError,
            where,
            f"custom_mask has {mask.shape[0]} elements",
            "fewer than 2^31, which int32 counts",
            "pack it by request, and pass packed_custom_mask",
        )
    if size is None:
        size = int(((bits + 7) // 8).sum())
    indptr, bools = torch.cat((bits.new_zeros(1), bits.cumsum(0))), mask.bool().contiguous()
    return torch.ops.attn.segment_packbits(bools, indptr.to(mask.device, torch.int32), size, bitorder="little")[0]


def _packed(where: str, mask: Tensor, device: torch.device, length: int | None = None) -> Tensor:
    """``packed_custom_mask``, checked, on ``device``."""
    meaning = "a byte for every 8 pairs of query row and key, each request's padded to a whole byte"
    _check(where, "packed_custom_mask", mask, (torch.uint8,), meaning, length)
    return mask.to(device).contiguous()


def _check_bools(where: str, mask: Tensor, length: int | None = None) -> None:
    _check(where, "custom_mask", mask, (torch.bool, torch.uint8), "one for every pair of query row and key", length)


def _check(
    where: str, name: str, mask: Tensor, dtypes: tuple[torch.dtype, ...], meaning: str, length: int | None
) -> None:
    """Raise unless ``mask`` is a vector of one of ``dtypes`` with ``length`` elements, None for any length."""
    if mask.dtype not in dtypes:
        fail(DTypeError, where, f"{name} is {dtype_name(mask.dtype)}", dtype_name(dtypes[0]), "convert it")
    if mask.dim() != 1 or (length is not None and not holds(mask.shape[0] == length)):
        expected = f"{'one dimension' if length is None else shape_of([length])}, {meaning}"
        fail(ShapeError, where, f"{name} is {shape_of(mask)}", expected, "make it of that length")


def most_rows(qo_indptr: Tensor) -> int:
    """Query rows of the longest request; 1, which every mask passes, if ``qo_indptr`` is not on the host."""
    return int(qo_indptr.long().diff().max()) if seen(qo_indptr) and qo_indptr.numel() > 1 else 1


TREE_MASK_DTYPES = (torch.uint16, torch.int16, torch.uint32, torch.int32)


def check_tree_mask(where: str, mask: Tensor, rows: int, q_len: int = 1) -> None:
    """Raise unless ``mask [..., words]`` has a row of at least ``q_len`` bits for each of ``rows`` query rows."""
    if mask.dtype not in TREE_MASK_DTYPES:
        fail(
            DTypeError,
            where,
            f"mask is {dtype_name(mask.dtype)}",
            "uint16 or uint32, whose bits are the draft's tokens",
            "pack it: bit j of a row's words is token j",
        )
    bits = 8 * mask.dtype.itemsize * mask.shape[-1] if mask.dim() else 0
    if mask.dim() < 2 or math.prod(mask.shape[:-1]) != rows or bits < q_len:
        fail(
            ShapeError,
            where,
            f"mask is {shape_of(mask)}, of {int(bits)} bits per row",
            f"[{int(rows)}, words] or [batch, rows of a request, words], with a bit for each row of a request",
            "make it of that shape",
        )


def tree_mask_bits(mask: Tensor, plan: PrefillPlan, capacity: int) -> Tensor:
    """The packed custom mask, uint8, of the planned batch, whose requests have at most ``capacity`` tokens.

    Bit j of row r in ``mask`` says whether query row r sees the j-th of its request's last tokens; every row sees the
    tokens before those. The result is made on the device from the plan's lengths, without synchronisation, and traces.
    """
    device, batch = plan.kv_len.device, plan.kv_len.shape[0]
    words = mask.to(device).contiguous().flatten()  # a contiguous dimension of one word may have any stride
    octets = words.view(torch.uint8).view(-1, mask.shape[-1] * mask.dtype.itemsize)
    rows, columns = octets.shape[0], 8 * octets.shape[1]
    row, column = torch.arange(rows, device=device), torch.arange(columns, device=device)
    indptr, kv_lens = plan.qo_indptr.long(), plan.kv_len.long()
    qo_lens = indptr.diff()
    sizes = (qo_lens * kv_lens + 7) // 8
    # All of indptr, since Inductor of PyTorch 2.11 cannot search a slice on CUDA.
    request = (torch.searchsorted(indptr, row, right=True) - 1).clamp(0, batch - 1)
    qo_len, kv_len = qo_lens[request][:, None], kv_lens[request][:, None]
    token = kv_len - qo_len + column
    first_bit = 8 * (sizes.cumsum(0) - sizes)[request][:, None]
    bit = first_bit + (row - indptr[request])[:, None] * kv_len + token
    seen = (octets[:, column // 8] >> (column % 8)) & 1
    hidden = (seen == 0) & (column < qo_len) & (token >= 0) & (row < indptr[-1])[:, None]
    size = rows * capacity // 8 + batch
    octet = torch.where(hidden, bit // 8, 0).clamp(0, size - 1).flatten()  # in bounds for a malformed qo_indptr too
    lost = (hidden.int() << (bit % 8).int()).flatten()
    return torch.full((size,), 255, dtype=torch.int32, device=device).index_add(0, octet, -lost).to(torch.uint8)


def multi_item_mask(
    where: str,
    prefix_len: Tensor | None,
    token_pos_in_items: Tensor | None,
    token_pos_in_items_len: int,
    table: PageTable,
    page_size: int,
    device: torch.device,
) -> Tensor:
    """bool ``[sum(qo_len * kv_len)]``: the mask of causal items after one prefix, which do not see each other.

    A token sees the prefix and, of its own item, the tokens after the delimiter up to itself. No row sees a delimiter,
    and the row of a delimiter sees only the prefix.

    Args:
        prefix_len: int ``[batch]``, the tokens of each request before its first item.
        token_pos_in_items: int ``[batch * token_pos_in_items_len]``: for each token after the prefix the distance to
            the delimiter before its item, 0 for the delimiter; after the tokens of a request there is padding.
        token_pos_in_items_len: elements of ``token_pos_in_items`` per request; 0 for a single request.
    """
    prefix_len, token_pos_in_items = required(
        where, prefix_len_ptr=prefix_len, token_pos_in_items_ptr=token_pos_in_items
    )
    qo_lens, kv_lens = table.lengths(page_size)
    prefixes = _host_numbers(where, "prefix_len_ptr", prefix_len)
    if prefixes.shape != kv_lens.shape:
        fail(
            ShapeError,
            where,
            f"prefix_len_ptr has length {prefixes.shape[0]}",
            f"{kv_lens.shape[0]}, one per request",
            "correct it",
        )
    places = _host_numbers(where, "token_pos_in_items_ptr", token_pos_in_items)
    stride = token_pos_in_items_len or places.shape[0]
    parts = []
    for b, (rows, tokens, prefix) in enumerate(zip(*(t.tolist() for t in (qo_lens, kv_lens, prefixes)), strict=True)):
        if not 0 <= prefix <= tokens:
            expected = f"0 to {tokens}, the tokens of the request"
            fail(PageTableError, where, f"prefix_len_ptr[{b}] is {prefix}", expected, "correct it")
        place = places[b * stride : (b + 1) * stride]
        if place.shape[0] < tokens - prefix:
            fail(
                ShapeError,
                where,
                f"token_pos_in_items_ptr has {place.shape[0]} tokens of request {b}",
                f"{tokens - prefix}, those after its prefix",
                "correct it, or token_pos_in_items_len",
            )
        parts.append(_visible(rows, tokens, prefix, place.to(device)).flatten())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.bool, device=device)


def _host_numbers(where: str, name: str, t: Tensor) -> Tensor:
    """``t`` of any integer dtype as int64, flat and on the host."""
    if t.is_floating_point() or t.is_complex() or t.dtype == torch.bool:
        fail(DTypeError, where, f"{name} is {dtype_name(t.dtype)}", "an integer dtype", "convert it")
    return t.cpu().long().flatten()


def _visible(rows: int, tokens: int, prefix: int, place: Tensor) -> Tensor:
    """bool ``[rows, tokens]``: the prefix, and the tokens of a row's own item after its delimiter, up to the row."""
    key = torch.arange(tokens, device=place.device)
    position = key.new_tensor(range(tokens - rows, tokens))[:, None]
    padded = torch.cat((place, place.new_zeros(1)))
    delimiter = position - padded[(position - prefix).clamp(0, place.shape[0])]
    return (key <= position) & ((position < prefix) | (key < prefix) | (key > delimiter))
