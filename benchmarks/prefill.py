"""Prefill over paged and ragged KV, and MLA decode, in CUDA graphs over rotating KV."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import report
from .decode import WORST_ERROR
from .prefill_problem import MlaProblem, PrefillProblem
from .prefill_rows import MLA_ROWS, PREFILL_ROWS, MlaRow, PrefillRow
from .timing import Call, device_microseconds

NOTE_PREFILL = "TFLOP/s, bf16, 32/8 heads of 128, page 16, counting 4 * heads * head_dim operations per visible pair."
NOTE_MLA = "Microseconds, bf16, 128 heads, keys of 512 + 64, page 64."
RATE = 500e6
"""Operations per microsecond, to size the graphs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=report.RESULTS, help="folder of the results")


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


def _sdpa(p: PrefillProblem) -> Call | None:
    """cuDNN on one dense batch, where every request has as many query rows as keys."""
    row = p.row
    if row.qo_lens != row.kv_lens or len(set(row.kv_lens)) > 1:
        return None

    def dense(t: torch.Tensor) -> torch.Tensor:
        return t.view(row.batch, -1, *t.shape[1:]).transpose(1, 2)

    def call(i: int) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(
                dense(p.q), dense(p.keys[i]), dense(p.values[i]), is_causal=row.causal, enable_gqa=True
            )
        return out.transpose(1, 2).flatten(0, 1)

    return call


PREFILL: dict[str, Callable[[PrefillProblem], Call | None]] = {"paged": _paged, "ragged": _ragged, "sdpa cudnn": _sdpa}


def _mla(p: MlaProblem) -> Call:
    planner = p.planner()
    return lambda i: torch.ops.attn.batch_mla(
        p.q_nope, p.q_pe, p.ckv[i], p.kpe[i], planner.state, planner.workspace, backend="triton"
    )[0]


def _times(
    row: PrefillRow | MlaRow, problem: PrefillProblem | MlaProblem, calls: dict[str, Call | None]
) -> dict[str, float]:
    checked = {}
    for name, call in calls.items():
        if call is not None:
            error = problem.error(call(0))
            if not error < WORST_ERROR:
                raise AssertionError(f"{row.name}, {name}: error {error:.2e}")
            checked[name] = call
    return device_microseconds(checked, problem.copies, row.flops() / RATE + 10)


def _prefill_row(row: PrefillRow) -> report.Row:
    problem = PrefillProblem(row)
    calls: dict[str, Callable[[PrefillProblem], Call | None]] = {
        "paged": _paged,
        "ragged": _ragged,
        "sdpa cudnn": _sdpa,
    }
    times = _times(row, problem, {name: make(problem) for name, make in calls.items()})
    rates = {name: row.flops() / times[name] / 1e6 if name in times else None for name in calls}
    return {"row": row.name, "goal": row.goal, **rates, "of goal": (rates["paged"] or 0.0) / row.goal}


def _mla_row(row: MlaRow) -> report.Row:
    time = _times(row, problem := MlaProblem(row), {"attn_ops": _mla(problem)})["attn_ops"]
    return {"row": row.name, "goal": row.goal, "attn_ops": time, "of goal": time / row.goal,
            "TFLOP/s": row.flops() / time / 1e6}  # fmt: skip


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    report.save("prefill", "Prefill", NOTE_PREFILL, [_prefill_row(row) for row in PREFILL_ROWS], args.output)
    report.save("mla", "MLA decode", NOTE_MLA, [_mla_row(row) for row in MLA_ROWS], args.output)
