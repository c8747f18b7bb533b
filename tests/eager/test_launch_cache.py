"""Which calls the Triton backend captures, and what a replay launches, with a fake driver."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.fake_driver import (
    FUNCTION,
    SCALARS_AND_CONSTANTS,
    STREAM,
    FakeDriver,
    UncompiledKernel,
    compiled,
    needs_a_compiler,
)

pytest.importorskip("triton")

from attn_ops.kernels.triton import cubin, launch

from attn_ops.eager import launch_cache
from attn_ops.eager.launch_cache import LaunchCache

pytestmark = [needs_a_compiler, pytest.mark.usefixtures("fake_driver", "loads")]


def test_the_tensors_of_a_call_are_those_of_its_options_too() -> None:
    """Sinks, scales and masks are options; plans are lists."""
    q, sinks, plan = torch.zeros(1), torch.zeros(2), [torch.zeros(3), torch.zeros(4)]
    found = launch_cache.runtime_tensors((q, plan, 0.5), {"sinks": sinks, "window_left": 3})
    assert [t is wanted for t, wanted in zip(found, (q, sinks), strict=True)] == [True, True]
    assert [id(t) for t in launch_cache.plan_tensors((q, plan, 0.5))] == [id(t) for t in plan]


def _capture(*tensors: torch.Tensor | list[torch.Tensor], compute: bool = False) -> tuple[torch.Tensor, Any]:
    kernel = cubin.load_kernel(compiled())
    assert kernel is not None

    def function(*args: torch.Tensor) -> torch.Tensor:
        out = torch.empty(2, 4)
        if compute:
            out.zero_()
        assert launch._capture.launches is not None
        launch._capture.launches.append(
            launch.CapturedLaunch(kernel, (3, 2), (args[0], None, out, *SCALARS_AND_CONSTANTS))
        )
        return out

    return launch.capture_launches(function, tensors, {})


def test_a_replay_launches_on_other_tensors(fake_driver: FakeDriver) -> None:
    _, prepared_call = _capture(torch.zeros(4), torch.zeros(4))
    for _ in range(2):
        a, b, before = torch.zeros(4), torch.zeros(4), fake_driver.launches
        out = prepared_call(STREAM, a.data_ptr(), b.data_ptr())
        assert out.shape == (2, 4)
        assert out.is_contiguous()
        assert fake_driver.launches == before + 1
        assert fake_driver.values() == [a.data_ptr(), out.data_ptr(), 7, 0.5, 0, 0]
        assert (fake_driver.sizes("grid"), fake_driver.sizes("block")) == ([3, 2, 1], [128, 1, 1])
        assert (fake_driver.shared, fake_driver.stream, fake_driver.function, fake_driver.pdl) == (
            512,
            STREAM,
            FUNCTION,
            1,
        )


MAPPED = {"t": "tensordesc<fp16[16, 64],Layout>", "BLOCK": "constexpr"}
MAP = {"swizzle": 3, "block_size": [16, 64]}


def _described(t: torch.Tensor) -> Any:
    hopper = pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    layout = pytest.importorskip("triton.experimental.gluon.language").NVMMASharedLayout(128, 16, 2)
    return hopper.TensorDescriptor(t, list(t.shape), list(t.stride()), [16, 64], layout)


def _capture_mapped(t: torch.Tensor) -> Any:
    kernel = cubin.load_kernel(compiled(MAPPED, tensordesc_meta=[MAP]))
    assert kernel is not None

    def function(t: torch.Tensor) -> torch.Tensor:
        assert launch._capture.launches is not None
        launch._capture.launches.append(launch.CapturedLaunch(kernel, (1,), (_described(t), 16)))
        return torch.empty(2)

    return launch.capture_launches(function, (t,), {})[1]


def test_a_replay_encodes_tensor_maps_of_its_tensors(fake_driver: FakeDriver) -> None:
    tensors = [torch.zeros(32, 128, dtype=torch.float16) for _ in range(2)]
    prepared_call, before = _capture_mapped(tensors[0]), fake_driver.maps
    for t, encoded in ((tensors[1], 1), (tensors[1], 1), (tensors[0], 2)):
        prepared_call(STREAM, t.data_ptr())
        assert fake_driver.values()[0] == t.data_ptr()
        assert fake_driver.maps == before + encoded
    assert fake_driver.map() == [6, 3, 2, 128, 32, 256, 64, 16]


def test_a_tensor_map_that_the_driver_rejects_is_an_error(fake_driver: FakeDriver) -> None:
    t = torch.zeros(32, 128, dtype=torch.float16)
    prepared_call, launches = _capture_mapped(t), fake_driver.launches
    fake_driver.set("map_answer", 1)
    with pytest.raises(RuntimeError, match="a kernel could not be launched: as set by the test"):
        prepared_call(STREAM, t.data_ptr())
    assert fake_driver.launches == launches
    fake_driver.set("map_answer", 0)
    prepared_call(STREAM, t.data_ptr())
    assert fake_driver.launches == launches + 1


def test_a_tensor_descriptor_without_metadata_is_not_loaded() -> None:
    assert cubin.load_kernel(compiled(MAPPED)) is None


@pytest.mark.parametrize("kind", [tuple, type(None), torch.Tensor])
def test_a_replay_returns_what_the_call_did(kind: type) -> None:
    made = {tuple: (torch.empty(2, 3), torch.empty(0)), type(None): None, torch.Tensor: torch.empty(5)}[kind]
    prepared_call = launch._prepare_call(
        [torch.zeros(4)],
        made,
        [
            launch.CapturedLaunch(
                cubin.load_kernel(compiled()), (1,), (torch.zeros(4), None, torch.zeros(4), *SCALARS_AND_CONSTANTS)
            )
        ],
    )
    replayed = prepared_call(STREAM, 64)
    assert type(replayed) is kind
    for old, new in zip(launch._tensors_of(made), launch._tensors_of(replayed), strict=True):
        assert new.shape == old.shape
        assert (new is old) == (old.numel() == 0)


def test_a_launch_that_the_driver_rejects_is_an_error(fake_driver: FakeDriver) -> None:
    _, prepared_call = _capture(torch.zeros(4))
    fake_driver.set("answer", 1)
    with pytest.raises(RuntimeError, match="a kernel could not be launched: as set by the test"):
        prepared_call(STREAM, 64)
    fake_driver.set("answer", 0)
    prepared_call(STREAM, 64)


def test_a_prepared_call_takes_as_many_addresses_as_tensors() -> None:
    _, prepared_call = _capture(torch.zeros(4))
    for bad in ((), (STREAM,), (STREAM, 64, 64)):
        with pytest.raises(TypeError, match=f"{len(bad)} arguments given, expected a stream and 1 addresses"):
            prepared_call(*bad)


def test_a_tensor_passed_twice_is_not_captured() -> None:
    """The next call of this key may pass two tensors, of which only one would be read."""
    same = torch.zeros(4)
    assert _capture(same, same)[1] is None


def test_a_tensor_passed_beside_its_plan_is_not_captured() -> None:
    """The next call of this plan may pass another, which is not to be taken for the plan's."""
    same, plan = torch.zeros(4), [torch.zeros(4)]
    assert _capture(same, plan)[1] is not None
    assert _capture(same, [same])[1] is None


def test_a_call_that_computes_is_not_captured() -> None:
    assert _capture(torch.zeros(4), compute=True)[1] is None


@pytest.mark.parametrize("metadata", [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"global_scratch_size": 8}])
def test_a_kernel_that_needs_more_than_parameters_is_not_loaded(loads: list[Any], metadata: dict[str, Any]) -> None:
    assert cubin.load_kernel(compiled(**metadata)) is None
    assert not loads


def test_launches_of_another_thread_are_not_captured(loads: list[Any]) -> None:
    def function(t: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=_capture, args=(torch.zeros(4),))
        other.start()
        other.join()
        assert launch._capture.launches == []
        return torch.empty(0)

    assert launch.capture_launches(function, (torch.zeros(4),), {})[1] is None
    assert len(loads) == 1


def test_a_kernel_that_does_not_compile_is_not_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    compiling: Future[Any] = Future()
    compiling.set_exception(ValueError("does not compile"))
    with pytest.raises(ValueError, match="does not compile"), launch._concurrent_compilation():
        launch._capture.pending[(None, 0)] = compiling
    with launch._concurrent_compilation():
        pass
    assert not launch._capture.pending


def test_a_call_on_unaligned_tensors_is_not_captured() -> None:
    assert _capture(torch.zeros(5)[1:])[1] is None


def test_without_run_a_kernel_is_loaded_and_not_launched(
    fake_driver: FakeDriver, loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    kernel, a, out = UncompiledKernel(), torch.zeros(4), torch.zeros(4)
    before = fake_driver.launches
    for run in (False, True, True):
        launch._launch_direct(kernel, (3,), (a, None, out, *SCALARS_AND_CONSTANTS), launch.Options(), run)
        assert loads == [("kernel", b"", 512, 3)]
        before += run
        assert fake_driver.launches == before
    assert fake_driver.values() == [a.data_ptr(), out.data_ptr(), 7, 0.5, 0, 0]


def test_a_64_bit_scalar_has_its_own_kernel(loads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    kernel, t = UncompiledKernel(), torch.zeros(4)
    for size in (7, -1, 2**31, 2**40):
        launch._launch_direct(kernel, (3,), (t, None, t, size, 0.5, 16), launch.Options(), False)
    assert len(loads) == 2


def test_kernels_without_run_compile_concurrently(loads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    compiling: Future[Any] = Future()
    kernel, t = UncompiledKernel(), torch.zeros(4)
    monkeypatch.setattr(kernel, "warmup", lambda *args, **options: compiling, raising=False)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    with launch._concurrent_compilation():
        launch._launch_direct(kernel, (3,), (t, None, t, *SCALARS_AND_CONSTANTS), launch.Options(), False)
        compiling.set_result(compiled())
        assert not loads
    assert loads == [("kernel", b"", 512, 3)]
    launch._launch_direct(kernel, (3,), (t, None, t, *SCALARS_AND_CONSTANTS), launch.Options(), True)
    assert len(loads) == 1


@pytest.mark.parametrize("together", [False, True])
def test_threads_compile_where_python_parses_in_several(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(launch, "CONCURRENT_COMPILATION", together)
    monkeypatch.setattr(launch.triton, "AsyncCompileMode", lambda executor: nullcontext(modes.append(executor)))
    with launch._concurrent_compilation():
        pass
    assert len(modes) == together


CHANGES = {
    "shape": lambda t: torch.zeros(3, 8),
    "stride": lambda t: torch.zeros(8, 4).T[:4],
    "dtype": lambda t: t.double(),
    "alignment": lambda t: torch.zeros(17)[1:].view(4, 4),
    "gradient": lambda t: t.clone().requires_grad_(),
    "type": torch.nn.Parameter,
}


class Op:
    """An op with a launch cache. A miss returns ``"miss"``, a replay None."""

    def __init__(self) -> None:
        self.cache = LaunchCache(self._on_miss)

    def _on_miss(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        count = len(launch_cache.runtime_tensors(args, kwargs))
        return "miss", launch_cache.native().PreparedCall((), count, (), True)

    def __call__(self, t: torch.Tensor, plan: list[torch.Tensor], **options: Any) -> bool:
        """Whether the call is a replay."""
        return self.cache.op(torch.zeros(2), t, plan, **options) is None


@pytest.fixture
def cached() -> tuple[Op, list[torch.Tensor]]:
    op, plan = Op(), [torch.zeros(3), torch.zeros(1)]
    assert not op(torch.zeros(4, 4), plan, causal=True)
    return op, plan


@pytest.mark.parametrize("change", CHANGES)
def test_the_key_contains_each_property_of_tensors(cached: tuple[Op, list[torch.Tensor]], change: str) -> None:
    op, plan = cached
    assert op(torch.ones(4, 4), plan, causal=True)
    for replayed in (False, True):
        assert op(CHANGES[change](torch.ones(4, 4)), plan, causal=True) is replayed


def test_the_key_contains_options_plans_and_grad_mode(cached: tuple[Op, list[torch.Tensor]]) -> None:
    op, plan = cached
    t = torch.ones(4, 4)
    assert op(t, plan, causal=True)
    assert not op(t, plan, causal=False)
    assert not op(t, plan)
    assert not op(t, [plan[0], torch.zeros(1)], causal=True)
    assert not op(t, plan, causal=True, sinks=t)
    with torch.no_grad():
        assert not op(t, plan, causal=True)


def test_a_replay_reads_the_tensors_of_its_call(fake_driver: FakeDriver) -> None:
    kernel = cubin.load_kernel(compiled())
    assert kernel is not None

    def on_miss(args: Any, kwargs: dict[str, Any]) -> Any:
        described = kernel.launch_tuple((1,), (1, None, 0, *SCALARS_AND_CONSTANTS))
        return "miss", launch_cache.native().PreparedCall((described,), 2, (), True)

    op, storage = LaunchCache(on_miss).op, torch.zeros(32)
    op(storage[4:8], scale=storage[8:12])
    a, b = storage[16:20], storage[24:28]
    assert op(a, scale=b) is None
    assert fake_driver.values()[:2] == [b.data_ptr(), a.data_ptr()]


@pytest.mark.parametrize("context", ["capturing", "device"])
def test_the_key_contains_capture_and_device(fake_driver: FakeDriver, context: str) -> None:
    if context == "device" and torch.cuda.device_count() == 1:
        pytest.skip("torch has streams of one GPU only")
    op, t, plan = Op(), torch.ones(4), [torch.zeros(1)]
    assert [op(t, plan), op(t, plan)] == [False, True]
    fake_driver.set(context, 1)
    assert [op(t, plan), op(t, plan)] == [False, True]


def test_a_thread_that_has_not_used_the_gpu_misses(fake_driver: FakeDriver) -> None:
    op, t, plan = Op(), torch.ones(4), [torch.zeros(1)]
    fake_driver.set("device_answer", 201)
    assert [op(t, plan), op(t, plan)] == [False, False]
    assert not op.cache._entries


def test_an_entry_is_evicted_with_its_plan(cached: tuple[Op, list[torch.Tensor]]) -> None:
    op, plan = cached
    plan.clear()
    assert not op.cache._entries
    assert not op.cache._plans


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "MAX_ENTRIES", 3)
    op, plan = Op(), [torch.zeros(1)]
    for scale in range(20):
        op(torch.ones(4), plan, scale=scale)
        assert len(op.cache._entries) <= 3
        assert op(torch.ones(4), plan, scale=scale)


def test_an_error_is_raised_and_nothing_inserted() -> None:
    def on_miss(args: Any, kwargs: dict[str, Any]) -> Any:
        raise ValueError("bad")

    cache = LaunchCache(on_miss)
    with pytest.raises(ValueError, match="bad"):
        cache.op(torch.zeros(1))
    assert not cache._entries


def test_without_a_compiler_every_call_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_cache, "native", lambda: None)
    cache = LaunchCache(lambda args, kwargs: ((args, kwargs), None))
    assert [cache.op(1, scale=2) for _ in range(2)] == [((1,), {"scale": 2})] * 2


def test_calls_are_made_while_the_module_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    building: Future[Any] = Future()
    monkeypatch.setattr(launch_cache, "_building", lambda: building)
    cache = LaunchCache(lambda args, kwargs: ((args, kwargs), None))
    assert cache.op(1, scale=2) == ((1,), {"scale": 2})
    building.set_result(None)
    assert cache.op(1, scale=2) == ((1,), {"scale": 2})


def test_a_module_that_cannot_be_built_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch_cache, "DRIVER", "/no/such/driver.so")
    launch_cache._building.cache_clear()
    assert launch_cache.native() is None
    launch_cache._building.cache_clear()
    assert "install a C compiler" in caplog.text
