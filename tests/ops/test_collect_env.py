"""``attn_ops.collect_env()`` and ``python -m attn_ops.collect_env``."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attn_ops
from attn_ops.collect_env import OPS, Environment, _driver_version, _images
from attn_ops.eager import op_cache
from attn_ops.native import package
from attn_ops.ops import backends, tuning_table

collect_env_module = importlib.import_module("attn_ops.collect_env")

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda as it answers on a machine with one GPU, for which no CUDA kernel is compiled."""
    properties = SimpleNamespace(name="Some GPU", major=8, minor=0, multi_processor_count=108, total_memory=80 << 30)
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "get_device_properties": properties,
        "get_device_name": "Some GPU",
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)


def test_versions_and_backends_are_those_in_use() -> None:
    found = attn_ops.collect_env()
    assert found.versions["attn_ops"].startswith(attn_ops.__version__)
    assert found.versions["torch"] == torch.__version__
    assert set(found.backends) == set(OPS)
    for op, lines in found.backends.items():
        labels = [backend.label(op) for backend in backends.BACKENDS if backend.has(op)]
        assert [line.split(":")[0] for line in lines] == labels
        assert sum(": runs it" in line and not re.search("runs it in (compiled|packages)", line) for line in lines) == 1


@needs_no_gpu
def test_on_the_cpu_the_reasons_are_given() -> None:
    found = attn_ops.collect_env()
    assert found.gpus == ()
    assert "it runs on cuda, not cpu" in found.backends["batch_decode"][0]
    assert "GPUs\n  none: torch sees no CUDA device" in str(found)


def test_gpus_are_described(one_gpu: None) -> None:
    assert attn_ops.collect_env().gpus == ("0: Some GPU, compute capability 8.0, 108 SMs, 80.0 GiB",)


@pytest.mark.parametrize(
    ("capabilities", "compiler", "expected"),
    [
        ([], "g++", "none: images are for compute capability 9.0 and newer, and no GPU is visible"),
        ([(9, 0)], "g++", "where the package allows them"),
        ([(9, 0), (9, 0)], "/nowhere/c++", "none: the compiler /nowhere/c++ is not on the PATH"),
        (
            [(9, 0), (8, 6)],
            "g++",
            "0: where the package allows them; 1: none: images are for compute capability 9.0 and newer, and cuda:1 "
            "has 8.6",
        ),
    ],
    ids=["no GPU", "one", "no compiler", "two"],
)
def test_images_in_packages(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], compiler: str, expected: str
) -> None:
    """Of each GPU, whichever is current."""
    pytest.importorskip("triton")
    gpus = {torch.device("cuda", i): found for i, found in enumerate(capabilities)}
    monkeypatch.setattr(package, "compute_capability", gpus.get)
    monkeypatch.setattr(package.shutil, "which", lambda name: None if "nowhere" in name else name)
    monkeypatch.setenv("CXX", compiler)
    assert _images(list(gpus)) == expected


def test_prepared_calls_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(op_cache.OP_CACHES["batch_decode"]._entries, "key", object())
    found = attn_ops.collect_env()
    assert found.prepared_calls["batch_decode"] >= 1
    assert f"prepared calls: {', '.join(f'{op} {n}' for op, n in found.prepared_calls.items())}" in str(found)


@pytest.mark.parametrize("reason", ["", "the extension module cannot be imported: no module"])
def test_whether_eager_calls_are_prepared(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env_module, "unavailable_reason", reason)
    found = attn_ops.collect_env()
    lost = f"not prepared, eager calls take more host time: {reason}; install with a C++ compiler"
    assert found.launcher == (lost if reason else "prepared calls")
    assert f"eager calls: {found.launcher}" in str(found)


def test_the_tuning_table_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_gpu: None) -> None:
    path = tmp_path / "tiles.json"
    monkeypatch.setenv(tuning_table.VARIABLE, str(path))
    assert "cannot be read" in attn_ops.collect_env().tuning_table
    for wrong in ("{", "[]", '{"Some GPU": 3}'):
        path.write_text(wrong)
        assert attn_ops.collect_env().tuning_table.startswith(f"{path} cannot be read")
    path.write_text(
        '{"Some GPU": {"decode": {"a": {}, "b": {}}, "prefill": {"c": {}}}, "Another": {"decode": {"a": {}}}}'
    )
    found = attn_ops.collect_env()
    assert found.tuning_table == f"{path}, 3 entries for Some GPU"
    assert found.variables[tuning_table.VARIABLE] == str(path)
    monkeypatch.delenv(tuning_table.VARIABLE)
    assert attn_ops.collect_env().tuning_table.startswith("none")


def test_a_driver_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_env_module, "LIBCUDA", "libabsent.so.1")
    assert _driver_version() == "none: libabsent.so.1 is not found"


def test_the_name_is_the_function_whatever_is_imported() -> None:
    importlib.import_module("attn_ops.collect_env")
    assert isinstance(attn_ops.collect_env(), Environment)


def test_the_command_prints_it_without_a_warning() -> None:
    command = [sys.executable, "-W", "error", "-m", "attn_ops.collect_env"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Versions\n  attn_ops" in done.stdout
    assert "batch_decode: reference:" in done.stdout


def test_where_cuda_kernels_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_ops.kernels.cuda import compile as compile_module

    monkeypatch.setenv("ATTN_OPS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_module, "compiler", lambda: ("some compiler 1.0", lambda specialization: b""))
    found = attn_ops.collect_env()
    assert found.cuda_compiler.startswith("some compiler 1.0")
    assert found.cuda_kernels.endswith(f" prebuilt; kept in {tmp_path / 'attn_ops' / 'cuda'}")
    assert f"CUDA kernels: {found.cuda_kernels}" in str(found)
    monkeypatch.setattr(compile_module, "compiler", lambda: ("there is no nvrtc", None))
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATTN_OPS_CACHE_DIR", str(tmp_path / "file"))
    found = attn_ops.collect_env()
    assert found.cuda_compiler == "none: there is no nvrtc"
    assert "none are kept on disk: " in found.cuda_kernels
