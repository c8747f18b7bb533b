"""The CUDA kernels that merge states, on a GPU against the oracle: strides, empty states, graphs, packages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.oracle import merge
from helpers.states import random_states
from torch import Tensor, nn

import attn_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

SHAPES = (
    (1, 1, 1, 8),
    (5, 3, 4, 64),
    (700, 2, 32, 128),
    (33, 70, 3, 80),
    (9, 23, 4, 128),
    (7, 4, 5, 16),
    (3, 9, 2, 512),
    (129, 8, 7, 256),
    (4, 0, 2, 16),
    (0, 3, 2, 16),
)
"""Rows, states, heads, head_dim: fewer, as many and more states than are loaded at once; rows that do not fill CTAs."""


def _check(out: Tensor, lse: Tensor, v: Tensor, s: Tensor) -> None:
    expected_out, expected_lse = merge(v, s)
    assert out.dtype == v.dtype
    eps = max(torch.finfo(v.dtype).eps, 32 * torch.finfo(torch.float32).eps)  # of many states and exponentials of 2^-22
    torch.testing.assert_close(out.cpu().double(), expected_out, rtol=eps, atol=eps)
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-6, atol=1e-5)


def _merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.attn.merge_states(v, s, backend="cuda")


@pytest.mark.parametrize(("spread", "empty"), [(3.0, 0.0), (5.0, 0.6), (1000.0, 0.3), (1.0, 1.0)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_states(dtype: torch.dtype, shape: tuple[int, ...], spread: float, empty: float) -> None:
    v, s = random_states(shape, dtype, spread, empty)
    _check(*_merge_states(v.cuda(), s.cuda()), v, s)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_states_of_any_strides(dtype: torch.dtype) -> None:
    """Spare columns of NaN, states outermost, heads before rows, one state for all rows, and one for all heads."""
    v, s = random_states((6, 5, 4, 48), dtype)
    wide = torch.full((6, 5, 4, 64), math.nan, dtype=dtype)
    wide[..., :48] = v
    outermost = v.transpose(0, 1).contiguous().cuda().transpose(0, 1)
    heads_first = v.permute(2, 0, 1, 3).contiguous().cuda().permute(1, 2, 0, 3)
    for given in (wide.cuda()[..., :48], outermost, heads_first):
        _check(*_merge_states(given, s.cuda()), v, s)
    s_outermost = s.transpose(0, 1).contiguous().cuda().transpose(0, 1)
    _check(*_merge_states(outermost, s_outermost), v, s)
    repeated = [t[:1].expand(6, *t.shape[1:]) for t in (v, s)]
    _check(*_merge_states(*(t[:1].cuda().expand(6, *t.shape[1:]) for t in (v, s))), *repeated)


@pytest.mark.parametrize("shape", [(1, 2, 1, 8), (5, 2, 4, 80), (700, 2, 32, 128), (0, 2, 2, 16)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_state(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    v, s = random_states(shape, dtype)
    parts = [t.cuda().unbind(1) for t in (v, s)]
    _check(*torch.ops.attn.merge_state(parts[0][0], parts[1][0], parts[0][1], parts[1][1], backend="cuda"), v, s)
    a = parts[0][0].contiguous()
    _check(*torch.ops.attn.merge_state(a, parts[1][0], parts[0][1], parts[1][1], backend="cuda"), v, s)


@pytest.mark.parametrize("spare", [0, 8])
@pytest.mark.parametrize("mask", [None, torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_state_in_place(dtype: torch.dtype, mask: torch.dtype | None, spare: int) -> None:
    """Masked rows keep their bits, whatever the other state holds, and so does memory between rows."""
    v, s = random_states((37, 2, 5, 48), dtype)
    v_other, s_other = v[:, 1].contiguous().cuda(), s[:, 1].contiguous().cuda()
    merged = torch.arange(37) % 3 != 1
    keep = None
    if mask is not None:
        v_other[~merged], s_other[~merged] = math.nan, math.nan
        keep = merged.to(mask).cuda()
    memory = torch.full((37, 5 + spare, 48 + spare), 7.0, dtype=dtype).cuda(), torch.full((37, 5 + spare), 7.0).cuda()
    out, lse = memory[0][:, :5, :48].copy_(v[:, 0]), memory[1][:, :5].copy_(s[:, 0])
    torch.ops.attn.merge_state_in_place(out, lse, v_other, s_other, keep, backend="cuda")
    rows = merged if mask is not None else torch.ones_like(merged)
    _check(out[rows.cuda()], lse[rows.cuda()], v[rows], s[rows])
    torch.testing.assert_close(out.cpu()[~rows], v[:, 0][~rows], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(lse.cpu()[~rows], s[:, 0][~rows], rtol=0, atol=0, equal_nan=True)
    for written, whole in zip((out, lse), memory, strict=True):
        written.fill_(7.0)
        assert (whole == 7.0).all()


def test_nan_and_infinity_stay_in_their_row() -> None:
    v, s = random_states((9, 6, 3, 64), torch.float32, empty=0.0)
    v[2, 3, 1, 5], s[4, 0, 2], v[6, 1, 0, 7] = math.nan, math.nan, math.inf
    out, lse = (t.cpu() for t in _merge_states(v.cuda(), s.cuda()))
    assert out[2, 1, 5].isnan()
    assert lse[4, 2].isnan()
    assert out[6, 0, 7].isinf()
    clean = torch.ones(9, 3, dtype=torch.bool)
    clean[2, 1] = clean[4, 2] = clean[6, 0] = False
    assert out[clean].isfinite().all()
    assert lse[clean].isfinite().all()
    rows = [0, 1, 3, 5, 7, 8]
    _check(out[rows], lse[rows], v[rows], s[rows])


def test_repeated_calls_agree_bit_for_bit_and_take_other_tensors() -> None:
    """The second call of a key launches the prepared call, as one in a CUDA graph does."""
    v, s = random_states((50, 8, 32, 128), torch.bfloat16)
    first = _merge_states(v.cuda(), s.cuda())
    for _ in range(3):
        again = _merge_states(v.cuda(), s.cuda())
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other, sums = v.flip(1), s.flip(1)
    _check(*_merge_states(other.cuda(), sums.cuda()), other, sums)
    inputs = v.cuda(), s.cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _merge_states(*inputs)
    for values, lses in ((v, s), (other, sums)):
        inputs[0].copy_(values)
        inputs[1].copy_(lses)
        graph.replay()
        _check(*captured, values, lses)


def test_a_kernel_waits_for_what_it_reads() -> None:
    """Launched with programmatic dependent launch, one after the other: each reads what the one before wrote."""
    v, s = random_states((3000, 2, 32, 128), torch.float32, empty=0.0)
    out, lse = v[:, 0].cuda().contiguous(), s[:, 0].cuda().contiguous()
    other, other_s = v[:, 1].cuda().contiguous(), s[:, 1].cuda().contiguous()
    for _ in range(20):
        torch.ops.attn.merge_state_in_place(out, lse, other, other_s, backend="cuda")
    expected_lse = torch.logsumexp(torch.stack([s[:, 0], *[s[:, 1]] * 20]).double() * math.log(2), 0) / math.log(2)
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-5, atol=1e-5)
    weight = torch.exp2(s[:, 0].double() - expected_lse)[..., None]
    expected = v[:, 0].double() * weight + v[:, 1].double() * (1 - weight)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_states_beyond_2_to_the_31_elements() -> None:
    rows, heads, dim = (1 << 31) // (2 * 32 * 128) + 3, 32, 128
    v = torch.zeros(rows, 2, heads, dim, dtype=torch.bfloat16, device="cuda")
    s = torch.zeros(rows, 2, heads, device="cuda")
    v[-1, 0], v[-1, 1], s[-1, 1] = 1.0, 3.0, 1.0
    out, lse = _merge_states(v, s)
    expected = (1.0 + 2 * 3.0) / 3
    torch.testing.assert_close(out[-1].cpu().float(), torch.full((heads, dim), expected), rtol=1e-2, atol=0)
    torch.testing.assert_close(lse[-1].cpu(), torch.full((heads,), math.log2(3)))
    assert not out[:-1].any()
    torch.testing.assert_close(lse[:-1], torch.ones_like(lse[:-1]))


class Merge(nn.Module):
    def forward(self, v: Tensor, s: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """Every op once. The inputs stay as they are."""
        out, lse = torch.ops.attn.merge_states(v, s)
        pair = torch.ops.attn.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
        kept = v[:, 0].clone(), s[:, 0].clone()
        torch.ops.attn.merge_state_in_place(*kept, v[:, 2], s[:, 2], mask)
        return out, lse, *pair, *kept


@pytest.mark.slow
def test_a_package_has_the_kernels_and_takes_other_sizes(tmp_path: Path) -> None:
    from attn_ops.native import images

    def inputs(rows: int) -> tuple[Tensor, ...]:
        v, s = random_states((rows, 6, 4, 128), torch.bfloat16, empty=0.0)
        return v.cuda(), s.cuda(), (torch.arange(rows) % 2 == 0).cuda()

    built: list[Any] = []
    add = images.ImageSet.add

    def observed(self: images.ImageSet, image: images.Image) -> str:
        built.append(image.function)
        return add(self, image)

    rows = torch.export.Dim("rows", min=2, max=4096)
    exported = torch.export.export(Merge(), inputs(50), dynamic_shapes=({0: rows}, {0: rows}, {0: rows}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images.ImageSet, "add", observed)
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "merge.pt2"))
    assert {"merge_states_kernel", "merge_state_kernel", "merge_state_in_place_kernel"} <= set(built)
    package = torch._inductor.aoti_load_package(path)
    for count in (50, 7, 333):
        x = inputs(count)
        for a, b in zip(package(*x), Merge()(*x), strict=True):
            assert torch.equal(a, b)


def test_explain_names_the_kernel() -> None:
    v, s = (t.cuda() for t in random_states((3, 2, 4, 64), torch.bfloat16))
    lines = attn_ops.explain("merge_states", v, s).splitlines()
    assert lines[0] == "cuda.merge_states: runs it, kernel merge_states; packages launch its image"
