"""Context parallelism: the positions of one rank's tokens (:mod:`attn_ops.plan.context`).

Functions take a table of constants with the fields of :class:`Shard`. Without several ranks they compile to nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from attn_ops.kernels.triton.launch import constexpr_table
from attn_ops.plan.state import PlanProblem


@constexpr_table
class Shard(NamedTuple):
    """The part of every request's tokens that a rank holds."""

    RANK: int = 0
    WORLD: int = 1
    INTERLEAVE: int = 0  # tokens that a rank holds in a row


def shard_of(problem: PlanProblem | None, positions: bool = True) -> Shard:
    """The shard of a plan. Kernels that use no ``positions`` are the same on all ranks."""
    if problem is None or not positions:
        return Shard()
    return Shard(problem.rank, problem.world, problem.interleave)


@triton.jit
def token_position(token, SHARD: tl.constexpr):
    """The position in the whole request of the rank's token number ``token``."""
    if SHARD.WORLD == 1:
        return token
    else:  # noqa: RET505  what follows a return is compiled too
        turn = token // SHARD.INTERLEAVE * SHARD.WORLD + SHARD.RANK
        return turn * SHARD.INTERLEAVE + token % SHARD.INTERLEAVE


@triton.jit
def tokens_before(position, SHARD: tl.constexpr):
    """How many of the rank's tokens are before ``position``; with one rank ``position``, also if it is negative."""
    if SHARD.WORLD == 1:
        return position
    else:  # noqa: RET505
        TURN: tl.constexpr = SHARD.INTERLEAVE * SHARD.WORLD
        position = tl.maximum(position, 0)
        rest = position % TURN - SHARD.RANK * SHARD.INTERLEAVE
        return position // TURN * SHARD.INTERLEAVE + tl.minimum(tl.maximum(rest, 0), SHARD.INTERLEAVE)
