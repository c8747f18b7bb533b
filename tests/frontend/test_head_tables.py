"""Page tables of each KV head, and of keys and values apart, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.oracle import Expected
from helpers.wrapper_requests import DEVICE, Requests, workspace
from torch import Tensor

from attn_ops import errors, trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SCALE = 0.125


class Sparse:
    """A batch whose KV heads select pages of their own: ``lens [num_kv_heads][batch]`` tokens of them."""

    def __init__(self, q_len: int, **requests: Any) -> None:
        self.r = r = Requests(kv_lens=(70, 33, 130, 5), qo_lens=(q_len,) * 4, **requests)
        self.q_len, kv_heads = q_len, r.heads[1]
        table, generator = r.block_tables(), torch.Generator().manual_seed(3)
        self.tables = torch.full((kv_heads, *table.shape), -7, dtype=torch.int32, device=DEVICE)
        self.lens = torch.zeros(kv_heads, len(r.kv_lens), dtype=torch.int32, device=DEVICE)
        batches: list[tuple[Tensor, ...]] = []
        for h in range(kv_heads):
            for b, length in enumerate(r.kv_lens):
                pages = -(-length // r.page_size)
                chosen = (torch.rand(pages, generator=generator) < 0.6).nonzero().flatten().tolist() or [0]
                self.tables[h, b, : len(chosen)] = table[b, chosen]
                places = [p * r.page_size + i for p in chosen for i in range(r.page_size)]
                places = [place for place in places if place < length]
                self.lens[h, b] = len(places)
                rows = r.q[b * q_len : (b + 1) * q_len].unflatten(1, (kv_heads, -1))[:, h]
                k, v = (t[b][places][:, h : h + 1] for t in (r.batch.keys, r.batch.values))
                row, key = torch.arange(q_len)[:, None] + len(places) - q_len, torch.arange(len(places))
                batches.append((rows, k, v, key <= row))
        self.expected = Expected.of(batches, sm_scale=SCALE)

    def call(self, **changes: Any) -> Any:
        arguments = {
            "query": self.r.q,
            "kv_cache": self.r.cache(),
            "workspace_buffer": workspace(),
            "block_tables": self.tables,
            "seq_lens": self.lens,
            "max_seq_len": 130,
            "bmm1_scale": SCALE,
            "kv_layout": self.r.kv_layout,
            "q_len_per_req": self.q_len,
            "enable_block_sparse_attention": True,
        }
        return trtllm_batch_decode_with_kv_cache(**{**arguments, **changes})

    def by_head(self, t: Tensor) -> Tensor:
        return t.unflatten(1, (self.r.heads[1], -1)).transpose(0, 1).flatten(0, 1)


@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
@pytest.mark.parametrize("storage", ["fused", "pair"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_tables_of_kv_heads(kv_layout: str, storage: str, q_len: int) -> None:
    s = Sparse(q_len, kv_layout=kv_layout, storage=storage, heads=(6, 3))
    out, lse = torch.empty_like(s.r.q), torch.empty(s.r.q.shape[:2], device=DEVICE)
    returned, same = s.call(out=out, lse=lse, return_lse=True)
    assert returned is out
    assert same is lse
    s.expected.check(s.by_head(out), s.by_head(lse))
    assert torch.equal(s.call(), out)


def test_tables_of_kv_heads_of_caches_of_other_strides() -> None:
    """A cache whose pages are no whole number of heads apart is copied."""
    s = Sparse(1, kv_layout="HND", storage="pair")
    odd = []
    for cache in s.r.cache():
        room = torch.full((cache.shape[0], cache[0].numel() + 8), torch.nan, dtype=cache.dtype, device=DEVICE)
        room[:, :-8] = cache.flatten(1)
        odd.append(room[:, :-8].unflatten(1, cache.shape[1:]))
    s.expected.check(s.by_head(s.call(kv_cache=tuple(odd))))


@pytest.mark.slow
@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("storage", ["fused", "pair"])
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_tables_of_kv_heads_compile(kv_layout: str, storage: str, backend: str) -> None:
    """Keys and values of one tensor are views in the graph, of which pages of one head are views by strides."""
    s = Sparse(1, kv_layout=kv_layout, storage=storage)

    def step(cache: Any, query: Tensor, tables: Tensor, lens: Tensor) -> Any:
        return s.call(kv_cache=cache, query=query, block_tables=tables, seq_lens=lens)

    out = torch.compile(step, fullgraph=True, backend=backend)(s.r.cache(), s.r.q, s.tables, s.lens)
    s.expected.check(s.by_head(out))


def test_what_tables_of_kv_heads_do_not_take() -> None:
    s = Sparse(1, kv_layout="HND")
    for name, value in (
        ("sinks", s.r.sinks),
        ("window_left", 3),
        ("uses_shared_paged_kv_idx", False),
        ("cp_world", 2),
        ("causal_seqlens_kv_global", s.lens[0]),
    ):
        with pytest.raises(errors.UnsupportedError, match=f"{name} is given with enable_block_sparse_attention"):
            s.call(**{name: value})
    with pytest.raises(errors.ShapeError, match=r"block_tables is .*; expected \[2, batch, max_pages_per_request\]"):
        s.call(block_tables=s.tables[:1])
    with pytest.raises(errors.ShapeError, match=r"seq_lens is \[4\]; expected \[2, 4\], as block_tables"):
        s.call(seq_lens=s.lens[0])
    for name, wrong, error, message in (
        ("block_tables", None, errors.ArgumentError, "block_tables is missing"),
        ("block_tables", [[0]], errors.ArgumentError, "block_tables is of type list; expected a tensor"),
        ("block_tables", s.tables.to("meta"), errors.DeviceError, "block_tables is on meta"),
        ("seq_lens", None, errors.ArgumentError, "seq_lens is missing"),
    ):
        with pytest.raises(error, match=message):
            s.call(**{name: wrong})
    with pytest.raises(errors.ShapeError, match="out is"):
        s.call(out=s.r.q[:1])


def test_tables_of_heads_on_the_host_name_pages_of_the_cache() -> None:
    s = Sparse(1)
    tables, lens = s.tables.cpu(), s.lens.cpu()
    tables[1, 2, 0] = 1 << 20
    with pytest.raises(errors.PageTableError, match=r"block_tables\[1\]\[2, 0\] is 1048576; expected a page"):
        s.call(block_tables=tables, seq_lens=lens)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_tables_of_keys_and_values(kv_layout: str, kv_dtype: torch.dtype | None) -> None:
    """As TensorRT-LLM's: one pool of pages, in which those of values follow those of keys in any order."""
    r = Requests(kv_lens=(37, 3, 130, 9), qo_lens=(3,) * 4, kv_layout=kv_layout, kv_dtype=kv_dtype)
    k, v = r.cache()
    bits = [t.view(torch.uint8) if kv_dtype else t for t in (k, v)]
    pool = torch.cat(bits)
    order = torch.randperm(pool.shape[0], generator=torch.Generator().manual_seed(0)).to(DEVICE)
    place = order.argsort().int()
    pool = pool[order].view(k.dtype)
    table = r.block_tables().long()
    tables = torch.stack([place[table], place[table + k.shape[0]]], 1)
    tables[0, :, 5:] = 1 << 30  # behind the tokens of the first request
    options: dict[str, Any] = {"kv_layout": kv_layout, "uses_shared_paged_kv_idx": False}
    arguments = r.q, (pool, pool), workspace(), tables, r.seq_lens
    out = trtllm_batch_decode_with_kv_cache(*arguments, 130, SCALE, q_len_per_req=3, **options)
    r.expected(sm_scale=SCALE, causal=True).check(out)
    out = trtllm_batch_context_with_kv_cache(*arguments, 3, 130, SCALE, 1.0, 4, r.qo_indptr, r.kv_indptr, **options)
    r.expected(sm_scale=SCALE, causal=True).check(out)
    with pytest.raises(errors.ShapeError, match=r"block_tables is .*; expected \[batch, 2, max_pages_per_request\]"):
        trtllm_batch_decode_with_kv_cache(*arguments[:3], tables[:, 0], r.seq_lens, 130, q_len_per_req=3, **options)
    tables, lens = tables.cpu(), r.seq_lens.cpu()
    tables[2, 1, 0] = -3
    with pytest.raises(errors.PageTableError, match=r"block_tables\[:, 1\]\[2, 0\] is -3; expected a page"):
        trtllm_batch_decode_with_kv_cache(*arguments[:3], tables, lens, 130, q_len_per_req=3, **options)
