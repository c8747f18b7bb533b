"""The error of an output that has another dtype than the one that its call computes in."""

from __future__ import annotations

import torch
from torch import Tensor

from helpers.fuzz.batch import FP8
from helpers.oracle import Expected


def check_rounded(
    expected: Expected,
    out: Tensor,
    lse: Tensor | None,
    computed: torch.dtype,
    *,
    float32_eps: float = 2**-23,
    smallest: float = 0.0,
) -> None:
    """Raise unless ``out`` is the oracle's, saturated and rounded once, from a call that computes in ``computed``.

    ``float32_eps`` and ``smallest`` are those of :meth:`helpers.oracle.Expected.check`.
    """
    limits, work = torch.finfo(out.dtype), torch.finfo(computed)
    arithmetic = 8 * float32_eps * (1 + expected.reach + expected.lse.abs().nan_to_num(posinf=0))
    relative = arithmetic[..., None] + (0 if computed == torch.float32 else 2 * work.eps)
    error = relative * expected.spread + torch.where(expected.spread > 0, 4 * max(smallest, work.smallest_normal), 0.0)
    truth, largest = expected.out, expected.out.abs() + error
    if out.dtype in FP8:
        truth = truth.clamp(limits.min, limits.max)
    unit = limits.eps * largest.clamp_min(limits.smallest_normal).log2().floor().exp2()
    _within("out", out, truth, error + 0.5 * unit)
    if lse is not None:
        _within("lse", lse, expected.lse, arithmetic)


def _within(name: str, got: Tensor, truth: Tensor, error: Tensor) -> None:
    got = got.detach().cpu().double()
    assert got.shape == truth.shape, f"{name} is {list(got.shape)}, expected {list(truth.shape)}"
    wrong = ~((got == truth) | ((got - truth).abs() <= error * (1 + 1e-9)))
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name} differs at {int(wrong.sum())} of {wrong.numel()} places, first {list(at)}: {float(got[at])}, "
            f"expected {float(truth[at])} within {float(error[at]):.3g}"
        )
