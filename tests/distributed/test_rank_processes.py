"""The helper that runs cases on several processes ends with an error, and soon, when one of them does not go on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import rank_processes

WAITS = "import time; print('this rank waits', flush=True); time.sleep(60)"


def _replace_processes(monkeypatch: pytest.MonkeyPatch, *programs: str) -> None:
    waiting, start = list(programs), subprocess.Popen
    monkeypatch.setattr(
        rank_processes.subprocess, "Popen", lambda _, **kw: start([sys.executable, "-c", waiting.pop(0)], **kw)
    )


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
