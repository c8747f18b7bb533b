"""Tune tile sizes of decode and prefill for one problem on this GPU, and store those that beat the defaults.

Tiles are those of the Triton kernels, which are measured also where ``auto`` takes a CUDA kernel, as on Hopper.
The library reads the table that the environment variable ``ATTN_OPS_TILES`` names. Entries of other GPUs and problems
in the table are kept.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attn_ops.kernels.triton.config_tuned import Entry, override_tile, problem_key
from attn_ops.ops import tuning_table
from attn_ops.plan.sizing import general_ctas_per_head
from benchmarks import decode, prefill, report
from benchmarks.comparison import MAX_RELATIVE_ERROR, Prepare, release_memory
from benchmarks.decode_problem import DecodeProblem
from benchmarks.decode_rows import DecodeRow
from benchmarks.prefill_problem import PrefillProblem
from benchmarks.prefill_rows import PrefillRow
from benchmarks.timing import device_microseconds

MAX_TIME_RATIO = 0.98
"""A tile replaces the default if its time is below this share of the default's."""

DECODE_LENGTHS = ((32768,), (4096,) * 32, (128,) * 256)
PREFILL_LENGTHS = (((8192,), (8192,)), ((512,) * 8, (8192,) * 8))
ROUNDS = 5

DECODE_AXES = {"kv": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)}
PREFILL_AXES = {"rows": (64, 128, 256), "kv": (32, 64, 128), "num_warps": (4, 8, 16), "num_stages": (2, 3, 4)}
ROWS_PER_WARP = (16, 32)


class Case(NamedTuple):
    """A problem to tune for, with its key in the table of tiles. ``expected`` microseconds size the graphs."""

    kernel: str
    key: str
    name: str
    problem: Any
    prepare: Prepare
    expected: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "--heads",
        type=lambda text: tuple(map(int, text.split("/"))),
        default=(32, 8),
        help="query heads/KV heads; default: 32/8",
    )
    parser.add_argument("--head-dim", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page; default: %(default)s")
    parser.add_argument("--fp8", action="store_true", help="tune decode for an FP8 KV cache")
    parser.add_argument("--kernels", nargs="*", choices=("decode", "prefill"), default=("decode", "prefill"))
    path = os.environ.get(tuning_table.VARIABLE, "attn_ops_tiles.json")
    parser.add_argument("--output", type=Path, default=Path(path), help=f"path of the table; default: {path}")


def decode_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Decode problems with the options of the command line."""
    (num_qo_heads, num_kv_heads), dim = args.heads, args.head_dim
    for lengths in DECODE_LENGTHS:
        name = f"decode {len(lengths)} x {lengths[0]}"
        row = DecodeRow(name, lengths, num_qo_heads, num_kv_heads, None, dim, args.page_size, args.fp8)
        p = DecodeProblem(row)
        key = problem_key(p.dtype, p.kv_dtype, dim, dim, num_qo_heads // num_kv_heads, args.page_size)
        ctas = general_ctas_per_head(p.q.device, num_kv_heads)
        prepare = functools.partial(decode.ours, backend="triton", num_ctas=ctas)
        yield Case("decode", key, name, p, prepare, row.bytes() / report.PEAK_BYTES_PER_US + 5)


def prefill_cases(args: argparse.Namespace) -> Iterator[Case]:
    """Prefill problems, paged and ragged, with the options of the command line."""
    (num_qo_heads, num_kv_heads), dim = args.heads, args.head_dim
    group = num_qo_heads // num_kv_heads
    for new, context in PREFILL_LENGTHS:
        name = f"prefill {len(new)} x ({new[0]} new on {context[0]})"
        row = PrefillRow(name, new, context, None, True, num_qo_heads, num_kv_heads, dim, dim, args.page_size)
        p = PrefillProblem(row)
        for kind, page_size in (("paged", args.page_size), ("ragged", 0)):
            packed_rows = p.planner(paged=kind == "paged").problem.tile_rows * group
            key = problem_key(p.dtype, p.dtype, dim, dim, group, page_size, packed_rows)
            yield Case(
                "prefill",
                key,
                f"{name}, {kind}",
                p,
                prefill.OURS_BY_BACKEND[f"triton {kind}"],
                row.flops() / prefill.EXPECTED_FLOPS_PER_US + 10,
            )


def candidates(kernel: str, key: str) -> list[Entry]:
    """Tiles to try. A prefill tile has at most the packed rows of the plan, the last number of ``key``."""
    axes = DECODE_AXES if kernel == "decode" else PREFILL_AXES
    entries = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if kernel == "decode":
        return entries
    low, high = ROWS_PER_WARP
    max_rows = int(key.split()[-1])
    return [e for e in entries if e["rows"] <= max_rows and low <= e["rows"] // e["num_warps"] <= high]


def microseconds(case: Case, entry: Entry | None) -> float | None:
    """Time of one launch with the tile of ``entry``, or the default. None if it does not fit or its result is wrong."""
    with ExitStack() as stack:
        if entry is not None:
            stack.enter_context(override_tile(case.kernel, entry))
        try:
            call = case.prepare(case.problem)
            if not case.problem.error(call(0)) < MAX_RELATIVE_ERROR:
                return None
            return device_microseconds({"": call}, case.problem.copies, case.expected, ROUNDS)[""]
        except Exception:  # Triton raises several types for a tile that is too large
            return None


def best_entry(cases: list[Case], advance: Callable[[], object]) -> tuple[Entry | None, float]:
    """The tile with the lowest ratio to the default's time, in the geometric mean over ``cases``, and that ratio.

    ``advance()`` is called after each candidate.
    """
    defaults = [microseconds(case, None) for case in cases]
    found: tuple[Entry | None, float] = (None, MAX_TIME_RATIO)
    for entry in candidates(cases[0].kernel, cases[0].key):
        ratios = []
        for case, default in zip(cases, defaults, strict=True):
            time = microseconds(case, entry)
            if time is None or default is None:
                break
            ratios.append(time / default)
        if len(ratios) == len(cases) and (ratio := statistics.geometric_mean(ratios)) < found[1]:
            found = entry, ratio
        advance()
    return found


def store(path: Path, gpu: str, kernel: str, key: str, entry: Entry | None) -> None:
    """Write a tile to the table. If ``entry`` is None, remove the entry of the problem."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    entries = table.setdefault(gpu, {}).setdefault(kernel, {})
    entries.pop(key, None)
    if entry is not None:
        entries[key] = entry
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Tune and store the tiles."""
    from tqdm import tqdm

    gpu = torch.cuda.get_device_name()
    if not args.output.exists():  # kernels read it too, if the environment variable names it
        args.output.write_text("{}\n", encoding="utf-8")
    makers = {"decode": decode_cases, "prefill": prefill_cases}
    groups: dict[tuple[str, str], list[Case]] = {}
    for kernel in args.kernels:
        for case in makers[kernel](args):
            groups.setdefault((kernel, case.key), []).append(case)
    total = sum(len(candidates(*group)) for group in groups)
    with tqdm(total=total, unit="tile") as bar:
        for (kernel, key), cases in groups.items():
            bar.set_description(f"{kernel} {key}")
            entry, ratio = best_entry(cases, bar.update)
            store(args.output, gpu, kernel, key, entry)
            bar.write(
                f"{kernel} {key}: "
                + (f"{entry}, {ratio:.3f} of the default's time" if entry else "the default is best")
            )
            release_memory()
    print(f"wrote {args.output}; to use it, set {tuning_table.VARIABLE}={args.output}")
    print("The tiles are those of the Triton kernels; CUDA kernels have none. attn_ops.explain says which runs a call.")
