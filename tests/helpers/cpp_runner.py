"""Runs an AOTInductor package in a C++ process."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.cpp_extension import include_paths, library_paths

from attn_ops import cpp
from attn_ops.demo.package import compile_runner

SOURCE = Path(__file__).with_name("run_package.cpp")
CASES_SOURCE = Path(__file__).with_name("run_package_cases.cpp")


def _program(device: str) -> Path:
    return build(SOURCE, device)


@functools.cache
def build(source: Path, device: str = "cpu") -> Path:
    """A program that links libtorch. It may include the C++ API."""
    program = Path(tempfile.mkdtemp(prefix="attn_ops-")) / source.stem
    flags = [f"-I{path}" for path in (cpp.include(), *include_paths())]
    flags += [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    libraries += ["-ltorch_cuda", "-lc10_cuda"] if device == "cuda" else []
    subprocess.run(["g++", "-std=c++20", "-O0", abi, source, "-o", program, *flags, *libraries], check=True)
    return program


def _run(package: str, inputs: list[Tensor], folder: Path) -> tuple[int, str, tuple[Tensor, ...]]:
    device = inputs[0].device.type
    torch.save([t.cpu() for t in inputs], folder / "inputs.pt")
    command = [_program(device), package, folder / "inputs.pt", folder / "outputs.pt", device]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AOTI_")}
    words = [str(word) for word in command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 4), done.stderr
    return done.returncode, done.stderr, torch.load(folder / "outputs.pt")


def run(package: str, inputs: list[Tensor], folder: Path) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The outputs of the package, and the inputs as it left them, on the host."""
    status, message, results = _run(package, inputs, folder)
    assert status == 0, message
    return results[: -len(inputs)], results[-len(inputs) :]


def refusal(package: str, inputs: list[Tensor], folder: Path) -> tuple[str, tuple[Tensor, ...]]:
    """The message of the exception that the package throws, and the inputs as it left them, on the host."""
    status, message, results = _run(package, inputs, folder)
    assert status == 4, "the package must throw"
    return message, results


@functools.cache
def _cases_program() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="packages-"))
    return compile_runner(folder, torch.device("cuda"), CASES_SOURCE)


def run_cases(
    package: str, cases: list[list[Tensor]], folder: Path, mode: str = "run"
) -> tuple[list[str], tuple[Tensor, ...]]:
    """What ``run_package_cases`` writes of each case, and its tensors. A tensor on the host stays there."""
    saved = []
    for case in cases:
        stays = torch.tensor([int(not t.is_cuda) for t in case])
        saved.append([*(_on_the_host(t) for t in case), stays])
    torch.save(saved, folder / "cases.pt")
    words = [str(word) for word in (_cases_program(), package, folder / "cases.pt", folder / "results.pt", mode)]
    environment = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "PYTHONPATH")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr.split("--- case\n")[:-1], torch.load(folder / "results.pt")


def _on_the_host(t: Tensor) -> Tensor:
    """A copy of ``t`` with its strides and its offset."""
    stored = t.untyped_storage().nbytes() // t.element_size()
    storage = t.as_strided((stored,), (1,), 0).cpu()
    return storage.as_strided(t.shape, t.stride(), t.storage_offset())


def preload() -> dict[str, str]:
    """The environment of a Python process that loads a package: some have a C++ library of their own."""
    path = subprocess.run(["g++", "-print-file-name=libstdc++.so.6"], capture_output=True, text=True, check=True)
    return dict(os.environ) | {"LD_PRELOAD": str(Path(path.stdout.strip()).resolve())}
