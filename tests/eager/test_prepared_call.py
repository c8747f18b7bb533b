"""Which calls of prepared methods are replayed, and on which tensors, with a fake driver."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from helpers.fake_driver import SCALARS_AND_CONSTANTS, FakeDriver, compiled, needs_a_compiler
from torch import Tensor

pytest.importorskip("triton")

from attn_ops.kernels.triton import cubin

import attn_ops
from attn_ops.eager import launch_cache, prepared_call
from attn_ops.eager.prepared_call import PreparedMethods, prepared

pytestmark = [needs_a_compiler, pytest.mark.usefixtures("fake_driver", "loads")]


class OneEntry:
    """A launch cache with one entry for all calls: one launch, on the op's tensors number ``a`` and ``b``."""

    def __init__(self, num_tensors: int, a: int, b: int, outputs: tuple[Any, ...] = (torch.empty(0),) * 2) -> None:
        kernel = cubin.load_kernel(compiled())
        assert kernel is not None
        launch = kernel.launch_tuple((1,), (a, None, b, *SCALARS_AND_CONSTANTS))
        self.entry = launch_cache.native().PreparedCall((launch,), num_tensors, outputs, False)

    def lookup(self, args: Any, kwargs: Any) -> Any:
        return self.entry


class Merger:
    """Merges two states, packed in one tensor each, or with one of its own."""

    def __init__(self) -> None:
        self._prepared_methods = PreparedMethods()
        self.own, self.calls, self.key = torch.zeros(4, 2, 8), 0, 1

    def _cache_key(self) -> int | None:
        return self.key

    def _owned_tensors(self) -> list[Tensor]:
        return [self.own]

    @prepared
    def merge(self, v: Tensor, s: Tensor, scale: Any = 1.0) -> Any:
        self.calls += 1
        out = torch.ops.attn.merge_state(v[0], s[0], v[1], s[1])
        return (out[0] * scale, out[1]) if scale != 1.0 else out

    @prepared
    def merge_into(self, v: Tensor, s: Tensor, out: Tensor) -> Any:
        self.calls += 1
        return out.copy_(torch.ops.attn.merge_state(v[0], s[0], v[1], s[1])[0])

    @prepared
    def merge_and_count(self, v: Tensor, s: Tensor) -> Any:
        self.calls += 1
        self.own += 1
        return torch.ops.attn.merge_state(v[0], s[0], v[1], s[1])

    @prepared
    def merge_own(self, states: Any) -> Any:
        self.calls += 1
        v, s = states
        return torch.ops.attn.merge_state(v, s, self.own, s)[0]


@pytest.fixture
def merger(loads: list[Any], monkeypatch: pytest.MonkeyPatch) -> Merger:
    """The op has a prepared call that launches on its third and first tensor and returns outputs without elements."""
    monkeypatch.setitem(prepared_call.LAUNCH_CACHES, "merge_state", OneEntry(4, 2, 0))
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
        assert [t.numel() for t in out] == [0, 0]
        assert fake_driver.values()[:2] == [v[1].data_ptr(), v.data_ptr()]


def test_tensors_of_the_owner_and_in_tuples_are_located(merger: Merger, fake_driver: FakeDriver) -> None:
    v, s = _states()
    assert merger.merge_own((v[0], s[0])).shape == (4, 2, 8)
    assert merger.merge_own((v[1], s[1])).numel() == 0
    assert merger.calls == 1
    assert fake_driver.values()[:2] == [merger.own.data_ptr(), v[1].data_ptr()]


def test_a_replay_writes_to_the_output_buffer(merger: Merger, fake_driver: FakeDriver) -> None:
    prepared_call.LAUNCH_CACHES["merge_state"] = OneEntry(4, 4, 0)  # type: ignore[assignment]
    for calls in (1, 1):
        v, s, out = *_states(), torch.zeros(4, 2, 8)
        assert merger.merge_into(v, s, out) is out
        assert merger.calls == calls
    assert fake_driver.values()[:2] == [out.data_ptr(), v.data_ptr()]


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


def test_the_key_of_the_owner_is_part_of_the_key(merger: Merger) -> None:
    assert _replays(merger, *_states())
    merger.key = 2
    merger.merge(*_states())
    assert merger.calls == 2
    merger.key = None
    assert not _replays(merger, *_states())


def test_a_method_that_computes_beside_its_op_is_not_replayed(merger: Merger) -> None:
    for calls in (1, 2):
        merger.merge_and_count(*_states())
        assert merger.calls == calls
        assert (merger.own == calls).all()


def test_a_method_that_computes_is_not_replayed(merger: Merger) -> None:
    assert not _replays(merger, *_states(), scale=2.0)
    assert _replays(merger, *_states())


def test_an_op_without_an_entry_is_not_replayed(merger: Merger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_call.LAUNCH_CACHES["merge_state"], "entry", None)
    assert not _replays(merger, *_states())


def test_a_tensor_that_is_neither_argument_nor_owned_is_not_replayed(merger: Merger) -> None:
    v, s = _states()
    merger.merge_own((v[0], s[0]))
    merger.key, merger.own, other = 2, torch.ones(4, 2, 8), torch.zeros(0)
    merger._owned_tensors = lambda: [other]  # type: ignore[method-assign]
    for calls in (2, 3):
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
    for calls in (1, 2):
        merger.merge_own(*change[1](v[0], s[0]))
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


def test_a_compiled_call_is_one_op(merger: Merger, monkeypatch: pytest.MonkeyPatch) -> None:
    states = _states()
    assert _replays(merger, *states)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # Dynamo reads the properties of an existing GPU
    v, s = torch.compile(lambda v, s: merger.merge(v, s), fullgraph=True, backend="aot_eager")(*states)
    assert (v.shape, s.shape) == ((4, 2, 8), (4, 2))


@pytest.mark.usefixtures("merger")
def test_prepared_methods_do_not_keep_the_owner_alive() -> None:
    other = Merger()
    assert _replays(other, *_states())
    kept, owner = list(other._prepared_methods.values()), weakref.ref(other)
    del other
    assert kept
    assert owner() is None


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda owner: pickle.loads(pickle.dumps(owner))])
def test_a_copy_of_the_owner_has_its_own_prepared_methods(merger: Merger, duplicate: Any) -> None:
    assert _replays(merger, *_states())
    other = duplicate(merger)
    assert _replays(other, *_states())
    assert (merger.calls, other.calls) == (1, 2)


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _wrapper() -> tuple[Any, list[Tensor]]:
    wrapper = attn_ops.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    return wrapper, [torch.tensor(t, dtype=torch.int32) for t in ([0, 2, 3], [4, 1, 2], [3, 16])]


def _plan(wrapper: Any, table: list[Tensor], **options: Any) -> None:
    wrapper.device = CPU
    wrapper.plan(*table, 4, 2, 16, 16, q_data_type=torch.float32, **options)
    wrapper.device = CUDA


def test_a_wrapper_replays_until_its_plan_options_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prepared_call.LAUNCH_CACHES, "batch_decode", OneEntry(4, 0, 2))
    wrapper, table = _wrapper()
    q, cache = torch.zeros(2, 4, 16), torch.zeros(5, 2, 16, 2, 16)

    def repeated() -> bool:
        return wrapper.run(q, cache).numel() == 0

    _plan(wrapper, table)
    assert [repeated(), repeated()] == [False, True]
    _plan(wrapper, [table[0], table[1].flip(0), table[2] - 1])
    assert repeated()
    wrapper.device = CPU
    wrapper.reset_workspace_buffer(torch.empty(1 << 20, dtype=torch.uint8))
    wrapper.device = CUDA
    assert [repeated(), repeated()] == [False, True]
    for options in ({"sm_scale": 0.5}, {"window_left": 3}, {"logits_soft_cap": 2.0}, {}):
        _plan(wrapper, table, **options)
        assert [repeated(), repeated()] == [False, True]
    wrapper.anything = "else"
    _plan(wrapper, table)
    assert [repeated(), repeated()] == [False, True]


def test_a_batch_of_other_rows_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prepared_call.LAUNCH_CACHES, "batch_decode", OneEntry(4, 0, 2))
    wrapper, table = _wrapper()
    q, cache = torch.zeros(2, 4, 16), torch.zeros(5, 2, 16, 2, 16)
    _plan(wrapper, table)
    for _ in range(2):
        wrapper.run(q, cache)
    _plan(wrapper, [table[0][:2], table[1], table[2][:1]])
    with pytest.raises(attn_ops.errors.ShapeError, match="q has 2 rows"):
        wrapper.run(q, cache)
    _plan(wrapper, table)
    assert wrapper.run(q, cache).numel() == 0


def test_a_batch_of_more_ragged_keys_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prepared_call.LAUNCH_CACHES, "ragged_prefill", OneEntry(4, 0, 2))
    wrapper = attn_ops.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    q, k = torch.zeros(3, 4, 16), torch.zeros(8, 2, 16)

    def plan(keys: int) -> None:
        wrapper.device = CPU
        indptrs = (torch.tensor([0, 1, last], dtype=torch.int32) for last in (3, keys))
        wrapper.plan(*indptrs, 4, 2, 16, q_data_type=torch.float32)
        wrapper.device = CUDA

    plan(8)
    assert [wrapper.run(q, k, k).numel() == 0 for _ in range(2)] == [False, True]
    plan(9)
    with pytest.raises(attn_ops.errors.ShapeError, match="k and v have 8 rows; expected 9"):
        wrapper.run(q, k, k)
