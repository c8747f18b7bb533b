"""The benchmark of eager calls on the CPU: its rows, of small calls."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks import cpu


def test_a_row_of_each_kind_of_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op, a function and a call without a peer, with one thread and with two."""
    monkeypatch.setattr(cpu, "SHAPES", {"batch_decode": (cpu.Shape(2, 1, 17),)})
    monkeypatch.setattr(
        cpu, "FUNCTIONS", {"of a function": cpu.FUNCTIONS["flash_attn_func"]._replace(sizes=((1, 8, 8),))}
    )
    monkeypatch.setattr(cpu, "HEADS", ((2, 1, 16),))
    monkeypatch.setattr(cpu, "DTYPES", (torch.float32,))
    monkeypatch.setattr(cpu, "_others", lambda: {"alone": lambda: None})
    monkeypatch.setattr(cpu, "ROUND_SECONDS", 1e-3)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    cpu.run(argparse.Namespace(rounds=2, output=tmp_path))
    rows = json.loads((tmp_path / "cpu.json").read_text())["rows"]
    names = [
        "batch_decode 2 x (1 on 17), heads 8/2/64, float32",
        "of a function 1 x (8 on 8), heads 2/1/16, float32",
        "alone",
    ]
    assert [(row["what"], row["threads"]) for row in rows] == [(name, n) for n in (1, 2) for name in names]
    assert threads == [1, 2]
    for op, function, alone in (rows[:3], rows[3:]):
        assert op["ratio"] == op["op"] / op["sdpa"]
        assert op["reference"] > 0
        assert "reference" not in function
        assert function["ratio"] == function["op"] / function["sdpa"]
        assert alone["ratio"] is None
