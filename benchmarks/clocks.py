"""Clock-based accounts of the CUDA kernels: the share of its time that each role spends in each phase.

The kernels are compiled with the macro ``CLOCKS`` (``clocks.cuh``), which no wheel has.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from attn_ops.kernels.cuda import mla, prefill
from attn_ops.kernels.cuda.compile import FOLDER
from attn_ops.kernels.cuda.kernel import Specialization
from benchmarks import report
from benchmarks.comparison import release_memory
from benchmarks.prefill import op_options
from benchmarks.prefill_problem import MlaProblem, PrefillProblem
from benchmarks.prefill_rows import MLA_ROWS, PREFILL_FP8_ROWS, PREFILL_ROWS
from benchmarks.timing import Call

CONSUMERS = {"consumer 0": (4, 5, 6, 7), "consumer 1": (8, 9, 10, 11)}
CONSUMER_2 = {"consumer 2": (12, 13, 14, 15)}
CONSUMERS_AFTER_CONVERTERS = {name: tuple(warp + 4 for warp in warps) for name, warps in CONSUMERS.items()}
CONSUMERS_AFTER_MANY_CONVERTERS = {name: tuple(warp + 8 for warp in warps) for name, warps in CONSUMERS.items()}
CONVERTERS = {"converter K": (4, 5), "converter V": (6, 7)}
MANY_CONVERTERS = {"converter K": (4, 5, 6, 7), "converter V": (8, 9, 10, 11)}
MLA_PRODUCERS = {"producer KV": (0,), "producer Q": (2,)}
PREFILL_PRODUCERS = {"producer K": (0,), "producer V": (1,), "producer Q": (2,)}

ROLES = {
    "mla": {**MLA_PRODUCERS, **CONSUMERS},
    "mla KV_FP8": {**MLA_PRODUCERS, "converter": (4, 5, 6, 7), **CONSUMERS_AFTER_CONVERTERS},
    "mla, one consumer": {**MLA_PRODUCERS, "consumer 0": CONSUMERS["consumer 0"]},
    "mla, one consumer KV_FP8": {**MLA_PRODUCERS, "converter": (4, 5, 6, 7), "consumer 0": CONSUMERS["consumer 1"]},
    "prefill": {**PREFILL_PRODUCERS, **CONSUMERS},
    "prefill, one consumer": {**PREFILL_PRODUCERS, "consumer 0": CONSUMERS["consumer 0"]},
    "prefill, three consumers": {**PREFILL_PRODUCERS, **CONSUMERS, **CONSUMER_2},
    "prefill KV_FP8": {**PREFILL_PRODUCERS, **CONVERTERS, **CONSUMERS_AFTER_CONVERTERS},
    "prefill KV_FP8, few rows": {**PREFILL_PRODUCERS, **MANY_CONVERTERS, **CONSUMERS_AFTER_MANY_CONVERTERS},
    "prefill RoPE": {**PREFILL_PRODUCERS, "converter": (4, 5, 6, 7), **CONSUMERS_AFTER_CONVERTERS},
}
"""The warps of each role, by kernel. Those that are not named do nothing, except where producers copy tokens by
``cp.async``: there MLA has four producers of KV tiles, warps 0 to 3, and in prefill warps 2 and 3 may be producers of
keys and of values too."""

MANY_CONVERTERS_THREADS = prefill.FEW_ROWS_TILES[128, 128].threads

CLOCK_BYTES = 24
"""``sizeof(WarpClock)``."""

ROWS = {"mla": (0, 1, 2, 4), "prefill": (1, 4, 6), "prefill_fp8": (0, 5)}
"""The rows of a benchmark that are measured by default."""

WARM_UP, LAUNCHES = 4, 8
"""Launches that are not counted, and those that are."""


@functools.cache
def columns() -> tuple[list[str], list[str]]:
    """The names of the phases, and of the further columns, in the order of ``clocks.cuh``."""
    text = re.sub(r"//.*", "", (FOLDER / "clocks.cuh").read_text())
    phases, others = (
        [
            name.split("=")[0].strip()[1:]
            for name in re.findall(rf"enum {enum} {{(.*?)}}", text, re.DOTALL)[0].split(",")
        ]
        for enum in ("Phase", "ClockColumn")
    )
    return phases[:-1], others[:-1]


@functools.cache  # one for each kernel that is measured
def clocked(one: Specialization) -> Specialization:
    """The same kernel with clocks, which lie after its shared memory."""
    kernel = one.kernel._replace(
        parameters={**one.kernel.parameters, "clocks": "pointer"}, writes=(*one.kernel.writes, "clocks")
    )
    return Specialization(
        kernel,
        {**dict(one.macros), "CLOCKS": one.shared_bytes},
        sizes=dict(one.sizes),
        threads=one.threads,
        shared_bytes=one.shared_bytes + one.threads // 32 * CLOCK_BYTES,
        cluster=one.cluster,
        pdl=one.pdl,
    )


class Recorded(NamedTuple):
    """A launch, and its clocks ``[CTAs, warps, columns]``."""

    kernel: Specialization
    clocks: Tensor


@contextmanager
def recording(count: int = 1) -> Iterator[list[Recorded]]:
    """Launch ``count`` kernels on one grid with clocks, which the list gets.

    The first launch allocates those of all, so that no other kernel runs between.
    """
    launches: list[Recorded] = []
    unused: list[Tensor] = []

    def with_clocks(launch: Callable[..., None], one: Specialization, grid: Sequence[Any], /, **arguments: Any) -> None:
        phases, others = columns()
        if not unused:
            size = count - len(launches), int(grid[0]), one.threads // 32, len(phases) + len(others)
            unused.extend(torch.zeros(size, dtype=torch.int64, device=arguments["out"].device))
        launches.append(Recorded(one, unused.pop(0)))
        launch(clocked(one), grid, **arguments, clocks=launches[-1].clocks)

    with (
        mock.patch.object(mla, "launch", functools.partial(with_clocks, mla.launch)),
        mock.patch.object(prefill, "launch", functools.partial(with_clocks, prefill.launch)),
    ):
        yield launches


def account(clocks: Tensor, roles: dict[str, tuple[int, ...]]) -> list[report.Row]:
    """A row for each role: percent of its time by phase. ``clocks [launches, CTAs, warps, columns]``."""
    phases, others = columns()
    rows: list[report.Row] = []
    for role, warps in roles.items():
        sums = clocks[:, :, list(warps)].double().sum((0, 1, 2))
        of = dict(zip((*phases, *others), sums.tolist(), strict=True))
        each = clocks.shape[0] * clocks.shape[1] * len(warps)
        row: report.Row = {"role": role, "cycles": round(of["Whole"] / each), "units": round(of["Units"] / each, 1)}
        row |= {"cycles per tile": round((of["Whole"] - of["Idle"]) / of["Tiles"]) if of["Tiles"] else None}
        rows.append(row | {name: f"{100 * of[name] / max(of['Whole'], 1):.1f}" for name in phases})
    used = [name for name in phases if any(float(row[name]) for row in rows)]
    return [{name: cell for name, cell in row.items() if name not in phases or name in used} for row in rows]


def span(clocks: Tensor) -> str:
    """When CTAs start and end, in microseconds, medians of the launches ``clocks [launches, CTAs, warps, columns]``."""
    phases, others = columns()
    begin, end = (clocks[..., len(phases) + others.index(name)].double() / 1000 for name in ("BeginNs", "EndNs"))
    origin = begin.amin((1, 2))
    starts, ends = (begin.amin(2) - origin[:, None], end.amax(2) - origin[:, None])
    last_start, first_end, half, last_end = (
        t.median().item() for t in (starts.amax(1), ends.amin(1), ends.median(1).values, ends.amax(1))
    )
    return f"last start {last_start:.1f}, first end {first_end:.1f}, half {half:.1f}, last {last_end:.1f}"


def _mla(p: MlaProblem) -> Call:
    planner = p.planner()
    return lambda i: mla.batch_mla(p.q_nope, p.q_pe, p.ckv[i], p.kpe[i], list(planner.state), planner.workspace)


def _prefill(p: PrefillProblem) -> Call:
    planner, options = p.planner(paged=True), op_options(p)
    return lambda i: prefill.batch_prefill(
        p.q, p.k_caches[i], p.v_caches[i], list(planner.state), planner.workspace, **options
    )


KERNELS: dict[str, tuple[Sequence[Any], Callable[[Any], Any], Callable[[Any], Call]]] = {
    "mla": (MLA_ROWS, MlaProblem, _mla),
    "prefill": (PREFILL_ROWS, PrefillProblem, _prefill),
    "prefill_fp8": (PREFILL_FP8_ROWS, PrefillProblem, _prefill),
}


def roles(one: Specialization) -> str:
    """The name in :data:`ROLES` of a kernel."""
    macros = dict(one.macros)
    if one.kernel.source != "prefill.cu":
        consumers = "mla" if one.kernel.source == "mla.cu" else "mla, one consumer"
        return f"{consumers} KV_FP8" if macros.get("KV_FP8") else consumers
    if macros.get("KV_FP8"):
        return "prefill KV_FP8, few rows" if one.threads == MANY_CONVERTERS_THREADS else "prefill KV_FP8"
    if macros.get("ROPE"):
        return "prefill RoPE"
    return {1: "prefill, one consumer", 2: "prefill", 3: "prefill, three consumers"}[macros["CONSUMERS"]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--kernel", choices=tuple(KERNELS), nargs="*", default=tuple(KERNELS))
    parser.add_argument("--rows", type=int, nargs="*", help="indices of the rows of the benchmark; default: a few")


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Print the accounts."""
    for name in args.kernel:
        rows, make_problem, prepare = KERNELS[name]
        for index in ROWS[name] if args.rows is None else args.rows:
            problem = make_problem(rows[index])
            call = prepare(problem)
            with recording(WARM_UP + LAUNCHES) as launches:
                for i in range(WARM_UP + LAUNCHES):
                    call(i % problem.copies)
            torch.cuda.synchronize()
            clocks = torch.stack([launch.clocks for launch in launches[WARM_UP:]]).cpu()
            print(f"\n{name}, {rows[index].name}: us from the first start: {span(clocks)}\n")
            print("\n".join(report.table(account(clocks, ROLES[roles(launches[0].kernel)]))))
            del problem, call, launches
            release_memory()
