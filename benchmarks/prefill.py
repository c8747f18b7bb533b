"""Prefill over paged and ragged KV, beside its peers: TFLOP/s in CUDA graphs over rotating KV."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from . import report
from .contest import Contest, add_peers, best, chosen, release
from .prefill_peers import PREFILL_PEERS
from .prefill_problem import PrefillProblem
from .prefill_rows import PREFILL_ROWS, PrefillRow
from .timing import Call

NOTE = (
    "TFLOP/s, bf16, causal, 32/8 heads of 128, page 16 unless said, counting 2 * heads * (head_dim of keys and of "
    "values) operations per visible pair; contenders take turns in one process. SDPA and FlexAttention read dense "
    "keys. The share is that of the faster of paged and ragged, of 790 TFLOP/s, and that of the roofline "
    "counts 4.45 TB/s too. The last column is how many times as "
    "long FlashInfer's fa2 takes at its fastest."
)
RATE = 500e6
"""Operations per microsecond, to size the graphs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, nargs="*", help="numbers of the rows; default: all")
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")
    parser.add_argument("--name", default="prefill", help="of the files of the results; default: %(default)s")
    add_peers(parser)


def _paged(p: PrefillProblem) -> Call:
    planner = p.planner(paged=True)
    return lambda i: torch.ops.attn.batch_prefill(
        p.q, p.k_caches[i], p.v_caches[i], planner.state, planner.workspace, causal=p.row.causal, backend="triton"
    )[0]


def _ragged(p: PrefillProblem) -> Call:
    planner = p.planner(paged=False)
    return lambda i: torch.ops.attn.ragged_prefill(
        p.q, p.keys[i], p.values[i], planner.state, planner.workspace, causal=p.row.causal, backend="triton"
    )[0]


OURS = {"paged": _paged, "ragged": _ragged}


def _measure(row: PrefillRow, contest: Contest) -> report.Row:
    times = contest.times(row.name, PrefillProblem(row), row.flops() / RATE + 10)
    rates = {name: row.flops() / time / 1e6 for name, time in times.items()}
    ours = min(times[name] for name in OURS)
    fa2 = best(times, (name for name in times if name.startswith("flashinfer fa2")))
    return {
        "row": row.name,
        "goal": row.goal,
        **{name: rates[name] for name in OURS},
        "of goal": rates["paged"] / row.goal if row.goal else None,
        "share": row.flops() / ours / report.MATRIX_RATE,
        "of roofline": report.of_roofline(row.flops(), row.bytes(), ours),
        **{name: rates.get(name) for name in contest.peers},
        "FlashInfer fa2": fa2 / ours if fa2 else None,
    }


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    contest = Contest(OURS, chosen(PREFILL_PEERS, args))
    results = []
    for row in PREFILL_ROWS if args.rows is None else [PREFILL_ROWS[i] for i in args.rows]:
        results.append(_measure(row, contest))
        release()
    report.save(args.name, report.title_of(args.name), NOTE, results, args.output, contest.refusals)
