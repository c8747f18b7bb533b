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
    [("attn_ops", ["of a kernel"]), (None, [])],
    ids=["info", "unset"],
)
def test_torch_logs_sets_the_level(setting: str | None, shown: list[str]) -> None:
    assert _messages(_log(PROGRAM, setting)) == shown


def _log(program: str, setting: str | None) -> list[str]:
    env = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    env |= {} if setting is None else {"TORCH_LOGS": setting}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def _messages(lines: list[str]) -> list[str]:
    return [line.split("message ")[1] for line in lines if "message " in line]


CALLS = """
import dataclasses
import torch
import attn_ops
from attn_ops.ops import backends

q, k, v = torch.zeros(3, 2, 2, 16).unbind()

def attend(q, k, v):
    return torch.ops.attn.single_prefill(q, k, v)[0]

attend(q, k, v)
attend(q, k, v)
torch._inductor.config.force_disable_caches = True
torch.compile(attend, fullgraph=True)(q, k, v)
backends.BACKENDS = (*backends.BACKENDS[:-1], dataclasses.replace(backends.BACKENDS[-1], inductor_lowerable=False))
backends.choose.cache_clear()
torch._dynamo.reset()
torch.compile(attend, fullgraph=True)(q, k, v)
"""

REASONS = (
    "cuda.prefill: it runs on cuda, not cpu",
    "cuda.prefill_e4m3: it runs on cuda, not cpu",
    "cuda.prefill_fp8: it runs on cuda, not cpu",
    "triton: it runs on cuda, not cpu",
)


@pytest.mark.slow
def test_the_log_says_which_kernel_runs_and_why() -> None:
    """Eager calls, and ops of compiled graphs, which are inlined or called."""
    lines = _log(PROGRAM + CALLS, "+attn_ops")
    assert _messages(lines) == ["of an op", "of a kernel"]
    messages = [line.rpartition("] ")[2] for line in lines if "attn_ops/ops/" in line]
    reasons, graph = "; ".join(REASONS), "Inductor does not generate it"
    *hopper, triton = REASONS
    in_packages = "; ".join((*(f"{one}, {graph}" for one in hopper), triton))
    traced = messages.index("single_prefill: reference runs the traced call")
    eager = f"single_prefill: cpu (kernel sdpa) runs it; {reasons}"
    assert messages[0] == eager
    in_graphs = f"single_prefill: reference runs it; {reasons}; cpu.sdpa: it runs eager calls only"
    assert set(messages[1:traced]) <= {eager, in_graphs}  # of the fake tensors
    inlined = messages.index("single_prefill: a graph contains the kernels of reference")
    assert messages[inlined - 1] == f"single_prefill: reference runs it; {in_packages}; cpu.sdpa: {graph}"
    called = "single_prefill: a graph calls the op, as Inductor does not generate the kernel reference"
    assert called in messages[inlined:]


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
