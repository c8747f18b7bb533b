"""Fallback: a compiled graph calls the op for a kernel that Inductor does not generate, and a package runs another."""

from __future__ import annotations

import math
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import decoder as d
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from tracing.conftest import check_decode_steps

from attn_ops.eager.checked_call import CHECKED_CALLS
from attn_ops.kernels import reference
from attn_ops.ops import backends
from attn_ops.ops.backends import Backend

LENGTHS = [5, 3, 9, 1]


@pytest.fixture(autouse=True)
def special(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls of kernels that Inductor does not generate, the first entry of the backend table."""
    module, calls = types.ModuleType("special_backend"), []

    def batch_decode(*args: Any, **kwargs: Any) -> Any:
        calls.append("batch_decode")
        return reference.batch_decode(*args, **kwargs)

    def merge_state_in_place(*args: Any, **kwargs: Any) -> None:
        calls.append("merge_state_in_place")
        reference.merge_state_in_place(*args, **kwargs)

    module.batch_decode, module.merge_state_in_place = batch_decode, merge_state_in_place  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kernels = dict.fromkeys(("batch_decode", "merge_state_in_place"), "special")
    entry = Backend("special", module.__name__, lambda _: [], kernels, specialized=True, inductor_lowerable=False)
    monkeypatch.setattr(backends, "BACKENDS", (entry, *backends.BACKENDS))

    def forget() -> None:
        backends.choose.cache_clear()
        for one in CHECKED_CALLS.values():
            one.clear()

    forget()
    yield calls
    forget()


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed batch", "dynamic batch"])
def test_a_compiled_graph_calls_the_op(dynamic: bool, special: list[str]) -> None:
    model, planner = d.decoder(), d.planner()
    compiled = torch.compile(model, fullgraph=True)
    eager_args = d.inputs()
    compiled_args = d.clone(eager_args)
    for step in range(4):
        batch = d.BATCH - step % 3 if dynamic else d.BATCH
        plan = planner.plan(*d.page_table(LENGTHS[:batch], seed=step))
        x = torch.randn(batch, d.WIDTH)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        expected = model(x, *eager_args[1:], plan, planner.workspace)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            actual, code = run_and_get_code(compiled, x, *compiled_args[1:], plan, planner.workspace)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(compiled_args[1:], eager_args[1:])
        if step == 0:
            source = "\n".join(code)
            assert "torch.ops.attn.batch_decode" in source
            assert "torch.ops.attn.append_kv" not in source
            buffers = re.findall(r"empty_strided_cpu\(\(([\d, ]*)\)", source)
            sizes = [math.prod(int(n) for n in shape.split(",") if n.strip()) for shape in buffers]
            assert max(sizes, default=0) < eager_args[1].numel() // 2, "a cache is copied"
    assert special


def test_a_call_that_writes_its_arguments(special: list[str]) -> None:
    """Views of larger buffers, which are read before and after."""

    def function(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor) -> tuple[Tensor, Tensor]:
        before = v.sum(-1) + s
        torch.ops.attn.merge_state_in_place(v[0], s[0], v_other, s_other)
        torch.ops.attn.merge_state_in_place(v[1], s[1], v_other, s_other, s_other[:, 0] > 0)
        return before, v.sum(-1) * 2 + s

    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = torch.randn(2, 5, 3, 16), torch.randn(2, 5, 3), torch.randn(5, 3, 16), torch.randn(5, 3)
    eager_args, compiled_args = d.clone(inputs), d.clone(inputs)
    expected = function(*eager_args)
    special.clear()
    actual, code = run_and_get_code(torch.compile(function, fullgraph=True), *compiled_args)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(compiled_args, eager_args)
    assert special == ["merge_state_in_place"] * 2
    assert "torch.ops.attn.merge_state_in_place" in "\n".join(code)


@pytest.mark.slow
def test_a_package_has_no_calls(special: list[str], tmp_path: Path) -> None:
    """It runs another kernel, in Python and in a C++ process. The package is for a fixed batch."""
    planner = d.planner()
    inputs = (*d.inputs(), planner.plan(*d.page_table(LENGTHS)), planner.workspace)
    program = torch.export.export(d.decoder(), inputs)
    special.clear()
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "step.pt2"))
    assert not special
    check_decode_steps(path, d.planner(), d.BATCH, tmp_path)
