"""Runs an AOTInductor package in a C++ process."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from attn_ops import cpp, cpp_serving

PROGRAMS = Path(__file__).with_name("cpp_programs.cpp")
CASES_SOURCE = Path(__file__).with_name("run_package_cases.cpp")


folder = Path(tempfile.gettempdir())
"""Where programs are built. A fixture of ``tests/conftest.py`` sets one that all processes of a test run share."""


@functools.cache
def build(source: Path, *options: str) -> Path:
    """A program that links libtorch and includes the C++ API, compiled once in a test run."""
    name = hashlib.sha256(repr((source, options)).encode()).hexdigest()[:16]
    program = folder / f"{source.stem}-{name}"
    with FileLock(f"{program}.lock"):
        if not program.exists():
            cpp.build(source, program, ("-O0", "-pthread", *options))
    return program


@functools.cache
def serving_example() -> Path:
    """The server of ``examples/cpp_serving``, built once in a test run: by CMake where it finds torch, else by g++."""
    source = Path(cpp_serving.__path__[0])
    if not find_package_works():
        return build(source / "server.cpp")
    target = folder / "cpp_serving"
    with FileLock(f"{target}.lock"):
        if not (target / "server").exists():
            options = (f"-DCMAKE_PREFIX_PATH={cpp.cmake_prefix()}", "-DCMAKE_BUILD_TYPE=Debug")
            for words in (("-S", source, "-B", target, *options), ("--build", target)):
                done = subprocess.run(["cmake", *map(str, words)], capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stdout + done.stderr
    return target / "server"


def program(name: str, *options: str) -> list[str]:
    """The command of a program of ``cpp_programs.cpp``, before its arguments."""
    return [str(build(PROGRAMS, "-DUSE_DISTRIBUTED", "-DUSE_C10D", *options)), name]


def find_package_works() -> bool:
    """CMake is there, and torch is no build for CUDA, whose CMake package looks for the CUDA toolkit."""
    return shutil.which("cmake") is not None and torch.version.cuda is None


@functools.cache
def sanitizer() -> tuple[str, ...]:
    """Options that find memory errors of a program's own code, if the compiler has the library for it."""
    options = ("-fsanitize=address",)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "main.cpp"
        source.write_text("int main() {}")
        try:
            program = cpp.build(source, Path(folder) / "main", options)
        except cpp.BuildError:
            return ()
        return () if subprocess.run([program], env=environment(), capture_output=True).returncode else options


def environment() -> dict[str, str]:
    """Variables of a C++ process. The sanitizer reports no leaks of libtorch, and no vectors that libtorch resizes."""
    options = "detect_leaks=0:detect_container_overflow=0:malloc_context_size=4"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AOTI_")}
    return kept | {"ASAN_OPTIONS": options}


def _run(package: str, inputs: list[Tensor], folder: Path) -> tuple[int, str, tuple[Tensor, ...]]:
    device = inputs[0].device.type
    torch.save([t.cpu() for t in inputs], folder / "inputs.pt")
    options = () if torch.version.cuda else sanitizer()  # which does not run with a CUDA driver
    files = [package, folder / "inputs.pt", folder / "outputs.pt", device]
    words = [*program("package", *options), *map(str, files)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
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


def run_cases(
    package: str, cases: list[list[Tensor]], folder: Path, mode: str = "run"
) -> tuple[list[str], tuple[Tensor, ...]]:
    """Text of ``run_package_cases`` for each case, and its tensors. A tensor on the host stays there."""
    saved = []
    for case in cases:
        stays = torch.tensor([int(not t.is_cuda) for t in case])
        saved.append([*(_on_the_host(t) for t in case), stays])
    torch.save(saved, folder / "cases.pt")
    program = build(CASES_SOURCE, *cpp.cuda_flags())
    words = [str(word) for word in (program, package, folder / "cases.pt", folder / "results.pt", mode)]
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
