"""Compiled steps, and the count of what must not happen to them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._dynamo.utils import counters

from attn_ops.demo.memory import Memory, Step, run_decode, run_prefill
from attn_ops.demo.model import LanguageModel
from attn_ops.demo.steps import DecodeStep, PrefillStep

WARM_UP_CALLS = 3
"""Under CUDA graphs the first call of a compiled function warms up, the second captures, the third replays."""


class Counts(NamedTuple):
    """In this process so far: graphs that Dynamo compiled, graph breaks, and graphs refused by CUDA graphs."""

    compilations: int
    graph_breaks: int
    cudagraph_skips: int

    @staticmethod
    def now() -> Counts:
        return Counts(
            counters["stats"]["unique_graphs"],
            sum(counters["graph_break"].values()),
            counters["inductor"]["cudagraph_skips"],
        )

    def since(self, earlier: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(self, earlier, strict=True)))


def compile_steps(model: LanguageModel, memory: Memory) -> tuple[Step, Step]:
    """The prefill and decode steps compiled and warmed up, on CUDA as CUDA graphs."""
    mode = "reduce-overhead" if memory.device.type == "cuda" else None
    prefill, decode = (
        torch.compile(step, fullgraph=True, dynamic=False, mode=mode)
        for step in (PrefillStep(model), DecodeStep(model))
    )
    for _ in range(WARM_UP_CALLS):
        warm_up(memory, prefill, decode)
    return prefill, decode


def warm_up(memory: Memory, prefill: Step, decode: Step) -> None:
    """Each step once on a batch of idle slots, which writes nothing to the cache."""
    batch = memory.capacity.max_batch
    nobody: list[list[int]] = [[]] * batch
    memory.plan_prefill(nobody, [0] * batch, [0] * batch)
    run_prefill(prefill, memory, [])
    memory.plan_decode(nobody, [0] * batch)
    run_decode(decode, memory, torch.zeros(batch, dtype=torch.int64))
