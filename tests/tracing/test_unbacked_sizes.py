"""Graphs that know no size: ``mark_unbacked``, as engines that must not recompile use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked

import attn_ops
from attn_ops.flash_attn import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

BATCH, HEADS, KV_HEADS, DIM, PAGE = 3, 4, 2, 16, 4
E4M3 = torch.float8_e4m3fn

Q = torch.randn(BATCH, 1, HEADS, DIM)
K_CACHE, V_CACHE = torch.randn(2, 24, PAGE, KV_HEADS, DIM).unbind()
TABLE, LENS = torch.arange(24, dtype=torch.int32).view(BATCH, 8), torch.tensor([5, 9, 20], dtype=torch.int32)
CACHE = Q, K_CACHE, V_CACHE, LENS, TABLE
FP8_CACHE = Q.bfloat16(), K_CACHE.to(E4M3), V_CACHE.to(E4M3), LENS, TABLE
OF_REQUESTS = (0, 3, 4)
ROWS, KEYS = torch.randn(8, HEADS, DIM), torch.randn(8, KV_HEADS, DIM)
CU = torch.tensor([0, 2, 3, 8], dtype=torch.int32)
DENSE = torch.randn(BATCH, 9, HEADS, DIM), *torch.randn(2, BATCH, 9, KV_HEADS, DIM).unbind()


def kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, lens: Tensor, table: Tensor, **options: Any) -> Any:
    return flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, block_table=table, **options)


def one_scale(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor) -> Any:
    scale = torch.tensor(1.5).expand(q.shape[0], KV_HEADS)
    return kvcache(q, k, v, lens, table, k_descale=scale, v_descale=scale)


def scale_of_request(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor) -> Any:
    scale = lens[:, None].float().expand(-1, KV_HEADS) / 10
    return kvcache(q, k, v, lens, table, k_descale=scale, v_descale=scale)


def chunks_of_pages(*batch: Tensor) -> Any:
    return kvcache(*batch, attention_chunk=8)


def several_rows(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor) -> Any:
    return kvcache(q.transpose(0, 1), k, v, lens[:1], table[:1], causal=True)


def append(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor, new: Tensor) -> Any:
    return kvcache(q, k.clone(), v.clone(), lens, table, k=new, v=new, causal=True)


def metadata_in_the_graph(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor) -> Any:
    sizes = q.shape[0], 1, 32, HEADS, KV_HEADS, DIM
    made = get_scheduler_metadata(*sizes, lens, page_size=PAGE, block_table=table)
    return kvcache(q, k, v, lens, table, scheduler_metadata=made)


def varlen(q: Tensor, k: Tensor, cu: Tensor, **options: Any) -> Any:
    return flash_attn_varlen_func(q, k, k, cu, cu, causal=True, **options)


def with_out(q: Tensor, k: Tensor, cu: Tensor, out: Tensor) -> Any:
    return varlen(q, k, cu, out=out)


def chunks(q: Tensor, k: Tensor, cu: Tensor) -> Any:
    return varlen(q, k, cu, attention_chunk=2)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return flash_attn_func(q, k, v, causal=True)


def masked(q: Tensor, k: Tensor, mask: Tensor) -> Any:
    return attn_ops.single_prefill_with_kv_cache(q, k, k, custom_mask=mask)


PARTIAL = torch.randn(2, 8, HEADS, DIM), torch.randn(2, 8, HEADS)
MASK = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.7

CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], tuple[int, ...]]] = {
    "cache": (kvcache, CACHE, OF_REQUESTS),
    "one FP8 scale": (one_scale, FP8_CACHE, OF_REQUESTS),
    "an FP8 scale of each request": (scale_of_request, FP8_CACHE, OF_REQUESTS),
    "chunks of pages": (chunks_of_pages, CACHE, OF_REQUESTS),
    "query rows of a request": (several_rows, CACHE, (0,)),
    "append": (append, (*CACHE, torch.randn(BATCH, 1, KV_HEADS, DIM)), (*OF_REQUESTS, 5)),
    "metadata in the graph": (metadata_in_the_graph, CACHE, OF_REQUESTS),
    "varlen": (varlen, (ROWS, KEYS, CU), (0, 1, 2)),
    "an output buffer": (with_out, (ROWS, KEYS, CU, torch.empty_like(ROWS)), (0, 3)),
    "chunks": (chunks, (ROWS, KEYS, CU), (2,)),
    "dense": (dense, DENSE, (0, 1, 2)),
    "combine": (flash_attn_combine, PARTIAL, (0, 1)),
    "mask": (masked, (ROWS, KEYS, MASK), (0, 2)),
    "flat mask": (masked, (ROWS, KEYS, MASK.flatten()), (0, 2)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_first_size_of_tensors(name: str) -> None:
    function, arguments, unbacked = CALLS[name]
    torch.compiler.reset()
    expected = function(*arguments)
    given = [t.clone() for t in arguments]
    for i in unbacked:
        mark_unbacked(given[i], 0)
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(*given)
    torch.testing.assert_close(got, expected)


def chosen_rows(q: Tensor, keep: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor, made: Any) -> Any:
    rows = q[keep.nonzero().flatten()]
    cu = torch.nn.functional.pad(keep.view(BATCH, -1).sum(1).cumsum(0), (1, 0)).int()
    options = {"seqused_k": lens, "block_table": table, "causal": True, "scheduler_metadata": made}
    return flash_attn_varlen_func(rows, k, v, cu, **options)


def test_metadata_for_rows_that_the_graph_chooses() -> None:
    q, keep = torch.randn(6, HEADS, DIM), torch.tensor([1, 1, 0, 1, 0, 0]).bool()
    cu = torch.tensor([0, 2, 3, 3], dtype=torch.int32)
    sizes: dict[str, Any] = {"page_size": PAGE, "block_table": TABLE, "cu_seqlens_q": cu, "total_q": 3, "causal": True}
    made = get_scheduler_metadata(BATCH, 1, 64, HEADS, KV_HEADS, DIM, LENS, **sizes)
    arguments = q, keep, K_CACHE, V_CACHE, LENS, TABLE, made
    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = torch.compile(chosen_rows, fullgraph=True, backend="aot_eager")(*arguments)
    torch.testing.assert_close(got, chosen_rows(*arguments))


@pytest.mark.parametrize("first", [0, 2])
def test_metadata_for_a_number_of_new_tokens_that_becomes_0(first: int) -> None:
    """A size of the graph that two calls compare."""

    def step(new: Tensor, number: int, lens: Tensor, table: Tensor) -> Any:
        sizes = BATCH, 1, 64, HEADS, KV_HEADS, DIM
        options: dict[str, Any] = {"max_seqlen_k_new": number, "page_size": PAGE, "block_table": table, "causal": True}
        made = get_scheduler_metadata(*sizes, lens, **options)
        cache = Q, K_CACHE.clone(), V_CACHE.clone(), lens, table
        return kvcache(*cache, k=new, v=new, scheduler_metadata=made, causal=True)

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for number in (first, 1, 3, 0):
        new = torch.randn(BATCH, number, KV_HEADS, DIM)
        torch.testing.assert_close(compiled(new, number, LENS, TABLE), step(new, number, LENS, TABLE))
