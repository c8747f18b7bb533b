"""Calls of an op by its name, which find prepared and checked calls before the dispatcher."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import fake_driver as f
from helpers.cases import DECODE_BASE
from helpers.fake_driver import FakeDriver
from helpers.harness import Setup
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attn_ops
from attn_ops.eager.captured_call import CapturedCall, outputs_of
from attn_ops.eager.checked_call import CHECKED_CALLS
from attn_ops.eager.op_cache import OpCache
from attn_ops.eager.op_entry import dispatched
from attn_ops.errors import GradientError

pytestmark = f.needs_the_module

OP = torch.ops.attn.batch_decode
SIZES: dict[str, Any] = {"page_size": 16, "num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 16, "device": "cpu"}


def planned() -> attn_ops.DecodePlanner:
    planner = attn_ops.DecodePlanner(2, 2, **SIZES)
    planner.plan(*[torch.tensor(t, dtype=torch.int32) for t in ([0, 1, 2], [0, 1], [16, 5])])
    return planner


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 2, 16), *torch.randn(2, 2, 16, 1, 16).unbind(1)


class Decode:
    """``batch_decode``, which launches one kernel on its query and ``kv_len``."""

    def __init__(self) -> None:
        self.image, self.captures = f.load(), 0
        self.cache = OpCache("batch_decode", f.unchecked, self._first_call)

    def _first_call(self, args: Any, kwargs: Any) -> Any:
        self.captures += 1
        result = dispatched(OP)(*args, **kwargs)
        return result, CapturedCall([f.launched(self.image, args[0], args[3][3])], outputs_of(result))


@pytest.fixture
def decode(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Decode:
    """Tensors on the CPU say that they are on CUDA."""
    made = Decode()
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    for function in (OP, OP.default):
        monkeypatch.setattr(function._op, "cuda", made.cache.planned)
    return made


@pytest.mark.parametrize("function", [OP, OP.default])
def test_a_repeated_call_is_replayed(function: Any, decode: Decode, fake_driver: FakeDriver) -> None:
    planner = planned()
    for launches in range(3):
        q, k, v = inputs()
        function(q, k, v, planner.state, planner.workspace, sm_scale=1)
        assert (decode.captures, fake_driver.get("launches")) == (1, launches)
    assert fake_driver.addresses() == [q.data_ptr(), planner.state.kv_len.data_ptr()]


def test_a_list_has_the_prepared_call_of_its_plan(decode: Decode) -> None:
    planner, given = planned(), inputs()
    OP(*given, planner.state, planner.workspace)
    decode.cache.op(*given, list(planner.state), planner.workspace)
    assert decode.captures == 1


def test_an_entry_goes_with_its_plan(decode: Decode) -> None:
    for captures in (1, 2):
        planner = planned()
        OP(*inputs(), planner.state, planner.workspace)
        assert (decode.captures, decode.cache.num_entries) == (captures, 1)
        del planner
        gc.collect()
        assert decode.cache.num_entries == 0


def with_number(plan: Any) -> Any:
    """``plan``, a list or a plan, with a number in place of its last tensor."""
    return [*plan[:-1], 3] if type(plan) is list else plan._replace(split_counters=3)


CALLS: dict[str, Callable[..., Any]] = {
    "plan by name": lambda q, k, v, plan, w: OP(q, k, v, plan=plan, workspace=w),
    "all by name": lambda q, k, v, plan, w: OP(q=q, k_cache=k, v_cache=v, plan=plan, workspace=w),
    "a parameter": lambda q, k, v, plan, w: OP(torch.nn.Parameter(q, False), k, v, plan, w),
    "a whole number": lambda q, k, v, plan, w: OP(q, k, v, plan, w, sm_scale=2),
    "too few": lambda q, k, v, plan, w: OP(q, k, v, plan),
    "too many": lambda q, k, v, plan, w: OP(q, k, v, plan, w, 1.0),
    "twice": lambda q, k, v, plan, w: OP(q, k, v, plan, w, q=q),
    "unknown": lambda q, k, v, plan, w: OP(q, k, v, plan, w, scale=1.0),
    "None": lambda q, k, v, plan, w: OP(q, None, v, plan, w),
    "a number": lambda q, k, v, plan, w: OP(q, k, v, plan, 3),
    "a text for a number": lambda q, k, v, plan, w: OP(q, k, v, plan, w, sm_scale="1"),
    "a fraction for a whole number": lambda q, k, v, plan, w: OP(q, k, v, plan, w, window_left=1.5),
    "None for a number": lambda q, k, v, plan, w: OP(q, k, v, plan, w, window_left=None),
    "no rows": lambda q, k, v, plan, w: OP(q[0], k, v, plan, w),
    "gradients": lambda q, k, v, plan, w: OP(q.clone().requires_grad_(), k, v, plan, w),
    "a number in a plan": lambda q, k, v, plan, w: OP(q, k, v, with_number(plan), w),
    "a plan of another op": lambda q, k, v, plan, w: OP(q, k, v, plan[::-1], w),
}


def outcome(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return [t.tolist() for t in call(*args)]
    except Exception as error:
        return type(error), str(error).split(" but instead found type")[0]  # a plan is no list there


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_calls_have_the_outcome_of_the_dispatcher(name: str, device: str, request: pytest.FixtureRequest) -> None:
    """Results and errors, of the first call and of another, are those of the call with a list."""
    if device == "cuda":
        request.getfixturevalue("decode")
    planner, given = planned(), inputs()
    expected = outcome(CALLS[name], *given, list(planner.state), planner.workspace)
    remade = planned()
    for _ in range(2 if device == "cpu" else 1):  # the fake driver's kernels write nothing
        assert outcome(CALLS[name], *given, remade.state, remade.workspace) == expected


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class Subclass(Tensor):
    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs)


@pytest.fixture(params=["cpu", "cuda"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A call that has been made before."""
    if request.param == "cuda":
        request.getfixturevalue("decode")
    planner, given = planned(), inputs()

    def call(**options: Any) -> Any:
        return OP(*given, planner.state, planner.workspace, **options)

    call()
    return call


def test_modes_observe_the_op(call: Callable[..., Any]) -> None:
    with Functions() as outer, Functions() as inner:
        call()
    assert (outer.seen.count(OP), inner.seen.count(OP)) == (1, 1)
    with Dispatched() as mode:
        call()
    assert mode.seen.count(OP.default) == 1


def test_profilers_observe_the_op(call: Callable[..., Any]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        call()
    assert [event.count for event in seen.key_averages() if event.key == "attn::batch_decode"] == [1]


def test_tensors_of_a_subclass_observe_the_op(call: Callable[..., Any]) -> None:
    """Also one that is not the first argument, and with the function that tensors have."""
    Subclass.seen.clear()
    out, _ = call(sinks=torch.zeros(2).as_subclass(Subclass))
    assert OP in Subclass.seen
    assert isinstance(out, Subclass)


def test_a_plan_is_a_sequence_to_other_functions() -> None:
    plan = planned().state
    assert torch.equal(torch.cat(plan[1:4]), torch.cat(list(plan[1:4])))
    same = type(plan)(*[plan.kv_len] * len(plan))
    assert torch.equal(torch.stack(same), torch.stack(list(same)))


def test_torchscript_finds_the_op() -> None:
    planner, given = planned(), inputs()

    def attend(q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor], workspace: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.attn.batch_decode(q, k, v, plan, workspace)  # type: ignore[no-any-return]

    scripted = torch.jit.script(attend)
    assert "attn::batch_decode" in str(scripted.graph)
    assert torch.equal(
        scripted(*given, list(planner.state), planner.workspace)[0], OP(*given, planner.state, planner.workspace)[0]
    )


def test_a_call_on_the_cpu_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CHECKED_CALLS["batch_decode"]
    check, checks = calls.check, []
    monkeypatch.setattr(calls, "check", lambda *given: checks.append(given) or check(*given))
    calls.clear()
    setup = Setup("decode", DECODE_BASE)
    for _ in range(3):
        setup.check(*setup.run("auto"))
    assert len(checks) == 1


def test_gradients_are_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(GradientError):
        call(sinks=torch.zeros(2, requires_grad=True))
    call()


def test_parameters_are_prepared_without_gradients(decode: Decode, fake_driver: FakeDriver) -> None:
    """As the sinks of a model, which require gradients."""
    planner, sinks = planned(), torch.nn.Parameter(torch.zeros(2))
    with torch.no_grad():
        for launches in range(2):
            OP(*inputs(), planner.state, planner.workspace, sinks=sinks)
            assert (decode.captures, fake_driver.get("launches")) == (1, launches)
