"""The ops that merge states against the oracle, and as the inverse of splitting the keys."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from helpers.oracle import attention, merge
from helpers.states import random_states
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poisoned_memory")
on_each_backend = pytest.mark.usefixtures("cpu_calls_on_each_backend")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _check(out: Tensor, lse: Tensor, v: Tensor, s: Tensor) -> None:
    expected_out, expected_lse = merge(v, s)
    assert out.dtype == v.dtype
    eps = max(torch.finfo(v.dtype).eps, 8 * torch.finfo(torch.float32).eps)
    torch.testing.assert_close(out.double(), expected_out, rtol=eps, atol=eps)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


@on_each_backend
@pytest.mark.parametrize("empty", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("spread", [3.0, 1000.0])
@pytest.mark.parametrize("shape", [(5, 3, 4, 64), (3, 1, 2, 8), (2, 17, 1, 80), (4, 0, 2, 16), (0, 3, 2, 16)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_states(dtype: torch.dtype, shape: tuple[int, ...], spread: float, empty: float) -> None:
    v, s = random_states(shape, dtype, spread, empty)
    _check(*torch.ops.attn.merge_states(v, s), v, s)


@on_each_backend
@pytest.mark.parametrize("empty", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_state(dtype: torch.dtype, empty: float) -> None:
    v, s = random_states((6, 2, 4, 32), dtype, 3.0, empty)
    (v_a, v_b), (s_a, s_b) = v.unbind(1), s.unbind(1)
    _check(*torch.ops.attn.merge_state(v_a, s_a, v_b, s_b), v, s)


@on_each_backend
def test_merge_state_of_different_strides() -> None:
    v, s = random_states((6, 2, 4, 32), torch.float32, 3.0, 0.2)
    (v_a, v_b), (s_a, s_b) = v.unbind(1), s.unbind(1)
    wide = torch.cat((v_b, torch.full_like(v_b, math.nan)), -1)
    _check(*torch.ops.attn.merge_state(v_a, s_a, wide[..., :32], s_b), v, s)
    _check(*torch.ops.attn.merge_state(wide[..., :32], s_b, v_a, s_a), v.flip(1), s.flip(1))


@on_each_backend
@given(
    seed=st.integers(0, 2**32),
    keys=st.integers(0, 40),
    splits=st.lists(st.integers(0, 40), max_size=6),
    scale=st.sampled_from([0.1, 1.0, 20.0]),
    sink=st.booleans(),
)
def test_any_partition_merges_to_the_whole(seed: int, keys: int, splits: list[int], scale: float, sink: bool) -> None:
    """Parts may be empty, and come in any order. A sink counts in one of them."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, 2, 8, generator=generator, dtype=torch.float64) for n in (3, keys, keys))
    sinks = torch.randn(2, generator=generator) * scale if sink and keys else None
    bounds = [*sorted({0, keys, *(min(split, keys) for split in splits)}), keys]
    parts = [slice(a, b) for a, b in pairwise(bounds)]
    first = next((i for i, part in enumerate(parts) if part.stop > part.start), 0)
    states = [
        attention(q, k[part], v[part], sm_scale=scale, sinks=sinks if i == first else None)
        for i, part in enumerate(parts)
    ]
    order = torch.randperm(len(states), generator=generator)
    outs, lses = (torch.stack([states[i][field] for i in order], 1).float() for field in (0, 1))
    out, lse = torch.ops.attn.merge_states(outs, lses)
    whole_out, whole_lse = attention(q, k, v, sm_scale=scale, sinks=sinks)
    # The LSE that weights a state is rounded to float32.
    rounding = 4e-7 * (1 + float(lses.abs().nan_to_num(posinf=0).max()))
    torch.testing.assert_close(out.double(), whole_out, rtol=rounding, atol=rounding * 4)
    torch.testing.assert_close(lse.double(), whole_lse, rtol=1e-6, atol=rounding)


@on_each_backend
@pytest.mark.parametrize("spare", [0, 8])
@pytest.mark.parametrize("mask", [None, torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_state_in_place(dtype: torch.dtype, mask: torch.dtype | None, spare: int) -> None:
    """Masked rows keep their bits, whatever the other state holds, and so does memory between rows."""
    v, s = random_states((6, 2, 4, 32), dtype, 3.0, 0.3)
    v_other, s_other = v[:, 1].contiguous(), s[:, 1].contiguous()
    merged = torch.tensor([True, False, True, True, False, False])
    keep = None if mask is None else merged.to(mask)
    if mask is not None:
        v_other[~merged], s_other[~merged] = math.nan, math.nan
    memory = torch.full((6, 4 + spare, 32 + spare), 7.0, dtype=dtype), torch.full((6, 4 + spare), 7.0)
    out, lse = memory[0][:, :4, :32].copy_(v[:, 0]), memory[1][:, :4].copy_(s[:, 0])
    torch.ops.attn.merge_state_in_place(out, lse, v_other, s_other, keep)
    rows = merged if mask is not None else torch.ones_like(merged)
    _check(out[rows], lse[rows], v[rows], s[rows])
    torch.testing.assert_close(out[~rows], v[:, 0][~rows], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(lse[~rows], s[:, 0][~rows], rtol=0, atol=0, equal_nan=True)
    for written, whole in zip((out, lse), memory, strict=True):
        written.fill_(7.0)
        assert (whole == 7.0).all()


@on_each_backend
@pytest.mark.parametrize("empty", [0.0, 0.6])
@pytest.mark.parametrize("heads", [3, 33, 0])
@pytest.mark.parametrize("counts", [(3, 0, 1, 7), (0, 0), (1,), (), (5, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_states_varlen(dtype: torch.dtype, counts: tuple[int, ...], heads: int, empty: float) -> None:
    """Behind the states of the last row are two more, of NaN."""
    v, s = random_states((sum(counts) + 2, heads, 16), dtype, 3.0, empty)
    v[-2:] = math.nan
    indptr = torch.tensor([0, *counts]).cumsum(0).int()
    out, lse = torch.ops.attn.merge_states_varlen(v, s, indptr)
    assert out.shape == (len(counts), heads, 16)
    for row, (begin, end) in enumerate(pairwise(indptr.tolist())):
        _check(out[row, None], lse[row, None], v[None, begin:end], s[None, begin:end])


def _merges(v: Tensor, s: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """By op, those of states ``v [rows, 2, heads, dim]``."""
    (v_a, v_b), (s_a, s_b) = v.unbind(1), s.unbind(1)
    in_place = v_a.clone(), s_a.clone()
    torch.ops.attn.merge_state_in_place(*in_place, v_b, s_b)
    indptr = torch.arange(0, 2 * v.shape[0] + 1, 2, dtype=torch.int32, device=v.device)
    return {
        "merge_state": torch.ops.attn.merge_state(v_a, s_a, v_b, s_b),
        "merge_states": torch.ops.attn.merge_states(v, s),
        "merge_state_in_place": in_place,
        "merge_states_varlen": torch.ops.attn.merge_states_varlen(v.flatten(0, 1), s.flatten(0, 1), indptr),
    }


def _check_lse_without_value(v: Tensor, s: Tensor) -> None:
    """A state whose LSE is NaN or infinite is a fault that a merge passes on, to its row and head alone."""
    v[1, 0, 2], s[1, 0, 2] = math.nan, math.nan
    s[3, 1, 0] = math.inf
    s[4, 0, 1], s[4, 1, 1] = -math.inf, math.nan
    wrong = torch.zeros(6, 4, dtype=torch.bool)
    wrong[1, 2] = wrong[3, 0] = wrong[4, 1] = True
    for op, (out, lse) in _merges(v, s).items():
        assert out[wrong].isnan().all(), op
        assert lse[wrong].isnan().all(), op
        assert out[~wrong].isfinite().all(), op
        assert not lse[~wrong].isnan().any(), op


@on_each_backend
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_lse_of_no_value(dtype: torch.dtype) -> None:
    _check_lse_without_value(*random_states((6, 2, 4, 32), dtype, 3.0, 0.0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_lse_of_no_value_on_a_gpu(dtype: torch.dtype) -> None:
    v, s = random_states((6, 2, 4, 32), dtype, 3.0, 0.0)
    _check_lse_without_value(v.cuda(), s.cuda())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 8), (5, 3, 4, 64), (700, 2, 32, 128), (33, 70, 3, 80), (0, 2, 2, 16)], ids=str
)
def test_strided_states_on_a_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, states, heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(rows, states, heads, dim + 8, generator=generator).to(dtype)[..., :dim]
    s = torch.randn(rows, states, heads, generator=generator) * 5
    s[torch.rand(s.shape, generator=generator) < 0.3] = -math.inf
    v[s == -math.inf] = math.nan
    expected_v, expected_s = merge(v, s)
    results = [torch.ops.attn.merge_states(v.cuda(), s.cuda(), backend="triton")]
    if states == 2:
        parts = [t.cuda().unbind(1) for t in (v, s)]
        results.append(torch.ops.attn.merge_state(parts[0][0], parts[1][0], parts[0][1], parts[1][1], backend="triton"))
    for merged, sums in results:
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(merged.cpu().double(), expected_v, rtol=8 * eps, atol=8 * eps)
        torch.testing.assert_close(sums.cpu().double(), expected_s, rtol=1e-6, atol=1e-5)
