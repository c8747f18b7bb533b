"""Runs cases on several processes of one ``torch.distributed`` group. The processes start once for all cases.

``python -m helpers.rank_processes MODULE WORLD FOLDER`` imports the module, and forks the processes: they import it
once. Each runs ``CASES`` of the module, each case with a group of its own, and writes what failed to
``FOLDER/RANK.json`` and what it prints to ``FOLDER/RANK.log``.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

TESTS = Path(__file__).parents[1]
CASE_TIMEOUT = timedelta(seconds=60)
"""After which a collective that a rank does not join fails on the others."""

AFTER_FAILURE_S = 10.0
"""How long the other processes go on after one has failed."""

STACKS_AFTER_S = 120
"""After which, again and again, a process that has not ended writes its stacks to its log."""

ALSO_IMPORTED = ("torch._inductor.compile_fx",)
"""Modules that cases which compile import, which takes longer than to import torch."""

Case = Callable[[dist.ProcessGroup], None]


class _Forked:
    """A rank that the starter forked: what is used of ``subprocess.Popen``."""

    def __init__(self, starter: subprocess.Popen[bytes], code: Path) -> None:
        self.starter, self.code = starter, code
        self.returncode: int | None = None

    def poll(self) -> int | None:
        ended = self.starter.poll()  # before a look at the file, which the starter writes before it ends
        if self.returncode is None:
            self.returncode = int(self.code.read_text()) if self.code.exists() else ended
        return self.returncode

    def kill(self) -> None:
        if self.starter.poll() is None:
            os.killpg(self.starter.pid, signal.SIGKILL)

    def wait(self) -> None:
        self.starter.wait()
        self.poll()


def _start(module: str, world: int, folder: Path) -> list[Any]:
    """The processes of the ranks. CUDA works in none that is forked: ranks on GPUs import the module themselves."""
    command = [sys.executable, "-m", "helpers.rank_processes", module, str(world), str(folder)]
    if os.environ.get("RANKS_ON") == "cuda":
        return [subprocess.Popen([*command, str(rank)], cwd=TESTS) for rank in range(world)]
    cpu_alone = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    with (folder / "0.log").open("a") as log:
        starter = subprocess.Popen(
            command, cwd=TESTS, env=cpu_alone, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    return [_Forked(starter, folder / f"{rank}.code") for rank in range(world)]


def run_ranks(module: str, world: int, folder: Path, timeout_s: float = 600) -> dict[str, dict[str, str]]:
    """The traceback of a failure, or an empty text, by case and rank."""
    processes = _start(module, world, folder)
    try:
        in_time = _wait(processes, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if not in_time:
        logs = "\n".join(f"rank {rank}:\n{_tail(folder, rank)}" for rank in range(world))
        raise AssertionError(f"the ranks did not end within {timeout_s:g} s:\n{logs}")
    results: dict[str, dict[str, str]] = {}
    for rank in range(world):
        report, code = folder / f"{rank}.json", processes[rank].returncode
        if code or not report.is_file():
            others = "\n".join(f"rank {other}:\n{_tail(folder, other)}" for other in range(world))
            raise AssertionError(f"rank {rank} ended with code {code}:\n{others}")
        for case, failure in json.loads(report.read_text()).items():
            results.setdefault(case, {})[str(rank)] = failure
    return results


def _wait(processes: list[Any], timeout_s: float) -> bool:
    """Whether all end in time. Once one has failed, the others have a few seconds more to say so too."""
    deadline = time.monotonic() + timeout_s
    failed_at: float | None = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if now > deadline:
            return False
        if failed_at is None and any(process.poll() for process in processes):
            failed_at = now
        if failed_at is not None and now > failed_at + AFTER_FAILURE_S:
            return True
        time.sleep(0.05)
    return True


def _tail(folder: Path, rank: int) -> str:
    log = folder / f"{rank}.log"
    return log.read_text(errors="replace")[-4000:] if log.exists() else ""


def _run_case(case: Case, world: int) -> str:
    try:
        case(dist.new_group(list(range(world)), timeout=CASE_TIMEOUT))
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> None:
    module, world, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if len(sys.argv) > 4:
        _be_rank(module, int(sys.argv[4]), world, folder)
    for name in (module, *ALSO_IMPORTED):
        importlib.import_module(name)
    sys.stdout.flush()
    ranks = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _be_rank(module, rank, world, folder)
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        part = folder / f"{ranks.pop(pid)}.part"
        part.write_text(str(os.waitstatus_to_exitcode(status)))
        part.rename(part.with_suffix(".code"))


def _be_rank(module: str, rank: int, world: int, folder: Path) -> NoReturn:
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    code = 1
    try:
        _run_cases(module, rank, world, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a group in which a case failed may not shut down


def _run_cases(module: str, rank: int, world: int, folder: Path) -> None:
    faulthandler.dump_traceback_later(STACKS_AFTER_S, repeat=True)
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= world and os.environ.get("RANKS_ON") == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    store = _store(rank, world, folder)
    backend = "nccl" if on_gpu else "gloo"
    device = torch.device("cuda", rank) if on_gpu else None
    dist.init_process_group(backend, rank=rank, world_size=world, store=store, timeout=CASE_TIMEOUT, device_id=device)
    dist.barrier()
    cases: dict[str, Case] = importlib.import_module(module).CASES
    failures = {}
    for name, case in cases.items():
        start = time.perf_counter()
        failures[name] = _run_case(case, world)
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        (folder / f"{rank}.json").write_text(json.dumps(failures))
    store.set(f"done/{rank}", "")
    if rank == 0:  # its process is the server
        store.wait([f"done/{other}" for other in range(world)], CASE_TIMEOUT)


def _store(rank: int, world: int, folder: Path) -> dist.Store:
    """A TCPStore, as torchrun gives, on a free port."""
    ports = dist.FileStore(str(folder / "store"), world)
    port = 0 if rank == 0 else int(ports.get("port"))
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, CASE_TIMEOUT, wait_for_workers=False)
    if rank == 0:
        ports.set("port", str(store.port))
    return store


if __name__ == "__main__":
    main()
