"""``cpu.append``: what eager calls on the CPU write to a cache, against a loop over the tokens."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.page_tables import indptr, int32

from attn_ops.kernels.cpu import append
from attn_ops.ops import backends

OPS = ("append_kv", "append_mla_kv")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("seed", range(24))
def test_tokens_go_to_their_places_and_nothing_else_is_written(seed: int, dtype: torch.dtype, op: str) -> None:
    """Tokens in order are copied as runs, others by their places; those without a place are skipped."""
    draw, page_size, generator = random.Random(seed), (1, 4, 16)[seed % 3], torch.Generator().manual_seed(seed)
    pages = [draw.randint(0, 4) for _ in range(3)]
    kv_indptr, kv_indices = indptr(pages), torch.randperm(20, generator=generator)[: sum(pages)].int()
    if seed % 4 == 3 and sum(pages):
        kv_indices[0] = draw.choice([-1, 20])
    places = [(b, p) for b, count in enumerate(pages) for p in range(count * page_size)]
    if seed % 2:
        draw.shuffle(places)
    places = places[: draw.randint(0, 20)] + [(-1, 0), (3, 0), (0, -1), (1, 10**6)][: seed % 5]
    if seed % 2:
        draw.shuffle(places)
    heads = (2, 8) if op == "append_kv" else (8,)
    new = [torch.randn(len(places), *heads, generator=generator).to(dtype) for _ in range(2)]
    caches = torch.randn(20, 2, page_size, *heads, generator=generator).to(dtype).unbind(1)
    expected = [cache.float() for cache in caches]
    for i, (request, position) in enumerate(places):
        if 0 <= request < 3 and 0 <= position < pages[request] * page_size:
            page = int(kv_indices[int(kv_indptr[request]) + position // page_size])
            if 0 <= page < 20:
                for cache, t in zip(expected, new, strict=True):
                    cache[page, position % page_size] = t[i].float()
    rows = (int32([x for x, _ in places]), int32([x for _, x in places]))
    getattr(torch.ops.attn, op)(*new, *caches, *rows, kv_indices, kv_indptr, backend="cpu")
    for cache, want in zip(caches, expected, strict=True):
        assert torch.equal(cache.float(), want)


@pytest.mark.parametrize("runs", [0, 100])
def test_tokens_that_lie_in_the_cache(runs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read before they are written over."""
    monkeypatch.setattr(append, "MAX_RUNS", runs)
    k_cache, v_cache = torch.randn(2, 1, 16, 2, 8)
    tokens = k_cache[0, 2:6], v_cache[0, 2:6]
    expected = [t.clone() for t in tokens]
    table = int32([0] * 4), int32([4, 5, 6, 7]), int32([0]), int32([0, 1])
    torch.ops.attn.append_kv(*tokens, k_cache, v_cache, *table)
    assert torch.equal(k_cache[0, 4:8], expected[0])
    assert torch.equal(v_cache[0, 4:8], expected[1])


@pytest.mark.parametrize("op", OPS)
def test_eager_calls_on_the_cpu_select_it(op: str) -> None:
    problem = backends.Problem(op, torch.device("cpu"))
    assert backends.choose(problem).label(op) == "cpu.append"
    assert backends.choose(problem, traced=True).name == "reference"
