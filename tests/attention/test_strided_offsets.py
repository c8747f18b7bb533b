"""Heads and tokens that are more than 2^31 elements apart. Only the last stride is fixed; offsets need 64 bits."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.backends import each_backend
from helpers.oracle import Expected, merge
from torch import Tensor

import attn_ops

FAR = 2**31
PAGE, HEADS, DIM, LENGTH = 16, 8, 64, 41
TABLE = [[0, 3], [5, 2, 3], [LENGTH - 2 * PAGE]]


def _far(shape: tuple[int, ...], dim: int, device: str) -> Tensor:
    """float16 that spans more than ``FAR`` elements along ``dim``. Memory that is not used stays uncommitted."""
    rest = [*shape[:dim], 1, *shape[dim + 1 :]]
    strides = list(torch.empty(rest, device="meta").stride())
    strides[dim] = -(-FAR // (shape[dim] - 1)) // 64 * 64 + 64
    assert strides[dim] > math.prod(rest)
    try:
        memory = torch.UntypedStorage(2 * ((shape[dim] - 1) * strides[dim] + math.prod(rest)), device=device)
    except RuntimeError as error:
        pytest.skip(f"no memory for a large tensor: {error}")
    return torch.empty(0, dtype=torch.float16, device=device).set_(memory, 0, shape, strides)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def _put(t: Tensor, value: Tensor) -> Tensor:
    t.copy_(value)
    return t


def _cache(dim: int, device: str) -> tuple[Tensor, Tensor]:
    """An NHD cache and the tokens of the request of ``TABLE`` in it. The rest of the cache is NaN."""
    cache, tokens = _far((6, PAGE, HEADS, DIM), dim, device), _random(LENGTH, HEADS, DIM)
    cache[:] = math.nan
    for t in range(LENGTH):
        cache[TABLE[1][t // PAGE], t % PAGE] = tokens[t].to(device)
    return cache, tokens


def _ints(values: list[list[int]], device: str) -> list[Tensor]:
    return [torch.tensor(v, dtype=torch.int32, device=device) for v in values]


SIZES = {"page_size": PAGE, "num_qo_heads": HEADS, "num_kv_heads": HEADS, "head_dim": DIM}
tokens_and_heads = pytest.mark.parametrize("dim", [1, 2], ids=["tokens", "heads"])


@each_backend
@tokens_and_heads
def test_decode(dim: int, device: str, backend: str) -> None:
    cache, tokens = _cache(dim, device)
    planner = attn_ops.DecodePlanner(1, 3, device=device, **SIZES)
    plan = planner.plan(*_ints(TABLE, device))
    q = _random(1, HEADS, DIM, seed=1)
    far_q = _put(_far((1, HEADS, DIM), 1, device), q)
    out, lse = torch.ops.attn.batch_decode(
        far_q, cache, cache, plan, planner.workspace, return_lse=True, backend=backend
    )
    Expected.of([(q, tokens, tokens)]).check(out, lse)


@each_backend
@tokens_and_heads
def test_prefill(dim: int, device: str, backend: str) -> None:
    cache, tokens = _cache(dim, device)
    planner = attn_ops.PrefillPlanner(1, 9, 3, device=device, **SIZES)
    plan = planner.plan(*_ints([[0, 9], *TABLE], device))
    q = _random(9, HEADS, DIM, seed=1)
    far_q = _put(_far((9, HEADS, DIM), 1, device), q)
    out, lse = torch.ops.attn.batch_prefill(
        far_q, cache, cache, plan, planner.workspace, causal=True, return_lse=True, backend=backend
    )
    Expected.of([(q, tokens, tokens)], causal=True).check(out, lse)


@each_backend
def test_mla(device: str, backend: str) -> None:
    heads, rows = 4, 2
    latents = _random(3 * 64, 576)
    planner = attn_ops.PrefillPlanner(
        1, rows, 3, page_size=64, num_qo_heads=heads, num_kv_heads=1, head_dim=576, head_dim_vo=512, device=device
    )
    plan = planner.plan(*_ints([[0, rows], [0, 3], [0, 1, 2], [7]], device))
    q = _random(rows, heads, 576, seed=1)
    far_q = _put(_far((rows, heads, 576), 1, device), q)
    ckv, kpe = latents.to(device).view(3, 64, 576).split((512, 64), -1)
    out, lse = torch.ops.attn.batch_mla(
        far_q[..., :512],
        far_q[..., 512:],
        ckv,
        kpe,
        plan,
        planner.workspace,
        sm_scale=0.05,
        return_lse=True,
        backend=backend,
    )
    seen = latents[: 2 * 64 + 7]
    Expected.of([(q, seen[:, None], seen[:, None, :512])], sm_scale=0.05).check(out, lse)


def _check_append(cache: Tensor, dim: int, device: str, backend: str) -> None:
    """Append three tokens whose keys, and values, are 2^31 elements apart in dimension ``dim``."""
    kv_indptr, kv_indices, positions, zeros = _ints([*TABLE[:2], [0, PAGE + 15, LENGTH - 1], [0, 0, 0]], device)
    new, caches = _random(3, HEADS, DIM, seed=1), (cache, cache.clone())
    far_new = _put(_far((3, HEADS, DIM), dim, device), new)
    torch.ops.attn.append_kv(far_new, far_new, *caches, zeros, positions, kv_indices, kv_indptr, backend=backend)
    for i, position in enumerate(positions.tolist()):
        for written in caches:
            assert torch.equal(written[TABLE[1][position // PAGE], position % PAGE].cpu(), new[i])


@each_backend
@tokens_and_heads
def test_append(dim: int, device: str, backend: str) -> None:
    cache, _ = _cache(dim, device)
    _check_append(cache, 1, device, backend)


@each_backend
def test_append_of_tokens_far_apart(device: str, backend: str) -> None:
    """The third new token lies 2^31 elements after the first."""
    _check_append(torch.zeros(6, PAGE, HEADS, DIM, dtype=torch.float16, device=device), 0, device, backend)


@each_backend
def test_merge_state(device: str, backend: str) -> None:
    rows = 3
    v_a, v_b = _random(2, rows, HEADS, DIM)
    s_a, s_b = _random(2, rows, HEADS, seed=1).float()
    expected, expected_lse = merge(torch.stack((v_a, v_b), 1), torch.stack((s_a, s_b), 1))
    far_a, far_b = (_put(_far((rows, HEADS, DIM), 1, device), v) for v in (v_a, v_b))
    s_a, s_b = s_a.to(device), s_b.to(device)
    out, lse = torch.ops.attn.merge_state(far_a, s_a, far_b, s_b, backend=backend)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-6, atol=1e-6)
    torch.ops.attn.merge_state_in_place(far_a, s_a, far_b, s_b, backend=backend)
    torch.testing.assert_close(far_a.double().cpu(), expected, rtol=1e-3, atol=1e-3)
