"""Small calls of every op, captured in a CUDA graph or compiled, give the bits of the eager call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.calls import observed, positional
from helpers.kernel_calls import ATTENTION, CALLS, ON_CUDA, call, run
from torch import Tensor
from torch._inductor.utils import run_and_get_code

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


def same(actual: list[Tensor], expected: list[Tensor], last_bits: bool = True) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        tolerance = 0 if last_bits else 4 * torch.finfo(a.dtype).eps
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_captured(name: str) -> None:
    """No call waits for the device, and a replay does the work again."""
    expected = [t.clone() for t in run(*call(name))]
    op, kwargs = call(name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(op, kwargs)
    graph.replay()
    same(result, expected, last_bits=op != "batch_decode")  # a kernel of its own adds partial results in another order


CAPTURED_FIRST = """
import torch, attn_ops
planner = attn_ops.DecodePlanner(2, 8, page_size=16, num_qo_heads=8, num_kv_heads=2, head_dim=128, device="cuda")
q = torch.randn(2, 8, 128, device="cuda", dtype=torch.bfloat16)
cache = torch.randn(8, 2, 16, 2, 128, device="cuda", dtype=torch.bfloat16)
plan = planner.plan(*(torch.tensor(t, dtype=torch.int32, device="cuda") for t in ([0, 3, 8], range(8), [16, 5])))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out, _ = torch.ops.attn.batch_decode(q, *cache.unbind(1), plan, planner.workspace)
out.fill_(torch.nan)
graph.replay()
expected, _ = torch.ops.attn.batch_decode(q, *cache.unbind(1), plan, planner.workspace)
torch.testing.assert_close(out, expected)
print("equal")
"""


def test_the_first_call_may_be_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled and loaded in the capture."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", CAPTURED_FIRST]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.parametrize("name", [name for name in CALLS if name not in {*ATTENTION, *ON_CUDA}])
def test_compiled(name: str) -> None:
    """The graph contains the kernels and calls no op of the library."""
    torch._dynamo.reset()
    expected = [t.clone() for t in run(*call(name))]
    op, kwargs = call(name)
    inputs, options = positional(op, kwargs)

    def function(*args: Any) -> Any:
        return getattr(torch.ops.attn, op)(*args, **options, backend="triton")

    with torch.no_grad():
        result, code = run_and_get_code(torch.compile(function, fullgraph=True), *inputs)
    same(observed(op, kwargs, result), expected)
    assert "torch.ops.attn" not in "".join(code)
