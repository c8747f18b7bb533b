"""Decode over a paged cache, beside its peers: microseconds in a CUDA graph over rotating caches."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import attn_ops

from . import report
from .contest import WORST_ERROR, Contest, add_peers, best, chosen, release
from .decode_peers import DECODE_PEERS
from .decode_problem import DecodeProblem
from .decode_rows import ROWS, DecodeRow
from .timing import Call

OURS = "attn_ops"
FP8_ERROR = 5e-2
"""Peers may round the softmax to FP8."""

NOTE = (
    "Microseconds, bf16, shuffled pages of 16, heads of 128 unless said, one launch of a CUDA graph over rotating "
    "copies of the cache, medians; contenders take turns in one process. SDPA reads a contiguous cache of equal "
    "lengths. TB/s counts KV, queries and outputs once; its share is of 4.45 TB/s. The last column is how many "
    "times as long FlashInfer's fastest path takes. A row that another backend than triton ran names it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="*", help="numbers of the rows; default: all")
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
    parser.add_argument("--name", default="decode", help="of the files of the results; default: %(default)s")
    add_peers(parser)


def ours(problem: DecodeProblem) -> Call:
    planner = problem.planner()
    plan = planner.plan(*problem.page_table)
    return lambda copy: torch.ops.attn.batch_decode(problem.q, *problem.caches(copy), plan, planner.workspace)[0]


def _backend(problem: DecodeProblem) -> str:
    """Which backend takes the row."""
    planner = problem.planner()
    lines = attn_ops.explain("batch_decode", problem.q, *problem.caches(0), planner.state, planner.workspace)
    return next(line.split(":")[0] for line in lines.splitlines() if line.endswith(": runs it"))


def _measure(row: DecodeRow, contest: Contest) -> report.Row:
    problem = DecodeProblem(row)
    backend = _backend(problem)
    slow = 1 if backend == "triton" else 20
    expected = row.bytes() / report.READ_RATE * slow + 5
    times = contest.times(row.name, problem, expected, FP8_ERROR if row.fp8 else WORST_ERROR)
    time, rate = times[OURS], row.bytes() / times[OURS]
    flashinfer = best(times, (name for name in times if name.startswith("flashinfer")))
    return {
        "row": row.name if backend == "triton" else f"{row.name} ({backend})",
        "goal": row.goal,
        OURS: time,
        "of goal": time / row.goal if row.goal else None,
        "TB/s": rate / 1e6,
        "share": rate / report.READ_RATE,
        **{name: times.get(name) for name in contest.peers},
        "FlashInfer": flashinfer / time if flashinfer else None,
    }


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    contest = Contest({OURS: ours}, chosen(DECODE_PEERS, args))
    results = []
    for row in ROWS if args.rows is None else [ROWS[i] for i in args.rows]:
        results.append(_measure(row, contest))
        release()
    report.save(args.name, report.title_of(args.name), NOTE, results, args.output, contest.refusals)
