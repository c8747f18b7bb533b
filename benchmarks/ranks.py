"""A process for each GPU of a host, or gloo processes on the CPU to see that a benchmark runs."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.comparison import release_memory
from benchmarks.timing import Call, device_microseconds

CPU_ROUNDS = 5

Measure = Callable[[torch.device], tuple[list[str], list[report.Row]]]
"""Lines above the table and its rows, from every rank alike. A function at the top level of a module."""


def microseconds(calls: dict[str, Call], copies: int, expected: float, device: torch.device) -> dict[str, float]:
    """Microseconds of one launch of each call, on this rank. On the CPU wall-clock time, which says little."""
    if device.type == "cuda":
        return device_microseconds(calls, copies, expected)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(CPU_ROUNDS + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call(i % copies)
            times[name].append((time.perf_counter() - begin) * 1e6)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def release(device: torch.device) -> None:
    """Free the memory of a row on a GPU and the code that was compiled for it."""
    if device.type == "cuda":
        release_memory()


def slowest(times: dict[str, float], device: torch.device) -> dict[str, float]:
    """The times of the slowest rank."""
    values = torch.tensor(list(times.values()), device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(times, values.tolist(), strict=True))


def _worker(
    rank: int, world: int, folder: str, on: str, measure: Measure, title: str, note: str, output: Path | None, name: str
) -> None:
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # only peer loads
    device = torch.device(on, rank) if on == "cuda" else torch.device(on)
    ours: dict[str, Any] = {"rank": rank, "world_size": world, "init_method": f"file://{folder}/rendezvous"}
    if on == "cuda":
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=device, **ours)
    else:
        dist.init_process_group("gloo", **ours)
    with torch.no_grad():
        above, rows = measure(device)
    if rank == 0:
        where = ", ".join(f"{key} {value}" for key, value in report.environment().items())
        lines = [f"# {title} on {world} {'GPUs' if on == 'cuda' else 'CPU processes'}", "", note, "", where, "", *above]
        lines += report.table(rows)
        print("\n".join(lines), flush=True)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            (output / f"{name}_{world}.md").write_text("\n".join(lines) + "\n")
    dist.barrier()
    if on == "cuda":
        torch.cuda.synchronize()
    os._exit(0)  # a communicator that CUDA graphs captured does not shut down before they do


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a benchmark on several GPUs."""
    parser.add_argument("--gpus", type=int, default=0, help="GPUs; default all of this host")
    parser.add_argument("--cpu", type=int, default=0, help="CPU processes in their place, with small rows")
    parser.add_argument("--output", type=Path, default=None, help="folder of the table; default none")


def run(args: argparse.Namespace, name: str, measure: Measure, title: str, note: str) -> None:
    """Measure with a process for each GPU, and print the table."""
    world, on = (args.cpu, "cpu") if args.cpu else (args.gpus or torch.cuda.device_count(), "cuda")
    with tempfile.TemporaryDirectory() as folder:
        spawn: Callable[..., Any] = torch.multiprocessing.spawn
        spawn(_worker, (world, folder, on, measure, title, note, args.output, name), nprocs=world)
