"""Rows of page tables, left padding, chunks, used lengths and latent queries, against the oracle, eager and traced."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.flash_requests import DenseCache, check_dense, check_varlen, dense, expected, rotated
from helpers.wrapper_requests import DEVICE, Requests, int32
from torch import Tensor

from attn_ops import errors
from attn_ops.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="lengths and tables on the host")


@pytest.fixture(params=["eager", "traced"])
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Calls a function, as it is or as a whole graph."""
    torch._dynamo.reset()
    return functools.partial(called, traced=request.param == "traced")


def called(f: Callable[..., Any], *args: Any, traced: bool = False, **options: Any) -> Any:
    with torch.no_grad():
        return (torch.compile(f, fullgraph=True, backend="aot_eager") if traced else f)(*args, **options)


def random(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.float16)


# ----------------------------------------------------------------------------------------------- rows of a block table


@pytest.mark.parametrize("made", ["", "without tables", "with both"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_rows_of_a_block_table(run: Callable[..., Any], q_len: int, made: str) -> None:
    """``cache_batch_idx`` chooses rows of the table, whatever scheduler metadata knows of it."""
    r, q, rows = Requests((37, 8, 130, 5, 64)), random(3, q_len, 4, 64), (4, 0, 2)
    table, index, lens = r.block_tables(), int32(*rows), r.seq_lens[list(rows)].clone()
    known = {} if made == "without tables" else {"block_table": table, "cache_batch_idx": index}

    def call(q: Tensor, k: Tensor, v: Tensor, lens: Tensor) -> Any:
        metadata = get_scheduler_metadata(3, q_len, 144, 4, 2, 64, lens, page_size=16, **known) if made else None
        return flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lens, page_table=table, cache_batch_idx=index, scheduler_metadata=metadata,
            return_softmax_lse=True,
        )  # fmt: skip

    requests = [(a, r.batch.keys[b], r.batch.values[b]) for a, b in zip(q, rows, strict=True)]
    check_dense(expected(requests), *run(call, q, *r.cache(), lens))


def test_metadata_without_the_rows_of_a_dense_cache() -> None:
    c, q = DenseCache((17, 4, 40), places=(3, 0, 2)), random(3, 1, 4, 64)
    made = get_scheduler_metadata(3, 1, 40, 4, 2, 64, c.cache_seqlens)
    out = flash_attn_with_kvcache(
        q, c.k, c.v, cache_seqlens=c.cache_seqlens, cache_batch_idx=int32(*c.places), scheduler_metadata=made
    )
    check_dense(expected(list(zip(q, c.keys, c.values, strict=True))), out)


def test_a_block_table_has_a_row_for_each_request() -> None:
    r = Requests((37, 8, 130, 5, 64))
    with pytest.raises(errors.ShapeError, match="block_table has 5 rows; expected 3, one per request"):
        get_scheduler_metadata(3, 1, 144, 4, 2, 64, r.seq_lens[:3], page_size=16, block_table=r.block_tables())


@on_cpu
def test_rows_that_a_block_table_does_not_have() -> None:
    r, q = Requests((37, 8)), random(2, 1, 4, 64)
    given = {"cache_seqlens": r.seq_lens, "block_table": r.block_tables(), "cache_batch_idx": int32(0, 2)}
    with pytest.raises(errors.PageTableError, match=r"cache_batch_idx\[1\] is 2; expected a row of the block table"):
        flash_attn_with_kvcache(q, *r.cache(), **given)


PAST = [(0, 0), (5, 0), (0, 10), (0, 16), (5, 16)]


@pytest.mark.parametrize(("pad", "chunk"), PAST, ids=str)
@pytest.mark.parametrize("new", [0, 3])
def test_a_length_past_the_table_is_that_of_its_row(new: int, pad: int, chunk: int) -> None:
    """Where no length is read. Tokens that are appended past the row are skipped."""
    torch._dynamo.reset()
    r, q = Requests((48, 8)), random(2, 2, 4, 64)
    k, v = random(2, 3, 2, 64, seed=1), random(2, 3, 2, 64, seed=2)
    lens, caches = int32(47, 5) if new else int32(61, 8), tuple(t.clone() for t in r.cache())
    places = {"block_table": r.block_tables(spare=0), "cache_leftpad": int32(pad, 0) if pad else None}

    def call(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lens: Tensor) -> Any:
        added = {"k": k, "v": v} if new else {}
        given = {"cache_seqlens": lens, "attention_chunk": chunk, "causal": True, "return_softmax_lse": True}
        return flash_attn_with_kvcache(q, k_cache, v_cache, **added, **places, **given)

    out = called(call, q, *caches, k, v, lens, traced=True)
    keys, values = ([t.clone() for t in tensors] for tensors in (r.batch.keys, r.batch.values))
    if new:
        for old, added in ((keys, k), (values, v)):
            old[0][47], old[1][5:] = added[0, 0], added[1]
    requests = [(q[0], keys[0][pad:], values[0][pad:]), (q[1], keys[1], values[1])]
    check_dense(expected(requests, causal=True, attention_chunk=chunk), *out)


@on_cpu
@pytest.mark.parametrize("name", ["block_table", "page_table"])
@pytest.mark.parametrize("lens", [49, 48], ids=str)
def test_a_table_too_narrow_is_named(name: str, lens: int) -> None:
    r, q, new = Requests((48,)), random(1, 1, 4, 64), random(1, 49 - lens, 2, 64)
    given = {"cache_seqlens": int32(lens), name: r.block_tables(spare=0)}
    message = f"a request has 49 tokens and {name} capacity for 48; .*pass a wider {name}"
    with pytest.raises(RuntimeError, match=message):
        flash_attn_with_kvcache(q, *r.cache(), *((new, new) if lens == 48 else ()), **given)


# -------------------------------------------------------------------------------------------------------- left padding


@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (6, 0)}], ids=["base", "window"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_left_padding_of_a_dense_cache(run: Callable[..., Any], q_len: int, options: dict[str, Any]) -> None:
    c, q, pad = DenseCache((17, 4, 40), places=(3, 0, 2)), random(3, q_len, 4, 64), (5, 0, 38)
    for place, n in zip(c.places, pad, strict=True):
        c.k[place, :n] = c.v[place, :n] = math.nan
    requests = [(a, k[n:], v[n:]) for a, k, v, n in zip(q, c.keys, c.values, pad, strict=True)]
    given = {"cache_batch_idx": int32(*c.places), "cache_leftpad": int32(*pad), **options}

    def call(q: Tensor, lens: Tensor) -> Any:
        return flash_attn_with_kvcache(q, c.k, c.v, cache_seqlens=lens, **given, return_softmax_lse=True)

    check_dense(expected(requests, **options), *run(call, q, c.cache_seqlens))


@pytest.mark.parametrize("with_metadata", [False, True])
def test_an_append_behind_left_padding_over_pages(run: Callable[..., Any], with_metadata: bool) -> None:
    """Tokens are appended, and rotated, at their places in the cache."""
    r, pad, new = Requests((37, 8, 130)), (17, 0, 16), 2
    q, k, v = random(3, new, 4, 64), random(3, new, 2, 64, seed=1), random(3, new, 2, 64, seed=2)
    lens = r.seq_lens - new
    angles = torch.rand(200, 32, device=DEVICE) * 2 * math.pi
    cos, sin, table = angles.cos(), angles.sin(), r.block_tables()

    def call(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lens: Tensor) -> Any:
        given = {"cache_leftpad": int32(*pad), "block_table": table, "causal": True}
        made = get_scheduler_metadata(3, new, 0, 4, 2, 64, lens, max_seqlen_k_new=new, page_size=16, **given)
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cos, sin, lens, **given, scheduler_metadata=made if with_metadata else None
        )

    requests = []
    for b, n in enumerate(pad):
        at = torch.arange(new) + int(lens[b])
        turned = [rotated(t[b], at, cos, sin, True) for t in (q, k)]
        keys = torch.cat((r.batch.keys[b][n : int(lens[b])].cpu().double(), turned[1].to(torch.float16).double()))
        values = torch.cat((r.batch.values[b][n : int(lens[b])].cpu(), v[b].cpu()))
        requests.append((turned[0].to(torch.float16), keys.to(torch.float16), values))
    check_dense(expected(requests, causal=True), run(call, q, *(t.clone() for t in r.cache()), k, v, lens))


@on_cpu
@pytest.mark.parametrize(("pad", "message"), [(38, r"\[1\] is 38; expected 0 to 8"), (-1, "a length of -1")])
def test_padding_beyond_the_tokens(pad: int, message: str) -> None:
    r, q = Requests((37, 8)), random(2, 1, 4, 64)
    given = {"cache_seqlens": r.seq_lens, "block_table": r.block_tables(), "cache_leftpad": int32(0, pad)}
    with pytest.raises(errors.PageTableError, match=f"cache_leftpad.*{message}"):
        flash_attn_with_kvcache(q, *r.cache(), **given)


def test_left_padding_over_pages_with_gaps() -> None:
    c = DenseCache((17, 4))
    k, v = (torch.stack((t, t), 1).flatten(0, 1)[::2] for t in (c.k, c.v))
    message = "a cache has strides .*expected pages without gaps"
    with pytest.raises(errors.ShapeError, match=message):
        flash_attn_with_kvcache(random(2, 1, 4, 64), k, v, cache_seqlens=4, cache_leftpad=int32(1, 2))


# -------------------------------------------------------------------------------------------------------------- chunks

CHUNKED: list[dict[str, Any]] = [
    {"attention_chunk": 7, "causal": True},
    {"attention_chunk": 16},
    {"attention_chunk": 1, "causal": True},
    {"attention_chunk": 32, "window_size": (9, 3)},
    {"attention_chunk": 1000, "causal": True},
]


@pytest.mark.parametrize("options", CHUNKED, ids=str)
@pytest.mark.parametrize("sizes", [(2, 20, 33), (1, 33, 20), (3, 1, 48), (2, 5, 0)], ids=str)
def test_chunks_of_a_dense_batch(options: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    q, k, v = dense(*sizes)
    out, lse = flash_attn_func(q, k, v, **options, return_softmax_lse=True)
    check_dense(expected(list(zip(q, k, v, strict=True)), **options), out, lse)


@pytest.mark.parametrize(("options", "traced"), [*((o, False) for o in CHUNKED), (CHUNKED[0], True)], ids=str)
def test_chunks_of_ragged_sequences(traced: bool, options: dict[str, Any]) -> None:
    r = Requests((33, 3, 0, 70, 16), (4, 5, 2, 40, 0))

    def call(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Any:
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, 40, 70, **options, return_softmax_lse=True)

    requests = list(zip(r.q.split(r.rows), r.batch.keys, r.batch.values, strict=True))
    check_varlen(
        expected(requests, **options), *called(call, r.q, *r.ragged(), r.qo_indptr, r.kv_indptr, traced=traced)
    )


@pytest.mark.parametrize(("options", "traced"), [*((o, False) for o in CHUNKED), (CHUNKED[0], True)], ids=str)
@pytest.mark.parametrize("q_len", [1, 4])
def test_chunks_over_pages(traced: bool, q_len: int, options: dict[str, Any]) -> None:
    r, q = Requests((37, 2, 130, 64)), random(4, q_len, 4, 64)
    table = r.block_tables()

    def call(q: Tensor, k: Tensor, v: Tensor, lens: Tensor) -> Any:
        given = {"block_table": table, **options}
        made = get_scheduler_metadata(4, q_len, 0, 4, 2, 64, lens, page_size=16, **given)
        return flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lens, **given, scheduler_metadata=made, return_softmax_lse=True
        )

    requests = list(zip(q, r.batch.keys, r.batch.values, strict=True))
    caches = (t.contiguous() for t in r.cache())
    check_dense(expected(requests, **options), *called(call, q, *caches, r.seq_lens, traced=traced))


@pytest.mark.parametrize("chunk", [16, 10])
@pytest.mark.parametrize("pad", [None, (3, 0, 20)])
def test_an_append_in_chunks(run: Callable[..., Any], chunk: int, pad: tuple[int, ...] | None) -> None:
    """More tokens are appended than there are query rows; chunks count from the first token."""
    r, q = Requests((37, 8, 130)), random(3, 2, 4, 64)
    k, v, table = random(3, 5, 2, 64, seed=1), random(3, 5, 2, 64, seed=2), r.block_tables()
    options = {"attention_chunk": chunk, "causal": True}
    leftpad = None if pad is None else int32(*pad)

    def call(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, lens: Tensor) -> Any:
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lens, block_table=table, cache_leftpad=leftpad, **options
        )

    caches = tuple(t.clone() for t in r.cache())
    out = run(call, q, *caches, k, v, r.seq_lens - 5)
    requests = []
    for b, n in enumerate(pad or (0, 0, 0)):
        old = slice(n, int(r.seq_lens[b]) - 5)
        requests.append((q[b], *(torch.cat((t[b][old], new[b].to(t[b]))) for t, new in
                                 ((r.batch.keys, k), (r.batch.values, v)))))  # fmt: skip
        for cache, new in zip(caches, (k, v), strict=True):
            places = torch.arange(old.stop, old.stop + 5, device=DEVICE)
            assert torch.equal(cache[table[b, places // 16].long(), places % 16], new[b])
    check_dense(expected(requests, **options), out)


def test_given_metadata_and_a_dynamic_number_of_rows() -> None:
    """Whether a call decodes is a number while it is traced, not an expression of its rows."""
    torch._dynamo.reset()
    r, q = Requests((37, 8, 130)), random(3, 3, 4, 64)
    table, lens = r.block_tables(), r.seq_lens
    made = get_scheduler_metadata(3, 3, 0, 4, 2, 64, lens, page_size=16, block_table=table)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, block_table=table, scheduler_metadata=made)

    with torch.no_grad():
        out = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)(q, *r.cache())
    check_dense(expected(list(zip(q, r.batch.keys, r.batch.values, strict=True))), out)


# -------------------------------------------------------------------------------------------------------- used lengths


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["", "causal"])
def test_used_lengths(run: Callable[..., Any], paged: bool, options: dict[str, Any]) -> None:
    r = Requests((33, 3, 9, 70), (4, 5, 2, 40))
    q_used, k_used = (4, 2, 0, 33), (20, 3, 9, 0)
    k, v = r.cache() if paged else r.ragged()
    given = {"block_table": r.block_tables()} if paged else {"cu_seqlens_k": r.kv_indptr}

    def call(q: Tensor, used_q: Tensor, used_k: Tensor) -> Any:
        return flash_attn_varlen_func(
            q, k, v, r.qo_indptr, seqused_q=used_q, seqused_k=used_k, **given, **options, return_softmax_lse=True
        )

    out, lse = run(call, r.q, int32(*q_used), int32(*k_used))
    rows = r.q.split(r.rows)
    requests = [
        (a[:n], b[:m], c[:m]) for a, b, c, n, m in zip(rows, r.batch.keys, r.batch.values, q_used, k_used, strict=True)
    ]
    of_used = [torch.arange(n) + sum(r.rows[:b]) for b, n in enumerate(q_used)]
    used = torch.cat(of_used).to(DEVICE)
    check_varlen(expected(requests, **options), out[used], lse[:, used].contiguous())
    others = torch.ones(len(out), dtype=torch.bool, device=DEVICE)
    others[used] = False
    assert not out[others].any()
    assert bool((lse[:, others] == -math.inf).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_used_lengths_fill_the_buffer(dtype: torch.dtype) -> None:
    r, out = Requests((9, 5), (4, 3)), torch.full((7, 4, 64), math.nan, device=DEVICE).to(dtype)
    arguments, used = (r.q, *r.ragged(), r.qo_indptr, r.kv_indptr), torch.tensor([0, 1, 4, 5, 6], device=DEVICE)
    scale = {"v_descale": 1e4} if dtype != torch.float16 else {}  # the largest of FP8
    got = flash_attn_varlen_func(*arguments, seqused_q=int32(2, 3), out=out, **scale)
    assert got is out
    assert not out.float()[2:4].any()
    whole = flash_attn_varlen_func(*arguments, out=torch.empty_like(out), **scale).float()
    torch.testing.assert_close(out.float()[used], whole[used], rtol=1e-2, atol=1e-3)


# ------------------------------------------------------------------------------------------------------ latent queries


def with_latents(requests: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """``(q, qv, k, v)`` as requests of one query, whose logits are ``q k + qv v``."""
    return [(torch.cat((q, qv), -1), torch.cat((k, v), -1), v) for q, qv, k, v in requests]


@pytest.mark.parametrize("batch", [1, 2])
def test_latent_queries_of_a_dense_batch(run: Callable[..., Any], batch: int) -> None:
    q, k, v = dense(batch, 5, 9, head_dims=(64, 128))
    qv = random(batch, 5, 4, 128)
    out = run(flash_attn_func, q, k, v, causal=True, qv=qv)
    check_dense(expected(with_latents(list(zip(q, qv, k, v, strict=True))), causal=True), out)


def test_latent_queries_of_ragged_sequences(run: Callable[..., Any]) -> None:
    r = Requests((33, 3), (4, 5))
    qv, (k, v) = random(9, 4, 64), r.ragged()
    given = {"qv": qv, "seqused_q": int32(4, 3), "causal": True}
    out = run(flash_attn_varlen_func, r.q, k, v, r.qo_indptr, r.kv_indptr, **given)
    parts = (r.q[:4], qv[:4], r.batch.keys[0], r.batch.values[0]), (r.q[4:7], qv[4:7], k[-3:], v[-3:])
    check_varlen(expected(with_latents(list(parts)), causal=True), out[:7])


@pytest.mark.parametrize(
    ("qv", "message"),
    [((2, 5, 4, 32), r"qv is \[2, 5, 4, 32\]; expected \[2, 5, 4, 64\]"), ((2, 5, 2, 64), r"qv is \[2, 5, 2, 64\]")],
)
def test_latent_queries_of_another_shape(qv: tuple[int, ...], message: str) -> None:
    with pytest.raises(errors.ShapeError, match=message):
        flash_attn_func(*dense(2, 5, 9), qv=random(*qv))
