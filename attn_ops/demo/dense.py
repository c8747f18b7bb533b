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

from attn_ops.demo.model import LanguageModel

TIE_TOLERANCE = 8.0
"""Two logits are a near tie if no further apart than this many roundings of the row's largest magnitude."""


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
    """Greedy tokens against the dense run's choices.

    near_ties  tokens that the dense run did not choose, by less than :data:`TIE_TOLERANCE`
    widest     the widest gap of these, in the same unit
    different  tokens that the dense run did not choose, by more
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
        ties = f", {self.near_ties} near ties, the widest of {self.widest:.1f} roundings" if self.near_ties else ""
        return f"yes, {self.tokens} of {self.tokens}{ties}"


@torch.no_grad()
def compare(model: LanguageModel, sequences: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Comparison:
    """Check ``(prompt, output)`` pairs of greedy decoding against the dense run."""
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
