"""Repeated calls of functions and methods on the CPU: when the first of a key is repeated, and on which tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import fake_driver as f
from helpers import oracle
from helpers.flash_requests import check_dense, dense, expected
from helpers.wrapper_requests import DEVICE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attn_ops
from attn_ops.eager.op_call import Lookup, OpCall
from attn_ops.eager.prepared_call import prepared_function
from attn_ops.errors import AttnOpsError, GradientError, OptionError, PageTableError
from attn_ops.flash_attn import flash_attn_func, flash_attn_with_kvcache, get_scheduler_metadata
from attn_ops.frontend.flash import arguments

pytestmark = [f.needs_the_module, pytest.mark.skipif(DEVICE != "cpu", reason="calls on the CPU")]


def states(n: int = 4) -> list[Tensor]:
    """``v, s`` of two states of ``n`` rows."""
    return [torch.randn(n, 2, 8), torch.randn(n, 2), torch.randn(n, 2, 8), torch.randn(n, 2)]


class Function:
    """A function over ``merge_state``, the calls of its body, and the fields of its :class:`OpCall`."""

    def __init__(self, args: Callable[..., tuple[Any, ...]] = lambda *given: given, **fields: Any) -> None:
        self.bodies, self.args, self.fields = 0, args, {"repeatable": True, **fields}
        self.function = prepared_function(self._body)

    def _body(self, *given: Any, **_: Any) -> OpCall:
        self.bodies += 1
        fields = {name: make(*given) if callable(make) else make for name, make in self.fields.items()}
        return OpCall("merge_state", self.args(*given), {}, **fields)

    def check(self, *given: Any, **more: Any) -> int:
        """Call it, and compare with the oracle; how often its body ran."""
        before = self.bodies
        out, lse = self.function(*given, **more)
        v_a, s_a, v_b, s_b = (t.double() for t in self.args(*given))
        merged, merged_lse = oracle.merge(torch.stack((v_a, v_b), 1), torch.stack((s_a, s_b), 1))
        torch.testing.assert_close(out.double(), merged, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse.double(), merged_lse, rtol=1e-5, atol=1e-6)
        return self.bodies - before


def test_a_function_is_repeated_on_other_tensors() -> None:
    function = Function()
    assert [function.check(*states()) for _ in range(3)] == [1, 0, 0]
    assert [function.check(*states(5)) for _ in range(2)] == [1, 0]
    assert function.check(*states()) == 0
    doubles = [t.double() for t in states()[::2]]
    with pytest.raises(AttnOpsError):
        function.function(doubles[0], states()[1], doubles[1], states()[3])


def test_views_are_taken_of_each_call() -> None:
    function = Function(lambda v, s: (v[0], s[0], v[1], s[1]))
    assert [function.check(torch.randn(2, 4, 2, 8), torch.randn(2, 4, 2)) for _ in range(3)] == [1, 0, 0]
    beginning = torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2)
    assert function.check(beginning[0][1:], beginning[1][1:]) == 0


def test_it_keeps_no_tensor_of_a_caller() -> None:
    function, given = Function(), states()
    function.check(*given)
    kept = [weakref.ref(t) for t in given]
    del given
    assert all(t() is None for t in kept)


@pytest.mark.parametrize("reason", ["computes a tensor", "has a buffer", "has an argument that no op takes"])
def test_what_depends_on_more_runs_as_written(reason: str) -> None:
    rest: list[Tensor] = []
    function = Function()
    if reason == "computes a tensor":
        function = Function(lambda v, *others: (v * 2, *others))
    elif reason == "has a buffer":
        function = Function(repeatable=False)
    else:
        function, rest = Function(lambda *given: given[:4]), [torch.zeros(1)]
    assert [function.check(*states(), *rest) for _ in range(3)] == [1, 1, 1]


def test_looked_up_tensors_are_found_in_each_call() -> None:
    others, found = states(), []

    def find(by: Tensor) -> Any:
        found.append(int(by))
        return others[2:] if int(by) >= 0 else None

    function = Function(
        lambda v, s, *_: (v, s, *others[2:]), lookup=lambda v, s, by: Lookup((by,), tuple(others[2:]), find)
    )
    bodies = [function.check(*states()[:2], torch.tensor(i)) for i in (1, 2, -1, 3)]
    assert (bodies, found) == ([1, 0, 1, 0], [2, -1, 3])


class Observer(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_mode_observes_the_op() -> None:
    given = dense(1, 5, 9, dtype=torch.float32)
    for _ in range(2):
        flash_attn_func(*given)
    with Observer() as observer:
        flash_attn_func(*given)
    assert "attn::single_prefill" in observer.seen


# ------------------------------------------------------------------------------------------ functions over a KV cache


class Cache:
    """A cache of 3 requests, dense or in pages of 16, and the functions' arguments."""

    def __init__(self, paged: bool, appended: int) -> None:
        self.k, self.v = torch.randn(2, 3, 64, 2, 16)
        self.seqlens = torch.tensor([20, 30, 7], dtype=torch.int32)
        self.table, self.appended = torch.randperm(12).int().view(3, 4), appended
        self.given: dict[str, Any] = {"k_cache": self.k, "v_cache": self.v, "cache_seqlens": self.seqlens}
        if paged:
            self.given["block_table"] = self.table
            for name in ("k_cache", "v_cache"):
                self.given[name] = self.given[name].view(12, 16, 2, 16)

    def dense(self, name: str) -> Tensor:
        """A copy of a cache, ``[3, 64, heads, dim]``."""
        cache = self.given[name]
        return (cache[self.table.long()].flatten(1, 2) if "block_table" in self.given else cache).clone()

    def run(self, **more: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One call: new queries, new tokens of both caches, output and LSE."""
        q, new = torch.randn(3, max(1, self.appended), 4, 16), torch.randn(2, 3, self.appended, 2, 16)
        tokens = {"k": new[0], "v": new[1]} if self.appended else {}
        out, lse = flash_attn_with_kvcache(q, **self.given, **tokens, causal=True, return_softmax_lse=True, **more)
        return q, new, out, lse

    def call(self, **more: Any) -> None:
        """One call, which is compared with the oracle; also what it appends."""
        caches = self.dense("k_cache"), self.dense("v_cache")
        q, new, out, lse = self.run(**more)
        ends = [length + self.appended for length in self.seqlens.tolist()]
        for b, end in enumerate(ends):
            for cache, t in zip(caches, new, strict=True):
                cache[b, end - self.appended : end] = t[b]
        want = expected([(q[b], caches[0][b, :end], caches[1][b, :end]) for b, end in enumerate(ends)], causal=True)
        check_dense(want, out, lse)
        for name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
            torch.testing.assert_close(self.dense(name), cache, rtol=0, atol=0)


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], int]:
    """How often a call runs the body of a function of FlashAttention."""
    counted, options = [0], arguments.options

    def count(*args: Any, **kwargs: Any) -> Any:
        counted[0] += 1
        return options(*args, **kwargs)

    def of(call: Callable[[], Any]) -> int:
        before = counted[0]
        call()
        return counted[0] - before

    monkeypatch.setattr(arguments, "options", count)
    return of


@pytest.mark.parametrize("appended", [0, 1, 3])
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_contents_are_those_of_each_call(paged: bool, appended: int, bodies: Any) -> None:
    """Lengths, page tables and caches change in place; the body of the function runs once."""
    cache = Cache(paged, appended)
    assert bodies(cache.call) == 1
    for _ in range(3):
        assert bodies(cache.call) == 0
        cache.seqlens += torch.tensor([1, 3, 2], dtype=torch.int32)
        cache.table.copy_(torch.randperm(12).view(3, 4))
        cache.k.normal_()
    cache.given["cache_seqlens"] = cache.seqlens = cache.seqlens.clone()
    assert bodies(cache.call) == 0


@pytest.mark.parametrize("appended", [0, 2])
def test_contents_are_checked_in_each_call(appended: int) -> None:
    """Nothing is written, and the message is that of a call that no other preceded."""
    cache = Cache(True, appended)
    cache.call()
    good, table = cache.seqlens.clone(), cache.table.clone()

    def spoil(change: Callable[[], Any], error: type[AttnOpsError], words: str) -> None:
        before = cache.k.clone()
        change()
        for _ in range(2):
            with pytest.raises(error, match=words):
                cache.run()
        assert torch.equal(cache.k, before)
        cache.seqlens.copy_(good), cache.table.copy_(table)
        cache.call()

    spoil(lambda: cache.seqlens.fill_(65), PageTableError, r"65 tokens|67 tokens|capacity for 64")
    spoil(lambda: cache.seqlens.fill_(-1), PageTableError, "has a length of -1")
    spoil(lambda: cache.table.fill_(12), PageTableError, r"block_table\[0, 0\] is 12")
    spoil(lambda: cache.table[1].fill_(-1), PageTableError, r"block_table\[1, 0\] is -1")


def test_a_table_that_was_good_for_a_larger_cache() -> None:
    q, seqlens = torch.randn(1, 1, 4, 16), torch.tensor([20], dtype=torch.int32)
    large, small = torch.randn(2, 8, 16, 2, 16), torch.randn(2, 4, 16, 2, 16)
    good, bad = torch.tensor([[1, 3]]).int(), torch.tensor([[7, 3]]).int()
    for _ in range(2):
        flash_attn_with_kvcache(q, *small, cache_seqlens=seqlens, block_table=good)
        flash_attn_with_kvcache(q, *large, cache_seqlens=seqlens, block_table=bad)
    for _ in range(2):
        with pytest.raises(PageTableError, match=r"block_table\[0, 0\] is 7"):
            flash_attn_with_kvcache(q, *small, cache_seqlens=seqlens, block_table=bad)


def test_given_metadata_is_checked_in_each_call(bodies: Any) -> None:
    cache = Cache(True, 1)
    lengths = {"cache_seqlens": cache.seqlens, "block_table": cache.table, "max_seqlen_k_new": 1, "causal": True}
    made = get_scheduler_metadata(3, 1, 64, 4, 2, 16, page_size=16, **lengths)
    assert [bodies(lambda: cache.call(scheduler_metadata=made)) for _ in range(3)] == [1, 0, 0]
    made.plan.kv_indices[0] = 12
    before = cache.k.clone()
    for _ in range(2):
        with pytest.raises(PageTableError, match="12"):
            cache.run(scheduler_metadata=made)
    assert torch.equal(cache.k, before)


def test_options_that_are_read_from_tensors() -> None:
    q, k, v = dense(1, 5, 9, dtype=torch.float32)
    sinks, window = torch.zeros(4), torch.tensor([2, 0])
    for left in (2, 0, 5):
        window[0] = left
        sinks.normal_()
        out = flash_attn_func(q, k, v, window_size=window, s_aux=sinks)
        check_dense(expected([(q[0], k[0], v[0])], window_size=(left, 0), s_aux=sinks), out)
    sinks[1] = torch.nan
    with pytest.raises(OptionError, match="s_aux has a NaN"):
        flash_attn_func(q, k, v, window_size=window, s_aux=sinks)


def test_gradients_are_refused_after_calls_that_passed() -> None:
    given = dense(1, 5, 9, dtype=torch.float32)
    for _ in range(2):
        flash_attn_func(*given)
    with pytest.raises(GradientError):
        flash_attn_func(given[0].clone().requires_grad_(), *given[1:])


@pytest.mark.parametrize("return_lse", [False, True])
def test_functions_of_one_request(return_lse: bool) -> None:
    for _ in range(3):
        q, k, v = torch.randn(5, 4, 16), *torch.randn(2, 9, 2, 16)
        found = attn_ops.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=return_lse)
        out, lse = found if return_lse else (found, None)
        expected([(q, k, v)], causal=True).check(out, lse)
        found = attn_ops.single_decode_with_kv_cache(q[0], k, v, return_lse=return_lse)
        out, lse = (t[None] for t in found) if return_lse else (found[None], None)
        expected([(q[:1], k, v)]).check(out, lse)


def test_tensors_in_a_list_run_as_written() -> None:
    function = Function(lambda *given: (*given[:2], *given[2]))
    for _ in range(3):
        v_a, s_a, v_b, s_b = states()
        assert function.check(v_a, s_a, [v_b, s_b]) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_does_not_reach_into_a_bound_call(dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in (torch.randn(5, 4, 16), *torch.randn(2, 9, 2, 16)))
    calls: list[Callable[[], Tensor]] = [
        lambda: attn_ops.single_prefill_with_kv_cache(q, k, v, causal=True),
        lambda: attn_ops.single_decode_with_kv_cache(q[0], k, v),
        lambda: flash_attn_func(q[None], k[None], v[None], window_size=(2, 0)),
    ]
    for call in calls:
        want = [call() for _ in range(2)][-1]
        for other in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=other):
                torch.testing.assert_close(call(), want, rtol=0, atol=0)


@pytest.mark.parametrize("value", [torch.inf, torch.nan], ids=str)
def test_numbers_that_the_kernel_does_not_hide(value: float) -> None:
    """The reference computes the call, also one like an earlier one that passed."""
    for spoiled in (False, True, False):
        q, k, v = torch.randn(2, 5, 4, 16), *torch.randn(2, 2, 5, 2, 16)
        if spoiled:
            k[:, 4] = value
        out = flash_attn_func(q, k, v, causal=True)
        want = expected([(q[b, :4], k[b, :4], v[b, :4]) for b in range(2)], causal=True)
        check_dense(want, out[:, :4])
        assert bool(out[:, 4].isnan().any()) == spoiled


def test_a_wrapper_after_another_plan() -> None:
    wrapper = attn_ops.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 16, dtype=torch.uint8))
    cache = torch.randn(8, 2, 4, 2, 16)
    for lengths in ((9, 3), (2, 12), (9, 3)):
        pages = [-(-length // 4) for length in lengths]
        indptr, indices = torch.tensor([0, pages[0], sum(pages)]).int(), torch.randperm(8)[: sum(pages)].int()
        last = torch.tensor([(length - 1) % 4 + 1 for length in lengths]).int()
        wrapper.plan(indptr, indices, last, 4, 2, 16, 4, q_data_type=torch.float32)
        for _ in range(3):
            q = torch.randn(2, 4, 16)
            cache.normal_()
            requests = []
            for b, length in enumerate(lengths):
                of_request = cache[indices[indptr[b] : indptr[b + 1]].long()].transpose(0, 1).flatten(1, 2)
                requests.append((q[b : b + 1], *of_request[:, :length]))
            expected(requests).check(wrapper.run(q, cache))
            out = torch.empty_like(q)
            assert wrapper.run(q, cache, out=out) is out
            expected(requests).check(out)
