"""Which calls of prepared methods are replayed, and on which tensors, with a fake driver."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from helpers import fake_driver as f
from helpers.fake_driver import FakeDriver
from torch import Tensor

import attn_ops
from attn_ops.eager import op_cache, prepared_call
from attn_ops.eager.captured_call import CapturedCall, outputs_of
from attn_ops.eager.op_call import OpCall
from attn_ops.eager.prepared_call import PreparedCalls, prepared
from attn_ops.eager.recorded_calls import Recording
from attn_ops.frontend import planned_batch
from attn_ops.ops.checks import CHECKS

pytestmark = [f.needs_the_module, pytest.mark.usefixtures("fake_driver")]


class FakeCache:
    """The cache of an op that runs on the CPU. Each call counts, and is captured as one launch on two of its tensors.

    They are its tensors number ``a`` and ``b``; number 4 is the first output.
    """

    def __init__(self, op: str, a: int, b: int) -> None:
        self.op, self.a, self.b, self.captures = getattr(torch.ops.attn, op), a, b, True
        self.image = f.load()

    def check(self, args: Any, kwargs: Any) -> None:
        CHECKS[self.op.__name__](*args, **kwargs)

    def first_call(self, args: Any, kwargs: Any) -> Any:
        result = self.op(*args, **kwargs)
        outputs = outputs_of(result)
        tensors = [x for x in args if isinstance(x, Tensor)][:4]
        tensors += [*outputs]
        launch = f.launched(self.image, tensors[self.a], tensors[self.b])
        return result, CapturedCall([launch], outputs) if self.captures else None


class Merger:
    """Merges two states, packed in one tensor each, or with one of its own."""

    def __init__(self) -> None:
        self.prepared, self.number = PreparedCalls(), 1
        self.own, self.calls, self.is_prepared = torch.zeros(4, 2, 8), 0, True

    def _prepared_calls(self) -> tuple[PreparedCalls, int] | None:
        return (self.prepared, self.number) if self.is_prepared else None

    def _constants(self) -> list[Tensor]:
        return [self.own]

    @prepared
    def merge(self, v: Tensor, s: Tensor, scale: Any = 1.0) -> OpCall:
        self.calls += 1
        call = OpCall("merge_state", (v[0], s[0], v[1], s[1]), {}, unpack=False)
        if scale == 1.0:
            return call
        return call._replace(finalize=lambda out, lse: (out * scale, lse), destinations=None)

    @prepared
    def merge_into(self, v: Tensor, s: Tensor, out: Tensor) -> OpCall:
        self.calls += 1
        arguments = v[0], s[0], v[1], s[1]
        return OpCall("merge_state", arguments, {}, lambda merged, lse: out.copy_(merged), (out, None))

    @prepared
    def merge_own(self, states: Any) -> OpCall:
        self.calls += 1
        v, s = states
        return OpCall("merge_state", (v, s, self.own, s), {}, lambda merged, lse: merged)


@pytest.fixture
def merger(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Merger:
    """Its op launches one kernel, on its third and first tensor."""
    monkeypatch.setitem(op_cache.OP_CACHES, "merge_state", FakeCache("merge_state", 2, 0))
    return Merger()


def _states() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2)


def _replays(merger: Merger, *args: Any, **kwargs: Any) -> bool:
    """Whether the second of two calls is a replay."""
    merger.merge(*args, **kwargs)
    before = merger.calls
    merger.merge(*args, **kwargs)
    return merger.calls == before


def test_views_of_the_arguments_are_located(merger: Merger, fake_driver: FakeDriver) -> None:
    first = merger.merge(*_states())
    assert [t.shape for t in first] == [(4, 2, 8), (4, 2)]
    for _ in range(2):
        v, s = _states()
        out = merger.merge(v, s)
        assert merger.calls == 1
        assert [t.shape for t in out] == [(4, 2, 8), (4, 2)]
    assert fake_driver.get("launches") == 2
    assert fake_driver.addresses() == [v[1].data_ptr(), v.data_ptr()]


def test_tensors_of_the_owner_and_in_tuples_are_located(merger: Merger, fake_driver: FakeDriver) -> None:
    v, s = _states()
    assert merger.merge_own((v[0], s[0])).shape == (4, 2, 8)
    assert merger.merge_own((v[1], s[1])).shape == (4, 2, 8)
    assert merger.calls == 1
    assert fake_driver.addresses() == [merger.own.data_ptr(), v[1].data_ptr()]


def test_a_replay_writes_to_the_output_buffer(merger: Merger, fake_driver: FakeDriver) -> None:
    op_cache.OP_CACHES["merge_state"] = FakeCache("merge_state", 4, 0)  # type: ignore[assignment]
    for calls in (1, 1):
        v, s, out = *_states(), torch.zeros(4, 2, 8)
        assert merger.merge_into(v, s, out) is out
        assert merger.calls == calls
    assert fake_driver.addresses() == [out.data_ptr(), v.data_ptr()]


@pytest.mark.parametrize("kind", ["of another dtype", "transposed", "not aligned", "among the arguments"])
def test_an_unsuitable_buffer_is_copied_to(merger: Merger, kind: str) -> None:
    v, s = _states()
    out = {
        "of another dtype": torch.zeros(4, 2, 8).double(),
        "transposed": torch.zeros(2, 4, 8).transpose(0, 1),
        "not aligned": torch.zeros(65)[1:].view(4, 2, 8),
        "among the arguments": v[0],
    }[kind]
    for calls in (1, 2):
        assert merger.merge_into(v, s, out) is out
        assert merger.calls == calls


def test_a_buffer_that_overlaps_an_argument_is_copied_to(merger: Merger) -> None:
    v, s = _states()
    merger.merge_into(v, s, torch.zeros(4, 2, 8))
    merger.merge_into(v, s, torch.zeros(4, 2, 8))
    assert merger.calls == 1
    merger.merge_into(v, s, v[1])
    assert merger.calls == 2


def test_the_number_of_the_owner_is_part_of_the_key(merger: Merger) -> None:
    assert _replays(merger, *_states())
    merger.number = 2
    merger.merge(*_states())
    assert merger.calls == 2
    merger.is_prepared = False
    assert not _replays(merger, *_states())


def test_a_result_that_is_computed_is_not_replayed(merger: Merger) -> None:
    assert not _replays(merger, *_states(), scale=2.0)
    assert _replays(merger, *_states())


def test_an_op_that_is_not_captured_is_not_replayed(merger: Merger) -> None:
    op_cache.OP_CACHES["merge_state"].captures = False  # type: ignore[attr-defined]
    assert not _replays(merger, *_states())


def test_a_tensor_that_is_neither_argument_nor_owned_is_not_replayed(merger: Merger) -> None:
    v, s = _states()
    merger._constants = lambda: []  # type: ignore[method-assign]
    for calls in (1, 2):
        merger.merge_own((v[0], s[0]))
        assert merger.calls == calls


def test_two_arguments_of_one_storage_are_not_replayed(merger: Merger) -> None:
    both = torch.zeros(144)
    assert not _replays(merger, both[:128].view(2, 4, 2, 8), both[128:].view(2, 4, 2))


@pytest.mark.parametrize(
    "change",
    {
        "list": lambda v, s: ([v, s],),
        "subclass": lambda v, s: ((v.as_subclass(type("Other", (Tensor,), {})), s),),
    }.items(),
    ids=lambda item: item[0],
)
def test_lists_and_subclasses_are_not_cached(merger: Merger, change: Any) -> None:
    v, s = _states()
    given = change[1](v[0], s[0])
    for calls in (1, 2):
        merger.merge_own(*given)
        assert merger.calls == calls


def test_options_without_a_hash_are_not_cached(merger: Merger) -> None:
    class Scale(float):
        __hash__ = None  # type: ignore[assignment]

    assert not _replays(merger, *_states(), scale=Scale(1.0))


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_interposed_modes_and_profilers_observe_the_op(merger: Merger) -> None:
    states = _states()
    assert _replays(merger, *states)
    with Mode() as mode:
        merger.merge(*states)
    assert "attn.merge_state.default" in mode.seen
    with torch.profiler.profile() as profile:
        merger.merge(*states)
    assert any(event.name == "attn::merge_state" for event in profile.events())
    traced = torch.jit.trace(lambda v, s: merger.merge(v, s), states, check_trace=False)
    assert "attn::merge_state" in str(traced.graph)
    with torch.device("cpu"):
        merger.merge(*states)
    assert merger.calls == 1 + 4
    merger.merge(*states)
    assert merger.calls == 1 + 4


@pytest.mark.usefixtures("merger")
def test_prepared_calls_do_not_keep_the_owner_alive() -> None:
    other = Merger()
    assert _replays(other, *_states())
    kept, owner = other.prepared, weakref.ref(other)
    del other
    assert kept
    assert owner() is None


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda owner: pickle.loads(pickle.dumps(owner))])
def test_a_copy_of_the_owner_has_its_own_prepared_calls(merger: Merger, duplicate: Any) -> None:
    assert _replays(merger, *_states())
    other = duplicate(merger)
    assert _replays(other, *_states())
    assert (merger.calls, other.calls) == (1, 2)


def _wrapper() -> tuple[Any, list[Tensor]]:
    wrapper = attn_ops.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    return wrapper, [torch.tensor(t, dtype=torch.int32) for t in ([0, 2, 3], [4, 1, 2], [3, 16])]


def _plan(wrapper: Any, table: list[Tensor], **options: Any) -> None:
    wrapper.plan(*table, 4, 2, 16, 16, q_data_type=torch.float32, **options)


@pytest.fixture
def count_launches(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``count_launches()``: how many launches the fake driver has counted, one for each replay."""
    for op in ("batch_decode", "ragged_prefill"):
        monkeypatch.setitem(op_cache.OP_CACHES, op, FakeCache(op, 0, 2))
    monkeypatch.setattr(planned_batch, "new_caches", lambda device, number, on_cpu: (PreparedCalls(), number))
    return lambda: fake_driver.get("launches")


def test_a_wrapper_replays_until_its_plan_options_change(count_launches: Any) -> None:
    wrapper, table = _wrapper()
    q, cache = torch.zeros(2, 4, 16), torch.zeros(5, 2, 16, 2, 16)

    def repeated() -> bool:
        before = count_launches()
        wrapper.run(q, cache)
        return count_launches() > before

    _plan(wrapper, table)
    assert [repeated(), repeated()] == [False, True]
    _plan(wrapper, [table[0], table[1].flip(0), table[2] - 1])
    assert repeated()
    wrapper.reset_workspace_buffer(torch.empty(1 << 20, dtype=torch.uint8))
    assert [repeated(), repeated()] == [False, True]
    for options in ({"sm_scale": 0.5}, {"window_left": 3}, {"logits_soft_cap": 2.0}, {}):
        _plan(wrapper, table, **options)
        assert [repeated(), repeated()] == [False, True]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sm_scale": 2, "logits_soft_cap": 3}, {"sm_scale": 2.0, "logits_soft_cap": 3.0, "window_left": -1}),
        ({"sm_scale": None, "window_left": 4}, {"sm_scale": None, "window_left": 4}),
        ({"out_dtype": torch.float32, "sinks": None}, {"out_dtype": torch.float32, "sinks": None}),
        ({"out_dtype": "float32"}, None),
        ({"window_left": True}, None),
        ({"window_left": 4.0}, None),
        ({"sm_scale": torch.zeros(())}, None),
        ({"sm_scale": 1 << 1024}, None),
    ],
)
def test_options_are_those_that_the_dispatcher_passes_on(options: Any, expected: Any) -> None:
    """A prepared method makes its first call without the dispatcher."""
    call = OpCall("batch_decode", (), {"window_left": -1, **options})
    found = call.as_dispatched()
    assert (found is None) == (expected is None)
    for name, value in (expected or {}).items():
        assert (type(found[name]), found[name]) == (type(value), value)


def test_a_call_is_checked_before_those_that_are_made_first(merger: Merger, monkeypatch: pytest.MonkeyPatch) -> None:
    """These may write to the cache."""
    v, s = torch.ones(4, 2, 8), torch.zeros(4, 2)
    write = OpCall("merge_state", (v, s, v, s), {})
    cache, made = op_cache.OP_CACHES["merge_state"], []
    first_call = cache.first_call
    monkeypatch.setattr(cache, "first_call", lambda args, kwargs: made.append(args) or first_call(args, kwargs))
    bad = write._replace(args=(v, s, v, torch.zeros(4, 3)), before=(write,))
    with pytest.raises(attn_ops.errors.ShapeError, match="s_b"):
        prepared_call.first_call(bad, (), (), Recording())
    assert not made
    prepared_call.first_call(write._replace(before=(write,)), (), (), Recording())
    assert len(made) == 2


def test_a_batch_of_other_rows_is_checked(count_launches: Any) -> None:
    wrapper, table = _wrapper()
    q, cache = torch.zeros(2, 4, 16), torch.zeros(5, 2, 16, 2, 16)
    _plan(wrapper, table)
    for _ in range(2):
        wrapper.run(q, cache)
    _plan(wrapper, [table[0][:2], table[1], table[2][:1]])
    with pytest.raises(attn_ops.errors.ShapeError, match="q has 2 rows"):
        wrapper.run(q, cache)
    _plan(wrapper, table)
    before = count_launches()
    wrapper.run(q, cache)
    assert count_launches() == before + 1


def test_a_batch_of_more_ragged_keys_is_checked(count_launches: Any) -> None:
    wrapper = attn_ops.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    q, k = torch.zeros(3, 4, 16), torch.zeros(8, 2, 16)

    def plan(keys: int) -> None:
        indptrs = (torch.tensor([0, 1, last], dtype=torch.int32) for last in (3, keys))
        wrapper.plan(*indptrs, 4, 2, 16, q_data_type=torch.float32)

    plan(8)
    v = torch.zeros(8, 2, 16)
    for count in (0, 1):
        wrapper.run(q, k, v)
        assert count_launches() == count
    plan(9)
    with pytest.raises(attn_ops.errors.ShapeError, match="k and v have 8 rows; expected 9"):
        wrapper.run(q, k, v)
