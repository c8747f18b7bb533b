"""Attention of serving steps, planning and 32 layers, with request lengths of published traces.

A decode step has one query row per request. A mixed step also has chunks of new prompts, as chunked prefill schedules
them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

import attn_ops
from benchmarks import report
from benchmarks.comparison import METHOD, Comparison, Prepare, add_peers, selected
from benchmarks.peers import batch_attention, flashinfer, flashinfer_workspace
from benchmarks.prefill_problem import PrefillProblem
from benchmarks.prefill_rows import PrefillRow
from benchmarks.timing import Call, host_microseconds

LENGTHS = Path(__file__).with_name("workloads") / "lengths.json"
LAYERS = 32
BATCH = 64
CHUNK_TOKENS = 2048

NOTE = (
    f"Microseconds of attention in a step of {LAYERS} layers: bf16, 32/8 heads of 128, page 16. A step is planning, "
    "and in each layer one call for decode requests and one for prefill chunks. attn_ops plans on the device, in the "
    "CUDA graph. FlashInfer plans on the host, once per step; that time is added to the time of its graph, and "
    f"`FlashInfer plan` shows the shortest. `{report.SPEEDUP}` is the time of the fastest peer divided by that of "
    "attn_ops, the faster of its columns. `one launch`: decode and prefill rows in one call of batch_prefill. "
    f"{METHOD} Lengths "
    "are sampled from Azure LLM inference 2023 (CC-BY-4.0) and Mooncake (Apache-2.0), see `benchmarks/workloads/`."
)


class Trace(NamedTuple):
    """The requests of a trace, as numbers of input and output tokens."""

    name: str
    requests: tuple[tuple[int, int], ...]


def traces() -> list[Trace]:
    """The stored samples of published traces."""
    entries = json.loads(LENGTHS.read_text(encoding="utf-8"))
    return [Trace(e["name"], tuple((i, o) for i, o in e["sample256"])) for e in entries]


def draw(trace: Trace, batch: int, chunk_tokens: int, seed: int = 0) -> PrefillRow:
    """A random step: ``batch`` requests that decode, then prompt chunks of ``chunk_tokens`` new tokens in total.

    A chunk begins at a multiple of ``chunk_tokens`` in its prompt; the tokens before it are in the KV cache.
    """
    source = random.Random(seed)
    decoding = [tokens + source.randrange(max(1, out)) + 1 for tokens, out in source.sample(trace.requests, batch)]
    new: list[int] = []
    context: list[int] = []
    while sum(new) < chunk_tokens:
        prompt, _ = source.choice(trace.requests)
        begin = source.randrange(0, prompt, chunk_tokens)
        new.append(min(chunk_tokens - sum(new), prompt - begin))
        context.append(begin + new[-1])
    kind = "mixed" if chunk_tokens else "decode"
    return PrefillRow(f"{trace.name}, {kind}", (1,) * batch + tuple(new), (*decoding, *context), None)


class StepImplementation(NamedTuple):
    """An implementation of a serving step. ``plan()`` plans the step; ``layer(copy)`` attends to a copy of the KV
    cache.

    A layer returns outputs ``[rows, heads, head_dim]`` of the decode requests, then of the chunks.
    """

    plan: Callable[[], object]
    layer: Callable[[int], tuple[Tensor, ...]]


class StepProblem(PrefillProblem):
    """A serving step. Its first ``decoding`` requests have one query row each; the others have a chunk."""

    def __init__(self, row: PrefillRow, device: str = "cuda") -> None:
        super().__init__(row, device=device)
        self.decoding = next((b for b, rows in enumerate(row.qo_lens) if rows > 1), row.batch)
        self.sizes: dict[str, Any] = {
            "page_size": row.page_size,
            "num_qo_heads": row.num_qo_heads,
            "num_kv_heads": row.num_kv_heads,
            "head_dim": row.head_dim,
        }

    def decode_table(self) -> tuple[Tensor, Tensor, Tensor]:
        """The page table of the decode requests."""
        n, (indptr, indices, last) = self.decoding, self.table.arguments
        return indptr[: n + 1], indices[: indptr[n]], last[:n]

    def chunk_table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Cumulative query rows, then the page table of the chunks."""
        n, (indptr, indices, last) = self.decoding, self.table.arguments
        return self.qo_indptr[n:] - n, indptr[n:] - indptr[n], indices[indptr[n] :], last[n:]

    def caches(self, copy: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a copy."""
        return self.k_caches[copy], self.v_caches[copy]

    def error(self, out: tuple[Tensor, ...], copy: int = 0, rows: int = 64) -> float:  # type: ignore[override]
        return super().error(torch.cat(out), copy, rows)


Implementation = Callable[[StepProblem], StepImplementation]


def ours(p: StepProblem) -> StepImplementation:
    """``batch_decode`` for the decode requests and ``batch_prefill`` for the chunks."""
    n, decode_table, chunk_table = p.decoding, p.decode_table(), p.chunk_table()
    decode = attn_ops.DecodePlanner(n, decode_table[1].shape[0], device=p.device, **p.sizes)
    if n == p.row.batch:
        return StepImplementation(lambda: decode.plan(*decode_table), lambda copy: (_decode(p, decode, copy),))
    chunks, pages = p.row.batch - n, chunk_table[2].shape[0]
    prefill = attn_ops.PrefillPlanner(chunks, p.q.shape[0] - n, pages, causal=True, device=p.device, **p.sizes)
    return StepImplementation(
        lambda: (decode.plan(*decode_table), prefill.plan(*chunk_table)),
        lambda copy: (_decode(p, decode, copy), _prefill(p, p.q[n:], prefill, copy)),
    )


def ours_in_one_launch(p: StepProblem) -> StepImplementation:
    """All requests in one call of ``batch_prefill``."""
    planner = p.planner(paged=True)
    return StepImplementation(
        lambda: planner.plan(p.qo_indptr, *p.table.arguments), lambda copy: (_prefill(p, p.q, planner, copy),)
    )


def _decode(p: StepProblem, planner: attn_ops.DecodePlanner, copy: int) -> Tensor:
    return torch.ops.attn.batch_decode(p.q[: p.decoding], *p.caches(copy), planner.state, planner.workspace)[0]


def _prefill(p: StepProblem, q: Tensor, planner: attn_ops.PrefillPlanner, copy: int) -> Tensor:
    return torch.ops.attn.batch_prefill(q, *p.caches(copy), planner.state, planner.workspace, causal=True)[0]


def flashinfer_wrappers(tensor_cores: bool, backend: str) -> Implementation:
    """The decode wrapper for the decode requests and the paged prefill wrapper for the chunks."""

    def implementation(p: StepProblem) -> StepImplementation:
        fi, n, row = flashinfer(), p.decoding, p.row
        heads = (row.num_qo_heads, row.num_kv_heads, row.head_dim, row.page_size)
        types = {"q_data_type": p.dtype, "kv_data_type": p.dtype}
        decode = fi.BatchDecodeWithPagedKVCacheWrapper(
            flashinfer_workspace(p.device), "NHD", use_tensor_cores=tensor_cores
        )
        prefill = fi.BatchPrefillWithPagedKVCacheWrapper(flashinfer_workspace(p.device), "NHD", backend=backend)
        decode_table, chunk_table, out = p.decode_table(), p.chunk_table(), p.empty_out()

        def plan() -> None:
            decode.plan(*decode_table, *heads, **types)
            if n < row.batch:
                prefill.plan(*chunk_table, *heads, causal=True, **types)

        def layer(copy: int) -> tuple[Tensor, ...]:
            first = decode.run(p.q[:n], p.caches(copy), out=out[:n])
            if n == row.batch:
                return (first,)
            return first, prefill.run(p.q[n:], p.caches(copy), out=out[n:])

        return StepImplementation(plan, layer)

    return implementation


def flashinfer_persistent(p: StepProblem) -> StepImplementation:
    """``BatchAttention``: all requests in one persistent kernel."""
    row = p.row
    sizes = (row.num_qo_heads, row.num_kv_heads, row.head_dim, row.head_dim_vo, row.page_size)
    plan, run = batch_attention(p.q, p.empty_out(), p.qo_indptr, p.table, sizes, p.dtype, causal=True)
    return StepImplementation(plan, lambda copy: (run(p.caches(copy)),))


def _step(implementation: StepImplementation, p: StepProblem, plan_in_graph: bool) -> Call:
    """All layers. The last one reads cache ``copy``, the layers before it the other copies in turn."""
    implementation.plan()

    def call(copy: int) -> tuple[Tensor, ...]:
        if plan_in_graph:
            implementation.plan()
        out: tuple[Tensor, ...] = ()
        for layer in range(1 - LAYERS, 1):
            out = implementation.layer((copy + layer) % p.copies)
        return out

    return call


class Workload:
    """The implementations of a step, and the host time of those that plan on the host."""

    OURS: ClassVar[dict[str, Implementation]] = {"attn_ops": ours, "one launch": ours_in_one_launch}
    PEERS: ClassVar[dict[str, Implementation]] = {
        "flashinfer": flashinfer_wrappers(tensor_cores=False, backend="fa2"),
        "flashinfer tensor cores, fa2": flashinfer_wrappers(tensor_cores=True, backend="fa2"),
        "flashinfer tensor cores, fa3": flashinfer_wrappers(tensor_cores=True, backend="fa3"),
        "flashinfer persistent": flashinfer_persistent,
    }

    def __init__(self, args: argparse.Namespace) -> None:
        self.planning: dict[str, float] = {}
        self.comparison = Comparison(
            {name: self._planning_in_graph(make) for name, make in self.OURS.items()},
            {name: self._planning_on_host(name, make) for name, make in selected(self.PEERS, args).items()},
            self.PEERS,
        )

    def _planning_in_graph(self, make: Implementation) -> Prepare:
        return lambda p: _step(make(p), p, plan_in_graph=True)

    def _planning_on_host(self, name: str, make: Implementation) -> Prepare:
        def prepare(p: StepProblem) -> Call:
            implementation = make(p)
            call = _step(implementation, p, plan_in_graph=False)
            self.planning[name] = host_microseconds({name: implementation.plan}, count=20, rounds=7)[name].median
            return call

        return prepare

    def measure(self, row: PrefillRow) -> report.Row:
        """Time one step of every implementation."""
        self.planning.clear()
        expected = LAYERS * (row.kv_bytes() / report.PEAK_BYTES_PER_US + row.flops() / report.PEAK_FLOPS_PER_US)
        graphs = self.comparison.times(row.name, StepProblem(row), expected)
        steps = {name: time + self.planning.get(name, 0.0) for name, time in graphs.items()}
        return {
            "row": row.name,
            "requests": row.batch,
            "KV tokens": sum(row.kv_lens),
            "new tokens": sum(row.qo_lens),
            **{name: steps.get(name) for name in (*self.OURS, *self.comparison.peers)},
            "FlashInfer plan": min(self.planning.values(), default=None),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    report.add_output(parser)
    add_peers(parser)


def steps() -> list[PrefillRow]:
    """A decode step and a mixed step of each trace."""
    return [draw(trace, BATCH, tokens) for trace in traces() for tokens in (0, CHUNK_TOKENS)]


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Measure and save the steps."""
    workload = Workload(args)
    results = workload.comparison.rows(steps(), workload.measure)
    columns = report.Columns(tuple(workload.OURS), tuple(workload.comparison.peers))
    report.save("workload", "Serving steps", NOTE, results, args.output, columns, workload.comparison.not_measured)
