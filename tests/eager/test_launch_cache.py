"""Which calls the Triton backend offers to repeat, and what the driver is then given, by a driver that only looks."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers.fake_driver import FUNCTION, REST, STREAM, Onlooker, compiled, needs_a_compiler

pytest.importorskip("triton")

from attn_ops.kernels.triton import cubin, launch

from attn_ops.eager import launch_cache as memory
from attn_ops.eager.launch_cache import LaunchCache

pytestmark = [needs_a_compiler, pytest.mark.usefixtures("onlooker", "loads")]


def _record(*tensors: torch.Tensor | list[torch.Tensor], compute: bool = False) -> tuple[torch.Tensor, Any]:
    kernel = cubin.load(compiled())
    assert kernel is not None

    def function(*args: torch.Tensor) -> torch.Tensor:
        out = torch.empty(2, 4)
        if compute:
            out.zero_()
        assert launch._call.recorded is not None
        launch._call.recorded.append(launch.Recorded(kernel, (3, 2), (args[0], None, out), REST))
        return out

    return launch.record(function, tensors, {})


def test_a_call_is_repeated_on_other_tensors(onlooker: Onlooker):
    _, repeat = _record(torch.zeros(4), torch.zeros(4))
    for _ in range(2):
        a, b, before = torch.zeros(4), torch.zeros(4), onlooker.launches
        out = repeat(STREAM, a.data_ptr(), b.data_ptr())
        assert out.shape == (2, 4)
        assert out.is_contiguous()
        assert onlooker.launches == before + 1
        assert onlooker.values() == [a.data_ptr(), out.data_ptr(), 7, 0.5, 0, 0]
        assert (onlooker.sizes("grid"), onlooker.sizes("block")) == ([3, 2, 1], [128, 1, 1])
        assert (onlooker.shared, onlooker.stream, onlooker.function, onlooker.early) == (512, STREAM, FUNCTION, 1)


MAPPED = {"t": "tensordesc<fp16[16, 64],Layout>", "BLOCK": "constexpr"}
MAP = {"swizzle": 3, "block_size": [16, 64]}


def _described(t: torch.Tensor) -> Any:
    hopper = pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    layout = pytest.importorskip("triton.experimental.gluon.language").NVMMASharedLayout(128, 16, 2)
    return hopper.TensorDescriptor(t, list(t.shape), list(t.stride()), [16, 64], layout)


def _record_mapped(t: torch.Tensor) -> Any:
    kernel = cubin.load(compiled(MAPPED, tensordesc_meta=[MAP]))
    assert kernel is not None

    def function(t: torch.Tensor) -> torch.Tensor:
        assert launch._call.recorded is not None
        launch._call.recorded.append(launch.Recorded(kernel, (1,), (_described(t),), (16,)))
        return torch.empty(2)

    return launch.record(function, (t,), {})[1]


def test_tensor_maps_are_of_the_tensors_of_the_call(onlooker: Onlooker):
    tensors = [torch.zeros(32, 128, dtype=torch.float16) for _ in range(2)]
    repeat, before = _record_mapped(tensors[0]), onlooker.maps
    for t, encoded in ((tensors[1], 1), (tensors[1], 1), (tensors[0], 2)):
        repeat(STREAM, t.data_ptr())
        assert onlooker.values()[0] == t.data_ptr()
        assert onlooker.maps == before + encoded
    assert onlooker.map() == [6, 3, 2, 128, 32, 256, 64, 16]


def test_a_tensor_map_that_the_driver_refuses_is_an_error(onlooker: Onlooker):
    t = torch.zeros(32, 128, dtype=torch.float16)
    repeat, launches = _record_mapped(t), onlooker.launches
    onlooker.tell("map_answer", 1)
    with pytest.raises(RuntimeError, match="a kernel could not be launched: as it was told to"):
        repeat(STREAM, t.data_ptr())
    assert onlooker.launches == launches
    onlooker.tell("map_answer", 0)
    repeat(STREAM, t.data_ptr())
    assert onlooker.launches == launches + 1


def test_a_tensor_descriptor_that_triton_does_not_describe_is_not():
    assert cubin.load(compiled(MAPPED)) is None


@pytest.mark.parametrize("kind", [tuple, type(None), torch.Tensor])
def test_a_repeat_returns_what_the_call_did(kind: type):
    made = {tuple: (torch.empty(2, 3), torch.empty(0)), type(None): None, torch.Tensor: torch.empty(5)}[kind]
    repeat = launch._repeat(
        [torch.zeros(4)],
        made,
        [launch.Recorded(cubin.load(compiled()), (1,), (torch.zeros(4), None, torch.zeros(4)), REST)],
    )
    again = repeat(STREAM, 64)
    assert type(again) is kind
    for old, new in zip(launch._tensors_of(made), launch._tensors_of(again), strict=True):
        assert new.shape == old.shape
        assert (new is old) == (old.numel() == 0)


def test_what_the_driver_refuses_is_an_error(onlooker: Onlooker):
    _, repeat = _record(torch.zeros(4))
    onlooker.tell("answer", 1)
    with pytest.raises(RuntimeError, match="a kernel could not be launched: as it was told to"):
        repeat(STREAM, 64)
    onlooker.tell("answer", 0)
    repeat(STREAM, 64)


def test_a_repeat_takes_as_many_addresses_as_tensors():
    _, repeat = _record(torch.zeros(4))
    for bad in ((), (STREAM,), (STREAM, 64, 64)):
        with pytest.raises(TypeError, match=f"{len(bad)} arguments given, expected a stream and 1 addresses"):
            repeat(*bad)


def test_a_tensor_passed_twice_is_not():
    """The next call of this key may pass two tensors, of which only one would be read."""
    same = torch.zeros(4)
    assert _record(same, same)[1] is None


def test_a_tensor_passed_beside_its_plan_is_not():
    """The next call of this plan may pass another, which is not to be taken for the plan's."""
    same, plan = torch.zeros(4), [torch.zeros(4)]
    assert _record(same, plan)[1] is not None
    assert _record(same, [same])[1] is None


def test_a_call_that_computes_is_not():
    assert _record(torch.zeros(4), compute=True)[1] is None


@pytest.mark.parametrize("metadata", [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"global_scratch_size": 8}])
def test_a_kernel_that_needs_more_than_parameters_is_not(loads: list[Any], metadata: dict[str, Any]):
    assert cubin.load(compiled(**metadata)) is None
    assert not loads


def test_what_another_thread_launches_meanwhile_is_not_a_part_of_the_call(loads: list[Any]):
    def function(t: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=_record, args=(torch.zeros(4),))
        other.start()
        other.join()
        assert launch._call.recorded == []
        return torch.empty(0)

    assert launch.record(function, (torch.zeros(4),), {})[1] is None
    assert len(loads) == 1


def test_a_kernel_that_does_not_compile_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    compiling: Future[Any] = Future()
    compiling.set_exception(ValueError("does not compile"))
    with pytest.raises(ValueError, match="does not compile"), launch._compiling_together():
        launch._call.coming[(None, 0)] = compiling
    with launch._compiling_together():
        pass
    assert not launch._call.coming


def test_unaligned_tensors_are_not():
    assert _record(torch.zeros(5)[1:])[1] is None


class Source:
    """As far as ``launch`` knows a kernel that is not compiled."""

    def warmup(self, *args: Any, **options: Any) -> Any:
        return compiled()


def test_a_kernel_made_ready_is_loaded_and_not_launched(
    onlooker: Onlooker, loads: list[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    kernel, a, out = Source(), torch.zeros(4), torch.zeros(4)
    before = onlooker.launches
    for run in (False, True, True):
        launch._launch_direct(kernel, (3,), (a, None, out), REST[:2], (), REST[2:], launch.Options(), run)
        assert loads == [("kernel", b"", 512, 3)]
        before += run
        assert onlooker.launches == before
    assert onlooker.values() == [a.data_ptr(), out.data_ptr(), 7, 0.5, 0, 0]


def test_a_scalar_of_64_bits_has_a_kernel_of_its_own(loads: list[Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    kernel, t = Source(), torch.zeros(4)
    for size in (7, -1, 2**31, 2**40):
        launch._launch_direct(kernel, (3,), (t, None, t), (size, 0.5), (), REST[2:], launch.Options(), False)
    assert len(loads) == 2


def test_kernels_made_ready_are_compiled_beside_others(loads: list[Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    compiling: Future[Any] = Future()
    kernel, t = Source(), torch.zeros(4)
    monkeypatch.setattr(kernel, "warmup", lambda *args, **options: compiling, raising=False)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    with launch._compiling_together():
        launch._launch_direct(kernel, (3,), (t, None, t), REST[:2], (), REST[2:], launch.Options(), False)
        compiling.set_result(compiled())
        assert not loads
    assert loads == [("kernel", b"", 512, 3)]
    launch._launch_direct(kernel, (3,), (t, None, t), REST[:2], (), REST[2:], launch.Options(), True)
    assert len(loads) == 1


@pytest.mark.parametrize("together", [False, True])
def test_threads_compile_where_python_can_parse_in_several(together: bool, monkeypatch: pytest.MonkeyPatch):
    modes: list[Any] = []
    monkeypatch.setattr(launch, "TOGETHER", together)
    monkeypatch.setattr(launch.triton, "AsyncCompileMode", lambda executor: nullcontext(modes.append(executor)))
    with launch._compiling_together():
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
    """An op that counts the calls made as if they were the first."""

    def __init__(self) -> None:
        self.repeats, self.first = LaunchCache(self._first), 0

    def _first(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self.first += 1
        count = len(memory.runtime_tensors(args, kwargs))
        return "first", memory.native().Repeat((), count, (), True)

    def __call__(self, t: torch.Tensor, plan: list[torch.Tensor], **options: Any) -> bool:
        """Whether the call is an earlier one again."""
        return self.repeats.op(torch.zeros(2), t, plan, **options) is None


@pytest.fixture
def remembered() -> tuple[Op, list[torch.Tensor]]:
    op, plan = Op(), [torch.zeros(3), torch.zeros(1)]
    assert not op(torch.zeros(4, 4), plan, causal=True)
    return op, plan


@pytest.mark.parametrize("change", CHANGES)
def test_calls_of_other_tensors_differ(remembered: tuple[Op, list[torch.Tensor]], change: str):
    op, plan = remembered
    assert op(torch.ones(4, 4), plan, causal=True)
    for again in (False, True):
        assert op(CHANGES[change](torch.ones(4, 4)), plan, causal=True) is again


def test_calls_of_other_options_plans_and_modes_differ(remembered: tuple[Op, list[torch.Tensor]]):
    op, plan = remembered
    t = torch.ones(4, 4)
    assert op(t, plan, causal=True)
    assert not op(t, plan, causal=False)
    assert not op(t, plan)
    assert not op(t, [plan[0], torch.zeros(1)], causal=True)
    assert not op(t, plan, causal=True, sinks=t)
    with torch.no_grad():
        assert not op(t, plan, causal=True)


def test_kernels_read_the_tensors_of_the_call(onlooker: Onlooker):
    kernel = cubin.load(compiled())
    assert kernel is not None

    def first(args: Any, kwargs: dict[str, Any]) -> Any:
        described = kernel.launch((1,), (1, None, 0, *REST))
        return "first", memory.native().Repeat((described,), 2, (), True)

    op, storage = LaunchCache(first).op, torch.zeros(32)
    op(storage[4:8], scale=storage[8:12])
    a, b = storage[16:20], storage[24:28]
    assert op(a, scale=b) is None
    assert onlooker.values()[:2] == [b.data_ptr(), a.data_ptr()]


@pytest.mark.parametrize("circumstance", ["capturing", "device"])
def test_calls_in_a_capture_or_on_another_device_differ(onlooker: Onlooker, circumstance: str):
    op, t, plan = Op(), torch.ones(4), [torch.zeros(1)]
    assert [op(t, plan), op(t, plan)] == [False, True]
    onlooker.tell(circumstance, 1)
    assert [op(t, plan), op(t, plan)] == [False, True]


def test_a_thread_that_has_not_used_the_gpu_makes_its_first_call(onlooker: Onlooker):
    op, t, plan = Op(), torch.ones(4), [torch.zeros(1)]
    onlooker.tell("device_answer", 201)
    assert [op(t, plan), op(t, plan)] == [False, False]
    assert not op.repeats._calls


def test_a_call_is_forgotten_with_its_plan(remembered: tuple[Op, list[torch.Tensor]]):
    op, plan = remembered
    plan.clear()
    assert not op.repeats._calls
    assert not op.repeats._plans


def test_no_more_calls_are_remembered_than_that(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "MAX_ENTRIES", 3)
    op, plan = Op(), [torch.zeros(1)]
    for scale in range(20):
        op(torch.ones(4), plan, scale=scale)
        assert len(op.repeats._calls) <= 3
        assert op(torch.ones(4), plan, scale=scale)


def test_an_error_of_the_first_call_is_raised_and_nothing_remembered():
    def first(args: Any, kwargs: dict[str, Any]) -> Any:
        raise ValueError("bad")

    repeats = LaunchCache(first)
    with pytest.raises(ValueError, match="bad"):
        repeats.op(torch.zeros(1))
    assert not repeats._calls


def test_without_a_compiler_every_call_is_the_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "native", lambda: None)
    repeats = LaunchCache(lambda args, kwargs: ((args, kwargs), None))
    assert [repeats.op(1, scale=2) for _ in range(2)] == [((1,), {"scale": 2})] * 2


def test_calls_are_made_while_the_module_is_built(monkeypatch: pytest.MonkeyPatch):
    building: Future[Any] = Future()
    monkeypatch.setattr(memory, "_building", lambda: building)
    repeats = LaunchCache(lambda args, kwargs: ((args, kwargs), None))
    assert repeats.op(1, scale=2) == ((1,), {"scale": 2})
    building.set_result(None)
    assert repeats.op(1, scale=2) == ((1,), {"scale": 2})


def test_a_module_that_cannot_be_built_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(memory, "DRIVER", "/no/such/driver.so")
    memory._building.cache_clear()
    assert memory.native() is None
    memory._building.cache_clear()
    assert "install a C compiler" in caplog.text
