"""Attention of whole serving steps, with request lengths of published traces: planning and 32 layers, in one graph.

A decode step has one query row for each of its requests. A mixed step has chunks of new prompts beside them, as
chunked prefill schedules it.
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

from . import report
from .contest import Contest, Prepare, add_peers, best, chosen, release
from .peers import flashinfer, flashinfer_workspace
from .prefill_problem import PrefillProblem
from .prefill_rows import PrefillRow
from .timing import Call, host_microseconds

LENGTHS = Path(__file__).with_name("workloads") / "lengths.json"
LAYERS = 32
BATCH = 64
CHUNK_TOKENS = 2048

NOTE = (
    f"Microseconds of attention in a step of {LAYERS} layers, bf16, 32/8 heads of 128, page 16: planning, and one call "
    "a layer and kind of request. Ours plans on the device, inside of the CUDA graph. FlashInfer plans on the host, "
    "once a step; that time is added to its graph's. Lengths are drawn from Azure LLM inference 2023 (CC-BY-4.0) and "
    "Mooncake (Apache-2.0), see `benchmarks/workloads/`. One launch: decode rows beside prefill rows in one call of "
    "batch_prefill. The last columns are the least host time of FlashInfer's plans, and how many times as long its "
    "fastest path takes."
)


class Trace(NamedTuple):
    """Pairs of input and output tokens of a trace's requests."""

    name: str
    requests: tuple[tuple[int, int], ...]


def traces() -> list[Trace]:
    entries = json.loads(LENGTHS.read_text(encoding="utf-8"))
    return [Trace(e["name"], tuple((i, o) for i, o in e["sample256"])) for e in entries]


def draw(trace: Trace, batch: int, chunk_tokens: int, seed: int = 0) -> PrefillRow:
    """``batch`` requests somewhere in their output, then chunks of prompts of ``chunk_tokens`` new tokens in all.

    A chunk begins at a multiple of ``chunk_tokens`` in its prompt, and what is before it is in the cache.
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


class Contender(NamedTuple):
    """Fills plans for the step; then attends, in one layer, to a copy of the cache.

    A layer gives ``[rows, heads, head_dim]`` in parts: the decoding requests' rows and the chunks'.
    """

    plan: Callable[[], object]
    layer: Callable[[int], tuple[Tensor, ...]]


class StepProblem(PrefillProblem):
    """The first requests are ``decoding``, with one query row each; the others have a chunk."""

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
        n, (indptr, indices, last) = self.decoding, self.table.arguments
        return indptr[: n + 1], indices[: indptr[n]], last[:n]

    def chunk_table(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """With the cumulative query rows first."""
        n, (indptr, indices, last) = self.decoding, self.table.arguments
        return self.qo_indptr[n:] - n, indptr[n:] - indptr[n], indices[indptr[n] :], last[n:]

    def caches(self, copy: int) -> tuple[Tensor, Tensor]:
        return self.k_caches[copy], self.v_caches[copy]

    def error(self, out: tuple[Tensor, ...], copy: int = 0, rows: int = 64) -> float:  # type: ignore[override]
        return super().error(torch.cat(out), copy, rows)


def ours(p: StepProblem) -> Contender:
    """A call for the decoding requests and one for the chunks."""
    n, decode_table, chunk_table = p.decoding, p.decode_table(), p.chunk_table()
    decode = attn_ops.DecodePlanner(n, decode_table[1].shape[0], device=p.device, **p.sizes)
    if n == p.row.batch:
        return Contender(lambda: decode.plan(*decode_table), lambda copy: (_decode(p, decode, copy),))
    chunks, pages = p.row.batch - n, chunk_table[2].shape[0]
    prefill = attn_ops.PrefillPlanner(chunks, p.q.shape[0] - n, pages, causal=True, device=p.device, **p.sizes)
    return Contender(
        lambda: (decode.plan(*decode_table), prefill.plan(*chunk_table)),
        lambda copy: (_decode(p, decode, copy), _prefill(p, p.q[n:], prefill, copy)),
    )


def ours_in_one(p: StepProblem) -> Contender:
    """Every request in one call of batch_prefill."""
    planner = p.planner(paged=True)
    return Contender(
        lambda: planner.plan(p.qo_indptr, *p.table.arguments), lambda copy: (_prefill(p, p.q, planner, copy),)
    )


def _decode(p: StepProblem, planner: attn_ops.DecodePlanner, copy: int) -> Tensor:
    return torch.ops.attn.batch_decode(p.q[: p.decoding], *p.caches(copy), planner.state, planner.workspace)[0]


def _prefill(p: StepProblem, q: Tensor, planner: attn_ops.PrefillPlanner, copy: int) -> Tensor:
    return torch.ops.attn.batch_prefill(q, *p.caches(copy), planner.state, planner.workspace, causal=True)[0]


def flashinfer_wrappers(tensor_cores: bool, backend: str) -> Callable[[StepProblem], Contender]:
    """The decode wrapper for the decoding requests and the paged prefill wrapper for the chunks."""

    def contender(p: StepProblem) -> Contender:
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

        return Contender(plan, layer)

    return contender


def flashinfer_persistent(p: StepProblem) -> Contender:
    """BatchAttention: every request in one persistent kernel."""
    fi, row = flashinfer(), p.row
    wrapper = fi.BatchAttention("NHD", p.device)
    indptr, indices, _ = p.table.arguments
    kv_len = torch.tensor(row.kv_lens, dtype=torch.int32, device=p.device)
    sizes = (row.num_qo_heads, row.num_kv_heads, row.head_dim, row.head_dim_vo, row.page_size)
    types = {"q_data_type": p.dtype, "kv_data_type": p.dtype}
    out, lse = p.empty_out(), torch.empty(p.q.shape[:2], dtype=torch.float32, device=p.device)
    return Contender(
        lambda: wrapper.plan(p.qo_indptr, indptr, indices, kv_len, *sizes, causal=True, **types),
        lambda copy: (wrapper.run(p.q, p.caches(copy), out=out, lse=lse)[0],),
    )


def _step(contender: Contender, p: StepProblem, planned_inside: bool) -> Call:
    """All layers, the last of which reads cache ``copy``; the layers before it the others in turn."""
    contender.plan()

    def call(copy: int) -> tuple[Tensor, ...]:
        if planned_inside:
            contender.plan()
        out: tuple[Tensor, ...] = ()
        for layer in range(1 - LAYERS, 1):
            out = contender.layer((copy + layer) % p.copies)
        return out

    return call


class Workload:
    """The contenders of a step, and the host time that those take who plan there."""

    OURS: ClassVar = {"attn_ops": ours, "one launch": ours_in_one}
    PEERS: ClassVar = {
        "flashinfer": flashinfer_wrappers(tensor_cores=False, backend="fa2"),
        "flashinfer tensor cores, fa2": flashinfer_wrappers(tensor_cores=True, backend="fa2"),
        "flashinfer tensor cores, fa3": flashinfer_wrappers(tensor_cores=True, backend="fa3"),
        "flashinfer persistent": flashinfer_persistent,
    }

    def __init__(self, args: argparse.Namespace) -> None:
        self.planning: dict[str, float] = {}
        self.contest = Contest(
            {name: self._inside(make) for name, make in self.OURS.items()},
            {name: self._beside(name, make) for name, make in chosen(self.PEERS, args).items()},
        )

    def _inside(self, make: Callable[[StepProblem], Contender]) -> Prepare:
        return lambda p: _step(make(p), p, planned_inside=True)

    def _beside(self, name: str, make: Callable[[StepProblem], Contender]) -> Prepare:
        def prepare(p: StepProblem) -> Call:
            contender = make(p)
            call = _step(contender, p, planned_inside=False)
            self.planning[name] = host_microseconds({name: contender.plan}, count=20, rounds=7)[name].median
            return call

        return prepare

    def measure(self, row: PrefillRow) -> report.Row:
        self.planning.clear()
        expected = LAYERS * (row.kv_bytes() / report.READ_RATE + row.flops() / report.MATRIX_RATE)
        graphs = self.contest.times(row.name, StepProblem(row), expected)
        steps = {name: time + self.planning.get(name, 0.0) for name, time in graphs.items()}
        least = min(steps[name] for name in self.OURS)
        peer = best(steps, self.contest.peers)
        return {
            "row": row.name,
            "requests": row.batch,
            "KV tokens": sum(row.kv_lens),
            "new tokens": sum(row.qo_lens),
            **{name: steps.get(name) for name in (*self.OURS, *self.contest.peers)},
            "FlashInfer plan": min(self.planning.values(), default=None),
            "FlashInfer": peer / least if peer else None,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
    add_peers(parser)


def steps() -> list[PrefillRow]:
    return [draw(trace, BATCH, tokens) for trace in traces() for tokens in (0, CHUNK_TOKENS)]


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    workload = Workload(args)
    results = []
    for row in steps():
        results.append(workload.measure(row))
        release()
    report.save("workload", "Serving steps", NOTE, results, args.output, workload.contest.refusals)
