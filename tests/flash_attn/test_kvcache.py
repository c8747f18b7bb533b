"""``flash_attn_with_kvcache`` against the oracle: dense and paged caches, appends, rotary embeddings, MLA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.flash_requests import DenseCache, check_dense, check_varlen, expected, rotated
from helpers.wrapper_requests import DEVICE, Requests, _cumulative
from torch import Tensor

from attn_ops.flash_attn import flash_attn_with_kvcache, get_scheduler_metadata

pytestmark = pytest.mark.usefixtures("poisoned_memory")

OPTIONS: dict[str, dict[str, Any]] = {
    "base": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (6, 0)},
    "both windows": {"window_size": (6, 2)},
    "softcap": {"softcap": 3.0, "softmax_scale": 0.2},
    "sinks": {"s_aux": torch.tensor([0.5, -1.0, 3.0, 0.0], device=DEVICE), "causal": True},
}


def random(*shape: int, seed: int = 5, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_dense_cache(name: str, q_len: int) -> None:
    c, q = DenseCache((17, 4, 40), places=(3, 0, 2)), random(3, q_len, 4, 64)
    index = torch.tensor(c.places, dtype=torch.int32, device=DEVICE)
    out, lse = flash_attn_with_kvcache(
        q, c.k, c.v, cache_seqlens=c.cache_seqlens, cache_batch_idx=index, **OPTIONS[name], return_softmax_lse=True
    )
    check_dense(expected(list(zip(q, c.keys, c.values, strict=True)), **OPTIONS[name]), out, lse)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("page_name", ["block_table", "page_table"])
def test_paged_cache(page_name: str, name: str, q_len: int) -> None:
    r, q = Requests((37, 8, 130, 5)), random(4, q_len, 4, 64)
    given = {page_name: r.block_tables(), "cache_seqlens": r.seq_lens}
    out, lse = flash_attn_with_kvcache(q, *r.cache(), **given, **OPTIONS[name], return_softmax_lse=True)
    check_dense(expected(list(zip(q, r.batch.keys, r.batch.values, strict=True)), **OPTIONS[name]), out, lse)


def test_lengths_as_a_number_and_a_full_cache() -> None:
    c, q = DenseCache((40, 40)), random(2, 1, 4, 64)
    check_dense(expected(list(zip(q, c.keys, c.values, strict=True))), flash_attn_with_kvcache(q, c.k, c.v))
    short = [(a, b[:9], d[:9]) for a, b, d in zip(q, c.keys, c.values, strict=True)]
    check_dense(expected(short), flash_attn_with_kvcache(q, c.k, c.v, cache_seqlens=9))


def test_an_empty_request() -> None:
    c, q = DenseCache((0, 3)), random(2, 1, 4, 64)
    out, lse = flash_attn_with_kvcache(q, c.k, c.v, cache_seqlens=c.cache_seqlens, return_softmax_lse=True)
    check_dense(expected(list(zip(q, c.keys, c.values, strict=True))), out, lse)


ROTARY = {"none": None, "interleaved": True, "halves": False}


def tables(positions: int = 64, rotary_dim: int = 32, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angle = torch.arange(positions)[:, None] * 0.9 ** torch.arange(rotary_dim // 2)
    return angle.cos().to(DEVICE, dtype), angle.sin().to(DEVICE, dtype)


class Step:
    """New tokens of a dense or paged batch in float32, so that the cache has what the oracle has to 2^-20."""

    def __init__(self, lens: tuple[int, ...], q_len: int, new: int, interleaved: bool | None, causal: bool) -> None:
        self.q = random(len(lens), q_len, 4, 64, dtype=torch.float32)
        self.k = random(len(lens), new, 2, 64, seed=6, dtype=torch.float32)
        self.v = random(len(lens), new, 2, 64, seed=7, dtype=torch.float32)
        self.options: dict[str, Any] = {"causal": causal}
        self.lens, self.interleaved = lens, interleaved
        if interleaved is not None:
            cos, sin = tables()
            self.options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}

    def requests(self, keys: list[Tensor], values: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of the oracle: the cache before the step, and the rotated tokens."""
        found = []
        for b, n in enumerate(self.lens):
            q, k = self.q[b].cpu().double(), self.k[b].cpu().double()
            if self.interleaved is not None:
                steps = torch.arange(q.shape[0]) if self.options["causal"] else torch.zeros(q.shape[0])
                q = rotated(q, n + steps, *tables(), self.interleaved)
                k = rotated(k, n + torch.arange(k.shape[0]), *tables(), self.interleaved)
            found.append(
                (q, torch.cat((keys[b].double(), k)), torch.cat((values[b].double(), self.v[b].cpu().double())))
            )
        return found


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("q_len", "new"), [(1, 1), (3, 3), (2, 5)], ids=str)
def test_append_to_a_dense_cache(q_len: int, new: int, causal: bool, rotary: str) -> None:
    lens = (17, 0, 30)
    c, step = DenseCache(lens, places=(3, 0, 2), dtype=torch.float32), Step(lens, q_len, new, ROTARY[rotary], causal)
    index = torch.tensor(c.places, dtype=torch.int32, device=DEVICE)
    requests = step.requests(c.keys, c.values)
    out, lse = flash_attn_with_kvcache(
        step.q, c.k, c.v, step.k, step.v, cache_seqlens=c.cache_seqlens, cache_batch_idx=index,
        **step.options, return_softmax_lse=True,
    )  # fmt: skip
    check_dense(expected(requests, causal=causal), out, lse)
    for place, n, (_, keys, values) in zip(c.places, lens, requests, strict=True):
        torch.testing.assert_close(c.k[place, : n + new].cpu(), keys.float())
        torch.testing.assert_close(c.v[place, : n + new].cpu(), values.float())
        assert c.k[place, n + new :].isnan().all()


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("given", [False, True], ids=["", "scheduler_metadata"])
def test_append_to_pages(rotary: str, given: bool) -> None:
    lens = (16, 0, 31)
    after = tuple(n + 2 for n in lens)
    r = Requests(after, dtype=torch.float32)
    step = Step(lens, 2, 2, ROTARY[rotary], True)
    seqlens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    k_cache, v_cache = r.cache()
    table = r.block_tables()
    options = dict(step.options)
    if given:
        options["scheduler_metadata"] = get_scheduler_metadata(
            3, 2, 64, 4, 2, 64, seqlens, page_size=16, block_table=table, max_seqlen_k_new=2, causal=True
        )
    requests = step.requests([k[:-2] for k in r.batch.keys], [v[:-2] for v in r.batch.values])
    out = flash_attn_with_kvcache(
        step.q, k_cache, v_cache, step.k, step.v, cache_seqlens=seqlens, block_table=table, **options
    )
    check_dense(expected(requests, causal=True), out)


def test_ragged_queries_and_new_tokens() -> None:
    lens, rows, new = (16, 0, 31), (2, 3, 1), (2, 5, 0)
    after = tuple(n + m for n, m in zip(lens, new, strict=True))
    r = Requests(after, rows, dtype=torch.float32)
    k = torch.cat([t[len(t) - m :] for t, m in zip(r.batch.keys, new, strict=True)]).to(DEVICE)
    v = torch.cat([t[len(t) - m :] for t, m in zip(r.batch.values, new, strict=True)]).to(DEVICE)
    k_cache, v_cache = (t.clone() for t in r.cache())
    indptr, indices, _ = (t.cpu().tolist() for t in r.table)
    for b, n in enumerate(lens):  # the places of the new tokens hold NaN before
        for at in range(n, after[b]):
            for cache in (k_cache, v_cache):
                cache[indices[indptr[b] + at // 16], at % 16] = float("nan")
    out, lse = flash_attn_with_kvcache(
        r.q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor(lens, device=DEVICE), block_table=r.block_tables(),
        cu_seqlens_q=_cumulative(rows), cu_seqlens_k_new=_cumulative(new), max_seqlen_q=3, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    requests = list(zip(r.q.split(rows), r.batch.keys, r.batch.values, strict=True))
    check_varlen(expected(requests, causal=True), out, lse)


def test_rows_of_chunks_have_positions_of_their_own() -> None:
    """A chunk is a window: rows are rotated row by row, as in FlashAttention 3, also without a causal mask."""
    lens = (17, 4)
    c, step = DenseCache(tuple(n + 3 for n in lens), dtype=torch.float32), Step(lens, 3, 3, False, True)
    requests = step.requests([t[:-3] for t in c.keys], [t[:-3] for t in c.values])
    out = flash_attn_with_kvcache(
        step.q, c.k, c.v, step.k, step.v, cache_seqlens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
        **{**step.options, "causal": False}, attention_chunk=64,
    )  # fmt: skip
    check_dense(expected(requests), out)


def test_positions_by_rotary_seqlens() -> None:
    lens, starts = (17, 4), (5, 9)
    c, step = DenseCache(lens, dtype=torch.float32), Step(lens, 1, 1, False, True)
    step.lens = starts
    requests = step.requests(c.keys, c.values)
    out = flash_attn_with_kvcache(
        step.q, c.k, c.v, step.k, step.v, cache_seqlens=c.cache_seqlens,
        rotary_seqlens=torch.tensor(starts, dtype=torch.int32, device=DEVICE), **step.options,
    )  # fmt: skip
    check_dense(expected(requests), out)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("new", [0, 2])
def test_latent_queries(new: int, q_len: int) -> None:
    """qv: the logits are ``q·k + qv·v``, and the values are those of the cache."""
    lens = (17, 9)
    c = DenseCache(tuple(n + new for n in lens), kv_heads=1, head_dims=(16, 64), dtype=torch.float32)
    q, qv = random(2, q_len, 4, 16, dtype=torch.float32), random(2, q_len, 4, 64, seed=6, dtype=torch.float32)
    given: dict[str, Any] = {}
    if new:
        given = {"k": torch.stack([t[-new:] for t in c.keys]), "v": torch.stack([t[-new:] for t in c.values])}
        given = {name: t.to(DEVICE) for name, t in given.items()}
        for b, n in enumerate(lens):
            c.k[b, n:], c.v[b, n:] = float("nan"), float("nan")
    requests = [(torch.cat((qv[b], q[b]), -1), torch.cat((c.values[b], c.keys[b]), -1), c.values[b]) for b in range(2)]
    seqlens = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    out, lse = flash_attn_with_kvcache(
        q, c.k, c.v, qv=qv, cache_seqlens=seqlens, causal=True, return_softmax_lse=True, **given
    )
    check_dense(expected(requests, causal=True), out, lse)


def test_views_of_one_tensor_are_caches() -> None:
    c, q = DenseCache((17, 4)), random(2, 1, 4, 64)
    both = torch.stack((c.k, c.v), 1)
    out = flash_attn_with_kvcache(q, both[:, 0], both[:, 1], cache_seqlens=c.cache_seqlens)
    check_dense(expected(list(zip(q, c.keys, c.values, strict=True))), out)
