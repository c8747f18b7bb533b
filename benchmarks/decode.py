"""Decode over a paged KV cache, compared with its peers: microseconds in CUDA graphs over rotating caches."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import attn_ops
from benchmarks import report
from benchmarks.comparison import MAX_RELATIVE_ERROR, METHOD, Comparison, add_peers, add_rows
from benchmarks.decode_peers import DECODE_PEERS
from benchmarks.decode_problem import DecodeProblem
from benchmarks.decode_rows import ROWS, DecodeRow
from benchmarks.timing import Call

OURS = "attn_ops"
MAX_FP8_ERROR = 5e-2
"""Peers may round the probabilities to FP8."""

NOTE = (
    "Microseconds per launch: bf16, head dim 128, shuffled NHD pages of 16 tokens unless the row says otherwise. "
    f"Launches are in CUDA graphs over rotating copies of the KV cache. {METHOD} `{report.SPEEDUP}` is the time of the "
    "fastest peer divided by that of attn_ops. SDPA reads a contiguous cache of equal lengths. TB/s counts KV, "
    f"queries and outputs once; `share` is of {report.PEAK_BANDWIDTH}, the measured peak. A row that another backend "
    "than triton ran names it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_rows(parser)
    report.add_output(parser)
    parser.add_argument("--name", default="decode", help="name of the result files; default: %(default)s")
    add_peers(parser)


def op_options(problem: DecodeProblem) -> dict[str, Any]:
    """The options of the row."""
    row = problem.row
    return {"kv_layout": row.layout, "pos_encoding": "ROPE_LLAMA" if row.rope else "NONE"}


def ours(problem: DecodeProblem, backend: str = "auto", num_ctas: int | None = None) -> Call:
    """``batch_decode`` with a plan that is made in advance."""
    planner = problem.planner(num_ctas)
    plan = planner.plan(*problem.table.arguments)
    decode, workspace = torch.ops.attn.batch_decode, planner.workspace
    options = {**op_options(problem), "backend": backend}
    return lambda copy: decode(problem.q, *problem.caches(copy), plan, workspace, **options)[0]


def _backend(problem: DecodeProblem) -> str:
    """The backend or kernel that runs the row."""
    planner = problem.planner()
    arguments = problem.q, *problem.caches(0), planner.state, planner.workspace
    lines = attn_ops.explain("batch_decode", *arguments, **op_options(problem))
    return next(line.split(":")[0] for line in lines.splitlines() if ": runs it" in line)


def _measure(row: DecodeRow, comparison: Comparison) -> report.Row:
    problem = DecodeProblem(row)
    backend = _backend(problem)
    slowdown = 1 if backend.startswith("triton") else 20
    expected = row.bytes() / report.PEAK_BYTES_PER_US * slowdown + 5
    times = comparison.times(row.name, problem, expected, MAX_FP8_ERROR if row.fp8 else MAX_RELATIVE_ERROR)
    time, rate = times[OURS], row.bytes() / times[OURS]
    return {
        "row": row.name if backend.startswith("triton") else f"{row.name} ({backend})",
        "goal": row.goal,
        OURS: time,
        "of goal": time / row.goal if row.goal else None,
        "TB/s": rate / 1e6,
        "share": rate / report.PEAK_BYTES_PER_US,
        **{name: times.get(name) for name in comparison.peers},
    }


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Measure and save the rows."""
    report.compare(args, args.name, NOTE, ROWS, {OURS: ours}, DECODE_PEERS, _measure, libraries=["flash_attn"])
