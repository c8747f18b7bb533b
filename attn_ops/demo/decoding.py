"""Greedy decoding of a fixed number of steps from a snapshot. ``runner.cpp`` does the same in C++."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from attn_ops.demo.engine import Snapshot
from attn_ops.demo.memory import Memory, Step, run_decode


class Decoded(NamedTuple):
    """``tokens [steps][max_batch]`` and the shortest time of all repeats, in seconds."""

    tokens: list[list[int]]
    seconds: float


def decode(step: Step, memory: Memory, start: Snapshot, steps: int, repeats: int) -> Decoded:
    """Decode ``steps`` tokens for every request of ``start``: once to warm up, then ``repeats`` times.

    Every repeat writes the same tokens to the same cache positions, so all repeats start from the same state.
    """
    times = []
    for _ in range(1 + repeats):
        start_time = time.perf_counter()
        tokens = _decode_once(step, memory, start, steps)
        times.append(time.perf_counter() - start_time)
    return Decoded(tokens, min(times[1:]))


def _decode_once(step: Step, memory: Memory, start: Snapshot, steps: int) -> list[list[int]]:
    last_tokens, lengths, decoded = torch.tensor(start.tokens), list(start.lengths), []
    for _ in range(steps):
        lengths = [length + 1 if length else 0 for length in lengths]
        memory.plan_decode(start.pages, lengths)
        last_tokens = run_decode(step, memory, last_tokens).clone()  # the next replay of a CUDA graph overwrites it
        decoded.append(last_tokens)
    return torch.stack(decoded).tolist()
