"""The benchmarks on several GPUs run: on gloo processes, with small rows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("heads", "| row | one GPU | 2 GPUs | speed-up |"),
        ("context", "| row | one GPU | local | all-gather | all-to-all |"),
    ],
)
def test_on_two_processes(name: str, columns: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", name, "--cpu", "2", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    table = (tmp_path / f"{name}_2.md").read_text()
    assert columns in table
    assert table in done.stdout
