"""A fake CUDA driver that records launches on a machine without a GPU, and kernels as Triton describes them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_ops.eager import launch_cache

HEADER = Path(sysconfig.get_path("include"), "Python.h")
POSSIBLE = HEADER.exists() and shutil.which("gcc") and (torch.version.cuda is None or torch.cuda.is_available())
needs_a_compiler = pytest.mark.skipif(
    not POSSIBLE, reason="needs gcc, the headers of Python, and for a torch with CUDA a GPU"
)

STREAM, FUNCTION = 77, 1234
SIGNATURE = {"a": "*fp32", "none": "constexpr", "out": "*fp32", "n": "i32", "scale": "fp32", "BLOCK": "constexpr"}
SCALARS_AND_CONSTANTS = (7, 0.5, 16)
"""Arguments after the tensors of SIGNATURE."""
PARAMETER_TYPES: tuple[Any, ...] = (
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_int32,
    ctypes.c_float,
    ctypes.c_uint64,
    ctypes.c_uint64,
)

DRIVER_SOURCE = """
#include <cuda.h>
#include <string.h>
unsigned grid[3], block[3], shared, pdl, launches, maps, map_answer, capturing, device, device_answer;
long long map[8];
void *stream, *function;
char values[6][8];
CUresult answer;
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **extra) {
    unsigned sizes[] = {c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ};
    for (int i = 0; i < 3; i++) grid[i] = sizes[i], block[i] = sizes[i + 3];
    shared = c->sharedMemBytes, stream = c->hStream, function = f, launches++;
    for (int i = 0; i < 6; i++) memcpy(values[i], p[i], i == 2 || i == 3 ? 4 : 8);
    pdl = c->numAttrs == 1 && c->attrs->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            && c->attrs->value.programmaticStreamSerializationAllowed == 1;
    return extra ? CUDA_ERROR_INVALID_VALUE : answer;
}
CUresult cuTensorMapEncodeTiled(
    CUtensorMap *m, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *sizes,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *element_strides,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
    CUtensorMapFloatOOBfill fill) {
    long long values[] = {type, swizzle, rank, sizes[0], sizes[1], strides[0], box[0], box[1]};
    memcpy(map, values, sizeof values);
    maps++;
    memcpy(m, &address, sizeof address);
    return map_answer || (unsigned long long)m % 64 || element_strides[rank - 1] != 1;
}
CUresult cuCtxGetDevice(CUdevice *d) { *d = device; return device_answer; }
CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *status) { *status = capturing; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult code, const char **text) { *text = "as set by the test"; return 0; }
"""


class FakeDriver:
    """The last launch and the last tensor map that this driver got, and the answers that it gives."""

    def __init__(self, folder: Path) -> None:
        from triton.backends.nvidia.driver import include_dirs

        source, self.path = folder / "driver.c", folder / "libdriver.so"
        source.write_text(DRIVER_SOURCE)
        includes = [f"-I{path}" for path in include_dirs]
        subprocess.run(["gcc", "-shared", "-fPIC", *includes, source, "-o", self.path], check=True)
        self.library = ctypes.CDLL(str(self.path))

    def __getattr__(self, name: str) -> int | None:
        kind = ctypes.c_void_p if name in ("stream", "function") else ctypes.c_uint
        return kind.in_dll(self.library, name).value

    def sizes(self, name: str) -> list[int]:
        return list((ctypes.c_uint * 3).in_dll(self.library, name))

    def map(self) -> list[int]:
        """Of the last tensor map: type, swizzle, rank, two sizes, a stride, two sizes of a block."""
        return list((ctypes.c_longlong * 8).in_dll(self.library, "map"))

    def values(self) -> list[Any]:
        at = ctypes.addressof(ctypes.c_char.in_dll(self.library, "values"))
        return [kind.from_address(at + 8 * i).value for i, kind in enumerate(PARAMETER_TYPES)]

    def set(self, name: str, value: int) -> None:
        """Set what the driver answers from now on."""
        ctypes.c_uint.in_dll(self.library, name).value = value


@pytest.fixture(scope="module")
def fake_driver_library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDriver]:
    fake_driver = FakeDriver(tmp_path_factory.mktemp("driver"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_cache, "DRIVER", str(fake_driver.path))
        launch_cache._building.cache_clear()
        assert launch_cache.native() is not None
        yield fake_driver
    launch_cache._building.cache_clear()


@pytest.fixture
def fake_driver(fake_driver_library: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    for name in ("answer", "map_answer", "capturing", "device", "device_answer"):
        fake_driver_library.set(name, 0)
    return fake_driver_library


def compiled(signature: dict[str, str] = SIGNATURE, **metadata: Any) -> Any:
    plain = {"num_ctas": 1, "launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0}
    return types.SimpleNamespace(
        metadata=types.SimpleNamespace(num_warps=4, shared=512, launch_pdl=True, **{**plain, **metadata}),
        src=types.SimpleNamespace(signature=signature),
        name="kernel",
        kernel=b"",
    )


class UncompiledKernel:
    """A kernel with the parameters of ``SIGNATURE``, as far as ``launch`` uses one that is not compiled."""

    arg_names = tuple(SIGNATURE)
    params = tuple(
        types.SimpleNamespace(is_constexpr=name == "BLOCK", do_not_specialize=name in ("n", "scale"))
        for name in SIGNATURE
    )

    def warmup(self, *args: Any, **options: Any) -> Any:
        return compiled()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that were loaded."""
    from attn_ops.kernels.triton import cubin

    loaded: list[Any] = []

    def load_binary(*binary: Any) -> tuple[int, ...]:
        loaded.append(binary)
        return 0, FUNCTION, 0, 0, 1024

    active = types.SimpleNamespace(utils=types.SimpleNamespace(load_binary=load_binary), get_current_device=lambda: 3)
    monkeypatch.setattr(cubin.triton.runtime.driver, "_active", active)
    return loaded
