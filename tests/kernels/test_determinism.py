"""The same bits from run to run, and for a request whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.kernel_calls import CALLS, call, run
from helpers.wrapper_requests import Requests, workspace
from torch import Tensor

import attn_ops

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

RUNS = 20


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = a.reshape(-1), b.reshape(-1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.numel() else a.shape == b.shape


@pytest.mark.parametrize("name", CALLS)
def test_from_run_to_run(name: str) -> None:
    op, kwargs = call(name)
    before = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, kwargs)
    first = [t.clone() for t in run(op, kwargs)]
    for _ in range(RUNS - 1):
        kwargs = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, before)
        for t, expected in zip(run(op, kwargs), first, strict=True):
            assert same_bits(t, expected)


OTHERS = ((), (1,), (2000, 3), (64,) * 40, (9000, 1, 0, 77))
"""KV lengths of the other requests of a batch."""

INVARIANT: list[dict[str, Any]] = [{"disable_split_kv": True}, {"fixed_split_size": 8}]


def decoded(others: tuple[int, ...], length: int, **options: Any) -> tuple[Tensor, Tensor]:
    """The result of a request of ``length`` tokens, which is the last of its batch."""
    alone = Requests(kv_lens=(length,), seed=1)
    r = Requests(kv_lens=(*others, length))
    place_request(r, alone)
    wrapper = attn_ops.BatchDecodeWithPagedKVCacheWrapper(workspace(), r.kv_layout)
    wrapper.plan(*r.table, *r.sizes, q_data_type=r.dtype, **options)
    out, lse = wrapper.run(r.q, r.cache(), return_lse=True)
    return out[-1], lse[-1]


def prefilled(others: tuple[int, ...], length: int, **options: Any) -> tuple[Tensor, Tensor]:
    """The result of 7 new rows of a request of ``length`` tokens, which is the last of its batch."""
    alone = Requests(kv_lens=(length,), qo_lens=(7,), seed=1)
    r = Requests(kv_lens=(*others, length), qo_lens=(*(min(n, 5) for n in others), 7))
    place_request(r, alone)
    wrapper = attn_ops.BatchPrefillWithPagedKVCacheWrapper(workspace(1 << 27), r.kv_layout)
    wrapper.plan(r.qo_indptr, *r.table, *r.sizes, causal=True, q_data_type=r.dtype, **options)
    out, lse = wrapper.run(r.q, r.cache(), return_lse=True)
    return out[-7:], lse[-7:]


def place_request(r: Requests, alone: Requests) -> None:
    """Give the last request of ``r`` the query and the tokens of ``alone``, on pages of its own."""
    r.q[-len(alone.q) :] = alone.q
    pages, source = (t.table[1][t.table[0][-2] : t.table[0][-1]].long() for t in (r, alone))
    for cache, other in zip(r.cache(), alone.cache(), strict=True):
        cache[pages] = other[source]


@pytest.mark.parametrize("options", INVARIANT, ids=str)
@pytest.mark.parametrize("attend", [decoded, prefilled])
@pytest.mark.parametrize("length", [9, 700, 5000])
def test_whatever_the_batch(attend: Any, length: int, options: dict[str, Any]) -> None:
    first = attend((), length, **options)
    for others in OTHERS[1:]:
        for t, expected in zip(attend(others, length, **options), first, strict=True):
            assert same_bits(t, expected), others
