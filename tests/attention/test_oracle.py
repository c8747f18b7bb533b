"""The oracle itself: against PyTorch's attention, by properties, and that it rejects wrong results."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.oracle import Expected, alibi_slopes, attention, merge, rope_llama
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _qkv(n: int, m: int, heads: tuple[int, int] = (4, 2), dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    return _random(n, heads[0], dim), _random(m, heads[1], dim, seed=1), _random(m, heads[1], dim, seed=2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 40), (7, 40), (40, 40)])
def test_matches_scaled_dot_product_attention(n: int, m: int, causal: bool) -> None:
    """Bottom-right alignment: the last query sees every key."""
    q, k, v = _qkv(n, m)
    keep = torch.ones(n, m, dtype=torch.bool).tril(m - n) if causal else None
    heads_first = (t.transpose(0, 1)[None] for t in (q, k, v))
    expected = scaled_dot_product_attention(*heads_first, attn_mask=keep, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(attention(q, k, v, causal=causal)[0], expected)


def test_lse_is_base_2_of_the_scaled_logits() -> None:
    q, k, v = _qkv(1, 3, heads=(1, 1))
    logits = [float(q[0, 0] @ k[j, 0]) * 0.7 for j in range(3)]
    _, lse = attention(q, k, v, sm_scale=0.7)
    assert float(lse) == pytest.approx(math.log2(sum(math.exp(x) for x in logits)))
    _, lse = attention(q, k, v, sm_scale=0.7, sinks=torch.tensor([1.5]))
    assert float(lse) == pytest.approx(math.log2(sum(math.exp(x) for x in [*logits, 1.5])))
    _, lse = attention(q, k, v, sm_scale=0.7, logits_soft_cap=0.5)
    assert float(lse) == pytest.approx(math.log2(sum(math.exp(0.5 * math.tanh(x / 0.5)) for x in logits)))


def test_a_window_equals_its_mask() -> None:
    """The key itself and the two before it."""
    q, k, v = _qkv(3, 5)
    keep = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]).bool()
    windowed, masked = attention(q, k, v, causal=True, window_left=2), attention(q, k, v, mask=keep)
    assert all(map(torch.equal, windowed, masked))


def test_a_window_on_the_right_equals_its_mask() -> None:
    """The key itself, the one before it and the two after it."""
    q, k, v = _qkv(3, 5)
    keep = torch.tensor([[0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]).bool()
    windowed, masked = attention(q, k, v, window_left=1, window_right=2), attention(q, k, v, mask=keep)
    assert all(map(torch.equal, windowed, masked))
    (q, k, v), all_keys = _qkv(4, 4), torch.ones(4, 4).bool()
    windowed, masked = attention(q, k, v, window_right=1), attention(q, k, v, mask=all_keys.tril(1))
    assert all(map(torch.equal, windowed, masked))


def test_rows_without_keys() -> None:
    q, k, v = _qkv(5, 2)
    out, lse = attention(q, k, v, causal=True)
    assert (out[:3] == 0).all()
    assert (lse[:3] == -math.inf).all()
    assert lse[3:].isfinite().all()


def test_rows_without_keys_have_the_lse_of_the_sink() -> None:
    q, k, v = _qkv(5, 2)
    out, lse = attention(q, k, v, causal=True, sinks=torch.tensor([0.0, 1.0, -2.0, 3.0]))
    assert (out[:3] == 0).all()
    torch.testing.assert_close(lse[:3], torch.tensor([0.0, 1.0, -2.0, 3.0]).double().div(math.log(2)).expand(3, 4))
    padded = Expected.of([(q, k, v)], padding=2, sinks=torch.ones(4))
    assert (padded.lse[5:] == 1 / math.log(2)).all()


def test_rotation_depends_on_relative_positions() -> None:
    q, k = _random(1, 1, 16), _random(1, 1, 16, seed=1)

    def logit(i: int, j: int) -> float:
        a, b = rope_llama(q, torch.tensor([i]), 1e4, 1.0), rope_llama(k, torch.tensor([j]), 1e4, 1.0)
        return float((a * b).sum())

    assert logit(9, 4) == pytest.approx(logit(105, 100))
    assert logit(9, 4) != pytest.approx(logit(4, 9))
    torch.testing.assert_close(rope_llama(q, torch.tensor([0]), 1e4, 1.0), q)


def test_alibi_slopes_as_published() -> None:
    assert alibi_slopes(8) == [2.0**-k for k in range(1, 9)]
    assert alibi_slopes(12) == [2.0**-k for k in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]


def test_merged_parts_equal_the_whole() -> None:
    q, k, v = _qkv(2, 9)
    parts = [attention(q, k[a:b], v[a:b]) for a, b in ((0, 4), (4, 4), (4, 9))]
    out, lse = merge(*(torch.stack([part[i] for part in parts], 1) for i in (0, 1)))
    whole = attention(q, k, v)
    torch.testing.assert_close(out, whole[0])
    torch.testing.assert_close(lse, whole[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_exact_result_is_accepted_and_one_without_a_key_is_not(dtype: torch.dtype) -> None:
    """Any one of 130 keys. Where the output is too coarse to show it, the LSE does."""
    q, k, v = (t.to(dtype) for t in _qkv(1, 130))
    expected = Expected.of([(q, k, v)])
    expected.check(expected.out.to(dtype), expected.lse.float())
    for missing in range(130):
        rest = torch.arange(130) != missing
        out, lse = attention(q, k[rest], v[rest])
        with pytest.raises(AssertionError, match="differs at"):
            expected.check(out.to(dtype), lse.float())


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e-3])
def test_an_empty_row_must_be_exactly_empty(value: float) -> None:
    q, k, v = (t.float() for t in _qkv(1, 0))
    expected = Expected.of([(q, k, v)], padding=1)
    expected.check(torch.zeros(2, 4, 16), torch.full((2, 4), -math.inf))
    with pytest.raises(AssertionError, match="out differs"):
        expected.check(torch.full((2, 4, 16), value), torch.full((2, 4), -math.inf))
    with pytest.raises(AssertionError, match="lse differs"):
        expected.check(torch.zeros(2, 4, 16), torch.full((2, 4), value))
