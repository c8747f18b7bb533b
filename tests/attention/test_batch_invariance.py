"""With splits of a fixed size, or none, a request gives the same bits alone and in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.wrapper_requests import DEVICE, Requests, workspace
from torch import Tensor

import attn_ops as flashinfer

pytestmark = pytest.mark.gpu

LENGTH, ROWS = 5000, 3
BATCHES = ((LENGTH,), (70, LENGTH, 0, 2100), (900,) * 40 + (LENGTH,))
"""The request that is compared has ``LENGTH`` tokens and the same pages in each."""
SPLITS: list[dict[str, Any]] = [{"fixed_split_size": 32}, {"disable_split_kv": True}]


def batch(lengths: tuple[int, ...], rows: int) -> tuple[Requests, int, Tensor, Tensor]:
    """The batch, the row where the request begins, its query and the cache, in which its tokens are the same."""
    r = Requests(lengths, (rows,) * len(lengths), heads=(8, 2), head_dims=(128, 128), dtype=torch.bfloat16)
    place = lengths.index(LENGTH)
    generator = torch.Generator().manual_seed(1)
    cache, q = r.cache("tensor").clone(), r.q.clone()
    pages = r.table[1][r.table[0][place] : r.table[0][place + 1]].long()
    cache[pages] = torch.randn(len(pages), *cache.shape[1:], generator=generator).to(DEVICE, cache.dtype)
    q[place * rows : (place + 1) * rows] = torch.randn(rows, 8, 128, generator=generator).to(DEVICE, q.dtype)
    return r, place * rows, q, cache


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("kind", ["decode", "rows", "prefill", "long prefill"])
def test_bits_do_not_depend_on_the_batch(kind: str, split: dict[str, Any]) -> None:
    rows = {"decode": 1, "rows": ROWS, "prefill": ROWS, "long prefill": 300}[kind]
    results = []
    for lengths in BATCHES:
        r, first, q, cache = batch(lengths, rows)
        if kind in ("decode", "rows"):
            wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(1 << 28))
            wrapper.plan(*r.table, *r.sizes, data_type=torch.bfloat16, q_len_per_req=rows, **split)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(1 << 29))
            wrapper.plan(r.qo_indptr, *r.table, *r.sizes, data_type=torch.bfloat16, causal=True, **split)
        out, lse = wrapper.run(q, cache, return_lse=True)
        results.append((out[first : first + rows], lse[first : first + rows]))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("seed", range(20))
def test_device_plans_are_those_of_the_reference(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    count, page_size = draw(1, 7, 300), draw(1, 3, 16, 64)
    pages = torch.randint(0, draw(2, 40, 400), (count,), generator=generator)
    last = torch.randint(1, page_size + 1, (count,), generator=generator).int()
    rows = torch.randint(0, draw(2, 100), (count,), generator=generator)
    kv_indptr, qo_indptr = (torch.cat((n.new_zeros(1), n.cumsum(0))).int() for n in (pages, rows))
    indices, total = torch.arange(int(pages.sum()) + 1).int(), int(rows.sum()) + 1
    more = {
        "page_size": page_size,
        "window_left": draw(-1, 0, 500),
        "fixed_split_size": draw(1, 4, 100),
        **{"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 8},
    }
    room, causal = draw(0, 10, 1000, None), draw(False, True)
    for kind, table in (("decode", ()), ("prefill", (qo_indptr,))):
        plans = []
        for backend, device in (("reference", "cpu"), ("triton", DEVICE)):
            planner: Any
            if kind == "decode":
                planner = flashinfer.DecodePlanner(count, len(indices), num_ctas=66, device=device, **more)
            else:
                own = {"num_ctas": room, "causal": causal, "tile_rows": 16, "device": device}
                planner = flashinfer.PrefillPlanner(count, total, len(indices), **own, **more)
            for t in planner.state:
                t.fill_(7)
            inputs = (t.to(device) for t in (*table, kv_indptr, indices, last))
            getattr(torch.ops.attn, f"plan_{kind}")(*inputs, planner.state, backend=backend)
            plans.append(planner.state)
        for name, expected, actual in zip(plans[0]._fields, *plans, strict=True):
            assert torch.equal(expected, actual.cpu()), (kind, name)
