"""Preparation in other threads when a planner or wrapper is made. Kernels are compiled when it has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_driver import UncompiledKernel, compiled

pytest.importorskip("triton")

import attn_ops
from attn_ops import planner
from attn_ops.eager import startup
from attn_ops.frontend import base
from attn_ops.kernels.triton import launch

IMPORTED_BY_THREADS = """
import sys, threading
import torch, attn_ops
from attn_ops.eager import startup

class Watch:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            print(name)

if torch.cuda.is_available():
    torch.cuda.init()
sys.meta_path.insert(0, Watch())
startup.prepare(torch.device("cuda"))
startup.wait_until_prepared()
driver, key = startup._preparing()
assert driver.done() and key.result()
"""

PLANNER_ON_THE_CPU = """
import sys
import attn_ops
attn_ops.DecodePlanner(2, 2, page_size=16, num_qo_heads=2, num_kv_heads=1, head_dim=16, device="cpu")
print("triton" in sys.modules)
"""

KERNELS_WITHOUT_SYMPY = """
import sys
import torch
before = "sympy" in sys.modules
import attn_ops
import attn_ops.kernels.triton
table = [torch.tensor(t, dtype=torch.int32) for t in ([0, 1, 2], [0, 1], [16, 16])]
planner = attn_ops.DecodePlanner(2, 2, page_size=16, num_qo_heads=2, num_kv_heads=1, head_dim=16, device="cpu")
q, cache = torch.zeros(2, 2, 16), torch.zeros(2, 2, 16, 1, 16)
torch.ops.attn.batch_decode(q, cache[:, 0], cache[:, 1], planner.plan(*table), planner.workspace)
print("sympy" in sys.modules and not before)
"""

IMPORTED_WHEN_PREPARED = """
import sys
import torch, attn_ops
from attn_ops.eager import startup
startup.prepare(torch.device("cuda"))
print("attn_ops.kernels.triton" in sys.modules)
startup.wait_until_prepared()
"""

FIRST_PLAN = """
import subprocess
import torch, attn_ops

built, run = [], subprocess.check_call

def check_call(command, *args, **kwargs):
    built.append(command[1].rsplit("/", 1)[-1])
    return run(command, *args, **kwargs)

subprocess.check_call = check_call
planner = attn_ops.DecodePlanner(2, 2, page_size=16, num_qo_heads=2, num_kv_heads=1, head_dim=16, device="cuda")
table = [torch.tensor(t, dtype=torch.int32, device="cuda") for t in ([0, 1, 2], [0, 1], [16, 16])]
assert planner.plan(*table).kv_len.tolist() == [16, 16]
print(*sorted(built))
"""

SIZES: dict[str, Any] = {"page_size": 16, "num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 16, "device": "cpu"}
WORKSPACE = torch.empty(1 << 20, dtype=torch.uint8)


def _python(code: str, **env: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_threads_import_nothing_that_the_program_may_import() -> None:
    packages = {name.split(".")[0] for name in _python(IMPORTED_BY_THREADS)}
    assert not packages & {"triton", "torch", "attn_ops"}


def test_a_planner_on_the_cpu_imports_no_triton() -> None:
    assert _python(PLANNER_ON_THE_CPU) == ["False"]


def test_an_eager_call_imports_no_sympy() -> None:
    """It takes a quarter of a second, and only traced sizes need it."""
    assert _python(KERNELS_WITHOUT_SYMPY) == ["False"]


def test_the_kernels_are_imported_when_a_planner_is_made() -> None:
    assert _python(IMPORTED_WHEN_PREPARED) == ["True"]


@pytest.mark.gpu
def test_each_module_is_built_once(tmp_path: Path) -> None:
    assert _python(FIRST_PLAN, TRITON_CACHE_DIR=str(tmp_path)) == ["cuda_utils.c"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: attn_ops.DecodePlanner(2, 2, **SIZES),
        lambda: attn_ops.PrefillPlanner(2, 2, 2, **SIZES),
        lambda: attn_ops.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE),
        lambda: attn_ops.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE),
    ],
    ids=["decode", "prefill", "decode wrapper", "prefill wrapper"],
)
def test_planners_and_wrappers_prepare_their_device(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    for module in (planner, base):
        monkeypatch.setattr(module, "prepare", devices.append)
    make()
    assert devices == [torch.device("cpu")]


@pytest.mark.parametrize(("device", "prepared"), [("cpu", []), ("cuda", ["triton"])])
def test_what_is_prepared_for_each_device(device: str, prepared: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(startup, "_preparing", lambda: names.append("triton"))
    startup.prepare(torch.device(device))
    assert names == prepared


def test_a_kernel_is_compiled_when_preparation_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel(UncompiledKernel):
        def warmup(self, *args: Any, **options: Any) -> Any:
            order.append("compiled")
            return compiled()

    order: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(launch, "wait_until_prepared", lambda: order.append("waited"))
    monkeypatch.setattr(launch, "_insert", lambda key, values, kernel: ())
    monkeypatch.setattr(launch, "_launch_by_triton", lambda *given: order.append("launched"))
    kernel: Any = Kernel()
    launch._launch_direct(kernel, (1,), (torch.zeros(4), None, torch.zeros(4), 7, 0.5, 16), launch.Options())
    assert order == ["waited", "compiled", "launched"]


def test_waiting_raises_no_error_of_the_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: Future[Any] = Future()
    failed.set_exception(RuntimeError("0 active drivers"))
    monkeypatch.setattr(startup, "_preparing", lambda: (failed,))
    startup.wait_until_prepared()
    with pytest.raises(RuntimeError, match="0 active drivers"):
        startup._preparing()[0].result()
