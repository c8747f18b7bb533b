"""Eager launches of Triton kernels: specializations, images, what a call captures; over a fake driver."""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from helpers.fake_driver import SCALARS_AND_CONSTANTS, FakeDriver, UncompiledKernel, compiled, needs_the_module
from helpers.native_launcher import STREAM
from torch import Tensor

triton = pytest.importorskip("triton")

from attn_ops.eager import launches  # noqa: E402
from attn_ops.kernels.triton import launch  # noqa: E402

pytestmark = [needs_the_module, pytest.mark.usefixtures("fake_driver")]

OPTIONS = launch.Options()


def _launch(kernel: Any, a: Tensor, out: Tensor, n: int = 7, *, grid: tuple[int, ...] = (3,)) -> None:
    launch._launch_direct(kernel, grid, (a, None, out, n, *SCALARS_AND_CONSTANTS[1:]), OPTIONS)


def test_a_launch_has_the_parameters_of_its_arguments(fake_driver: FakeDriver) -> None:
    a, out = torch.zeros(4), torch.zeros(4)
    _launch(UncompiledKernel(), a, out, grid=(3, 2))
    assert fake_driver.array("grid", 3) == [3, 2, 1]
    counts = [fake_driver.get(name) for name in ("threads", "shared", "pdl", "launches")]
    assert counts == [128, 512, 1, 1]
    assert fake_driver.get("stream", ctypes.c_void_p) == STREAM
    _launch(UncompiledKernel(), a, out)
    assert fake_driver.values() == [a.data_ptr(), out.data_ptr(), 7, 0.5, 0, 0]


def test_a_kernel_is_loaded_once(fake_driver: FakeDriver) -> None:
    kernel, a, out = UncompiledKernel(), torch.zeros(4), torch.zeros(4)
    for launched in (1, 2, 3):
        _launch(kernel, a, out)
        assert (fake_driver.get("loads"), fake_driver.get("launches")) == (1, launched)


def test_a_kernel_is_loaded_while_a_graph_is_captured(fake_driver: FakeDriver) -> None:
    """The fake driver refuses to load in a capture that is not relaxed."""
    fake_driver.set(capturing=1)
    _launch(UncompiledKernel(), torch.zeros(4), torch.zeros(4))
    assert (fake_driver.get("loads"), fake_driver.get("launches")) == (1, 1)


def test_a_kernel_of_async_compile_mode_is_waited_for(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling: Future[Any] = Future()
    compiling.set_result(compiled())
    kernel = UncompiledKernel()
    monkeypatch.setattr(kernel, "warmup", lambda *args, **options: compiling, raising=False)
    _launch(kernel, torch.zeros(4), torch.zeros(4))
    assert (fake_driver.get("loads"), fake_driver.get("launches")) == (1, 1)


def test_an_empty_grid_launches_nothing(fake_driver: FakeDriver) -> None:
    _launch(UncompiledKernel(), torch.zeros(4), torch.zeros(4), grid=(0,))
    assert (fake_driver.get("loads"), fake_driver.get("launches")) == (1, 0)


def test_ints_share_a_kernel_as_triton_specializes_them() -> None:
    """Strides that grow with a cache load no kernel for each length."""
    specialize = getattr(triton.runtime.jit, "native_specialize_impl", None)
    if specialize is None:
        pytest.skip("this release of Triton specializes in another function")
    of_triton = functools.partial(specialize, triton.backends.compiler.BaseBackend)
    values = (0, 1, 2, 15, 16, 17, 48, 1024 * 128, 2**31 - 1, 2**31 - 16, 2**31, 2**40, 2**40 + 1, -1, -16, -(2**40))
    for a, b in itertools.product(values, repeat=2):
        same = of_triton(a, False, True, True) == of_triton(b, False, True, True)
        assert (launch._class_of(a) == launch._class_of(b)) == same, (a, b)
    assert launch._class_of(True) is True
    assert launch._class_of(None) is None


def test_a_64_bit_scalar_has_its_own_kernel(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "run", lambda made, device: None)  # the fake kernel has a scalar of 32 bits
    kernel, t = UncompiledKernel(), torch.zeros(4)
    for size in (7, -1, 2**31, 2**40):
        _launch(kernel, t, t, size)
    assert fake_driver.get("loads") == 2


def test_an_unaligned_tensor_has_its_own_kernel(fake_driver: FakeDriver) -> None:
    kernel, t = UncompiledKernel(), torch.zeros(9)
    for a in (t, t[4:], t[1:], t[5:]):
        _launch(kernel, a, t)
    assert fake_driver.get("loads") == 2


@pytest.mark.parametrize("metadata", [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"global_scratch_size": 8}])
def test_triton_launches_a_kernel_that_needs_more_than_parameters(
    fake_driver: FakeDriver, metadata: dict[str, Any]
) -> None:
    class Kernel(UncompiledKernel):
        launched: list[Any] = []  # noqa: RUF012

        def warmup(self, *args: Any, **options: Any) -> Any:
            return compiled(**metadata)

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *values, **options: self.launched.append((grid, values[3:], options))

    kernel, t = Kernel(), torch.zeros(4)

    def function(t: Tensor) -> Tensor:
        _launch(kernel, t, t)
        return t

    assert launches.capture_launches(function, (t,), {})[1] is None
    assert kernel.launched == [((3,), SCALARS_AND_CONSTANTS, {"num_warps": 4, "num_stages": 1})]
    assert not fake_driver.get("loads")


def _capturing(kernel: Any, *tensors: Tensor) -> Any:
    def function(*args: Tensor) -> Tensor:
        out = torch.empty(2, 4)
        _launch(kernel, args[0], out)
        return out

    return launches.capture_launches(function, tensors, {})


def test_a_call_captures_its_launches() -> None:
    a = torch.zeros(4)
    out, captured = _capturing(UncompiledKernel(), a)
    (made,) = captured.launches
    assert [t is x for t, x in zip(made.tensors, (a, out), strict=True)] == [True, True]
    assert (made.integers, made.floats) == ((3, 1, 1, 7), (0.5,))
    assert captured.outputs[0] is out


def test_launches_of_another_thread_are_not_captured(fake_driver: FakeDriver) -> None:
    def function(t: Tensor) -> Tensor:
        other = threading.Thread(target=_capturing, args=(UncompiledKernel(), torch.zeros(4)))
        other.start()
        other.join()
        assert launches._captured.launches == []
        return torch.empty(0)

    assert launches.capture_launches(function, (torch.zeros(4),), {})[1] is None
    assert fake_driver.get("launches") == 1
