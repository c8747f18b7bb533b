"""The fuzzer's own oracle: attention of one request in float64, all rows and heads at once.

It is written from the specification, independently of :mod:`helpers.oracle`, whose :class:`~helpers.oracle.Expected`
it fills: that class says how large an error may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from helpers.oracle import Expected


@dataclass(frozen=True)
class Options:
    """The options of one call, as the specification names them. ``k_scale`` and ``v_scale`` multiply K and V."""

    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    soft_cap: float = 0.0
    sm_scale: float | None = None
    sinks: Tensor | None = None
    pos_encoding: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 1e4
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __str__(self) -> str:
        changed = {k: v for k, v in vars(self).items() if isinstance(v, Tensor) or v != vars(_DEFAULT)[k]}
        return ", ".join(f"{k}={'given' if isinstance(v, Tensor) else v}" for k, v in changed.items())


_DEFAULT = Options()


@dataclass(frozen=True)
class Request:
    """One request: ``q [n, Hq, Dqk]`` attends to ``k [m, Hkv, Dqk]`` and ``v [m, Hkv, Dvo]``; ``mask [n, m]`` is True
    if seen."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None


def attend(request: Request, o: Options) -> Expected:
    q, k, v = (t.detach().cpu().double() for t in (request.q, request.k, request.v))
    (n, num_heads, dim), m = q.shape, len(k)
    group = num_heads // k.shape[1]
    scale = (1 / math.sqrt(dim) if o.sm_scale is None else o.sm_scale) * o.k_scale
    i, j = torch.arange(n)[:, None], torch.arange(m)[None, :]
    visible = torch.ones(n, m, dtype=torch.bool)
    if request.mask is not None:
        visible &= request.mask.cpu()
    elif o.causal:
        visible &= j + n <= m + i
    if o.window_left >= 0:
        visible &= j + n + o.window_left >= m + i
    if o.window_right >= 0:
        visible &= j + n <= m + i + o.window_right
    reach = _logits(q.abs(), k.abs(), group) * abs(scale)
    if o.pos_encoding == "ROPE_LLAMA":
        q, k = _rotate(q, torch.arange(m - n, m), o), _rotate(k, torch.arange(m), o)
        reach *= 1 + m
    logits = _logits(q, k, group) * scale
    if o.pos_encoding == "ALIBI":
        bias = _slopes(num_heads)[None, :, None] * (j - i)[:, None, :]
        logits, reach = logits + bias, reach + bias.abs()
    if o.soft_cap:
        logits, reach = o.soft_cap * torch.tanh(logits / o.soft_cap), reach + o.soft_cap
    logits = logits.masked_fill(~visible[:, None, :], -math.inf)
    sink = torch.full((num_heads,), -math.inf) if o.sinks is None else o.sinks.detach().cpu()
    total = torch.cat((logits, sink.double()[None, :, None].expand(n, -1, 1)), -1).logsumexp(-1)
    p = (logits - total[..., None]).exp().nan_to_num(0.0)
    p = p.unflatten(1, (-1, group))
    out, spread = (torch.einsum("nhgm,mhd->nhgd", p, x).flatten(1, 2) for x in (v * o.v_scale, (v * o.v_scale).abs()))
    largest = reach.amax(-1) if m else reach.new_zeros(n, num_heads)
    return Expected(out, total / math.log(2), spread, largest)


def attend_all(requests: Sequence[Request], o: Options, padding: int = 0) -> Expected:
    """The rows of all requests, then ``padding`` rows without keys."""
    sample = requests[0]
    none = Request(sample.q[:0].new_zeros(padding, *sample.q.shape[1:]), sample.k[:0], sample.v[:0])
    parts = [attend(request, o) for request in (*requests, none)]
    columns = zip(*((e.out, e.lse, e.spread, e.reach) for e in parts), strict=True)
    return Expected(*(torch.cat(column) for column in columns))


def scaled(o: Options, **scales: float | None) -> Options:
    """``o`` with ``q_scale`` and ``k_scale`` in the logits and ``v_scale`` in the output."""
    q, k, v = (1.0 if scales.get(f"{name}_scale") is None else float(scales[f"{name}_scale"] or 0) for name in "qkv")
    return replace(o, k_scale=q * k, v_scale=v)


def _logits(q: Tensor, k: Tensor, group: int) -> Tensor:
    """``[n, Hq, m]``: each KV head serves ``group`` query heads."""
    return torch.einsum("nhgd,mhd->nhgm", q.unflatten(1, (-1, group)), k).flatten(1, 2)


def _rotate(x: Tensor, position: Tensor, o: Options) -> Tensor:
    dim = x.shape[-1]
    d = torch.arange(dim)
    frequency = o.rope_theta ** (-2.0 * (d % (dim // 2)).double() / dim) / o.rope_scale
    angle = position.double()[:, None] * frequency[None, :]
    partner = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
    return x * angle.cos()[:, None, :] + partner * angle.sin()[:, None, :]


def _slopes(num_heads: int) -> Tensor:
    n = 1 << (num_heads.bit_length() - 1)
    whole = [2.0 ** (-8.0 * k / n) for k in range(1, n + 1)]
    return torch.tensor([*whole, *(2.0 ** (-4.0 * (2 * m - 1) / n) for m in range(1, num_heads - n + 1))]).double()


def merge(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the states ``v [rows, S, H, D]``, ``s [rows, S, H]`` in base 2; none of them is ``0, -inf``."""
    v, s = v.detach().cpu().double(), s.detach().cpu().double()
    if not s.shape[1]:
        return v.new_zeros(v.shape[0], *v.shape[2:]), s.new_full((s.shape[0], s.shape[2]), -math.inf)
    total = (s * math.log(2)).logsumexp(1) / math.log(2)
    weights = (s - total[:, None]).nan_to_num(-math.inf, neginf=-math.inf).exp2()
    return (weights[..., None] * v.where(weights[..., None] > 0, 0.0)).sum(1), total
