"""The native launcher over a fake driver: parameters, attributes, contexts, errors."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import native_launcher as n
from helpers.native_launcher import FakeLibcuda, Launcher, Refusal, view
from torch import Tensor

from attn_ops.errors import BackendError
from attn_ops.native.images import Image, ImageSet, MapSpec, Parameter, TensorSpec

pytestmark = n.needs_a_compiler

OUT, CACHE = torch.zeros(5, 4), torch.zeros(6, 3, 16, dtype=torch.bfloat16)
IMAGE = Image(
    function="kernel",
    cubin=b"not read by the fake driver",
    compute_capability=90,
    threads=256,
    shared_bytes=100 << 10,
    pdl=True,
    tensors=(TensorSpec("out", torch.float32, 2, 16), TensorSpec("cache", torch.bfloat16, 3, 2)),
    maps=(MapSpec(tensor=1, type=9, swizzle=3, element_bytes=2, box=(1, 2, 8)),),
    parameters=(
        Parameter("pointer", 0, "out"),
        Parameter("map", 0, "cache"),
        Parameter("i32", 0, "rows"),
        Parameter("i64", 0, "stride"),
        Parameter("fp32", 0, "scale"),
        Parameter("null"),
    ),
)
PLAIN = IMAGE._replace(function="plain", maps=(), parameters=(), pdl=False, shared_bytes=1 << 10, cluster=(2, 1, 1))
SIZES = [*OUT.shape, *OUT.stride(), *CACHE.shape, *CACHE.stride()]
MAP = [6, 3, 16, 48, 16, 1]
GRID = [7, 2, 1]
ROWS, STRIDE, SCALE = 5, 1 << 40, 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launcher")


@pytest.fixture(scope="module")
def libcuda_of_the_module(folder: Path) -> FakeLibcuda:
    return FakeLibcuda(folder)


@pytest.fixture
def libcuda(libcuda_of_the_module: FakeLibcuda) -> FakeLibcuda:
    libcuda_of_the_module.reset()
    return libcuda_of_the_module


@pytest.fixture
def launcher(libcuda: FakeLibcuda, folder: Path) -> Launcher:
    images = ImageSet()
    for image in (IMAGE, PLAIN):
        images.add(image)
    return Launcher(images, folder, str(libcuda.path))


def _call(launcher: Launcher, image: Image = IMAGE, **changes: Any) -> Refusal:
    parameters = [*MAP, ROWS, STRIDE] if image is IMAGE else []
    arguments = {
        "tensors": [view(OUT), view(CACHE)],
        "integers": [*GRID, *SIZES, *parameters],
        "floats": [SCALE] if image is IMAGE else [],
    }
    return launcher(image.name, **(arguments | changes))


def test_parameters_are_those_of_the_table(launcher: Launcher, libcuda: FakeLibcuda) -> None:
    sizes = libcuda.sizes_of(IMAGE.parameters)
    assert _call(launcher) == (n.OK, "")
    pointer = [struct.pack("<Q", t.data_ptr()) for t in (OUT, CACHE)]
    scalars = [struct.pack("<i", ROWS), struct.pack("<q", STRIDE), struct.pack("<f", SCALE), bytes(8)]
    assert libcuda.parameters(sizes) == [*pointer, *scalars]
    assert libcuda.array("grid", 3) == GRID
    assert (libcuda.get("threads"), libcuda.get("shared"), libcuda.get("pdl")) == (256, 100 << 10, 1)
    assert libcuda.get("max_shared") == 100 << 10
    assert libcuda.get("num_attributes") == 1
    assert libcuda.array("map", 18, n.ctypes.c_longlong) == [
        *(9, 3, 3),
        *(16, 3, 6, 0, 0),  # sizes, innermost first
        *(0, 32, 96, 0, 0),  # strides in bytes, from the second dimension on
        *(8, 2, 1, 0, 0),  # the box
    ]


def test_a_cluster_is_an_attribute(launcher: Launcher, libcuda: FakeLibcuda) -> None:
    assert _call(launcher, PLAIN).code == n.OK
    assert libcuda.array("cluster", 3) == [2, 1, 1]
    assert (libcuda.get("pdl"), libcuda.get("num_attributes")) == (0, 1)


def test_threads_without_a_context_launch_and_the_kernel_is_loaded_once(
    launcher: Launcher, libcuda: FakeLibcuda
) -> None:
    """The fake driver refuses what is asked without a current context, which the launcher also takes back."""
    refusals: list[Refusal] = []
    threads = [threading.Thread(target=lambda: refusals.append(_call(launcher))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refusals == [(n.OK, "")] * 8
    assert (libcuda.get("loads"), libcuda.get("launches"), libcuda.get("maps")) == (1, 8, 8)
    assert libcuda.get("pushes") == libcuda.get("pops") == 8


def test_an_empty_grid_is_not_launched(launcher: Launcher, libcuda: FakeLibcuda) -> None:
    assert _call(launcher, integers=[0, 2, 1, *SIZES, *MAP, ROWS, STRIDE]).code == n.OK
    assert libcuda.get("launches") == 0


def test_a_map_over_no_elements_is_not_encoded(launcher: Launcher, libcuda: FakeLibcuda) -> None:
    """The driver refuses sizes of 0. A kernel loads nothing through such a map."""
    sizes = [*OUT.shape, *OUT.stride(), 0, 3, 16, 48, 16, 1]
    tensors = [view(OUT), view(CACHE[:0])]
    assert _call(launcher, tensors=tensors, integers=[*GRID, *sizes, 0, *MAP[1:], ROWS, STRIDE]).code == n.OK
    assert (libcuda.get("launches"), libcuda.get("maps")) == (1, 0)


def _with_integer(index: int, value: int) -> dict[str, Any]:
    integers = [*GRID, *SIZES, *MAP, ROWS, STRIDE]
    integers[index] = value
    return {"integers": integers}


def _with_out(t: Tensor, **changes: int) -> dict[str, Any]:
    return {"tensors": [view(t, **changes), view(CACHE)]}


BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "dtype": (_with_out(OUT.int()), n.BAD_TENSOR, "out is int32; expected float32; pass tensors like the exported"),
    "rank": (_with_out(OUT[0]), n.BAD_TENSOR, "out has 1 dimensions; expected 2"),
    "size": (_with_out(OUT[:4]), n.BAD_TENSOR, "size 0 of out is 4; expected 5"),
    "stride": (_with_out(torch.zeros(4, 5).t()), n.BAD_TENSOR, "stride 0 of out is 1; expected 4"),
    "alignment": (
        _with_out(torch.zeros(24)[1:21].view(5, 4)),
        n.BAD_TENSOR,
        "expected a multiple of 16 bytes; pass a tensor that starts at such an address",
    ),
    "host": (_with_out(OUT, device_type=0), n.BAD_DEVICE, "out is on device 0 of type 0; expected device 0 of type 1"),
    "another GPU": (
        {"tensors": [view(OUT), view(CACHE, device=1)]},
        n.BAD_DEVICE,
        "cache is on device 1 of type 1; expected device 0",
    ),
    "no such GPU": (_with_out(OUT, device=64), n.BAD_DEVICE, "on device 64; expected one of the first 64 GPUs; move"),
    "a tensor less": (
        {"tensors": [view(OUT)]},
        n.BAD_CALL,
        "1 tensors, 21 integers and 1 floats; expected 2, 21 and 1",
    ),
    "a float less": ({"floats": []}, n.BAD_CALL, "expected 2, 21 and 1; package the program again"),
    "wide integer": (_with_integer(-2, 1 << 31), n.BAD_CALL, "rows does not fit in 32 bits; expected a size below"),
    "large grid": (_with_integer(1, 65536), n.BAD_CALL, "size 65536 in dimension 1; expected 0 to 65535"),
    "negative grid": (_with_integer(0, -1), n.BAD_CALL, "size -1 in dimension 0"),
}


@pytest.mark.parametrize(("changes", "code", "message"), BAD.values(), ids=list(BAD))
def test_bad_calls_are_refused(
    launcher: Launcher, libcuda: FakeLibcuda, changes: dict[str, Any], code: int, message: str
) -> None:
    refusal = _call(launcher, **changes)
    assert refusal.code == code
    assert message in refusal.text
    assert refusal.text.startswith("launch_image: ")
    assert libcuda.get("launches") == 0
    assert _call(launcher).code == n.OK


def _elf(abi: int) -> bytes:
    """The first bytes of a cubin of a compiler of CUDA 12 (7) or 13 (8)."""
    return b"\x7fELF\x02\x01\x01\x33" + bytes([abi])


def _close_and_count(launcher: Launcher, libcuda: FakeLibcuda) -> dict[str, int]:
    launcher.close()
    return {name: libcuda.get(name) for name in ("loads", "unloads", "wrong_unloads", "retained")}


def test_closing_the_library_unloads_each_kernel_once(launcher: Launcher, libcuda: FakeLibcuda) -> None:
    """Of each GPU, in its context, and then releases the contexts."""
    for device in (0, 1, 0):
        assert _call(launcher, tensors=[view(OUT, device=device), view(CACHE, device=device)]).code == n.OK
    assert _call(launcher, PLAIN).code == n.OK
    assert (libcuda.get("unloads"), libcuda.get("retained")) == (0, 2)
    assert _close_and_count(launcher, libcuda) == {"loads": 3, "unloads": 3, "wrong_unloads": 0, "retained": 0}
    assert libcuda.get("pushes") == libcuda.get("pops")


def test_closing_a_library_that_launched_nothing_asks_nothing(launcher: Launcher, libcuda: FakeLibcuda) -> None:
    assert set(_close_and_count(launcher, libcuda).values()) == {0}


@pytest.mark.parametrize("answers", [{"answer_push": 4}, {"answer_unload": 4}], ids=["no context", "no module"])
def test_closing_after_the_driver_is_harmless(
    launcher: Launcher, libcuda: FakeLibcuda, answers: dict[str, int]
) -> None:
    """It answers CUDA_ERROR_DEINITIALIZED at the end of a process. Where there is no context, nothing is unloaded."""
    assert _call(launcher).code == n.OK
    libcuda.set(**answers)
    counted = _close_and_count(launcher, libcuda)
    assert counted == {"loads": 1, "unloads": int("answer_unload" in answers), "wrong_unloads": 0, "retained": 0}


AT_EXIT = """
import ctypes, sys
from native import test_launcher as t
launcher = t.Launcher.__new__(t.Launcher)
launcher.call_launcher = ctypes.CDLL(sys.argv[1]).call_launcher
assert t._call(launcher).code == t.n.OK
"""


def test_the_end_of_a_process_unloads_too(launcher: Launcher, tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = os.environ | {"FAKE_LIBCUDA_LOG": str(log), "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", AT_EXIT, str(launcher.path)], env=environment, check=True)
    assert [line.partition(" ")[0] for line in log.read_text().splitlines()] == ["7", "unload"]


def test_a_kernel_that_cannot_be_loaded_leaves_no_module(launcher: Launcher, libcuda: FakeLibcuda) -> None:
    libcuda.set(answer_function=500)
    for _ in range(2):
        assert _call(launcher).code == n.DRIVER_ERROR
    libcuda.set(answer_function=0)
    assert _call(launcher).code == n.OK
    assert _close_and_count(launcher, libcuda) == {"loads": 3, "unloads": 3, "wrong_unloads": 0, "retained": 0}


DRIVERS: dict[str, tuple[dict[str, int], int, str]] = {
    "another GPU": ({"answer_major": 8}, n.BAD_DEVICE, "has compute capability 8.0; expected 9.0; run the package on"),
    "old driver": ({"answer_version": 11080}, n.NO_DRIVER, "is for CUDA 11.8; expected one for CUDA 12.0 or newer"),
    "no context": (
        {"answer_retain": 2},
        n.DRIVER_ERROR,
        "the device has no context: as set by the test (CUDA error 2)",
    ),
    "not loaded": ({"answer_load": 209}, n.DRIVER_ERROR, "cannot be loaded; expected a driver as new as the compiler"),
    "no function": ({"answer_function": 500}, n.DRIVER_ERROR, "its function cannot be loaded"),
    "no map": ({"answer_encode": 1}, n.DRIVER_ERROR, "its tensor map cannot be encoded"),
    "no launch": ({"answer_launch": 719}, n.DRIVER_ERROR, "cannot be launched: as set by the test (CUDA error 719)"),
}


@pytest.mark.parametrize(("answers", "code", "message"), DRIVERS.values(), ids=list(DRIVERS))
def test_errors_of_the_driver_are_reported(
    launcher: Launcher, libcuda: FakeLibcuda, answers: dict[str, int], code: int, message: str
) -> None:
    libcuda.set(**answers)
    refusal = _call(launcher)
    assert refusal.code == code
    assert message in refusal.text
    assert libcuda.get("pushes") == libcuda.get("pops")
    libcuda.reset()
    assert _call(launcher).code == (n.NO_DRIVER if code == n.NO_DRIVER else n.OK)


def test_a_missing_image_is_named(launcher: Launcher) -> None:
    refusal = launcher("other_kernel", [], [])
    assert refusal == (
        n.NO_IMAGE,
        "launch_image: there is no image other_kernel; expected one that was packaged with the graph; package the "
        "program again",
    )


def test_a_missing_driver_is_an_error(folder: Path) -> None:
    images = ImageSet()
    images.add(IMAGE)
    refusal = _call(Launcher(images, folder, "/nowhere/libcuda.so.1"))
    assert refusal.code == n.NO_DRIVER
    assert "/nowhere/libcuda.so.1" in refusal.text
    assert "install the driver" in refusal.text


@pytest.mark.parametrize("absent", ["cuLaunchKernelEx", "cuTensorMapEncodeTiled"])
def test_a_driver_without_a_function_is_named(folder: Path, absent: str) -> None:
    """Before anything is launched, whatever version the driver says it has."""
    images, libcuda = ImageSet(), FakeLibcuda(folder, absent)
    images.add(IMAGE)
    assert _call(Launcher(images, folder, str(libcuda.path))) == (
        n.NO_DRIVER,
        f"launch_image: the CUDA driver is for CUDA 13.0 and has no {absent}; expected one for CUDA 12.0 or newer; "
        "update the driver",
    )
    assert (libcuda.get("loads"), libcuda.get("launches")) == (0, 0)


@pytest.mark.parametrize(("abi", "version", "code"), [(7, 12000, n.OK), (8, 13000, n.OK), (8, 12090, n.NO_DRIVER)])
def test_an_image_of_a_newer_compiler_needs_its_driver(
    libcuda: FakeLibcuda, tmp_path: Path, abi: int, version: int, code: int
) -> None:
    images, image = ImageSet(), PLAIN._replace(cubin=_elf(abi))
    images.add(image)
    launcher = Launcher(images, tmp_path, str(libcuda.path))
    libcuda.set(answer_version=version)
    refusal = launcher(image.name, [view(OUT), view(CACHE)], [*GRID, *SIZES])
    assert refusal.code == code
    assert (libcuda.get("loads"), libcuda.get("launches")) == ((1, 1) if code == n.OK else (0, 0))
    if code != n.OK:
        assert refusal.text == (
            f"launch_image: image {image.name}: it was compiled for CUDA 13, and the CUDA driver is for CUDA 12.9; "
            "expected a driver for CUDA 13.0 or newer; update the driver, or package the program with an older Triton"
        )


def test_a_failed_compilation_is_reported(tmp_path: Path) -> None:
    images = ImageSet()
    images.add(IMAGE)
    with pytest.raises(BackendError, match=r"(?s)could not compile the launcher.*no-such-option.*for C\+\+17; set CXX"):
        images.build(tmp_path, ["--no-such-option"])


def _changed(field: str, value: Any) -> Callable[[Image], Image]:
    return lambda image: image._replace(**{field: value})


def test_names_tell_images_apart() -> None:
    others = [("shared_bytes", 1), ("pdl", False), ("cubin", b"x"), ("parameters", ()), ("cluster", (2, 1, 1))]
    assert len({IMAGE.name, *(_changed(*change)(IMAGE).name for change in others)}) == 1 + len(others)
