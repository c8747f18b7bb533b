"""compute-sanitizer finds no access out of bounds and no race in small calls of every kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.racecheck import races

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

TESTS = Path(__file__).parents[1]
SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def sanitize(tool: str, part: str) -> subprocess.CompletedProcess[str]:
    """Run a part of ``helpers/sanitizer_calls.py`` with a separate allocation for every tensor."""
    if SANITIZER is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    options = ["--tool", tool, "--target-processes", "application-only", "--error-exitcode", "1"]
    done = subprocess.run(
        [SANITIZER, *options, sys.executable, "-m", "helpers.sanitizer_calls", part],
        env={
            **os.environ,
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this device")
    return done


@pytest.mark.parametrize("part", ["calls", "strays", "hostile_plans", "hostile_tables"])
def test_no_access_is_out_of_bounds(part: str) -> None:
    done = sanitize("memcheck", part)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "calls done" in done.stdout


def test_there_are_no_races() -> None:
    done = sanitize("racecheck", "calls")
    assert not races(done.stdout), done.stdout[-6000:]
    assert "calls done" in done.stdout
    assert "RACECHECK SUMMARY" in done.stdout


def test_memcheck_finds_a_planted_error() -> None:
    done = sanitize("memcheck", "planted")
    assert done.returncode == 1
    assert "Invalid __global__ read of size" in done.stdout
