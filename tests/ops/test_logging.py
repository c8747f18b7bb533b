"""``TORCH_LOGS="+attn_ops"`` shows the log of this library, whose loggers are named as its modules."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import logging, torch, attn_ops
logging.getLogger("attn_ops.ops.backends").debug("message of an op")
logging.getLogger("attn_ops.kernels.triton.launch").info("message of a kernel")
logging.getLogger("torch.library").debug("message of another library")
"""


@pytest.mark.parametrize(
    ("setting", "shown"),
    [("+attn_ops", ["of an op", "of a kernel"]), ("attn_ops", ["of a kernel"]), (None, [])],
    ids=["debug", "info", "unset"],
)
def test_torch_logs_sets_the_level(setting: str | None, shown: list[str]) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    env |= {} if setting is None else {"TORCH_LOGS": setting}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    messages = [line.split("message ")[1] for line in done.stderr.splitlines() if "message " in line]
    assert messages == shown


def test_loggers_are_named_as_their_modules() -> None:
    """Or the setting would not reach them."""
    calls = [
        (path.name, node)
        for folder in ("attn_ops", "kernels", "meta")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger")
    ]
    assert calls
    for name, call in calls:
        assert ast.unparse(call) == "logging.getLogger(__name__)", name
