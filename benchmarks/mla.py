"""MLA decode over a paged cache of latent keys, in CUDA graphs over rotating caches."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from . import report
from .contest import Contest, add_peers, chosen, release
from .mla_peers import MLA_PEERS
from .prefill_problem import MlaProblem
from .prefill_rows import MLA_ROWS, MlaRow
from .timing import Call

NOTE = (
    "Microseconds, bf16, 128 heads, keys of 512 + 64, page 64. TFLOP/s counts 2 * heads * (576 + 512) operations per "
    "key; its share is of 790 TFLOP/s, and that of the roofline counts 4.45 TB/s too."
)
OURS = "attn_ops"
RATE = 500e6
"""Operations per microsecond, to size the graphs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
    add_peers(parser)


def _ours(p: MlaProblem) -> Call:
    planner = p.planner()
    return lambda i: torch.ops.attn.batch_mla(
        p.q_nope, p.q_pe, p.ckv[i], p.kpe[i], planner.state, planner.workspace, backend="triton"
    )[0]


def _measure(row: MlaRow, contest: Contest) -> report.Row:
    times = contest.times(row.name, MlaProblem(row), row.flops() / RATE + 10)
    ours = times[OURS]
    return {
        "row": row.name,
        "goal": row.goal,
        OURS: ours,
        "of goal": ours / row.goal,
        "TFLOP/s": row.flops() / ours / 1e6,
        "share": row.flops() / ours / report.MATRIX_RATE,
        "of roofline": report.of_roofline(row.flops(), row.bytes(), ours),
        **{name: times.get(name) for name in contest.peers},
    }


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    contest = Contest({OURS: _ours}, chosen(MLA_PEERS, args))
    results = []
    for row in MLA_ROWS:
        results.append(_measure(row, contest))
        release()
    report.save("mla", "MLA decode", NOTE, results, args.output, contest.refusals)
