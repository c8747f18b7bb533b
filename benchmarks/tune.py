"""Measure tiles of decode and prefill for one shape of model on this GPU, and store those that beat the defaults.

The library reads the table that the environment variable ``ATTN_OPS_TILES`` names. Entries of other GPUs and shapes
in it stay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from attn_ops.kernels.triton.config_tuned import Entry, key_of, trying

from attn_ops.ops import tuning_table

from . import decode, prefill, report
from .contest import WORST_ERROR, Prepare, release
from .decode_problem import DecodeProblem
from .decode_rows import DecodeRow
from .prefill_problem import PrefillProblem
from .prefill_rows import PrefillRow
from .timing import device_microseconds

GAIN = 0.98
"""A tile takes the default's place if it needs at most this share of its time."""

DECODE_LENGTHS = ((32768,), (4096,) * 32, (128,) * 256)
PREFILL_LENGTHS = (((8192,), (8192,)), ((512,) * 8, (8192,) * 8))
ROUNDS = 5

DECODE_AXES = {"kv": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)}
PREFILL_AXES = {"rows": (64, 128, 256), "kv": (32, 64, 128), "num_warps": (4, 8, 16), "num_stages": (2, 3, 4)}
ROWS_PER_WARP = (16, 32)


class Case(NamedTuple):
    """A problem that a tile is for: what the library's table calls it, and how it is launched."""

    kernel: str
    key: str
    name: str
    problem: Any
    prepare: Prepare
    expected: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--heads", type=lambda text: tuple(map(int, text.split("/"))), default=(32, 8), help="Hq/Hkv")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--fp8", action="store_true", help="an FP8 cache, for decode")
    parser.add_argument("--kernels", nargs="*", choices=("decode", "prefill"), default=("decode", "prefill"))
    chosen = os.environ.get(tuning_table.VARIABLE, "attn_ops_tiles.json")
    parser.add_argument("--output", type=Path, default=Path(chosen), help=f"the table; default: {chosen}")


def decode_cases(args: argparse.Namespace) -> Iterator[Case]:
    (num_qo_heads, num_kv_heads), dim = args.heads, args.head_dim
    for lengths in DECODE_LENGTHS:
        name = f"decode {len(lengths)} x {lengths[0]}"
        row = DecodeRow(name, lengths, num_qo_heads, num_kv_heads, None, dim, args.page_size, args.fp8)
        p = DecodeProblem(row)
        key = key_of(p.dtype, p.kv_dtype, dim, dim, num_qo_heads // num_kv_heads, args.page_size)
        yield Case("decode", key, name, p, decode.ours, row.bytes() / report.READ_RATE + 5)


def prefill_cases(args: argparse.Namespace) -> Iterator[Case]:
    (num_qo_heads, num_kv_heads), dim = args.heads, args.head_dim
    group = num_qo_heads // num_kv_heads
    for new, context in PREFILL_LENGTHS:
        name = f"prefill {len(new)} x ({new[0]} new on {context[0]})"
        row = PrefillRow(name, new, context, None, True, num_qo_heads, num_kv_heads, dim, dim, args.page_size)
        p = PrefillProblem(row)
        for kind, page_size in (("paged", args.page_size), ("ragged", 0)):
            pairs = p.planner(paged=kind == "paged").problem.tile_rows * group
            key = key_of(p.dtype, p.dtype, dim, dim, group, page_size, pairs)
            yield Case("prefill", key, f"{name}, {kind}", p, prefill.OURS[kind], row.flops() / prefill.RATE + 10)


def candidates(kernel: str, key: str) -> list[Entry]:
    """Tiles to try. One of prefill has no more rows than the plan's, the last number of ``key``."""
    axes = DECODE_AXES if kernel == "decode" else PREFILL_AXES
    entries = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if kernel == "decode":
        return entries
    low, high = ROWS_PER_WARP
    most = int(key.split()[-1])
    return [e for e in entries if e["rows"] <= most and low <= e["rows"] // e["num_warps"] <= high]


def microseconds(case: Case, entry: Entry | None) -> float | None:
    """Of one launch with the tile of ``entry``, or the default; None where it does not fit or is wrong."""
    with ExitStack() as stack:
        if entry is not None:
            stack.enter_context(trying(case.kernel, entry))
        try:
            call = case.prepare(case.problem)
            if not case.problem.error(call(0)) < WORST_ERROR:
                return None
            return device_microseconds({"": call}, case.problem.copies, case.expected, ROUNDS)[""]
        except Exception:  # whatever the compiler raises for a tile that is too large
            return None


def best_entry(cases: list[Case], advance: Any) -> tuple[Entry | None, float]:
    """The tile that needs the least of the default's time over ``cases``, in the geometric mean, and that share."""
    defaults = [microseconds(case, None) for case in cases]
    found: tuple[Entry | None, float] = (None, GAIN)
    for entry in candidates(cases[0].kernel, cases[0].key):
        shares = []
        for case, default in zip(cases, defaults, strict=True):
            time = microseconds(case, entry)
            if time is None or default is None:
                break
            shares.append(time / default)
        if len(shares) == len(cases) and (share := statistics.geometric_mean(shares)) < found[1]:
            found = entry, share
        advance()
    return found


def store(path: Path, gpu: str, kernel: str, key: str, entry: Entry | None) -> None:
    """Enter a tile into the table; without one, what the table said of the problem goes."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    entries = table.setdefault(gpu, {}).setdefault(kernel, {})
    entries.pop(key, None)
    if entry is not None:
        entries[key] = entry
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    gpu = torch.cuda.get_device_name()
    if not args.output.exists():  # kernels look it up too, if it is the one that the variable names
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
            entry, share = best_entry(cases, bar.update)
            store(args.output, gpu, kernel, key, entry)
            bar.write(f"{kernel} {key}: " + (f"{entry}, {share:.3f} of the default" if entry else "the default"))
            release()
    print(f"{args.output}: set {tuning_table.VARIABLE} to it")
