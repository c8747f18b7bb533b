"""Where the C++ API is installed: ``python -m attn_ops.cpp --cmake-prefix`` or ``--include``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

FOLDER = Path(__file__).parent

__all__ = ["cmake_prefix", "include", "main"]


def cmake_prefix() -> str:
    """``CMAKE_PREFIX_PATH`` for ``find_package(attn_ops)``: this library, and the torch that is installed with it."""
    return f"{FOLDER};{Path(torch.__file__).parent}"


def include() -> str:
    """The folder of ``attn_ops/attn_ops.h``."""
    return str(FOLDER / "include")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m attn_ops.cpp", description="Print where the C++ API is installed.")
    one = parser.add_mutually_exclusive_group(required=True)
    one.add_argument("--cmake-prefix", action="store_true", help="CMAKE_PREFIX_PATH, with the installed torch")
    one.add_argument("--include", action="store_true", help="the folder of attn_ops/attn_ops.h")
    chosen = parser.parse_args(arguments)
    print(cmake_prefix() if chosen.cmake_prefix else include())


if __name__ == "__main__":
    main()
