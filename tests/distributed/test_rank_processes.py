"""The helper that runs cases on several processes ends with an error, and soon, when one of them does not go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import rank_processes

WAITS = "import time; print('this rank waits', flush=True); time.sleep(60)"


def _replace_processes(monkeypatch: pytest.MonkeyPatch, *programs: str) -> None:
    def start(_module: str, _world: int, folder: Path) -> list[subprocess.Popen[bytes]]:
        processes = []
        for rank, program in enumerate(programs):
            with (folder / f"{rank}.log").open("w") as log:
                command = [sys.executable, "-c", program]
                processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        while not all((folder / f"{rank}.log").stat().st_size for rank in range(len(programs))):
            time.sleep(0.01)  # the time to wait counts from here, whatever the start of Python takes
        return processes

    monkeypatch.setattr(rank_processes, "_start", start)


def test_a_process_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "AFTER_FAILURE_S", 1.0)
    _replace_processes(monkeypatch, WAITS, "raise SystemExit('this rank fails')")
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"(?s)this rank waits.*this rank fails"):
        rank_processes.run_ranks("", 2, tmp_path, 50)
    assert time.monotonic() - begin < 30


def test_processes_that_do_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_processes(monkeypatch, "print('this rank is done')", WAITS)
    with pytest.raises(AssertionError, match=r"(?s)did not end within 1 s.*this rank is done.*this rank waits"):
        rank_processes.run_ranks("", 2, tmp_path, 1)


ONE_ENDS = """
import os, time
import torch.distributed as dist

def case(group):
    if dist.get_rank() == 0:
        print("this rank waits", flush=True)
        dist.barrier(group)
        time.sleep(60)
    dist.barrier(group)
    print("this rank ends", flush=True)
    os._exit(3)

CASES = {"case": case}
"""


def test_a_forked_process_that_ends_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "AFTER_FAILURE_S", 1.0)
    (tmp_path / "one_ends.py").write_text(ONE_ENDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    processes = rank_processes._start("one_ends", 2, tmp_path)
    monkeypatch.setattr(rank_processes, "_start", lambda *_: processes)
    with pytest.raises(AssertionError, match=r"(?s)this rank waits.*this rank ends"):
        rank_processes.run_ranks("one_ends", 2, tmp_path, 50)
    assert [process.returncode for process in processes] == [-signal.SIGKILL, 3]
