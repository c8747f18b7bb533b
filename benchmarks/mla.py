"""MLA decode over a paged latent cache, compared with its peers: microseconds in CUDA graphs over rotating caches."""

from __future__ import annotations

import argparse

import torch

from benchmarks import report
from benchmarks.comparison import METHOD, Comparison, add_peers, add_rows
from benchmarks.mla_peers import MLA_PEERS
from benchmarks.prefill_problem import MlaProblem
from benchmarks.prefill_rows import MLA_ROWS, MlaRow
from benchmarks.timing import Call

NOTE = (
    "Microseconds per launch: bf16, latents of 512 and 64, page 64, 128 heads unless the row says otherwise. "
    f"{METHOD} `{report.SPEEDUP}` is the time of the fastest peer divided by that of attn_ops. "
    f"TFLOP/s counts 2 * heads * (576 + 512) operations per key; `share` is of {report.PEAK_COMPUTE}, the measured "
    f"peak, and `of roofline` counts {report.PEAK_BANDWIDTH} too."
)
OURS = "attn_ops"
EXPECTED_FLOPS_PER_US = 500e6
"""Sizes the CUDA graphs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_rows(parser)
    report.add_output(parser)
    add_peers(parser)


def _ours(p: MlaProblem) -> Call:
    planner = p.planner()
    return lambda i: torch.ops.attn.batch_mla(
        p.q_nope, p.q_pe, p.ckv[i], p.kpe[i], planner.state, planner.workspace, backend="cuda"
    )[0]


def _measure(row: MlaRow, comparison: Comparison) -> report.Row:
    times = comparison.times(row.name, MlaProblem(row), row.flops() / EXPECTED_FLOPS_PER_US + 10)
    ours = times[OURS]
    return {
        "row": row.name,
        "goal": row.goal,
        OURS: ours,
        "of goal": ours / row.goal if row.goal else None,
        "TFLOP/s": row.flops() / ours / 1e6,
        "share": row.flops() / ours / report.PEAK_FLOPS_PER_US,
        "of roofline": report.of_roofline(row.flops(), row.bytes(), ours),
        **{name: times.get(name) for name in comparison.peers},
    }


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Measure and save the rows."""
    report.compare(args, "mla", NOTE, MLA_ROWS, {OURS: _ours}, MLA_PEERS, _measure, title="MLA decode")
