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

SOURCE = Path(__file__).with_name("run_package.cpp")


@functools.cache
def _program(device: str) -> Path:
    program = Path(tempfile.mkdtemp(prefix="attn_ops-")) / "run_package"
    flags = [f"-I{path}" for path in include_paths()]
    flags += [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    libraries = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10"]
    libraries += ["-ltorch_cuda", "-lc10_cuda"] if device == "cuda" else []
    subprocess.run(["g++", "-std=c++20", "-O1", abi, SOURCE, "-o", program, *flags, *libraries], check=True)
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
