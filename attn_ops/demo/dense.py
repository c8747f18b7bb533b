"""The oracle: one request at a time, no pages, no cache, no compilation, no ``attn`` op.

Greedy decoding is checked teacher-forced. One dense pass over a request's prompt and output gives the
logits behind every output token; if each token is the argmax there, decoding densely token by token would
have chosen the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import LanguageModel

TIE_TOLERANCE = 8
"""Two logits closer than this many units of rounding, of the row's largest magnitude, count as a tie."""


def attention(q: Tensor, k: Tensor, v: Tensor, window_left: int) -> Tensor:
    """Causal attention of ``q [n, Hq, D]`` on ``k, v [n, Hkv, D]``, accumulated in float32."""
    n, heads, dim = q.shape
    group = heads // k.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
    logits = q.float().transpose(0, 1) @ keys.mT / math.sqrt(dim)  # [Hq, n, n]
    row, column = torch.arange(n, device=q.device)[:, None], torch.arange(n, device=q.device)
    hidden = column > row
    if window_left >= 0:
        hidden = hidden | (column + window_left < row)
    weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    return (weights @ values).transpose(0, 1).to(q.dtype)


def logits(model: LanguageModel, tokens: Tensor, first: int = 0) -> Tensor:
    """Logits after each of ``tokens [n]`` from the one at ``first`` on: ``[n - first, vocab]``."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, model.config.windows[layer])

    positions = torch.arange(tokens.shape[0], device=tokens.device)
    return model.logits(model(tokens, positions, attend)[first:])


@dataclass(frozen=True)
class Comparison:
    """How many of ``tokens`` greedy choices are ties that fell the other way in the dense run, or differ from it."""

    tokens: int = 0
    near_ties: int = 0
    different: int = 0

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.tokens + other.tokens, self.near_ties + other.near_ties, self.different + other.different
        )

    def __str__(self) -> str:
        if not self.tokens:
            return "not compared"
        if self.different:
            return f"no: {self.different} of {self.tokens} differ"
        ties = f", {self.near_ties} near ties" if self.near_ties else ""
        return f"yes, {self.tokens} of {self.tokens}{ties}"


@torch.no_grad()
def compare(model: LanguageModel, sequences: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Comparison:
    """Check ``(prompt, output)`` pairs of greedy decoding against the dense run."""
    total = Comparison()
    device = model.lm_head.weight.device
    for prompt, output in sequences:
        tokens = torch.tensor([*prompt, *output], device=device)
        rows = logits(model, tokens[:-1], first=len(prompt) - 1).float()
        chosen = rows.gather(1, tokens[len(prompt) :, None]).squeeze(1)
        best = rows.amax(1)
        tolerance = TIE_TOLERANCE * torch.finfo(model.lm_head.weight.dtype).eps * rows.abs().amax(1)
        wrong = best - chosen > tolerance
        tied = (rows.argmax(1) != tokens[len(prompt) :]) & ~wrong
        total = total + Comparison(len(output), int(tied.sum()), int(wrong.sum()))
    return total
