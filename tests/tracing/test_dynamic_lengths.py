"""Functions without a plan: lengths that change from call to call share few graphs, and export as one dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers.flash_requests import dense, expected
from helpers.mla_requests import Latents
from helpers.oracle import Expected
from helpers.tracing import CallModule, GraphRecorder
from helpers.wrapper_requests import DEVICE, Requests
from torch import Tensor
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import attn_ops
from attn_ops.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from attn_ops.kernels.reference import attention

pytestmark = pytest.mark.usefixtures("cold")

PROMPTS = (30, 3, 17, 64, 33, 100, 65, 700, 5, 129)
"""Rows of a request and as many keys. The query tiles of two heads per KV head change beyond 32 and 64 rows."""

CACHED = (40, 3, 17, 4096, 100, 65, 1500, 30, 333, 2000)
"""Keys of a request. A table is as wide as at least two pages of the longest."""

STATIC, DYNAMIC = 1, 1
"""The graph of the first call, and that of all others."""

TILES = 3
"""Sizes of query tiles (MIN_PACKED_ROWS to MAX_PACKED_ROWS), each with a graph."""


class Form(NamedTuple):
    """``call(*tensors)`` of a batch that ``batch(length)`` makes, for all ``lengths`` by so many ``graphs``.

    dims  a dynamic dimension by tensor, and the sizes that it has
    """

    lengths: tuple[int, ...]
    batch: Callable[[int], Any]
    tensors: Callable[[Any], tuple[Tensor, ...]]
    call: Callable[..., Any]
    expected: Callable[[Any], Expected]
    graphs: int
    dims: tuple[int | None, ...]
    sizes: tuple[int, int] = (2, 4096)


def requests(n: int, *, rows: bool = False) -> Requests:
    lengths = n, n // 2 + 1
    return Requests(lengths, lengths if rows else (), num_pages=400)


def prompts(n: int) -> Requests:
    return requests(n, rows=True)


def table(r: Requests) -> Tensor:
    return r.block_tables(spare=2)


def latents(m: Latents) -> tuple[Tensor, ...]:
    """A cache of one size for all lengths, and a block table that is not of width 1."""
    cache = torch.nn.functional.pad(m.cache, (0, 0, 0, 0, 0, 400 - m.cache.shape[0]))
    return m.q[:, None], cache, torch.nn.functional.pad(m.block_tables, (0, 2)), m.table[2]


def each(t: tuple[Tensor, ...]) -> Expected:
    """Of dense ``q, k, v``."""
    return expected(list(zip(*t, strict=True)), causal=True)


def cached(t: tuple[Tensor, ...]) -> Expected:
    """Of a cache whose second request has fewer tokens."""
    q, k, v, lens = t
    return expected([(q[b], k[b, :n], v[b, :n]) for b, n in enumerate(lens.tolist())])


def with_cache(n: int) -> tuple[Tensor, ...]:
    lens = torch.tensor([n, n // 2 + 1], dtype=torch.int32, device=DEVICE)
    return *dense(2, 1, n), lens


FORMS: dict[str, Form] = {
    "flash_attn_func": Form(
        PROMPTS,
        lambda n: dense(2, n, n),
        tuple,
        lambda q, k, v: flash_attn_func(q, k, v, causal=True).flatten(0, 1),
        each,
        STATIC + DYNAMIC,
        (1, 1, 1),
    ),
    "flash_attn_func of one request": Form(
        PROMPTS,
        lambda n: dense(1, n, n),
        tuple,
        lambda q, k, v: flash_attn_func(q, k, v, causal=True).flatten(0, 1),
        each,
        STATIC + DYNAMIC,
        (1, 1, 1),
    ),
    "flash_attn_varlen_func": Form(
        PROMPTS,
        prompts,
        lambda r: (r.q, *r.ragged(), r.qo_indptr, r.kv_indptr),
        lambda *t: flash_attn_varlen_func(*t, 4096, 4096, causal=True),
        lambda r: r.expected(causal=True),
        STATIC + TILES,
        (0, 0, 0, None, None),
        (2, 8192),
    ),
    "flash_attn_with_kvcache": Form(
        CACHED,
        requests,
        lambda r: (r.q[:, None], *r.cache(), r.seq_lens, table(r)),
        lambda q, k, v, lens, pages: flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, block_table=pages)[:, 0],
        lambda r: r.expected(),
        STATIC + DYNAMIC,
        (None, None, None, None, 1),
    ),
    "flash_attn_with_kvcache of a dense cache": Form(
        CACHED,
        with_cache,
        tuple,
        lambda q, k, v, lens: flash_attn_with_kvcache(q, k, v, cache_seqlens=lens)[:, 0],
        cached,
        STATIC + DYNAMIC,
        (None, 1, 1, None),
    ),
    "single_prefill_with_kv_cache": Form(
        PROMPTS,
        lambda n: requests(n, rows=True),
        lambda r: (r.q[: r.rows[0]], *(t[: r.kv_lens[0]] for t in r.ragged())),
        lambda q, k, v: attn_ops.single_prefill_with_kv_cache(q, k, v, causal=True),
        lambda r: Expected.of([(r.q[: r.rows[0]], r.batch.keys[0], r.batch.values[0])], causal=True),
        STATIC + DYNAMIC,
        (0, 0, 0),
    ),
    "trtllm_batch_decode_with_kv_cache": Form(
        CACHED,
        requests,
        lambda r: (r.q, r.cache("tensor"), table(r), r.seq_lens),
        lambda q, cache, pages, lens: attn_ops.trtllm_batch_decode_with_kv_cache(
            q, cache, None, pages, lens, 4096, 0.125, kv_layout="NHD"
        ),
        lambda r: r.expected(),
        STATIC + DYNAMIC,
        (None, None, 1, None),
    ),
    "trtllm_batch_context_with_kv_cache": Form(
        PROMPTS,
        prompts,
        lambda r: (r.q, r.cache("tensor"), table(r), r.seq_lens, r.qo_indptr),
        lambda q, cache, pages, lens, cum: attn_ops.trtllm_batch_context_with_kv_cache(
            q, cache, None, pages, lens, 4096, 4096, 0.125, 1.0, 2, cum, cum, kv_layout="NHD"
        ),
        lambda r: r.expected(causal=True),
        STATIC + TILES,
        (0, None, 1, None, None),
        (2, 8192),
    ),
    "trtllm_batch_decode_with_kv_cache_mla": Form(
        CACHED,
        lambda n: Latents(((1, n), (1, n // 2 + 1)), dims=(64, 16)),
        latents,
        lambda q, cache, pages, lens: attn_ops.trtllm_batch_decode_with_kv_cache_mla(
            q, cache, None, 128, 64, 16, pages, lens, 4096, bmm1_scale=0.1
        )[:, 0],
        lambda m: m.expected(sm_scale=0.1),
        STATIC + DYNAMIC,
        (None, None, 1, None),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_lengths_share_graphs(name: str) -> None:
    form, recorder = FORMS[name], GraphRecorder()
    compiled = torch.compile(form.call, fullgraph=True, backend=recorder)
    for length in form.lengths:
        batch = form.batch(length)
        form.expected(batch).check(compiled(*form.tensors(batch)))
    assert len(recorder.graphs) == form.graphs


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", FORMS)
def test_a_program_takes_all_lengths(name: str, strict: bool) -> None:
    form = FORMS[name]
    tensors = form.tensors(form.batch(40))
    by_size = {t.shape[d]: None for t, d in zip(tensors, form.dims, strict=True) if d is not None}
    names = {size: Dim(f"size_{size}", min=form.sizes[0], max=form.sizes[1]) for size in by_size}
    shapes = tuple({} if d is None else {d: names[t.shape[d]]} for t, d in zip(tensors, form.dims, strict=True))
    program = torch.export.export(CallModule(form.call), tensors, dynamic_shapes=(shapes,), strict=strict).module()
    for length in form.lengths:
        batch = form.batch(length)
        form.expected(batch).check(program(*form.tensors(batch)))


def test_a_dense_cache_of_a_dynamic_length_is_appended_to_in_place() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, new: Tensor, rows: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q, k, v, new, 2 * new, cache_seqlens=lens, cache_batch_idx=rows)[:, 0]

    recorder, rows = GraphRecorder(), torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    compiled = torch.compile(step, fullgraph=True, backend=recorder)
    for length in (20, 9, 33, 100):
        q, k, v = dense(3, 1, length)
        lens = torch.tensor([length - 1, 4], dtype=torch.int32, device=DEVICE)
        new = torch.ones(2, 1, 2, 64, dtype=k.dtype, device=DEVICE)
        out = compiled(q[:2], k, v, lens, new, rows)
        for row, n in ((2, length - 1), (0, 4)):
            torch.testing.assert_close(torch.stack((k[row, n], v[row, n])), torch.stack((new[0, 0], 2 * new[0, 0])))
        expected([(q[0], k[2], v[2]), (q[1], k[0, :5], v[0, :5])]).check(out)
    assert len(recorder.graphs) == STATIC + DYNAMIC


def test_a_cache_with_gaps_has_a_graph_per_length() -> None:
    """Its tokens are no pages: views of them copy nothing."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q, k, v)[:, 0]

    recorder = GraphRecorder()
    compiled = torch.compile(call, fullgraph=True, backend=recorder)
    for length in (20, 9, 33):
        q, k, v = dense(2, 1, length, transposed=True)
        expected(list(zip(q, k, v, strict=True))).check(compiled(q, k, v))
    assert len(recorder.graphs) == 3


@pytest.mark.parametrize(("items", "groups"), [(2, 1), (3, 4), (9, 16), (60, 64)])
def test_graphs_for_any_length_compute_few_work_items_at_a_time(
    items: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU: as many groups as the traced sizes need, which have all items, however many there are."""

    def group(work: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
        found = attention._groups(work, 2 * keys.shape[0])
        return tuple(x + torch.zeros_like(x) @ torch.zeros_like(x)[:, None] for x in found)  # with products

    monkeypatch.setattr(attention, "MAX_ELEMENTS", 400)
    graph = make_fx(group, tracing_mode="symbolic")(torch.arange(items), torch.zeros(100))
    assert not any("< 2" in str(guard.expr) for guard in graph.shape_env.guards)  # no size is taken to be 1
    for n in (items, 2, 5, 16, 61, 100):
        found = graph(torch.arange(n), torch.zeros(7))
        assert len(found) == groups
        assert len({len(x) for x in found}) == 1
        assert set(torch.cat(found).tolist()) == set(range(n))
        assert len(found[0]) <= max(2, -(-n // groups))
