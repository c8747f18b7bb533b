"""NVRTC, the run-time compiler of CUDA. PyTorch's CUDA builds install it. It needs no GPU, driver or toolkit."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

OLDEST = 12
"""The first major version of CUDA that knows ``sm_90a``."""


class CompilerError(Exception):
    """A source does not compile, or the compiler failed. The text is the log of the compiler."""


class Nvrtc:
    """A loaded libnvrtc."""

    def __init__(self, path: str) -> None:
        self.path = path
        # libnvrtc opens libnvrtc-builtins by name and would not find it in the folder of a Python package, so it is
        # loaded before.
        beside = Path(path).parent.glob("libnvrtc-builtins[.-]*so*") if "/" in path else ()
        self._builtins = [ctypes.CDLL(str(builtins)) for builtins in sorted(beside)]
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = major.value, minor.value

    def _check(self, status: int, log: str = "") -> None:
        if status:
            what = self._library.nvrtcGetErrorString(status)
            raise CompilerError(log.strip() or f"nvrtc: {what.decode() if what else status}")

    def _read(self, what: str, program: Any) -> bytes:
        """An output of a program: ``what`` is ``"CUBIN"``, ``"PTX"`` or ``"ProgramLog"``."""
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def compile(
        self,
        name: str,
        source: bytes,
        headers: Mapping[str, bytes],
        options: Sequence[str],
        output: str = "CUBIN",
    ) -> bytes:
        """Compile ``source``, which may include ``headers``, name -> text, to ``output``: ``"CUBIN"`` or ``"PTX"``.

        Raises:
            CompilerError: with the compiler's log.
        """
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*headers.values())
        names = (ctypes.c_char_p * len(headers))(*(header.encode() for header in headers))
        self._check(
            self._library.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), len(headers), texts, names)
        )
        try:
            words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), words)
            if status:
                self._check(status, self._read("ProgramLog", program).rstrip(b"\0").decode(errors="replace"))
            return self._read(output, program)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))


def _in_packages() -> Iterator[Path]:
    """Paths of libnvrtc in NVIDIA's Python packages, on which PyTorch depends, and in PyTorch's folder."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):  # another package of that name
        spec = None
    for location in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(location).glob("*/lib/libnvrtc.so.*"))
    yield from sorted((Path(torch.__file__).parent / "lib").glob("libnvrtc[.-]*so*"))


def _major(path: str) -> int:
    found = re.search(r"\.so\.(\d+)", path)
    return int(found[1]) if found else 0


def candidates() -> list[str]:
    """Paths and names of libnvrtc to try, best first.

    The major version of PyTorch's CUDA comes first, and newer ones are left out: the driver may not load their cubins.
    """
    wanted = int(torch.version.cuda.split(".")[0]) if torch.version.cuda else 0
    found = [str(path) for path in _in_packages()]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            found += sorted(str(path) for path in Path(os.environ[variable]).glob("lib64/libnvrtc.so.*"))
    found += [f"libnvrtc.so.{major}" for major in ((wanted,) if wanted else (13, 12))]
    usable = [path for path in found if not wanted or _major(path) in (0, *range(OLDEST, wanted + 1))]
    return sorted(dict.fromkeys(usable), key=lambda path: (_major(path) != wanted, -_major(path)))


_lock = threading.Lock()


@functools.cache  # one for the life of the process
def _find() -> tuple[Nvrtc | None, str]:
    tried: list[str] = []
    for path in candidates():
        try:
            found = Nvrtc(path)
        except (OSError, AttributeError, CompilerError) as error:
            tried.append(f"{path}: {error}")
            continue
        if found.version[0] >= OLDEST:
            return found, ""
        tried.append(f"{path}: CUDA {found.version[0]} does not know sm_90a")
    return None, "; ".join(tried) or "it is not among the installed packages"


def find() -> tuple[Nvrtc | None, str]:
    """The compiler and an empty string, or None and why there is no compiler."""
    with _lock:
        return _find()
