"""Caches of more than 2^31 elements: offsets need 64 bits."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from helpers.backends import each_triton
from helpers.oracle import Expected
from torch import Tensor

import attn_ops
from attn_ops.ops.options import MAX_WINDOW
from attn_ops.plan.plan_checks import MAX_KV_TOKENS

PAGE, HEADS, DIM = 16, 8, 128
PAGES = 2**31 // (2 * PAGE * HEADS * DIM) + 40
TABLE = (PAGES - 1, 0, PAGES - 3, PAGES // 2)
LENGTH = 3 * PAGE + 5


class Large(NamedTuple):
    k_cache: Tensor
    v_cache: Tensor
    keys: Tensor
    values: Tensor
    table: tuple[Tensor, Tensor, Tensor]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def large(request: pytest.FixtureRequest) -> Large:
    """One request on four pages from both ends of the cache. On the CPU only the pages in use are committed."""
    try:
        cache = torch.empty(PAGES, 2, PAGE, HEADS, DIM, dtype=torch.float16, device=request.param)
    except RuntimeError as error:
        pytest.skip(f"no memory for a large cache: {error}")
    assert cache.numel() > 2**31
    keys, values = torch.randn(2, LENGTH, HEADS, DIM, generator=torch.Generator().manual_seed(0)).half()
    for t in range(LENGTH):
        page, offset = TABLE[t // PAGE], t % PAGE
        cache[page, 0, offset], cache[page, 1, offset] = keys[t], values[t]
    table = [[0, len(TABLE)], TABLE, [LENGTH % PAGE]]
    kv_indptr, kv_indices, last = (torch.tensor(t, dtype=torch.int32, device=request.param) for t in table)
    return Large(cache[:, 0], cache[:, 1], keys, values, (kv_indptr, kv_indices, last))


def test_decode(large: Large) -> None:
    planner = attn_ops.DecodePlanner(
        1,
        len(TABLE),
        page_size=PAGE,
        num_qo_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        device=large.k_cache.device,
    )
    plan = planner.plan(*large.table)
    q = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(1)).half()
    out, lse = torch.ops.attn.batch_decode(
        q.to(large.k_cache.device), large.k_cache, large.v_cache, plan, planner.workspace, return_lse=True
    )
    Expected.of([(q, large.keys, large.values)]).check(out, lse)


def test_prefill(large: Large) -> None:
    device = large.k_cache.device
    planner = attn_ops.PrefillPlanner(
        1, 9, len(TABLE), page_size=PAGE, num_qo_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM, device=device
    )
    plan = planner.plan(torch.tensor([0, 9], dtype=torch.int32, device=device), *large.table)
    q = torch.randn(9, HEADS, DIM, generator=torch.Generator().manual_seed(1)).half()
    out, lse = torch.ops.attn.batch_prefill(
        q.to(device), large.k_cache, large.v_cache, plan, planner.workspace, causal=True, return_lse=True
    )
    Expected.of([(q, large.keys, large.values)], causal=True).check(out, lse)


def test_append(large: Large) -> None:
    device = large.k_cache.device
    kv_indptr, kv_indices, _ = large.table
    positions = torch.tensor([0, PAGE + 1, 2 * PAGE + 2, LENGTH], dtype=torch.int32, device=device)
    new = torch.randn(4, HEADS, DIM, generator=torch.Generator().manual_seed(1)).half().to(device)
    zeros = torch.zeros_like(positions)
    torch.ops.attn.append_kv(new, -new, large.k_cache, large.v_cache, zeros, positions, kv_indices, kv_indptr)
    for i, place in enumerate(((TABLE[0], 0), (TABLE[1], 1), (TABLE[2], 2), (TABLE[3], LENGTH % PAGE))):
        assert torch.equal(large.k_cache[place], new[i])
        assert torch.equal(large.v_cache[place], -new[i])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def latent(request: pytest.FixtureRequest) -> Tensor:
    """Packed MLA cache ``[pages, page, 512 + 64]``."""
    try:
        return torch.empty(2**31 // (64 * 576) + 40, 64, 576, dtype=torch.float16, device=request.param)
    except RuntimeError as error:
        pytest.skip(f"no memory for a large cache: {error}")


@pytest.mark.slow
def test_append_and_attend_to_a_latent_cache(latent: Tensor) -> None:
    """Tokens of one request on pages from both ends of the cache."""
    device, table = latent.device, (len(latent) - 1, 0, len(latent) - 3)
    ckv, kpe = latent.split((512, 64), -1)
    length = 2 * 64 + 5
    tokens = torch.randn(length, 576, generator=torch.Generator().manual_seed(0)).half()
    kv_indptr, kv_indices, last, positions, zeros, qo_indptr = (
        torch.tensor(t, dtype=torch.int32, device=device)
        for t in ([0, 3], table, [5], range(length), [0] * length, [0, 2])
    )
    new = tokens.to(device).split((512, 64), -1)
    torch.ops.attn.append_mla_kv(*new, ckv, kpe, zeros, positions, kv_indices, kv_indptr)
    for position in (0, 63, 64, length - 1):
        assert torch.equal(latent[table[position // 64], position % 64].cpu(), tokens[position])

    sizes = {"page_size": 64, "num_qo_heads": 3, "num_kv_heads": 1, "head_dim": 576, "head_dim_vo": 512}
    planner = attn_ops.PrefillPlanner(1, 2, 3, device=device, **sizes)
    plan = planner.plan(qo_indptr, kv_indptr, kv_indices, last)
    q = torch.randn(2, 3, 576, generator=torch.Generator().manual_seed(1)).half()
    q_nope, q_pe = q.to(device).split((512, 64), -1)
    out, lse = torch.ops.attn.batch_mla(
        q_nope, q_pe, ckv, kpe, plan, planner.workspace, sm_scale=0.05, causal=True, return_lse=True
    )
    Expected.of([(q, tokens[:, None], tokens[:, None, :512])], sm_scale=0.05, causal=True).check(out, lse)


@each_triton
def test_a_position_and_a_window_exceed_int32_together(device: str, backend: str) -> None:
    """All keys are 0, so the LSE is the logarithm of the number that a row sees: fewer at the end of the keys."""
    key = torch.zeros(1, 1, 16, device=device).expand(MAX_KV_TOKENS, 1, 16)
    q, options = torch.zeros(4, 1, 16, device=device), {"window_left": 3, "return_lse": True, "backend": backend}
    for right, seen in ((0, (4, 4, 4, 4)), (1, (5, 5, 5, 4)), (MAX_WINDOW, (7, 6, 5, 4))):
        _, lse = torch.ops.attn.single_prefill(q, key, key, window_right=right, **options)
        torch.testing.assert_close(lse.cpu(), torch.tensor(seen).log2()[:, None])


@pytest.mark.gpu
def test_heads_far_apart() -> None:
    """The keys of a head of ragged HND KV begin more than 2^31 elements after those of the first."""
    tokens = 2**31 // ((HEADS - 1) * DIM) + 1000
    kv = torch.empty(HEADS, tokens, DIM, dtype=torch.float16, device="cuda")
    used = torch.randn(HEADS, 200, DIM, generator=torch.Generator().manual_seed(0)).half()
    kv[:, -200:] = used.cuda()
    q = torch.randn(9, HEADS, DIM, generator=torch.Generator().manual_seed(1)).half()
    options = {"causal": True, "window_left": 100}
    out, lse = torch.ops.attn.single_prefill(q.cuda(), kv, kv, kv_layout="HND", return_lse=True, **options)
    tail = used.transpose(0, 1)
    Expected.of([(q, tail, tail)], **options).check(out, lse)


@pytest.mark.gpu
def test_pages_beyond_2_to_the_31_give_the_bits_of_a_small_cache() -> None:
    page_size, heads, dim = 64, 8, 128
    pages = 2**31 // (page_size * heads * dim) + 40
    cache = torch.zeros(pages, page_size, heads, dim, dtype=torch.float16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    cache[-40:] = torch.randn(40, page_size, heads, dim, device="cuda", generator=generator).half()
    small = cache[-40:].clone()
    q = torch.randn(2, 16, dim, device="cuda", generator=generator).half()
    results = []
    for used, first in ((cache, pages - 40), (small, 0)):
        planner = attn_ops.DecodePlanner(
            2, 40, page_size=page_size, num_qo_heads=16, num_kv_heads=heads, head_dim=dim, device="cuda"
        )
        plan = planner.plan(torch.tensor([0, 15, 40]), torch.arange(40) + first, torch.tensor([3, 64]))
        results.append(torch.ops.attn.batch_decode(q, used, used, plan, planner.workspace, backend="triton")[0])
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_a_mask_of_more_than_2_32_bits(backend: str) -> None:
    rows, tokens = 66_000, 66_003
    assert rows * tokens > 2**32
    g = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(n, 1, 64, generator=g, device="cuda").half() for n in (rows, tokens, tokens))
    mask = torch.randint(0, 256, (-(-rows * tokens // 8),), generator=g, device="cuda", dtype=torch.uint8)
    out, lse = torch.ops.attn.single_prefill(q, k, v, mask=mask, return_lse=True, backend=backend)
    for row in (0, 2**31 // tokens, 2**32 // tokens, rows - 1):
        bit = row * tokens + torch.arange(tokens, device="cuda")
        visible = (mask[bit // 8] >> (bit % 8).to(torch.uint8) & 1).bool().cpu()[None]
        expected = Expected.of([(q[row : row + 1].cpu(), k.cpu(), v.cpu(), visible)])
        expected.check(out[row : row + 1].cpu(), lse[row : row + 1].cpu())
