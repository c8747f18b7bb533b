"""Which calls of an op are prepared, what the prepared call launches, and the keys of calls; over a fake driver."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from helpers import fake_driver as f
from helpers.fake_driver import FakeDriver
from helpers.native_launcher import STREAM
from torch import Tensor

from attn_ops.eager import captured_call, op_cache, op_call
from attn_ops.eager.bounded_cache import BoundedCache
from attn_ops.eager.captured_call import CapturedCall
from attn_ops.eager.extension import extension
from attn_ops.eager.op_cache import OpCache
from attn_ops.gpu import ALIGNMENT

pytestmark = [f.needs_the_module, pytest.mark.usefixtures("fake_driver")]


def test_the_tensors_of_a_call_are_those_of_its_options_too() -> None:
    """Sinks, scales and masks are options; plans are lists."""
    q, sinks, plan = torch.zeros(1), torch.zeros(2), [torch.zeros(3), torch.zeros(4)]
    found = op_call.flatten_tensors((q, plan, 0.5, sinks, 3))
    assert [t is wanted for t, wanted in zip(found, (q, sinks), strict=True)] == [True, True]
    assert [id(t) for t in op_cache.plan_tensors((q, plan, 0.5))] == [id(t) for t in plan]


class Op:
    """An op with a cache, which launches one kernel on its second tensor, or on ``x(args)``, and a new output."""

    def __init__(self, x: Any = lambda args: args[1], outputs: Any = None) -> None:
        self.cache, self.misses = OpCache("merge_state", f.unchecked, self._first_call), 0
        self.image, self.x, self.outputs = f.load(), x, outputs

    def _first_call(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self.misses += 1
        result = (torch.empty(2, 4), torch.empty(0)) if self.outputs is None else self.outputs
        outputs = captured_call.outputs_of(result)
        written = outputs[0] if outputs else args[0]
        return result, CapturedCall([f.launched(self.image, self.x(args), written)], outputs)

    def __call__(self, t: Tensor, plan: list[Tensor], **options: Any) -> bool:
        """Whether the call is a replay."""
        before = self.misses
        self.cache.op(torch.zeros(2), t, plan, **options)
        return self.misses == before


def test_a_replay_launches_on_other_tensors(fake_driver: FakeDriver) -> None:
    op, plan = Op(), [torch.zeros(3)]
    assert not op(torch.zeros(4), plan)
    for _ in range(2):
        q, t, before = torch.zeros(2), torch.zeros(4), fake_driver.get("launches")
        out, lse = op.cache.op(q, t, plan)
        assert (out.shape, lse.shape, op.misses) == ((2, 4), (0,), 1)
        assert fake_driver.get("launches") == before + 1
        assert fake_driver.array("grid", 3) == [3, 2, 1]
    q, t = torch.zeros(2), torch.zeros(4)
    fake_driver.sizes_of(f.PARAMETERS)
    out, _ = op.cache.op(q, t, plan)
    assert fake_driver.values() == [t.data_ptr(), out.data_ptr(), 7, 0.5, 0, 0]


def test_threads_share_no_parameters(fake_driver: FakeDriver) -> None:
    """Of many calls on four threads, each launch reads its own input and writes its own output."""
    op, plan, barrier = Op(), [torch.zeros(3)], threading.Barrier(4)
    op(torch.zeros(4), plan)
    fake_driver.set(echo=1)
    made: list[list[int]] = [[] for _ in range(4)]
    inputs = [torch.zeros(4) for _ in range(4)]

    def calls(i: int) -> None:
        barrier.wait()
        outputs = (op.cache.op(torch.zeros(2), inputs[i], plan)[0] for _ in range(500))
        made[i] = [int(out.view(torch.int64)[0, 0]) for out in outputs]

    threads = [threading.Thread(target=calls, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [[t.data_ptr()] * 500 for t in inputs]
    assert fake_driver.get("launches") == 2000
    assert op.misses == 1


@pytest.mark.parametrize("kind", ["tuple", "tensor", "none"])
def test_a_replay_returns_what_the_call_did(kind: str) -> None:
    outputs = {"tuple": (torch.empty(2, 3), torch.empty(0)), "tensor": torch.empty(5), "none": None}[kind]
    op, plan = Op(outputs=outputs if kind != "none" else ()), [torch.zeros(1)]
    if kind == "none":
        op._first_call = lambda args, kwargs: (None, CapturedCall([f.launched(op.image, args[1], args[0])], ()))  # type: ignore[method-assign]
        op.cache.first_call = op._first_call
    first, again = (op.cache.op(torch.zeros(2), torch.zeros(4), plan) for _ in range(2))
    assert type(again) is type(first)
    for old, new in zip(captured_call.outputs_of(first), captured_call.outputs_of(again), strict=True):
        assert (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)
        assert (new is old) == (old.numel() == 0)


def test_a_launch_that_the_driver_rejects_is_an_error(fake_driver: FakeDriver) -> None:
    op, plan = Op(), [torch.zeros(1)]
    op(torch.zeros(4), plan)
    fake_driver.set(answer_launch=700)
    with pytest.raises(RuntimeError, match=r"kernel: cannot be launched: as set by the test \(CUDA error 700\)"):
        op(torch.zeros(4), plan)
    fake_driver.set(answer_launch=0)
    assert op(torch.zeros(4), plan)


def test_views_of_an_argument_are_found_by_their_storage(fake_driver: FakeDriver) -> None:
    op, plan = Op(lambda args: args[1][2:]), [torch.zeros(1)]
    op(torch.zeros(6), plan)
    t = torch.zeros(6)
    assert op(t, plan)
    assert fake_driver.addresses()[0] == t.data_ptr() + 8


@pytest.mark.parametrize(
    ("x", "prepared"),
    {
        "of the plan": (lambda args: args[2][0], True),
        "unknown": (lambda args: torch.zeros(4), False),
        "empty, of the storage of an argument": (lambda args: args[1][:0], True),
        "empty, of another": (lambda args: torch.zeros(0), True),
    }.values(),
)
def test_a_tensor_is_known_or_the_call_is_not_prepared(x: Any, prepared: bool) -> None:
    op, plan = Op(x), [torch.zeros(4)]
    assert [op(torch.zeros(4), plan), op(torch.zeros(4), plan)] == [False, prepared]


def test_a_tensor_passed_twice_is_not_prepared() -> None:
    """The next call of this key may pass two tensors, of which only one would be read."""
    op, t = Op(), torch.zeros(4)
    assert not op(t, [torch.zeros(1)], sinks=t)
    assert not op.cache._entries


def test_a_view_of_two_arguments_is_not_prepared() -> None:
    storage = torch.zeros(12)
    op, plan = Op(lambda args: storage[1:5]), [torch.zeros(1)]
    assert [op(storage[:8], plan, sinks=storage[4:]) for _ in range(2)] == [False, False]


def test_a_tensor_passed_beside_its_plan_is_read_from_the_argument(fake_driver: FakeDriver) -> None:
    """The next call of this plan may pass another, which is not to be taken for the plan's."""
    op, t = Op(), torch.zeros(4)
    plan, other = [t], torch.zeros(4)
    assert [op(t, plan), op(other, plan)] == [False, True]
    assert fake_driver.addresses()[0] == other.data_ptr()


def test_a_plan_in_the_memory_of_an_argument_keeps_its_address(fake_driver: FakeDriver) -> None:
    storage = torch.zeros(16)
    plan, op = [storage[8:]], Op(lambda args: args[2][0])
    assert [op(storage[:4], plan), op(torch.zeros(4), plan)] == [False, True]
    assert fake_driver.addresses()[0] == plan[0].data_ptr()


CHANGES = {
    "shape": lambda t: torch.zeros(3, 8),
    "stride": lambda t: torch.zeros(8, 4).T[:4],
    "dtype": lambda t: t.double(),
    "alignment": lambda t: torch.zeros(17)[1:].view(4, 4),
    "alignment to 8 bytes": lambda t: torch.zeros(18)[2:].view(4, 4),
    "gradient": lambda t: t.clone().requires_grad_(),
    "type": torch.nn.Parameter,
}


@pytest.fixture
def cached() -> tuple[Op, list[Tensor]]:
    op, plan = Op(), [torch.zeros(3), torch.zeros(1)]
    assert not op(torch.zeros(4, 4), plan, causal=True)
    return op, plan


@pytest.mark.parametrize("change", CHANGES)
def test_the_key_contains_each_property_of_tensors(cached: tuple[Op, list[Tensor]], change: str) -> None:
    op, plan = cached
    assert op(torch.ones(4, 4), plan, causal=True)
    for replayed in (False, True):
        assert op(CHANGES[change](torch.ones(4, 4)), plan, causal=True) is replayed


def test_the_key_contains_options_plans_and_grad_mode(cached: tuple[Op, list[Tensor]]) -> None:
    op, plan = cached
    t = torch.ones(4, 4)
    assert op(t, plan, causal=True)
    assert not op(t, plan, causal=False)
    assert not op(t, plan, causal=1)
    assert not op(t, plan, other=True)
    assert not op(t, plan)
    assert not op(t, [plan[0], torch.zeros(1)], causal=True)
    assert not op(t, plan, causal=True, sinks=torch.ones(4, 4))
    with torch.no_grad():
        assert not op(t, plan, causal=True)


@pytest.mark.parametrize("takes_tensors", [False, True], ids=["op", "function"])
def test_the_key_contains_the_numbers_of_a_list(fake_driver: FakeDriver, takes_tensors: bool) -> None:
    """Not their addresses: once a number is freed, another may get its address."""
    entries: dict[Any, Any] = {}

    def on_miss(key: Any, args: Any, kwargs: Any) -> bool:
        entries[key] = lambda *args, **kwargs: True
        return False

    cache = op_cache.call_cache(entries, on_miss, on_cuda=True, takes_tensors=takes_tensors)
    t, window = torch.zeros(4), [1000, 0.5]
    assert not cache(t, window=window)
    ((_, *options),) = entries
    assert any(x is window[0] for x in options)
    assert cache(t, window=[int("1000"), float("0.5")])
    assert not cache(t, window=[1001, 0.5])


def test_a_list_of_tensors_of_a_function_is_not_cached(fake_driver: FakeDriver) -> None:
    """Nothing keeps them, and another tensor may get their address."""
    cache = op_cache.call_cache({}, lambda key, args, kwargs: key, on_cuda=True, takes_tensors=True)
    assert cache(torch.zeros(4), [1]) is not None
    assert cache(torch.zeros(4), [torch.zeros(4)]) is None


def test_the_key_contains_the_alignment_that_kernels_are_compiled_for() -> None:
    op, plan, storage = Op(), [torch.zeros(1)], torch.zeros(64, dtype=torch.uint8)
    start = -storage.data_ptr() % ALIGNMENT
    multiples, others = ([op(storage[start + ahead :][:8], plan) for ahead in (n, n + ALIGNMENT)] for n in (0, 1))
    assert (multiples, others) == ([False, True], [False, True])


def test_the_key_contains_capture(fake_driver: FakeDriver) -> None:
    op, t, plan = Op(), torch.ones(4), [torch.zeros(1)]
    assert [op(t, plan), op(t, plan)] == [False, True]
    fake_driver.set(capturing=1)
    assert [op(t, plan), op(t, plan)] == [False, True]


def test_a_thread_that_has_not_used_the_gpu_misses(fake_driver: FakeDriver) -> None:
    op, t, plan = Op(), torch.ones(4), [torch.zeros(1)]
    fake_driver.set(answer_device=201)
    assert [op(t, plan), op(t, plan)] == [False, False]
    assert not op.cache._entries


def test_calls_on_another_gpu_are_not_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    op, t, plan = Op(), torch.ones(4), [torch.zeros(1)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [op(t, plan), op(t, plan)] == [False, False]


def test_an_entry_is_evicted_with_its_plan(cached: tuple[Op, list[Tensor]]) -> None:
    op, plan = cached
    plan.clear()
    assert not op.cache._entries
    assert not op.cache._plans


@pytest.mark.parametrize("field", [0, 1])
def test_an_entry_is_evicted_with_any_tensor_of_its_plan(cached: tuple[Op, list[Tensor]], field: int) -> None:
    op, plan = cached
    del plan[field]
    assert not op.cache._entries
    assert not op.cache._plans


def test_the_cache_is_bounded() -> None:
    op, plan = Op(), [torch.zeros(1)]
    op.cache._entries.limit = 3
    for scale in range(20):
        op(torch.ones(4), plan, scale=scale)
        assert len(op.cache._entries) == len(op.cache._plans) <= 3
        assert op(torch.ones(4), plan, scale=scale)


def test_threads_that_fill_the_cache_leave_no_entry_without_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread finds the cache full; another inserts before the first one has dropped the plans too."""
    ops, plan, inserting = Op(), [torch.zeros(1)], threading.Event()
    ops.cache._entries.limit = 1
    clear = BoundedCache.clear

    def slow_clear(entries: BoundedCache[Any, Any]) -> None:
        clear(entries)
        if threading.current_thread() is not other:
            inserting.set()
            other.join(0.3)  # it waits for this thread, or has inserted

    def insert_another() -> None:
        inserting.wait()
        ops(torch.ones(4), [plan_of_other[0]], scale=2)

    plan_of_other = [torch.zeros(1)]
    other = threading.Thread(target=insert_another)
    ops(torch.ones(4), plan, scale=0)
    monkeypatch.setattr(BoundedCache, "clear", slow_clear)
    other.start()
    ops(torch.ones(4), plan, scale=1)
    other.join()
    assert ops.cache._entries.keys() == ops.cache._plans.keys()
    plan_of_other.clear()
    assert not ops.cache._entries or next(iter(ops.cache._plans.values()))[0]() is plan[0]


def test_an_interrupt_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler may raise in a check, which is Python code; after other errors there the call is a miss."""
    raised: list[type[BaseException]] = []

    def check() -> bool:
        if raised:
            raise raised.pop()
        return False

    entries: dict[Any, Any] = {}
    call = op_cache.call_cache(entries, lambda key, args, kwargs: key, (check,), on_cuda=False)
    assert call(1) is not None
    raised.append(ValueError)
    assert call(1) is None
    raised.append(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        call(1)
    assert call(1) is not None


def test_an_error_is_raised_and_nothing_inserted() -> None:
    def first_call(args: Any, kwargs: Any) -> Any:
        raise ValueError("bad")

    cache = OpCache("merge_state", f.unchecked, first_call)
    with pytest.raises(ValueError, match="bad"):
        cache.op(torch.zeros(1))
    assert not cache._entries


def test_without_the_module_every_call_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_cache, "extension", None)
    cache = OpCache("merge_state", f.unchecked, lambda args, kwargs: ((args, kwargs), None))
    assert [cache.op(1, scale=2) for _ in range(2)] == [((1,), {"scale": 2})] * 2


IMAGE_ROW = ("k", "k", b"", 90, 128, 0, False, (1, 1, 1))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda c, i: c.PreparedCall(((i, (1,), (1, 1, 1), ()),), ((-1, 64),), (), True), IndexError),
        (lambda c, i: c.PreparedCall(((i, (0,), (1, 1), ()),), ((-1, 64),), (), True), ValueError),
        (lambda c, i: c.PreparedCall((), ((64, 0),), (), True), IndexError),
        (lambda c, i: c.PreparedCall((), ((-2, 0),), (), True), IndexError),
        (lambda c, i: c.PreparedCall((), (), (64,), True), IndexError),
        (lambda c, i: c.PreparedCall((), ((-1, 1),) * 129, (), True), ValueError),
        (lambda c, i: c.PreparedCall((), ((0, 0),), (), True).launch(0, STREAM), TypeError),
        (lambda c, i: c.PreparedCall((), (), (0,), True).launch(0, STREAM), TypeError),
        (lambda c, i: c.Image(*IMAGE_ROW, ((0, 6, 0, 2, (1,) * 6),), ()), ValueError),
        (lambda c, i: c.Image(*IMAGE_ROW, (), ((0, 0, "x"),) * 129), ValueError),
        (lambda c, i: i.load(64), RuntimeError),
        (lambda c, i: c.CallCache({}, torch.is_grad_enabled, print, (), True, True)(0, None, ()), TypeError),
        (lambda c, i: c.CallCache({}, torch.is_grad_enabled, print, (), True, True)(0, None, [], {}), TypeError),
        (lambda c, i: c.CallCache({}, torch.is_grad_enabled, print, (), True, True)(0, None, (), None), TypeError),
    ],
)
def test_the_module_refuses_what_does_not_fit(make: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make(extension, f.load())
