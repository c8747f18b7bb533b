"""The dense reference: one request at a time, without pages, KV cache, compilation or ``attn`` ops.

Greedy decoding is checked with teacher forcing. One dense pass over a request's prompt and output gives the logits of
every output token. If each token is the argmax of its logits, dense decoding would choose the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_ops.demo.model import LanguageModel

TIE_TOLERANCE = 8.0
"""Largest gap of two logits in a near tie, in units of the dtype's epsilon times the row's largest magnitude."""


def attention(q: Tensor, k: Tensor, v: Tensor, window_left: int) -> Tensor:
    """Causal attention of ``q [n, Hq, D]`` to ``k, v [n, Hkv, D]``, accumulated in float32."""
    n, heads, dim = q.shape
    group = heads // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
    logits = q.float().transpose(0, 1) @ keys.mT / math.sqrt(dim)  # [Hq, n, n]
    row, column = torch.arange(n, device=q.device)[:, None], torch.arange(n, device=q.device)
    masked = column > row
    if window_left >= 0:
        masked = masked | (column + window_left < row)
    probabilities = logits.masked_fill(masked, -torch.inf).softmax(-1)
    return (probabilities @ values).transpose(0, 1).to(q.dtype)


def logits(model: LanguageModel, tokens: Tensor, first: int = 0) -> Tensor:
    """Next-token logits ``[n - first, vocab]`` after each of ``tokens [first:n]``."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, model.config.windows[layer])

    positions = torch.arange(tokens.shape[0], device=tokens.device)
    return model.logits(model(tokens, positions, attend)[first:])


@dataclass(frozen=True)
class Comparison:
    """Greedy tokens compared with the dense reference.

    Attributes:
        tokens: number of tokens compared.
        near_ties: tokens that differ from the reference, with logits that are within :data:`TIE_TOLERANCE`.
        widest: the largest gap of the near ties, in the unit of :data:`TIE_TOLERANCE`.
        different: tokens that differ from the reference by more.
    """

    tokens: int = 0
    near_ties: int = 0
    widest: float = 0.0
    different: int = 0

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.tokens + other.tokens,
            self.near_ties + other.near_ties,
            max(self.widest, other.widest),
            self.different + other.different,
        )

    def __str__(self) -> str:
        if not self.tokens:
            return "not compared"
        if self.different:
            return f"no: {self.different} of {self.tokens} differ"
        ties = f", {self.near_ties} near ties within {self.widest:.1f} eps" if self.near_ties else ""
        return f"yes, {self.tokens} of {self.tokens}{ties}"


@torch.no_grad()
def compare(model: LanguageModel, sequences: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Comparison:
    """Compare ``(prompt, output)`` pairs of greedy decoding with the dense reference."""
    total = Comparison()
    weight = model.lm_head.weight
    for prompt, output in sequences:
        tokens = torch.tensor([*prompt, *output], device=weight.device)
        rows = logits(model, tokens[:-1], first=len(prompt) - 1).float()
        chosen = tokens[len(prompt) :]
        gap = rows.amax(1) - rows.gather(1, chosen[:, None]).squeeze(1)
        gap = gap / (torch.finfo(weight.dtype).eps * rows.abs().amax(1))
        other = rows.argmax(1) != chosen
        near = other & (gap <= TIE_TOLERANCE)
        widest = float(torch.where(near, gap, 0.0).amax())
        total = total + Comparison(len(output), int(near.sum()), widest, int((other & ~near).sum()))
    return total
