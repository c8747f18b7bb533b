"""The native launcher, compiled with a table of images and called by ctypes, over a fake libcuda."""

from __future__ import annotations

import _ctypes
import ctypes
import itertools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from torch import Tensor

from attn_ops.native import images

HERE = Path(__file__).parent
ENTRY = HERE / "call_launcher.cpp"
STREAM = 77

needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

OK, BAD_CALL, BAD_TENSOR, BAD_DEVICE, NO_IMAGE, NO_DRIVER, DRIVER_ERROR = range(7)
"""``Code`` of launcher.h."""

CUDA = 1
"""``c10::DeviceType::CUDA``."""


class TensorView(ctypes.Structure):
    """``TensorView`` of launcher.h."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("dtype", ctypes.c_int32),
        ("device_type", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("rank", ctypes.c_int64),
    )


class _TestCall(ctypes.Structure):
    _fields_ = (
        ("image", ctypes.c_char_p),
        ("tensors", ctypes.POINTER(TensorView)),
        ("num_tensors", ctypes.c_size_t),
        ("integers", ctypes.POINTER(ctypes.c_int64)),
        ("num_integers", ctypes.c_size_t),
        ("floats", ctypes.POINTER(ctypes.c_double)),
        ("num_floats", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
    )


class Refusal(NamedTuple):
    """An error that the launcher returns."""

    code: int
    text: str


def view(t: Tensor, **changes: int) -> TensorView:
    """``t`` as if it were on GPU 0."""
    sizes, strides = ((ctypes.c_int64 * t.dim())(*values) for values in (t.shape, t.stride()))
    fields = {"address": t.data_ptr(), "dtype": images.SCALAR_TYPES[t.dtype], "device_type": CUDA, "device": 0}
    return TensorView(sizes=sizes, strides=strides, rank=t.dim(), **(fields | changes))


class FakeLibcuda:
    """``fake_libcuda.c``, without the function ``absent``: what it was asked, and the answers that it gives."""

    def __init__(self, folder: Path, absent: str = "") -> None:
        from triton.backends.nvidia.driver import include_dirs

        self.path = folder / f"libcuda{absent}.so"
        options = [f"-I{path}" for path in include_dirs] + ([f"-D{absent}=absent"] if absent else [])
        source = HERE / "fake_libcuda.c"
        subprocess.run(["gcc", "-shared", "-fPIC", *options, str(source), "-o", str(self.path)], check=True)
        self.library = ctypes.CDLL(str(self.path))

    def get(self, name: str, kind: Any = ctypes.c_int) -> Any:
        return kind.in_dll(self.library, name).value

    def array(self, name: str, count: int, kind: Any = ctypes.c_uint) -> list[int]:
        return list((kind * count).in_dll(self.library, name))

    def set(self, **values: int) -> None:
        for name, value in values.items():
            ctypes.c_int.in_dll(self.library, name).value = value

    def reset(self) -> None:
        counters = ("loads", "unloads", "wrong_unloads", "launches", "maps", "pushes", "pops", "retained")
        answers = ("retain", "push", "load", "unload", "function", "encode", "launch", "device")
        self.set(
            device=0, capturing=0, echo=0, **dict.fromkeys(counters, 0), **{f"answer_{name}": 0 for name in answers}
        )
        self.set(answer_version=13000, answer_major=9, answer_minor=0)
        self.sizes_of(())

    def sizes_of(self, parameters: Sequence[images.Parameter]) -> list[int]:
        """Set how many bytes of each parameter the next launch copies, and return these sizes."""
        bytes_of = {"i32": 4, "fp32": 4}
        sizes = [bytes_of.get(p.kind, 8) for p in parameters]
        array = (ctypes.c_int * 128).in_dll(self.library, "sizes")
        for i in range(128):
            array[i] = sizes[i] if i < len(sizes) else 0
        return sizes

    def parameters(self, sizes: Sequence[int]) -> list[bytes]:
        """The bytes of the parameters of the last launch; of a tensor map, the address."""
        values = (ctypes.c_char * (128 * 8)).in_dll(self.library, "values").raw
        return [values[8 * i : 8 * i + size] for i, size in enumerate(sizes)]


class Launcher:
    """A library with these images. Each object is a copy of its own, which has loaded nothing yet."""

    _copies = itertools.count()

    def __init__(self, collected: images.ImageSet, folder: Path, libcuda: str) -> None:
        with mock.patch.object(images, "LIBCUDA", libcuda):
            built = collected.build(folder, [f"-I{images.FOLDER}"], entry=ENTRY)
        path = folder / f"launcher_{next(self._copies)}.so"
        subprocess.run(["g++", "-shared", str(built), "-o", str(path)], check=True)
        self.path, self.library = path, ctypes.CDLL(str(path))
        self.call_launcher = self.library.call_launcher

    def close(self) -> None:
        """Close the library, as the end of a package does. The launcher cannot be called any more."""
        _ctypes.dlclose(self.library._handle)

    def __call__(
        self, image: str, tensors: Sequence[TensorView], integers: Sequence[int], floats: Sequence[float] = ()
    ) -> Refusal:
        text = ctypes.create_string_buffer(1024)
        call = _TestCall(
            image.encode(),
            (TensorView * len(tensors))(*tensors),
            len(tensors),
            (ctypes.c_int64 * len(integers))(*integers),
            len(integers),
            (ctypes.c_double * len(floats))(*floats),
            len(floats),
            STREAM,
        )
        code = self.call_launcher(ctypes.byref(call), text)
        return Refusal(code, text.value.decode())
