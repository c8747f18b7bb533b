"""Prefill over paged and ragged KV, compared with its peers: TFLOP/s in CUDA graphs over rotating KV."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch

import attn_ops.flash_attn
from benchmarks import report
from benchmarks.comparison import MAX_RELATIVE_ERROR, METHOD, Comparison, Prepare, add_peers, add_rows
from benchmarks.decode import MAX_FP8_ERROR
from benchmarks.prefill_peers import DENSE_PEERS, PREFILL_PEERS, contiguous, dense
from benchmarks.prefill_problem import PrefillProblem
from benchmarks.prefill_rows import PREFILL_DENSE_ROWS, PREFILL_FP8_ROWS, PREFILL_ROWS, PrefillRow
from benchmarks.timing import Call

NOTE = (
    "TFLOP/s: bf16, causal, 32/8 heads of 128, page 16 unless the row says otherwise. FLOPs are 2 * heads * (head dim "
    "of keys and of values) for each query row and key that it sees. "
    f"{METHOD} `{report.SPEEDUP}` compares the faster of paged and ragged with the fastest peer. "
    "SDPA and FlexAttention read dense KV. `share` is that of the faster of paged and ragged, of "
    f"{report.PEAK_COMPUTE}, the measured peak; `of roofline` counts {report.PEAK_BANDWIDTH} too."
)
EXPECTED_FLOPS_PER_US = 500e6
"""Sizes the CUDA graphs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_rows(parser)
    report.add_output(parser)
    selection = parser.add_mutually_exclusive_group()
    selection.add_argument("--fp8", action="store_true", help="the rows with FP8 keys and values, on two backends")
    selection.add_argument("--dense", action="store_true", help="flash_attn_func on requests of equal lengths")
    parser.add_argument("--name", help="name of the result files; default: prefill, prefill_fp8 or prefill_dense")
    add_peers(parser)


def op_options(p: PrefillProblem) -> dict[str, Any]:
    """The options of the row, for ops and kernels."""
    row = p.row
    return {
        "causal": row.causal,
        "window_left": row.window_left,
        "logits_soft_cap": row.logits_soft_cap,
        "mask": p.packed_mask(),
        "pos_encoding": row.pos_encoding,
        "out_dtype": p.dtype if row.fp8_query else None,
    }


def _paged(p: PrefillProblem, backend: str = "auto") -> Call:
    planner, options = p.planner(paged=True), {**op_options(p), "backend": backend}
    return lambda i: torch.ops.attn.batch_prefill(
        p.q, p.k_caches[i], p.v_caches[i], planner.state, planner.workspace, **options
    )[0]


def _ragged(p: PrefillProblem, backend: str = "auto") -> Call:
    planner, options = p.planner(paged=False), {**op_options(p), "backend": backend}
    return lambda i: torch.ops.attn.ragged_prefill(
        p.q, p.keys[i], p.values[i], planner.state, planner.workspace, **options
    )[0]


def _dense(p: PrefillProblem) -> Call:
    copies = [tuple(t.transpose(1, 2) for t in tensors) for tensors in dense(p)]

    def call(i: int) -> object:
        q, k, v = copies[i]
        return attn_ops.flash_attn.flash_attn_func(q, k, v, causal=p.row.causal).flatten(0, 1)

    return call


OURS: dict[str, Callable[..., Call]] = {"paged": _paged, "ragged": contiguous(_ragged)}

OURS_DENSE: dict[str, Prepare] = {"flash_attn_func": _dense}

OURS_BY_BACKEND: dict[str, Prepare] = {
    f"{backend} {name}": functools.partial(prepare, backend=backend)
    for backend in ("triton", "cuda")
    for name, prepare in OURS.items()
}
"""The same on one backend, which is named."""


def _measure(row: PrefillRow, comparison: Comparison) -> report.Row:
    max_error = MAX_FP8_ERROR if row.fp8 else MAX_RELATIVE_ERROR
    expected = row.flops() / EXPECTED_FLOPS_PER_US + 10
    times = comparison.times(row.name, PrefillProblem(row), expected, max_error)
    rates = {name: row.flops() / time / 1e6 for name, time in times.items()}
    ours = min(times[name] for name in comparison.ours if name in times)
    return {
        "row": row.name,
        "goal": row.goal,
        **{name: rates.get(name) for name in comparison.ours},
        "of goal": rates["paged"] / row.goal if row.goal else None,  # rows with FP8 have none
        "share": row.flops() / ours / report.PEAK_FLOPS_PER_US,
        "of roofline": report.of_roofline(row.flops(), row.bytes(), ours),
        **{name: rates.get(name) for name in comparison.peers},
    }


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Measure and save the rows."""
    name, rows, ours = "prefill", PREFILL_ROWS, OURS
    if args.fp8:
        name, rows, ours = "prefill_fp8", PREFILL_FP8_ROWS, OURS_BY_BACKEND
    if args.dense:
        name, rows, ours = "prefill_dense", PREFILL_DENSE_ROWS, OURS_DENSE
    peers = DENSE_PEERS if args.dense else PREFILL_PEERS
    report.compare(
        args, args.name or name, NOTE, rows, ours, peers, _measure, higher_is_better=True, libraries=["flash_attn"]
    )
