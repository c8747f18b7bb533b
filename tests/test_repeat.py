"""Which calls the Triton backend offers to repeat, and what the driver is then given, by a driver that only looks."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attn_ops.kernels.triton import driver, launch

from attn_ops.repeat import Repeats

STREAM, FUNCTION = 77, 1234
SIGNATURE = {"a": "*fp32", "none": "constexpr", "out": "*fp32", "n": "i32", "scale": "fp32", "BLOCK": "constexpr"}
REST = (7, 0.5, 16)


def _compiled(**metadata: Any) -> Any:
    plain = {"num_ctas": 1, "launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0}
    return types.SimpleNamespace(
        metadata=types.SimpleNamespace(num_warps=4, shared=512, launch_pdl=True, **{**plain, **metadata}),
        src=types.SimpleNamespace(signature=SIGNATURE),
        function=FUNCTION,
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the driver was told to launch, on a machine without one."""
    seen: list[dict[str, Any]] = []
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(driver.Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
    )

    @prototype
    def look(config: Any, function: int, parameters: Any, extra: int | None) -> int:
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64)
        values = [kind.from_address(parameters[i]).value for i, kind in enumerate(kinds)]
        c = config.contents
        grid, block = (c.grid_x, c.grid_y, c.grid_z), (c.block_x, c.block_y, c.block_z)
        attributes = [(c.attributes[i].id, c.attributes[i].value) for i in range(c.num_attributes)]
        seen.append(
            {
                "grid": grid,
                "block": block,
                "shared": c.shared,
                "stream": c.stream,
                "function": function,
                "values": values,
            }
            | {"values": values, "attributes": attributes, "extra": extra}
        )
        return 0

    monkeypatch.setattr(driver, "_driver", lambda: types.SimpleNamespace(cuLaunchKernelEx=look))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return seen


def _record(
    *tensors: torch.Tensor | list[torch.Tensor], compute: bool = False, compiled: Any = None
) -> tuple[torch.Tensor, Any]:
    def function(*args: torch.Tensor) -> torch.Tensor:
        out = torch.empty(2, 4)
        if compute:
            out.zero_()
        assert launch._recorded is not None
        launch._recorded.append(launch.Recorded(compiled or _compiled(), (3, 2), (args[0], None, out), REST))
        return out

    return launch.record(function, tensors, {})


def test_a_call_is_repeated_on_other_tensors(launched: list[dict[str, Any]]):
    _, repeat = _record(torch.zeros(4), torch.zeros(4))
    a, b = torch.zeros(4), torch.zeros(4)
    out = repeat([a.data_ptr(), b.data_ptr()])
    assert out.shape == (2, 4)
    assert out.is_contiguous()
    assert launched == [
        {
            "grid": (3, 2, 1),
            "block": (128, 1, 1),
            "shared": 512,
            "stream": STREAM,
            "function": FUNCTION,
            "values": [a.data_ptr(), out.data_ptr(), 7, 0.5, 0, 0],
            "attributes": [(driver.PROGRAMMATIC_STREAM_SERIALIZATION, 1)],
            "extra": None,
        }
    ]


def test_a_tensor_passed_twice_is_not(launched: list[dict[str, Any]]):
    """The next call of this key may pass two tensors, of which only one would be read."""
    same = torch.zeros(4)
    assert _record(same, same)[1] is None


def test_a_tensor_passed_beside_its_plan_is_not(launched: list[dict[str, Any]]):
    """The next call of this plan may pass another, which is not to be taken for the plan's."""
    same, plan = torch.zeros(4), [torch.zeros(4)]
    assert _record(same, plan)[1] is not None
    assert _record(same, [same])[1] is None


def test_a_call_that_computes_is_not(launched: list[dict[str, Any]]):
    assert _record(torch.zeros(4), compute=True)[1] is None


@pytest.mark.parametrize("metadata", [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"global_scratch_size": 8}])
def test_a_kernel_that_needs_more_than_parameters_is_not(launched: list[dict[str, Any]], metadata: dict[str, Any]):
    assert _record(torch.zeros(4), compiled=_compiled(**metadata))[1] is None


def test_unaligned_tensors_are_not(launched: list[dict[str, Any]]):
    assert _record(torch.zeros(5)[1:])[1] is None


class Kernel:
    """As far as ``launch`` knows one: compiled by ``warmup``, loaded when ``run`` is first asked for."""

    function, packed_metadata = FUNCTION, (4, 1, 512)

    def __init__(self) -> None:
        self.loaded, self.ran = 0, []

    def warmup(self, *args: Any, **options: Any) -> Kernel:
        return self

    @property
    def run(self) -> Any:
        self.loaded += 1
        return lambda *args: self.ran.append(args)


def test_a_kernel_made_ready_is_loaded_and_not_launched(
    launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    kernel, t = Kernel(), torch.zeros(4)
    for run in (False, True):
        launch._launch_direct(kernel, (3,), (t, None), (7,), (), (16,), launch.Options(), run)
        assert kernel.loaded == run + 1
    settings = (FUNCTION, kernel.packed_metadata, None, None, None)
    assert kernel.ran == [(3, 1, 1, STREAM, *settings, t.data_ptr(), None, 7, 16)]


CHANGES = {
    "shape": lambda t: torch.zeros(3, 8),
    "stride": lambda t: torch.zeros(8, 4).T[:4],
    "dtype": lambda t: t.double(),
    "alignment": lambda t: torch.zeros(17)[1:].view(4, 4),
    "gradient": lambda t: t.clone().requires_grad_(),
    "type": torch.nn.Parameter,
}


def _find(repeats: Repeats, t: torch.Tensor, plan: list[torch.Tensor], **options: Any) -> object:
    return repeats.find((torch.zeros(2), t, plan), options)[1]


@pytest.fixture
def remembered(launched: list[dict[str, Any]]) -> tuple[Repeats, list[torch.Tensor]]:
    repeats, plan = Repeats(), [torch.zeros(3), torch.zeros(1)]
    args, options = (torch.zeros(2), torch.zeros(4, 4), plan), {"causal": True}
    repeats.add(repeats.find(args, options)[0], print, args, options)
    return repeats, plan


@pytest.mark.parametrize("change", CHANGES)
def test_calls_of_other_tensors_differ(remembered: tuple[Repeats, list[torch.Tensor]], change: str):
    repeats, plan = remembered
    assert _find(repeats, torch.ones(4, 4), plan, causal=True) is print
    assert _find(repeats, CHANGES[change](torch.ones(4, 4)), plan, causal=True) is None


def test_calls_of_other_options_plans_and_modes_differ(
    remembered: tuple[Repeats, list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
):
    repeats, plan = remembered
    t = torch.ones(4, 4)
    assert _find(repeats, t, plan, causal=False) is None
    assert _find(repeats, t, plan) is None
    assert _find(repeats, t, [plan[0], torch.zeros(1)], causal=True) is None
    with torch.no_grad():
        assert _find(repeats, t, plan, causal=True) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert _find(repeats, t, plan, causal=True) is None


def test_a_call_is_forgotten_with_its_plan(remembered: tuple[Repeats, list[torch.Tensor]]):
    repeats, plan = remembered
    plan.clear()
    assert not repeats._calls
    assert not repeats._plans
