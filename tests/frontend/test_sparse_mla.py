"""Sparse MLA: query rows that attend to chosen tokens of the cache, against the oracle over these tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.mla_requests import Latents
from helpers.oracle import GARBAGE, Expected
from helpers.wrapper_requests import DEVICE
from torch import Tensor

import attn_ops as flashinfer
from attn_ops.errors import OptionError, PageTableError, ShapeError, UnsupportedError

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TOP_K = 24
EVEN = ((2, 40), (2, 5), (2, 70))
RAGGED = ((1, 70), (5, 9), (0, 3), (7, 130))


class Sparse(Latents):
    """``chosen[r]`` are the tokens of query row r, in its request: up to ``top_k`` of those that it sees."""

    def __init__(self, *args: Any, top_k: int = TOP_K, seed: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.top_k, generator = top_k, torch.Generator().manual_seed(seed)
        self.requests = [b for b, rows in enumerate(self.rows) for _ in range(rows)]
        visible = [n - rows + i + 1 for n, rows in zip(self.tokens, self.rows, strict=True) for i in range(rows)]
        self.chosen = [torch.randperm(max(n, 0), generator=generator)[:top_k] for n in visible]
        self.counts = torch.tensor([len(c) for c in self.chosen], device=DEVICE)

    def places(self, chosen: list[Tensor] | None = None, padding: int = -1) -> Tensor:
        """``[rows, top_k]``: where the cache has the chosen tokens, then ``padding``."""
        indptr, indices, _ = (t.cpu() for t in self.table)
        result = torch.full((len(self.requests), self.top_k), padding, dtype=torch.int32)
        for r, (b, c) in enumerate(zip(self.requests, chosen or self.chosen, strict=True)):
            result[r, : len(c)] = indices[indptr[b] + c // self.page_size] * self.page_size + c % self.page_size
        return result.to(DEVICE)

    def of_rows(self, t: Tensor) -> Tensor:
        """A tensor of rows as one of requests with equally many."""
        return t.unflatten(0, (len(self.rows), self.rows[0]))

    def sparse(self, **options: Any) -> Expected:
        rows = []
        for q, b, c in zip(self.q.cpu(), self.requests, self.chosen, strict=True):
            k = self.latents[b].double()[c, None]
            rows.append((q[None], k, k[..., : self.dims[0]]))
        return Expected.of(rows, **options)


def call(m: Sparse, query: Tensor, tokens: Tensor, seq_lens: Tensor | None, **options: Any) -> Any:
    sizes = (None, 128, *m.dims, tokens, seq_lens, 130, m.top_k)
    options = {"bmm1_scale": 0.1, "return_lse": True, **options}
    return flashinfer.trtllm_batch_decode_with_kv_cache_mla(query, options.pop("cache", m.cache), *sizes, **options)


LENGTHS: dict[str, Callable[[Sparse], Tensor | None]] = {
    "of requests": lambda m: m.table[2],
    "of rows": lambda m: m.of_rows(m.counts),
    "of flat rows": lambda m: m.counts,
    "none": lambda m: None,
}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("scattered", [False, True], ids=["padded", "negative entries between"])
def test_rows_of_chosen_tokens(lengths: str, scattered: bool) -> None:
    m = Sparse(EVEN)
    tokens = m.places()
    if scattered:
        order = torch.randperm(TOP_K, generator=torch.Generator().manual_seed(1))
        tokens = tokens[:, order.to(DEVICE)]
        assert ((tokens[:, :-1] < 0) & (tokens[:, 1:] >= 0)).any()
    out, lse = call(m, m.of_rows(m.q), m.of_rows(tokens), LENGTHS[lengths](m))
    assert out.shape == (3, 2, 3, 64)
    m.sparse(sm_scale=0.1).check(out.flatten(0, 1), lse)


@pytest.mark.parametrize("cache", ["16 bits", "fp8"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_ragged_rows(page_size: int, cache: str) -> None:
    kv_dtype = torch.float8_e4m3fn if cache == "fp8" else None
    m = Sparse(RAGGED, page_size=page_size, kv_dtype=kv_dtype)
    sinks = torch.randn(3, device=DEVICE)
    out = torch.empty(13, 3, 64, dtype=torch.float16, device=DEVICE)
    options = {"cum_seq_lens_q": m.qo_indptr, "out": out, "sinks": sinks, "bmm2_scale": 2.0}
    got, lse = call(m, m.q, m.places().long(), m.table[2], **options)
    assert got is out
    m.sparse(sm_scale=0.1, sinks=sinks).check(out / 2, lse)


def test_given_counts_leave_the_other_entries_unread() -> None:
    m = Sparse(EVEN)
    tokens = m.of_rows(m.places(padding=GARBAGE))
    out, lse = call(m, m.of_rows(m.q), tokens, m.table[2], sparse_mla_top_k_lens=m.counts.int())
    m.sparse(sm_scale=0.1).check(out.flatten(0, 1), lse)


def test_of_tokens_that_a_row_does_not_see_the_first_count() -> None:
    """All rows of a request name its first tokens in order; the last of them are after the row."""
    m = Sparse(((3, 24), (3, 23), (3, 2)))
    named = [torch.arange(min(m.tokens[b], TOP_K)) for b in m.requests]
    visible = [max(0, m.tokens[b] - 2 + r % 3) for r, b in enumerate(m.requests)]
    m.chosen = [c[:n] for c, n in zip(named, visible, strict=True)]
    out, lse = call(m, m.of_rows(m.q), m.of_rows(m.places(named)), m.table[2])
    assert visible[6] == 0
    m.sparse(sm_scale=0.1).check(out.flatten(0, 1), lse)


def test_rows_after_the_last_request_have_no_tokens() -> None:
    m = Sparse(EVEN)
    for offsets, lens in (([0, 2, 4], m.table[2][:2]), ([0], m.table[2][:0])):
        cum = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
        out, lse = call(m, m.q, m.places(), lens, cum_seq_lens_q=cum)
        assert not out[offsets[-1] :].any()
        assert (lse[offsets[-1] :] == -math.inf).all()


def test_no_requests() -> None:
    m = Sparse(EVEN)
    out, lse = call(m, m.of_rows(m.q)[:0], m.of_rows(m.places())[:0], m.table[2][:0])
    assert out.shape == (0, 2, 3, 64)
    assert lse.shape == (0, 3)


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("counted", [False, True])
def test_compiles_once(counted: bool) -> None:
    def step(q: Tensor, cache: Tensor, tokens: Tensor, lens: Tensor, cum: Tensor, counts: Tensor) -> Any:
        given = {"sparse_mla_top_k_lens": counts} if counted else {}
        return call(first, q, tokens, lens, cache=cache, cum_seq_lens_q=cum, **given)

    first = Sparse(RAGGED)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for m in (first, Sparse(RAGGED[::-1], seed=1)):
        with torch.compiler.set_stance("default" if m is first else "fail_on_recompile"):
            result = compiled(m.q, m.cache, m.places(), m.table[2], m.qo_indptr, m.counts)
        m.sparse(sm_scale=0.1).check(*result)


def test_exports() -> None:
    class Step(torch.nn.Module):
        def forward(self, q: Tensor, cache: Tensor, tokens: Tensor, lens: Tensor) -> Any:
            return call(m, q, tokens, lens, cache=cache)

    m = Sparse(EVEN)
    inputs = m.of_rows(m.q), m.cache, m.of_rows(m.places()), m.table[2]
    batch, pages = torch.export.Dim("batch", max=64), torch.export.Dim("pages", max=4096)
    shapes = {"q": {0: batch}, "cache": {0: pages}, "tokens": {0: batch}, "lens": {0: batch}}
    program = torch.export.export(Step(), inputs, dynamic_shapes=shapes)
    for lengths in (EVEN, EVEN[:2]):
        m = Sparse(lengths, seed=2)
        out, lse = program.module()(m.of_rows(m.q), m.cache, m.of_rows(m.places()), m.table[2])
        m.sparse(sm_scale=0.1).check(out.flatten(0, 1), lse)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 128])
def test_deepseek_sizes_captured_and_compiled(num_heads: int) -> None:
    lengths = ((2, 3000), (2, 70), (2, 900))
    batches = [
        Sparse(lengths, (512, 64), torch.bfloat16, page_size=64, num_heads=num_heads, top_k=512, seed=seed)
        for seed in (0, 1)
    ]

    def step(tokens: Tensor) -> Any:
        return call(first, first.of_rows(first.q), first.of_rows(tokens), first.table[2])

    first, tokens = batches[0], batches[0].places()
    compiled = torch.compile(step, fullgraph=True)
    results = [step(tokens), compiled(tokens)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(tokens)
    for m in batches:
        tokens.copy_(m.places())
        graph.replay()
        for out, lse in (captured, compiled(tokens), step(tokens), *(results if m is first else ())):
            m.sparse(sm_scale=0.1).check(out.flatten(0, 1), lse)


def test_bad_input() -> None:
    m, name = Sparse(EVEN), "trtllm_batch_decode_with_kv_cache_mla"
    query, tokens, lens = m.of_rows(m.q), m.of_rows(m.places()), m.table[2]
    expected = r"\[3, 2, 24\], sparse_mla_top_k tokens of each query row; correct one of them"
    with pytest.raises(ShapeError, match=rf"^{name}: block_tables is \[6, 24\]; expected {expected}"):
        call(m, query, tokens.flatten(0, 1), lens)
    gaps = torch.cat((m.cache, m.cache), 1)[:, : m.page_size]
    expected = "pages without gaps, of .*, as sparse_mla_top_k counts tokens"
    with pytest.raises(ShapeError, match=rf"^{name}: kv_cache has strides .*; expected {expected}"):
        call(m, query, tokens, lens, cache=gaps)
    with pytest.raises(ShapeError, match=rf"^{name}: seq_lens is \[5\]; expected \[6\], one per query row"):
        call(m, query, tokens, m.counts[:5])
    with pytest.raises(ShapeError, match=r"sparse_mla_top_k_lens is \[3\]; expected \[6\], one per query row; correct"):
        call(m, query, tokens, lens, sparse_mla_top_k_lens=lens)
    with pytest.raises(UnsupportedError, match="enable_dcp is given with sparse_mla_top_k"):
        call(m, query, tokens, lens, enable_dcp=True, cp_world=2, causal_seqlens_kv_global=lens)
    with pytest.raises(ShapeError, match=rf"^{name}: seq_lens is \[6\]; expected \[3\], one per request"):
        call(m, m.q, m.places(), m.counts, cum_seq_lens_q=m.qo_indptr)
    expected = r"25 tokens of a row; expected at most sparse_mla_top_k, 24; correct it"
    with pytest.raises(PageTableError, match=rf"^{name}: sparse_mla_top_k_lens has {expected}"):
        call(m, query, tokens, lens, sparse_mla_top_k_lens=torch.full((6,), 25))
    m.top_k = -1
    with pytest.raises(OptionError, match=rf"^{name}: sparse_mla_top_k is -1; expected 0 or more"):
        call(m, query, tokens, lens)
    m.top_k = 0
    with pytest.raises(OptionError, match="sparse_mla_top_k_lens is given and sparse_mla_top_k is 0"):
        call(m, query, tokens, lens, sparse_mla_top_k_lens=m.counts)
