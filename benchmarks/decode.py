"""Decode over a paged cache, beside its peers: microseconds in a CUDA graph over rotating caches."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from . import report
from .decode_problem import DecodeProblem
from .decode_rows import ROWS, DecodeRow
from .peers import DECODE_PEERS, NotMeasuredError
from .timing import Call, device_microseconds

OURS = "attn_ops"
WORST_ERROR = 1e-2
NOTE = (
    "Microseconds, bf16, shuffled pages, one launch of a CUDA graph over rotating copies of the cache, medians; "
    "contenders take turns in one process. SDPA reads a contiguous cache of equal lengths. "
    "TB/s counts KV, queries and outputs once; its share is of 4.45 TB/s."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="*", help="numbers of the rows; default: all")
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
    parser.add_argument("--no-peers", action="store_true")


def _ours(problem: DecodeProblem) -> Call:
    planner = problem.planner()
    plan = planner.plan(*problem.page_table)

    def call(copy: int) -> torch.Tensor:
        k_cache, v_cache = problem.k_caches[copy], problem.v_caches[copy]
        return torch.ops.attn.batch_decode(problem.q, k_cache, v_cache, plan, planner.workspace, backend="triton")[0]

    return call


def measure(row: DecodeRow, peers: bool) -> report.Row:
    problem = DecodeProblem(row)
    calls: dict[str, Call] = {OURS: _ours(problem)}
    refused: dict[str, str] = {}
    for name, prepare in DECODE_PEERS.items() if peers else ():
        try:
            call = prepare(problem)
            call(0)
            calls[name] = call
        except (NotMeasuredError, RuntimeError, ValueError) as error:
            refused[name] = str(error).splitlines()[0]
    for name, call in calls.items():
        error = problem.error(call(0))
        if not error < WORST_ERROR:
            if name == OURS:
                raise AssertionError(f"{row.name}: error {error:.2e}")
            refused[name] = f"wrong: error {error:.2e}"
    calls = {name: call for name, call in calls.items() if name not in refused}
    times = device_microseconds(calls, problem.copies, row.bytes() / report.READ_RATE + 5)
    rate = row.bytes() / times[OURS]
    result: report.Row = {"row": row.name, "goal": row.goal, OURS: times[OURS], "of goal": times[OURS] / row.goal}
    result |= {"TB/s": rate / 1e6, "share": rate / report.READ_RATE}
    result |= {name: times.get(name) for name in DECODE_PEERS if peers}
    for name, why in refused.items():
        print(f"{row.name}: {name} not measured: {why}", flush=True)
    return result


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    rows = ROWS if args.rows is None else [ROWS[i] for i in args.rows]
    results = []
    for row in rows:
        results.append(measure(row, not args.no_peers))
        torch.cuda.empty_cache()
    report.save("decode", "Decode", NOTE, results, args.output)
