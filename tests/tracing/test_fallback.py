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
from attn_ops.kernels import reference
from helpers import decoder as d
from torch._inductor.utils import run_and_get_code

from attn_ops.ops import backends
from attn_ops.ops.backends import Backend

LENGTHS = [5, 3, 9, 1]


@pytest.fixture(autouse=True)
def special(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls of a decode kernel that Inductor does not generate, the first entry of the backend table."""
    module, calls = types.ModuleType("special_backend"), []

    def batch_decode(*args: Any, **kwargs: Any) -> Any:
        calls.append("batch_decode")
        return reference.batch_decode(*args, **kwargs)

    module.batch_decode = batch_decode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kernels = {"batch_decode": "special"}
    entry = Backend("special", module.__name__, lambda _: [], kernels, specialized=True, inductor_lowerable=False)
    monkeypatch.setattr(backends, "BACKENDS", (entry, *backends.BACKENDS))
    backends.choose.cache_clear()
    yield calls
    backends.choose.cache_clear()


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


@pytest.mark.slow
def test_a_package_has_no_calls(special: list[str], tmp_path: Path) -> None:
    model, planner = d.decoder(), d.planner()
    plan, args = planner.plan(*d.page_table(LENGTHS)), d.inputs()
    exported_args, eager_args = d.clone(args), d.clone(args)
    program = torch.export.export(model, (*exported_args, plan, planner.workspace))
    special.clear()
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "step.pt2"))
    assert not special
    actual = torch._inductor.aoti_load_package(path)(*exported_args, plan, planner.workspace)
    torch.testing.assert_close(actual, model(*eager_args, plan, planner.workspace))
