"""Random valid appends of tokens to caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from helpers.fuzz.batch import Batch, Shape
from helpers.fuzz.draw import Call, Draw, tensors_of

ops = torch.ops.attn


def append_kv(d: Draw) -> Call:
    return append_call(d, "append_kv")


def append_mla_kv(d: Draw) -> Call:
    return append_call(d, "append_mla_kv")


def append_call(d: Draw, op: str, call: Callable[..., Any] | None = None) -> Call:
    """An append of tokens at random places, some of which are skipped. The caches must hold these tokens after it."""
    mla = op == "append_mla_kv"
    shape = Shape.draw(d, mla=mla)
    batch = Batch(d, shape, longest=d.by_size(20, 100, 500))
    names = ("ckv", "kpe", "ckv_cache", "kpe_cache") if mla else ("k", "v", "k_cache", "v_cache")
    indptr, indices, last = batch.page_table(wide=False)
    capacity = [len(mine) * shape.page_size for mine in batch.pages]
    taken: set[int] = set()
    places: list[tuple[int, int]] = []
    for _ in range(d.integer(0, 12)):
        b = d.integer(-1, len(capacity) - 1)
        position = d.integer(0, capacity[b] + (3 if call is None else -1)) if b >= 0 and capacity[b] else 0
        skipped = b < 0 or position >= capacity[b]
        if skipped and b >= 0 and call is not None:
            b = -1  # public functions are given tokens that have a page
        at = (
            -1
            if skipped
            else batch.pages[b][position // shape.page_size] * shape.page_size + (position % shape.page_size)
        )
        if at < 0 or at not in taken:  # two tokens at one place would race
            taken.add(at)
            places.append((b, position))
    heads, (dim, dim_vo) = shape.heads[1], shape.dims
    if mla:
        tokens = [d.normal(len(places), n).to(shape.kv_dtype) for n in (dim_vo, dim - dim_vo)]
        whole = batch.both[0][:, :, 0].float()
        caches = [d.place(part.to(shape.kv_dtype)) for part in (whole[..., :dim_vo], whole[..., dim_vo:])]
    else:
        tokens = [d.normal(len(places), heads, n).to(shape.kv_dtype) for n in (dim, dim_vo)]
        caches = list(batch.caches())
    given = [d.place(t) for t in tokens]
    before = [cache.clone() for cache in caches]

    def fill(cache: Tensor, new: Tensor) -> Tensor:
        expected = cache.clone()
        nhd = expected.transpose(1, 2) if shape.kv_layout == "HND" and not mla else expected
        for (b, position), token in zip(places, new, strict=True):
            if b >= 0 and position < capacity[b]:
                nhd[batch.pages[b][position // shape.page_size], position % shape.page_size] = token.to(d.device)
        return expected

    after = [fill(cache, new) for cache, new in zip(caches, tokens, strict=True)]
    columns = [torch.tensor([p[i] for p in places], dtype=torch.int32, device=d.device) for i in (0, 1)]
    arguments: dict[str, Any] = {
        **dict(zip(names, (*given, *caches), strict=True)),
        "batch_indices": columns[0],
        "positions": columns[1],
        "kv_indices": indices,
        "kv_indptr": indptr,
    }
    if not mla:
        arguments["kv_layout"] = shape.kv_layout

    def run() -> Any:
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)
        if call is not None:
            return call(arguments, last)
        return getattr(ops, op)(**arguments, backend=d.backend)

    def check(_: Any) -> None:
        for cache, expected in zip(caches, after, strict=True):
            assert torch.equal(cache.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))

    reads = [*tensors_of(arguments), last]
    return Call(op, f"{batch}, {places}", run, check, reads, caches, traceable=call is None)
