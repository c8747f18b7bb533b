"""Runs the tests marked ``interpreter``: Triton kernels in Triton's interpreter on the CPU.

Triton decides when its kernels are imported whether to interpret them, so the tests run in processes of their own.
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


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="starts the processes of the interpreter")
@pytest.mark.parametrize("folder", ["attention", "paging", "planning", "fuzz"])
def test_in_the_interpreter(folder: str) -> None:
    options = ["-q", "-m", "interpreter", "-p", "no:cacheprovider", "--durations=0", str(TESTS / folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
