"""Tolerances of kernels that round probabilities to e4m3 before PV, and multiply in FP8.

A probability that is rounded to three bits of mantissa has a relative error of at most 2^-4. So an output differs by at
most 2^-4 of the weighted mean of ``|v|``. With many keys it differs by far less, as the errors have either sign: their
standard deviation is at most ``RELATIVE`` of each weight, and that of the output ``RELATIVE * sqrt(sum((w * v)^2))``.
``DEVIATIONS`` of these are allowed. They are more than the greatest difference for 12 keys or fewer.

A probability at the row maximum is scaled to ``SCALE``; one that is then below 2^-6 has an absolute error of at most
2^-10. The row sum and the LSE are those of the probabilities before they are rounded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from helpers.oracle import Expected, attention

SCALE = 2.0**5
RELATIVE = 2.0**-4 / math.sqrt(3)
DEVIATIONS = 6
TENSOR_CORE_EPS = 2.0**-14
"""Rounding of sums in tensor cores, which keep fewer bits than float32; ``float32_eps`` of ``Fp8Expected.check``."""


@functools.cache
def rounding_of_probabilities() -> float:
    """Where calls with FP8 queries round them: the greatest error of an output, of the weighted mean of ``|v|``."""
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    return 2.0**-4 if hopper else 0.0


def tolerance_of_fp8_queries() -> dict[str, float]:
    """The same for :meth:`~helpers.oracle.Expected.check`."""
    rounding = rounding_of_probabilities()
    return {"eps": rounding / 2, "float32_eps": TENSOR_CORE_EPS} if rounding else {}


class Fp8Expected(NamedTuple):
    """The exact result of a batch, and the error that is allowed.

    energy   ``[rows, num_qo_heads, head_dim_vo]``: ``sqrt(sum((w * v)^2))`` over the keys, with weights ``w``
    lengths  ``sqrt(number of keys)`` of each row's request times the largest ``|v|``
    """

    exact: Expected
    energy: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, requests: Sequence[tuple[Any, ...]], padding: int = 0, **options: Any) -> Fp8Expected:
        """As :meth:`~helpers.oracle.Expected.of`."""
        exact = Expected.of(requests, padding, **options)
        scale = options.get("sm_scale") or 1 / math.sqrt(requests[0][0].shape[-1])
        sinks = options.get("sinks")
        doubled = options | {
            "sm_scale": 2 * scale,
            "logits_soft_cap": 2 * options.get("logits_soft_cap", 0.0),
            "sinks": None if sinks is None else 2 * sinks.double(),
        }
        energies, lses, lengths = [], [], []
        for q, k, v, *mask in requests:
            # The squares of the weights are, but for a factor, the weights of logits that are twice as large.
            squares, lse = attention(q, k, v.double().square(), mask=mask[0] if mask else None, **doubled)
            energies.append(squares)
            lses.append(lse)
            largest = float(v.double().abs().max()) if v.numel() else 0.0
            lengths.append(torch.full((len(q),), math.sqrt(len(k)) * largest, dtype=torch.float64))
        rows = sum(map(len, energies))
        of_weights = torch.exp2(torch.cat(lses) - 2 * exact.lse[:rows]).nan_to_num(0)
        energy = (torch.cat(energies) * of_weights[..., None]).sqrt()
        padded = torch.zeros_like(exact.out)
        padded[:rows] = energy
        return cls(exact, padded, torch.cat((*lengths, torch.zeros(padding, dtype=torch.float64))))

    def rows(self, rows: slice) -> Fp8Expected:
        return Fp8Expected(self.exact.rows(rows), self.energy[rows], self.lengths[rows])

    def check(self, out: Tensor, lse: Tensor | None = None, *, float32_eps: float = 2**-23) -> float:
        """Raise unless the result is within tolerance. The largest error of an output, of what is allowed."""
        exact, got = self.exact, out.detach().cpu().double()
        assert got.shape == exact.out.shape
        arithmetic = 8 * float32_eps * (1 + exact.reach + exact.lse.abs().nan_to_num(posinf=0))
        rounding = torch.minimum(DEVIATIONS * RELATIVE * self.energy, 2**-4 * exact.spread)
        underflow = DEVIATIONS * 2.0**-10 / SCALE * self.lengths[:, None, None]
        allowed = rounding + arithmetic[..., None] * exact.spread + torch.where(exact.spread > 0, underflow, 0.0)
        if out.dtype != torch.float32:
            info = torch.finfo(out.dtype)
            largest = (exact.out.abs() + allowed).clamp(info.smallest_normal, info.max)
            exponent = largest.log2().floor()
            allowed = torch.where(exact.spread > 0, allowed + 0.5 * info.eps * torch.exp2(exponent), 0.0)
        error = (got - exact.out.clamp(torch.finfo(out.dtype).min, torch.finfo(out.dtype).max)).abs()
        wrong = ~(error <= allowed)
        assert not wrong.any(), (
            f"out differs at {int(wrong.sum())} of {wrong.numel()} places, first {wrong.nonzero()[0].tolist()}: "
            f"{got[wrong][0]}, expected {exact.out[wrong][0]} within {allowed[wrong][0]:.3g}"
        )
        if lse is not None:
            difference = (lse.detach().cpu().double() - exact.lse).abs()
            same = (lse.cpu() == exact.lse) | (difference <= arithmetic)
            assert same.all(), f"lse differs by up to {difference.nan_to_num(0, 0, 0).max()}"
        return float((error / allowed.clamp_min(1e-30)).max()) if error.numel() else 0.0
