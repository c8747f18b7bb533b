"""Where the C++ API is installed, and how to compile a program that uses it.

``python -m attn_ops.cpp --cmake-prefix``, ``--include`` or ``--flags``.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from attn_ops.errors import AttnOpsError, fail

FOLDER = Path(__file__).parent
TORCH = Path(torch.__file__).parent

__all__ = ["BuildError", "build", "cmake_prefix", "cuda_flags", "flags", "include", "main"]


class BuildError(AttnOpsError, RuntimeError):
    """A C++ program was not compiled."""


def cmake_prefix() -> str:
    """``CMAKE_PREFIX_PATH`` for ``find_package(attn_ops)``: this library, and the torch that is installed with it."""
    return f"{FOLDER};{TORCH}"


def include() -> str:
    """The folder of ``attn_ops/attn_ops.h``."""
    return str(FOLDER / "include")


def flags() -> list[str]:
    """Options of g++ after the source: the C++ API, and the installed torch with its device."""
    libraries = ["torch", "torch_cpu", "c10", *(["torch_cuda", "c10_cuda"] if torch.version.cuda else [])]
    return [
        "-std=c++20",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{path}" for path in (include(), TORCH / "include", TORCH / "include/torch/csrc/api/include")),
        f"-L{TORCH / 'lib'}",
        f"-Wl,-rpath,{TORCH / 'lib'}",
        "-Wl,--no-as-needed",
        *(f"-l{library}" for library in libraries),
    ]


def cuda_flags() -> list[str]:
    """Further options for a program that uses CUDA itself: headers and library of the CUDA runtime."""
    from torch.utils.cpp_extension import CUDA_HOME

    site, home = TORCH.parent, Path(CUDA_HOME or "/usr/local/cuda")
    runtimes = [*site.glob("nvidia/cu*/lib/libcudart.so.*"), *site.glob("nvidia/cuda_runtime/lib/libcudart.so.*")]
    runtimes += [path for path in (home / "lib64/libcudart.so",) if path.exists()]
    includes = [path for path in (home / "include", *site.glob("nvidia/cu*/include")) if path.is_dir()]
    libraries = [word for path in runtimes[:1] for word in (str(path), f"-Wl,-rpath,{path.parent}")]
    return [*(f"-isystem{path}" for path in includes), *libraries]


def build(source: Path, program: Path, options: Sequence[str] = ()) -> Path:
    """Compile a program of one file with g++.

    Raises:
        BuildError: g++ is absent or fails.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        fail(BuildError, "build", "g++ is not on the PATH", "a C++ compiler", "install g++")
    command = [compiler, "-O1", str(source), "-o", str(program), *flags(), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        expected, fix = "C++ for the installed torch", f"correct {source.name}"
        fail(BuildError, "build", f"g++ refuses {source}:\n{done.stderr.strip()[-2000:]}\n", expected, fix)
    return program


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m attn_ops.cpp", description="Print where the C++ API is installed, and how to compile with it."
    )
    one = parser.add_mutually_exclusive_group(required=True)
    one.add_argument("--cmake-prefix", action="store_true", help="CMAKE_PREFIX_PATH, with the installed torch")
    one.add_argument("--include", action="store_true", help="the folder of attn_ops/attn_ops.h")
    one.add_argument("--flags", action="store_true", help="options of g++, to be put after the source")
    chosen = parser.parse_args(arguments)
    print(cmake_prefix() if chosen.cmake_prefix else include() if chosen.include else shlex.join(flags()))


if __name__ == "__main__":
    main()
