"""Eager launches over the fake libcuda, on a machine without a GPU, and kernels as Triton describes them."""

from __future__ import annotations

import struct
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_ops.eager.captured_call import Launch
from attn_ops.eager.extension import extension, is_available, unavailable_reason
from attn_ops.native import images
from helpers.native_launcher import STREAM, FakeLibcuda

needs_the_module = pytest.mark.skipif(not is_available(), reason=unavailable_reason)

SIGNATURE = {"a": "*fp32", "none": "constexpr", "out": "*fp32", "n": "i32", "scale": "fp32", "BLOCK": "constexpr"}
SCALARS_AND_CONSTANTS = (7, 0.5, 16)
"""Arguments after the tensors of SIGNATURE."""
PARAMETERS = (
    *(images.Parameter("pointer", i, name) for i, name in enumerate(("a", "out"))),
    images.Parameter("i32", 0, "n"),
    images.Parameter("fp32", 0, "scale"),
    *[images.Parameter("null")] * 2,
)
IMAGE = images.Image("kernel", b"cubin", 90, 128, 512, True, (), (), PARAMETERS)


class FakeDriver(FakeLibcuda):
    """The fake libcuda: its last launch and tensor map, and the answers that it gives."""

    def values(self) -> list[Any]:
        """The parameters of the last launch of ``IMAGE``."""
        raw = self.parameters(self.sizes_of(PARAMETERS))
        return [struct.unpack(f, x)[0] for f, x in zip(("q", "q", "i", "f", "q", "q"), raw, strict=True)]

    def addresses(self) -> list[int]:
        return self.values()[:2]


@pytest.fixture(scope="session")
def fake_driver_library(tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    return FakeDriver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def fake_driver(fake_driver_library: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Tensors on the CPU are on GPU 0 of the fake driver."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    fake_driver_library.reset()
    fake_driver_library.sizes_of(PARAMETERS)
    connect = extension.connect
    connect(str(fake_driver_library.path))
    yield fake_driver_library
    connect(images.LIBCUDA)


def load() -> Any:
    """The image of a kernel with SIGNATURE."""
    return images.load(IMAGE, 0)


def launched(image: Any, a: Tensor, out: Tensor, grid: Sequence[int] = (3, 2, 1)) -> Launch:
    return Launch(image, (a, out), (*grid, SCALARS_AND_CONSTANTS[0]), (SCALARS_AND_CONSTANTS[1],))


def compiled(signature: dict[str, str] = SIGNATURE, **metadata: Any) -> Any:
    plain = {"num_ctas": 1, "launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0}
    target = types.SimpleNamespace(arch=90)
    return types.SimpleNamespace(
        metadata=types.SimpleNamespace(
            **{"num_warps": 4, "shared": 512, "launch_pdl": True, "target": target, **plain, **metadata}
        ),
        src=types.SimpleNamespace(signature=signature),
        name="kernel",
        asm={"cubin": b"cubin"},
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


def unchecked(args: Any, kwargs: Any) -> None:
    """The check of an op's cache, for calls that are right."""
