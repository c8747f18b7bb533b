"""Compiled model steps, and counts of compilations, graph breaks and skipped CUDA graphs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_ops.demo.memory import Memory, Step, run_decode, run_prefill
from attn_ops.demo.model import LanguageModel
from attn_ops.demo.steps import DecodeStep, PrefillStep

WARM_UP_CALLS = 3
"""With CUDA graphs, the first call of a compiled function warms up, the second captures and the third replays."""


class Counts(NamedTuple):
    """Counts since the process started: compiled graphs, graph breaks, and graphs that run without a CUDA graph."""

    compilations: int
    graph_breaks: int
    cudagraph_skips: int

    @staticmethod
    def now() -> Counts:
        from torch._dynamo.utils import counters  # takes a second to import

        return Counts(
            counters["stats"]["unique_graphs"],
            sum(counters["graph_break"].values()),
            counters["inductor"]["cudagraph_skips"],
        )

    def since(self, earlier: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(self, earlier, strict=True)))


def compile_steps(model: LanguageModel, memory: Memory) -> tuple[Step, Step]:
    """Compile and warm up the prefill and decode steps, on CUDA with CUDA graphs."""
    mode = "reduce-overhead" if memory.device.type == "cuda" else None
    prefill, decode = (
        torch.compile(step, fullgraph=True, dynamic=False, mode=mode)
        for step in (PrefillStep(model), DecodeStep(model))
    )
    for _ in range(WARM_UP_CALLS):
        warm_up(memory, prefill, decode)
    return prefill, decode


def warm_up(memory: Memory, prefill: Step, decode: Step) -> None:
    """Run each step once on a batch of empty slots. It writes nothing to the KV cache."""
    batch = memory.capacity.max_batch
    no_pages: list[list[int]] = [[]] * batch
    memory.plan_prefill(no_pages, [0] * batch, [0] * batch)
    run_prefill(prefill, memory, [])
    memory.plan_decode(no_pages, [0] * batch)
    run_decode(decode, memory, torch.zeros(batch, dtype=torch.int64))
