"""The prefill and MLA kernels in Triton's interpreter, on the CPU, against the oracle.

The interpreter is chosen by an environment variable before Triton is imported, so the cases run in a process of
their own. It multiplies no bfloat16 matrices.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_cases_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, str(Path(__file__).parents[1] / "helpers" / "interpreted_prefill.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
