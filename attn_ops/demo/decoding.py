"""Greedy decoding over a fixed horizon from a snapshot: in Python what ``runner.cpp`` does in C++."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from attn_ops.demo.engine import Snapshot
from attn_ops.demo.memory import Memory, Step, run_decode


class Decoded(NamedTuple):
    """``tokens [steps][max_batch]`` and the best of the measured times."""

    tokens: list[list[int]]
    seconds: float


def decode(step: Step, memory: Memory, start: Snapshot, steps: int, repeats: int) -> Decoded:
    """``steps`` tokens for every request of ``start``, once to warm up and then ``repeats`` times.

    Every time writes the same tokens to the same places of the cache, so each starts where the first did.
    """
    times = []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        tokens = _decode_once(step, memory, start, steps)
        times.append(time.perf_counter() - began)
    return Decoded(tokens, min(times[1:]))


def _decode_once(step: Step, memory: Memory, start: Snapshot, steps: int) -> list[list[int]]:
    newest, lengths, chosen = torch.tensor(start.tokens), list(start.lengths), []
    for _ in range(steps):
        lengths = [length + 1 if length else 0 for length in lengths]
        memory.plan_decode(start.pages, lengths)
        newest = run_decode(step, memory, newest).clone()  # a CUDA graph overwrites its output at the next replay
        chosen.append(newest)
    return torch.stack(chosen).tolist()
