"""Calls of this package that do not pass through the dispatcher: ops by plans as tuples, and whole functions."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from helpers import fake_driver as f
from helpers.fake_driver import FakeDriver
from torch import Tensor

from attn_ops.eager import launches, op_cache, op_call
from attn_ops.eager.captured_call import CapturedCall, outputs_of
from attn_ops.eager.extension import extension
from attn_ops.eager.op_cache import OpCache
from attn_ops.eager.op_call import Lookup, OpCall
from attn_ops.eager.prepared_call import prepared_function

pytestmark = [f.needs_the_module, pytest.mark.usefixtures("fake_driver")]


class Op:
    """The cache of ``merge_state``, which launches one kernel on tensors ``a`` and ``b`` of its arguments, its first
    output and its scratch memory, in that order."""

    def __init__(self, a: int = 0, b: int = 1) -> None:
        self.cache, self.a, self.b, self.captures = OpCache("merge_state", f.unchecked, self._first_call), a, b, 0
        self.image = f.load()

    def _first_call(self, args: Any, kwargs: Any) -> Any:
        self.captures += 1
        tensors = op_call.flatten_tensors(args)
        result = torch.ops.attn.merge_state(*tensors[:4])
        found = (*tensors, *outputs_of(result)[:1])
        launch = f.launched(self.image, found[self.a], found[self.b])
        return result, CapturedCall([launch], outputs_of(result))


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``op(a, b)`` takes the place of ``merge_state``. Tensors say that they are on CUDA."""
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)

    def make(a: int = 0, b: int = 1) -> Op:
        made = Op(a, b)
        monkeypatch.setitem(op_cache.OP_CACHES, "merge_state", made.cache)
        return made

    return make


def allocating(image: Any) -> Any:
    """A first call of ``merge_state`` that launches a kernel on memory which it allocates, and on its output."""

    def function(*tensors: Tensor) -> Any:
        result = torch.ops.attn.merge_state(*tensors)
        launches.record(f.launched(image, launches.scratch(torch.empty(3, 5)), result[0]))
        return result

    return lambda args, kwargs: launches.capture_launches(function, args, kwargs)


def states(rows: int = 4) -> list[Tensor]:
    v, s = torch.zeros(2, rows, 2, 8), torch.zeros(2, rows, 2)
    return [v[0].clone(), s[0].clone(), v[1].clone(), s[1].clone()]


def test_the_tensors_of_a_tuple_may_be_others(op: Any, fake_driver: FakeDriver) -> None:
    """A plan that is new in every call has the same prepared call."""
    made = op(4, 0)
    for plan in ((torch.zeros(3), torch.zeros(4)), (torch.zeros(3), torch.zeros(4))):
        given = states()
        made.cache.direct(*given, plan)
        assert made.captures == 1
    assert fake_driver.addresses() == [plan[0].data_ptr(), given[0].data_ptr()]
    made.cache.direct(*states(), (torch.zeros(5), torch.zeros(4)))
    assert made.captures == 2
    made.cache.direct(*states(), *plan)
    assert made.captures == 3


@pytest.mark.parametrize("twice", [False, True])
def test_one_tensor_in_two_places(twice: bool, op: Any, fake_driver: FakeDriver) -> None:
    """As equal cumulative lengths of rows and keys: prepared, under a key of its own."""
    made = op(0, 2)
    for captures in (1, 1):
        v, s, w, _ = states()
        made.cache.direct(v, s, v if twice else w, s)
        assert made.captures == captures
    assert fake_driver.addresses() == [v.data_ptr(), (v if twice else w).data_ptr()]
    made.cache.direct(v, s, w if twice else v, s)
    assert made.captures == 2


def test_the_dispatcher_sees_calls_that_a_profiler_of_another_thread_may_observe(op: Any) -> None:
    made, given = op(), states()
    made.cache.direct(*given)
    made.cache.direct(*given)
    assert made.captures == 1
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=every) as seen:
        thread = threading.Thread(target=made.cache.direct, args=given)
        thread.start()
        thread.join()
    assert sum(event.name() == "attn::merge_state" for event in seen.profiler.kineto_results.events()) == 1  # type: ignore[union-attr]


def test_tensors_that_require_grad_pass_through_the_dispatcher(op: Any) -> None:
    made, given = op(), states()
    given[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="requires grad"):
        made.cache.direct(*given)
    assert made.captures == 0


class Function:
    """A prepared function over ``merge_state``, and the calls of its body."""

    def __init__(self, **fields: Any) -> None:
        self.calls, self.fields = 0, fields
        self.call = prepared_function(self._call)

    def _call(self, v: Tensor, s: Tensor, *rest: Any, **_: Any) -> OpCall:
        self.calls += 1
        fields = {name: make(v, s, *rest) for name, make in self.fields.items()}
        return OpCall("merge_state", fields.pop("args", (v, s, *rest)), {}, **fields)


def test_a_function_is_replayed_on_other_tensors(op: Any, fake_driver: FakeDriver) -> None:
    op(0, 4)
    function = Function(shape=lambda *_: (2, 2, 2, 8))
    function.call(*states())
    for _ in range(2):
        given = states()
        out = function.call(*given)
        assert out.shape == (2, 2, 2, 8)
        assert fake_driver.addresses() == [given[0].data_ptr(), out.data_ptr()]
    assert function.calls == 1


def test_memory_that_an_op_allocates_is_new_in_every_call(op: Any, fake_driver: FakeDriver) -> None:
    made = op()
    made.cache.first_call = allocating(made.image)
    function, held = prepared_function(lambda *args: OpCall("merge_state", args, {}, lambda out, lse: out)), []
    for _ in range(3):
        given = states()
        held.append([*given, function(*given)])
    assert fake_driver.get("launches") == 2
    memory, out = fake_driver.addresses()
    assert out == held[-1][-1].data_ptr()
    assert memory not in [t.data_ptr() for tensors in held for t in tensors]


def test_scratch_memory_is_new_in_every_call(op: Any, fake_driver: FakeDriver) -> None:
    op(2, 4)

    def args(v: Tensor, s: Tensor, *_: Any) -> Any:
        return v, s, torch.empty_like(v), s

    def call(v: Tensor, s: Tensor) -> OpCall:
        given = args(v, s)
        return OpCall("merge_state", given, {}, lambda out, lse: out, scratch=given[2:3])

    function, held = prepared_function(call), []
    for _ in range(3):
        v, s, *_ = states()
        held.append(function(v, s))
    assert fake_driver.get("launches") == 2
    scratch, out = fake_driver.addresses()
    assert out == held[-1].data_ptr()
    assert scratch not in [t.data_ptr() for t in (v, s, *held)]


def test_views_of_tensors_in_one_storage_are_located(op: Any, fake_driver: FakeDriver) -> None:
    """As queries, keys and values that one projection made."""
    op(0, 2)

    def call(v: Tensor, s: Tensor, w: Tensor) -> OpCall:
        a, b = v.flatten(0, 1), w.flatten(0, 1)
        return OpCall("merge_state", (a, s, b, s), {}, views=((a, v), (b, w)))

    function = prepared_function(call)
    for expected in (0, 1):
        v, w = torch.zeros(2, 2, 2, 2, 8).unbind()
        function(v, torch.zeros(4, 2), w)
        assert fake_driver.get("launches") == expected
    assert fake_driver.addresses() == [v.data_ptr(), w.data_ptr()]


def test_without_views_they_are_not(op: Any, fake_driver: FakeDriver) -> None:
    op(0, 2)
    function = prepared_function(
        lambda v, s, w: OpCall("merge_state", (v.flatten(0, 1), s, w.flatten(0, 1), s), {})  # type: ignore[misc]
    )
    for _ in range(3):
        v, w = torch.zeros(2, 2, 2, 2, 8).unbind()
        function(v, torch.zeros(4, 2), w)
    assert fake_driver.get("launches") == 0


def test_calls_that_are_made_before_are_launched_before(op: Any, fake_driver: FakeDriver) -> None:
    op()
    function = Function(before=lambda *given: (OpCall("merge_state", given, {}),))
    function.call(*states())
    function.call(*states())
    assert (function.calls, fake_driver.get("launches")) == (1, 2)


def test_a_call_after_one_that_is_not_captured_is_not_replayed(op: Any, fake_driver: FakeDriver) -> None:
    made, captures = op(), [False, True, False, True]
    capture = made.cache.first_call

    def first_call(*given: Any) -> Any:
        result, captured = capture(*given)
        return result, captured if captures.pop(0) else None

    made.cache.first_call = first_call
    function = Function(before=lambda *given: (OpCall("merge_state", given, {}),))
    function.call(*states())
    function.call(*states())
    assert (function.calls, fake_driver.get("launches")) == (2, 0)


def test_a_plan_is_looked_up_in_every_call(op: Any, fake_driver: FakeDriver) -> None:
    op(2, 4)
    plans = [torch.zeros(4, 2, 8) for _ in range(2)]
    found: list[Tensor | None] = [plans[0], plans[1], None]

    def lookup(v: Tensor, s: Tensor) -> Lookup:
        def find(*tensors: Tensor) -> Any:
            assert [t.shape for t in tensors] == [s.shape]
            t = found.pop(0)
            return None if t is None else [t]

        return Lookup((s,), [plans[0]], find)

    function = Function(args=lambda v, s: (v, s, plans[0], s), lookup=lookup)
    function.call(*states()[:2])
    for plan in plans:
        function.call(*states()[:2])
        assert fake_driver.addresses()[0] == plan.data_ptr()
    assert function.calls == 1
    function.call(*states()[:2])
    assert (function.calls, found) == (2, [])


def test_a_call_with_a_lookup_is_not_replayed_into_a_buffer(op: Any, fake_driver: FakeDriver) -> None:
    op(4, 0)

    def lookup(v: Tensor, s: Tensor, *_: Any) -> Lookup:
        return Lookup((s,), [], lambda *_: [])

    def finalize(out: Tensor, *_: Any) -> Tensor:
        return buffer.copy_(out)

    function = Function(
        args=lambda v, s, *_: (v, s, v, s),
        lookup=lookup,
        finalize=lambda *_: finalize,
        destinations=lambda *x: (x[2], None),
    )
    for calls in (1, 2):
        v, s = states()[:2]
        buffer = torch.full_like(v, torch.nan)
        assert function.call(v, s, buffer) is buffer
        assert not buffer.isnan().any()
        assert (function.calls, fake_driver.get("launches")) == (calls, 0)


@pytest.mark.parametrize("given", [[], (1,), (torch.zeros(1),) * 65, ()])
def test_arguments_of_a_call_on_tensors_are_checked(given: Any) -> None:
    call = extension.PreparedCall((), ((0, 0),), (), True)
    with pytest.raises((TypeError, IndexError)):
        call.call(given)
    writes = extension.PreparedCall((), (), (0,), True)
    with pytest.raises(TypeError, match="writes to arguments"):
        writes.call((torch.zeros(1),))


def test_a_call_that_is_not_prepared_makes_the_calls_before_it() -> None:
    v, s, w, t = torch.zeros(4, 2, 8), torch.zeros(4, 2), torch.ones(4, 2, 8), torch.zeros(4, 2)
    before = OpCall("merge_state_in_place", (v, s, w, t), {})
    out, _ = OpCall("merge_state", (v, s, v, s), {}, before=(before,)).execute()
    assert out.eq(0.5).all()
