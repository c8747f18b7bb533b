"""Runs cases on several processes of one ``torch.distributed`` group. The processes start once for all cases.

``python -m helpers.rank_processes MODULE RANK WORLD FOLDER`` is one process. It runs ``CASES`` of the module, each with
a group of its own, and writes what failed to ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TESTS = Path(__file__).parents[1]
CASE_TIMEOUT = timedelta(seconds=60)
"""After which a collective that a rank does not join fails on the others."""

Case = Callable[[dist.ProcessGroup], None]


def run_ranks(module: str, world: int, folder: Path, timeout_s: float = 600) -> dict[str, dict[str, str]]:
    """By case and rank, the traceback of a failure, or an empty text."""
    processes = []
    for rank in range(world):
        command = [sys.executable, "-m", "helpers.rank_processes", module, str(rank), str(world), str(folder)]
        log = (folder / f"{rank}.log").open("w")
        processes.append(subprocess.Popen(command, cwd=TESTS, stdout=log, stderr=subprocess.STDOUT))
    try:
        for process in processes:
            process.wait(timeout_s)
    finally:
        for process in processes:
            process.kill()
    results: dict[str, dict[str, str]] = {}
    for rank in range(world):
        report, log_text = folder / f"{rank}.json", (folder / f"{rank}.log").read_text()[-4000:]
        if not report.is_file():
            raise AssertionError(f"rank {rank} ended without a report:\n{log_text}")
        for case, failure in json.loads(report.read_text()).items():
            results.setdefault(case, {})[str(rank)] = failure
    return results


def _run_case(case: Case, group: Any) -> str:
    try:
        case(group)
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> None:
    module, rank, world, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= world and os.environ.get("RANKS_ON") == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), world)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world, store=store, timeout=CASE_TIMEOUT)
    cases: dict[str, Case] = importlib.import_module(module).CASES
    failures = {}
    for name, case in cases.items():
        failures[name] = _run_case(case, dist.new_group(list(range(world)), timeout=CASE_TIMEOUT))
        (folder / f"{rank}.json").write_text(json.dumps(failures))
    sys.stdout.flush()
    os._exit(0)  # a group in which a case failed may not shut down


if __name__ == "__main__":
    main()
