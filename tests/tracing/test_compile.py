"""``torch.compile``: one graph, no recompile for other lengths, no copy of a cache, no stale compiled code."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import decoder as d
from torch._inductor.utils import run_and_get_code

STEPS = [[5, 3, 9, 1], [7, 0, 20, 2], [48, 48, 48, 48], [1, 1, 1, 1], [0, 0, 0, 0]]


def _steps(batch: int) -> list[list[int]]:
    return [[(7 * step + 11 * b) % d.MAX_KV_LEN for b in range(batch)] for step in range(20)]


@pytest.mark.usefixtures("vector_code")
def test_compiled_equals_eager_and_copies_no_cache() -> None:
    model, planner = d.decoder(), d.planner()
    plan = planner.plan(*d.page_table(STEPS[0]))
    args = d.inputs()
    eager_args, compiled_args = d.clone(args), d.clone(args)
    expected = model(*eager_args, plan, planner.workspace)
    actual, code = run_and_get_code(torch.compile(model, fullgraph=True), *compiled_args, plan, planner.workspace)
    torch.testing.assert_close(actual, expected)
    for eager, compiled in zip(eager_args[1:], compiled_args[1:], strict=True):
        torch.testing.assert_close(compiled, eager)
    assert not torch.equal(eager_args[1], args[1]), "the step must have appended"

    source = "\n".join(code)
    assert "torch.ops.attn" not in source, "the ops are inlined"
    half_a_cache = args[1].numel() // 2
    buffers = re.findall(r"empty_strided_cpu\(\(([\d, ]*)\)", source)
    assert buffers, "the pattern must find Inductor's buffers"
    assert max(math.prod(int(n) for n in shape.split(",") if n.strip()) for shape in buffers) < half_a_cache


@pytest.mark.parametrize(
    "dynamic", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fixed batch", "dynamic batch"]
)
def test_no_recompile_over_twenty_steps(dynamic: bool) -> None:
    model, planner = d.decoder(), d.planner()
    compiled = torch.compile(model, fullgraph=True)
    eager_args = d.inputs()
    compiled_args = d.clone(eager_args)
    for step, lengths in enumerate(_steps(d.BATCH)):
        batch = d.BATCH - step % 3 if dynamic else d.BATCH
        plan = planner.plan(*d.page_table(lengths[:batch], seed=step))
        x = torch.randn(batch, d.WIDTH)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
        expected = model(x, *eager_args[1:], plan, planner.workspace)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            actual = compiled(x, *compiled_args[1:], plan, planner.workspace)
        torch.testing.assert_close(actual, expected)


def test_swapping_plans_of_one_shape_does_not_recompile() -> None:
    model, planners = d.decoder(), [d.planner(), d.planner()]
    compiled = torch.compile(model, fullgraph=True)
    args = d.inputs()
    for step, planner in enumerate(planners):
        plan = planner.plan(*d.page_table(STEPS[step]))
        expected = model(*d.clone(args), plan, planner.workspace)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            actual = compiled(*d.clone(args), plan, planner.workspace)
        torch.testing.assert_close(actual, expected)


COLD = """
import os, sys
import torch._inductor.compile_fx  # once for all processes, which import attn_ops themselves

def compile_and_run():
    from helpers import decoder as d
    x, cache, _ = d.inputs()
    planner = d.planner()
    plan = planner.plan(*d.page_table([5, 3, 9, 1]))

    @torch.compile(fullgraph=True)
    def decode(q, cache, plan, workspace):
        return torch.ops.attn.batch_decode(q, cache[:, 0], cache[:, 1], plan, workspace)[0]

    out = decode(x.view(4, d.QO_HEADS, d.DIM), cache, plan, planner.workspace)
    print(d.attn_ops.__file__, out.double().sum().item(), flush=True)

for _ in sys.stdin:
    assert "attn_ops" not in sys.modules
    if os.fork() == 0:
        compile_and_run()
        os._exit(0)
    assert os.wait()[1] == 0
"""


@contextlib.contextmanager
def _cold_processes(cache: Path, path: str) -> Iterator[Callable[[], float]]:
    """Each call has the result of a new process that has neither imported the library nor compiled anything."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": path}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", COLD], env=env, cwd=cache.parent, text=True, **pipes)
    assert process.stdin is not None
    assert process.stdout is not None

    def run() -> float:
        print(file=process.stdin, flush=True)
        words = process.stdout.readline().split()
        assert len(words) == 2, process.communicate()[1]
        assert words[0].startswith(path.split(os.pathsep)[0]), "the copy must be the one imported"
        return float(words[1])

    try:
        yield run
    finally:
        process.communicate()


@pytest.mark.slow
def test_cold_process_and_stale_cache(tmp_path: Path) -> None:
    """After a change of a kernel, Inductor's disk cache does not give the code compiled from the old one."""
    root = Path(__file__).parents[2]
    package = tmp_path / "site" / "attn_ops"
    shutil.copytree(root / "attn_ops", package)
    for folder in ("kernels", "meta"):
        shutil.copytree(root / folder, package / folder)
    path = os.pathsep.join([str(package.parent), str(Path(__file__).parents[1])])
    cache = tmp_path / "cache"

    planner, (x, kv, _) = d.planner(), d.inputs()
    plan = planner.plan(*d.page_table([5, 3, 9, 1]))
    call = (x.view(4, d.QO_HEADS, d.DIM), *kv.unbind(1), plan, planner.workspace)
    expected = torch.ops.attn.batch_decode(*call)[0].double().sum()
    body = package / "kernels" / "reference" / "attention.py"
    changed = body.read_text().replace("return saturate(out[:, 0]", "return saturate(0 * out[:, 0]")
    assert changed != body.read_text(), "the edit must find its place"
    with _cold_processes(cache, path) as result:
        assert result() == pytest.approx(expected.item(), rel=1e-4)
        body.write_text(changed)
        assert result() == 0


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_an_op_that_writes_nothing_runs_in_branches_and_transforms() -> None:
    """Ops that write to a workspace do not (docs/guide/compile.md)."""
    q, k = torch.randn(3, 4, 16), torch.randn(9, 2, 16)

    def attend(q: torch.Tensor) -> torch.Tensor:
        return torch.ops.attn.single_prefill(q, k, k)[0]

    def choose(q: torch.Tensor) -> torch.Tensor:
        return torch.cond(q.sum() > 1e9, torch.clone, attend, (q,))

    expected = attend(q)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(choose, fullgraph=True, backend="aot_eager")(q), expected)
        torch.testing.assert_close(torch.func.functionalize(attend)(q), expected)
        torch.testing.assert_close(torch.vmap(attend)(q[None])[0], expected)
