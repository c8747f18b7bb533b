"""With splits of a fixed size, or without splits, a request has the same bits alone and in any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.wrapper_requests import DEVICE, Requests, workspace
from torch import Tensor

import attn_ops

SPLITS: list[dict[str, Any]] = [{"fixed_split_size": 32}, {"fixed_split_size": 8}, {"disable_split_kv": True}]
LENGTH, ROWS = 5000, 3
BATCHES = ((LENGTH,), (70, LENGTH, 0, 2100), (900,) * 40 + (LENGTH,))
"""KV lengths of batches with the request of ``LENGTH`` tokens that is compared."""


def _batch(lengths: tuple[int, ...], rows: int) -> tuple[Requests, int, Tensor, Tensor]:
    """A batch, the first query row of the compared request, all queries, and the cache with that request's tokens."""
    r = Requests(lengths, (rows,) * len(lengths), heads=(8, 2), head_dims=(128, 128), dtype=torch.bfloat16)
    place = lengths.index(LENGTH)
    generator = torch.Generator().manual_seed(1)
    cache, q = r.cache("tensor").clone(), r.q.clone()
    pages = r.table[1][r.table[0][place] : r.table[0][place + 1]].long()
    cache[pages] = torch.randn(len(pages), *cache.shape[1:], generator=generator).to(DEVICE, cache.dtype)
    q[place * rows : (place + 1) * rows] = torch.randn(rows, 8, 128, generator=generator).to(DEVICE, q.dtype)
    return r, place * rows, q, cache


@pytest.mark.gpu
@pytest.mark.parametrize("split", [SPLITS[0], SPLITS[2]], ids=str)
@pytest.mark.parametrize("kind", ["decode", "decode of rows", "prefill", "long prefill"])
def test_a_request_in_any_place_of_a_batch(kind: str, split: dict[str, Any]) -> None:
    rows = {"decode": 1, "decode of rows": ROWS, "prefill": ROWS, "long prefill": 300}[kind]
    results = []
    for lengths in BATCHES:
        r, first, q, cache = _batch(lengths, rows)
        if kind.startswith("decode"):
            wrapper: Any = attn_ops.BatchDecodeWithPagedKVCacheWrapper(workspace(1 << 28))
            wrapper.plan(*r.table, *r.sizes, data_type=torch.bfloat16, q_len_per_req=rows, **split)
        else:
            wrapper = attn_ops.BatchPrefillWithPagedKVCacheWrapper(workspace(1 << 29))
            wrapper.plan(r.qo_indptr, *r.table, *r.sizes, data_type=torch.bfloat16, causal=True, **split)
        out, lse = wrapper.run(q, cache, return_lse=True)
        results.append((out[first : first + rows], lse[first : first + rows]))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


OTHERS = ((), (1,), (2000, 3), (64,) * 40, (9000, 1, 0, 77))
"""KV lengths of the requests before the one that is compared."""

Attend = Callable[..., tuple[Tensor, Tensor]]


def _place_last(r: Requests, alone: Requests) -> None:
    """Give the last request of ``r`` the query and the tokens of ``alone``, on the pages that it has there."""
    r.q[-len(alone.q) :] = alone.q
    pages, source = (t.table[1][t.table[0][-2] : t.table[0][-1]].long() for t in (r, alone))
    for cache, other in zip(r.cache(), alone.cache(), strict=True):
        cache[pages] = other[source]


def decode(others: tuple[int, ...], length: int, **options: Any) -> tuple[Tensor, Tensor]:
    """The result of a request of ``length`` tokens, the last of its batch."""
    r = Requests(kv_lens=(*others, length))
    _place_last(r, Requests(kv_lens=(length,), seed=1))
    wrapper = attn_ops.BatchDecodeWithPagedKVCacheWrapper(workspace(), r.kv_layout)
    wrapper.plan(*r.table, *r.sizes, q_data_type=r.dtype, **options)
    out, lse = wrapper.run(r.q, r.cache(), return_lse=True)
    return out[-1], lse[-1]


def prefill(others: tuple[int, ...], length: int, **options: Any) -> tuple[Tensor, Tensor]:
    """The result of 7 query rows of a request of ``length`` tokens, the last of its batch."""
    r = Requests(kv_lens=(*others, length), qo_lens=(*(min(n, 5) for n in others), 7))
    _place_last(r, Requests(kv_lens=(length,), qo_lens=(7,), seed=1))
    wrapper = attn_ops.BatchPrefillWithPagedKVCacheWrapper(workspace(1 << 27), r.kv_layout)
    wrapper.plan(r.qo_indptr, *r.table, *r.sizes, causal=True, q_data_type=r.dtype, **options)
    out, lse = wrapper.run(r.q, r.cache(), return_lse=True)
    return out[-7:], lse[-7:]


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("split", SPLITS[1:], ids=str)
@pytest.mark.parametrize("attend", [decode, prefill])
@pytest.mark.parametrize("length", [9, 700, 5000])
def test_a_request_behind_any_others(attend: Attend, length: int, split: dict[str, Any]) -> None:
    first = attend((), length, **split)
    for others in OTHERS[1:]:
        for t, expected in zip(attend(others, length, **split), first, strict=True):
            assert torch.equal(t.view(torch.uint8), expected.view(torch.uint8)), others


@pytest.mark.interpreter
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_interpreted_decode_with_splits_of_a_fixed_size() -> None:
    """A request of 30 pages alone on two CTAs, as the second of four, and as the only one on one CTA."""
    from attn_ops.kernels.triton import batch_decode, plan_decode

    generator = torch.Generator().manual_seed(0)
    q, cache = torch.randn(4, 4, 32, generator=generator), torch.randn(2, 80, 16, 2, 32, generator=generator)
    tables = [(0, 30, 31, 31, 50), (0, 2, 32), (0, 30)]
    places = [(0, range(50)), (1, (60, 61, *range(30))), (0, range(30))]
    results = []
    for indptr, (row, pages), ctas in zip(tables, places, (2, 7, 1), strict=True):
        batch = len(indptr) - 1
        planner = attn_ops.DecodePlanner(
            batch, 64, page_size=16, num_qo_heads=4, num_kv_heads=2, head_dim=32, num_ctas=ctas, fixed_split_size=8
        )
        last = torch.tensor([9] * batch).int()
        plan_decode(torch.tensor(indptr).int(), torch.tensor(pages).int(), last, list(planner.state))
        rows = q[:1].expand(batch, -1, -1).contiguous()
        out, lse = batch_decode(rows, *cache, list(planner.state), planner.workspace, return_lse=True)
        results.append((out[row], lse[row]))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
