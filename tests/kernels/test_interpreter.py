"""Runs the tests marked ``interpreter``: Triton kernels in Triton's interpreter on the CPU.

Triton decides when its kernels are imported whether to interpret them, so the tests run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.backends import INTERPRETED

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
FOLDERS = ("attention", "paging", "planning", "fuzz")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="starts the process of the interpreter")
def test_in_the_interpreter() -> None:
    options = ["-m", "interpreter", "-p", "no:cacheprovider", "--durations=0"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(TESTS / folder) for folder in FOLDERS)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for folder in FOLDERS:
        assert f"\ntests/{folder}/test_" in done.stdout, f"no test of {folder} ran"
