"""Calls of FlashAttention's functions like an earlier one launch its kernels again, over a fake driver; and what they
compute for other contents, where the tests run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import fake_driver as f
from helpers.fake_driver import FakeDriver
from helpers.flash_requests import DenseCache, check_dense, check_varlen, dense, expected
from helpers.wrapper_requests import DEVICE, Requests
from torch import Tensor

from attn_ops.eager import op_cache, recorded_calls
from attn_ops.eager.captured_call import CapturedCall, outputs_of
from attn_ops.eager.extension import is_available, unavailable_reason
from attn_ops.eager.op_cache import OpCache
from attn_ops.eager.op_call import flatten_tensors
from attn_ops.flash_attn import (
    SharedPlans,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from attn_ops.frontend import shared_plans
from attn_ops.frontend.flash import arguments, metadata

OPS = ("batch_decode", "batch_prefill", "ragged_prefill", "single_prefill", "append_kv")
PLANNING_OPS = ("plan_decode", "plan_prefill", "page_table", "batch_indices_positions")


class Replays:
    """How often the bodies of the functions ran, and how often their kernels were launched by prepared calls."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver, self.bodies = driver, 0

    def of(self, call: Callable[[], Any]) -> tuple[int, int]:
        """In one call: runs of the body, launches of prepared calls."""
        before = self.bodies, self.driver.get("launches")
        call()
        return self.bodies - before[0], self.driver.get("launches") - before[1]


@pytest.fixture
def replays(fake_driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Replays:
    """Tensors say that they are on CUDA. Each op launches a kernel on its first and its last tensor."""
    if not is_available():
        pytest.skip(unavailable_reason)
    if DEVICE == "cuda":
        pytest.skip("tensors on the CPU stand for those of a GPU")
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    for module in (metadata, shared_plans):
        monkeypatch.setattr(module, "seen", lambda _: False)
    image = f.load()

    def cache_of(op: str) -> OpCache:
        def first_call(args: Any, kwargs: Any) -> Any:
            result = getattr(torch.ops.attn, op)(*args, **kwargs)
            tensors = flatten_tensors(args)
            return result, CapturedCall([f.launched(image, tensors[0], tensors[-1])], outputs_of(result))

        return OpCache(op, f.unchecked, first_call)

    for op in (*OPS, *PLANNING_OPS):
        monkeypatch.setitem(op_cache.OP_CACHES, op, cache_of(op))
    counted, options = Replays(fake_driver), arguments.options

    def count(*args: Any, **kwargs: Any) -> Any:
        counted.bodies += 1
        return options(*args, **kwargs)

    monkeypatch.setattr(arguments, "options", count)
    return counted


def paged(seed: int = 0, size: int = 1) -> tuple[Tensor, dict[str, Any]]:
    """A batch over a paged cache, as arguments: of other contents for another ``seed``."""
    r = Requests((37, 8, 130, 5))
    q = torch.randn(4, size, 4, 64, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.float16)
    k, v = r.cache()
    return q, {"k_cache": k, "v_cache": v, "block_table": r.block_tables(), "cache_seqlens": r.seq_lens}


def planned(given: dict[str, Any], **more: Any) -> Any:
    return get_scheduler_metadata(
        4, 1, 1, 4, 2, 64, given["cache_seqlens"], page_size=16, block_table=given["block_table"], **more
    )


def test_a_dense_call_of_one_request_is_replayed(replays: Replays) -> None:
    found = [
        replays.of(lambda seed=seed: flash_attn_func(*dense(1, 5, 9, seed=seed), causal=True)) for seed in range(3)
    ]  # type: ignore[misc]
    assert found == [(1, 0), (0, 1), (0, 1)]


def test_a_dense_call_of_several_requests_finds_its_plan(replays: Replays) -> None:
    shared_plans.host_plans().entries.clear()
    found = [replays.of(lambda: flash_attn_func(*dense(3, 5, 9))) for _ in range(3)]
    assert found == [(1, 0), (0, 1), (0, 1)]


def test_calls_with_metadata_are_replayed_in_later_steps_too(replays: Replays) -> None:
    """Of which each has metadata of its own."""
    for bodies in (1, 0, 0):
        q, given = paged()
        made = planned(given)
        assert replays.of(lambda: flash_attn_with_kvcache(q, **given, scheduler_metadata=made)) == (bodies, 1 - bodies)  # noqa: B023


def test_an_append_is_part_of_the_replay(replays: Replays) -> None:
    for bodies in (1, 0):
        q, given = paged()
        given["cache_seqlens"] = given["cache_seqlens"] - 1
        new = torch.zeros(2, 4, 1, 2, 64, dtype=torch.float16, device=DEVICE).unbind()
        made = planned(given, max_seqlen_k_new=1)
        call = lambda: flash_attn_with_kvcache(q, k=new[0], v=new[1], **given, scheduler_metadata=made)  # noqa: E731, B023
        assert replays.of(call) == (bodies, 2 * (1 - bodies))


@pytest.mark.parametrize("function", ["cache", "varlen"])
def test_layers_that_share_a_plan_are_replayed(function: str, replays: Replays) -> None:
    """The first of a step plans, in Python. Without a block every call launches the planning again."""
    q, given = paged()
    r = Requests((33, 3, 9, 70), (4, 5, 2, 40))
    ragged = (r.q, *r.ragged(), r.qo_indptr, r.kv_indptr, 40, 70)
    calls = {
        "cache": lambda: flash_attn_with_kvcache(q, **given),
        "varlen": lambda: flash_attn_varlen_func(*ragged, causal=True),
    }
    launches = {"cache": 3, "varlen": 2}[function]
    assert [replays.of(calls[function]) for _ in range(3)] == [(1, 0), (0, launches), (0, launches)]
    for _ in range(2):
        with SharedPlans():
            found = [replays.of(calls[function]) for _ in range(3)]
            assert [bodies for bodies, _ in found] == [1, 0, 0]
            assert found[-1] == (0, 1)
    assert replays.of(calls[function]) == (0, launches)


_caps = itertools.count(3)


def _calls_that_plan() -> dict[str, Callable[[], Any]]:
    """With a soft cap that no other call has, and so a key of their own."""
    more: dict[str, Any] = {"causal": True, "softcap": float(next(_caps))}
    q, given = paged()
    rows, c, r = paged(size=5)[0], DenseCache((17, 4, 40)), Requests((33, 3, 9, 70), (4, 5, 2, 40))
    dense_q = q[:3]
    k, v = given["k_cache"], given["v_cache"]
    lens, table = given["cache_seqlens"], given["block_table"]
    offsets, ragged = (r.qo_indptr, r.kv_indptr), r.ragged()
    own = r.q[:, :2].contiguous(), r.q[:, 2:].contiguous()
    return {
        "pages": lambda: flash_attn_with_kvcache(q, **given, **more),
        "pages, several rows": lambda: flash_attn_with_kvcache(rows, **given, **more),
        "dense cache": lambda: flash_attn_with_kvcache(dense_q, c.k, c.v, cache_seqlens=c.cache_seqlens, **more),
        "ragged": lambda: flash_attn_varlen_func(r.q, *ragged, *offsets, 40, 70, **more),
        "ragged, one tensor of offsets": lambda: flash_attn_varlen_func(
            r.q, *own, offsets[0], offsets[0], 40, 40, **more
        ),
        "ragged rows over pages": lambda: flash_attn_varlen_func(
            r.q, k, v, offsets[0], None, 40, 130, block_table=table, seqused_k=lens, **more
        ),
    }


@pytest.mark.parametrize("name", _calls_that_plan())
def test_calls_that_plan_are_replayed(name: str, replays: Replays) -> None:
    call = _calls_that_plan()[name]
    assert replays.of(call) == (1, 0)
    bodies, launches = replays.of(call)
    assert bodies == 0
    assert launches >= 2
    assert replays.of(call) == (0, launches)


def test_what_pytorch_computes_is_not_replayed(replays: Replays) -> None:
    """Lengths of another dtype."""
    q, given = paged()
    given["cache_seqlens"] = given["cache_seqlens"].long()
    assert [replays.of(lambda: flash_attn_with_kvcache(q, **given))[0] for _ in range(3)] == [1, 1, 1]


def test_lengths_after_an_append_are_computed_in_each_replay(replays: Replays) -> None:
    q, given = paged()
    lens, new = given.pop("cache_seqlens"), torch.zeros(2, 4, 1, 2, 64, dtype=torch.float16, device=DEVICE).unbind()
    for bodies, more in ((1, 1), (0, 2), (0, 1)):
        given["cache_seqlens"] = lens - more
        assert replays.of(lambda: flash_attn_with_kvcache(q, k=new[0], v=new[1], **given))[0] == bodies


def test_tensors_on_the_host_are_read_in_every_call(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    (q, given), cap = paged(), float(next(_caps))
    call = lambda: flash_attn_with_kvcache(q, **given, softcap=cap)  # noqa: E731
    monkeypatch.setattr(Tensor, "get_device", lambda self: -1 if self is given["block_table"] else 0)
    assert [replays.of(call)[0] for _ in range(3)] == [1, 1, 1]


def test_a_capture_has_no_constants(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph writes them when it is replayed, which may be after another graph reads them."""
    monkeypatch.setattr(recorded_calls, "is_capturing", lambda: True)
    calls = _calls_that_plan()
    assert [replays.of(calls["dense cache"])[0] for _ in range(2)] == [1, 1]
    assert [replays.of(calls["pages"])[0] for _ in range(2)] == [1, 0]


def test_a_write_to_the_lengths_plans_again(replays: Replays) -> None:
    q, given = paged()
    call = lambda: flash_attn_with_kvcache(q, **given)  # noqa: E731
    call()
    with SharedPlans():
        assert [replays.of(call)[0] for _ in range(2)] == [1, 0]
        given["cache_seqlens"].sub_(1)
        assert [replays.of(call)[0] for _ in range(2)] == [1, 0]


def test_results_are_converted_in_each_replay(replays: Replays) -> None:
    q, given = paged()
    made = planned(given)
    call = lambda **more: flash_attn_with_kvcache(q, **given, return_softmax_lse=True, **more)  # noqa: E731
    assert [replays.of(lambda: call(scheduler_metadata=made))[0] for _ in range(3)] == [1, 0, 0]
    assert [replays.of(call)[0] for _ in range(3)] == [1, 0, 0]


def test_a_buffer_is_not_written_by_a_replay_that_converts(replays: Replays) -> None:
    """Which does not check it for overlap."""
    q, given = paged()
    out = torch.empty_like(q)
    call = lambda: flash_attn_with_kvcache(q, **given, return_softmax_lse=True, out=out)  # noqa: E731
    assert [replays.of(call)[0] for _ in range(2)] == [1, 1]


def test_repeated_calls_compute_on_their_own_tensors() -> None:
    """On a GPU the second and the third launch what the first did."""
    for seed in range(3):
        q, k, v = dense(1, 5, 9, seed=seed)
        want = expected(list(zip(q.cpu(), k.cpu(), v.cpu(), strict=True)), causal=True)
        check_dense(want, flash_attn_func(q, k, v, causal=True))
        q, k, v = dense(3, 5, 9, seed=seed)
        want = expected(list(zip(q.cpu(), k.cpu(), v.cpu(), strict=True)))
        check_dense(want, flash_attn_func(q, k, v))
        c = DenseCache((17, 4, 40), seed=seed)
        q = torch.randn(3, 1, 4, 64, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.float16)
        want = expected(list(zip(q, c.keys, c.values, strict=True)))
        with SharedPlans():
            for _ in range(2):
                check_dense(want, flash_attn_with_kvcache(q, c.k, c.v, cache_seqlens=c.cache_seqlens))
        check_dense(want, flash_attn_with_kvcache(q, c.k, c.v, cache_seqlens=c.cache_seqlens))


@pytest.mark.parametrize("has_metadata", [True, False])
def test_repeated_appends_write_their_own_tokens(has_metadata: bool) -> None:
    for seed in range(3):
        c, generator = DenseCache((16 + seed, 3, 39 - seed), seed=seed), torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(3, 1, n, 64, generator=generator).to(torch.float16) for n in (4, 2, 2))
        given: dict[str, Any] = {"cache_seqlens": c.cache_seqlens}
        if has_metadata:
            made = get_scheduler_metadata(3, 1, 40, 4, 2, 64, c.cache_seqlens, max_seqlen_k_new=1)
            given["scheduler_metadata"] = made
        keys = [torch.cat((a, b)) for a, b in zip(c.keys, k, strict=True)]
        values = [torch.cat((a, b)) for a, b in zip(c.values, v, strict=True)]
        for return_lse in (False, True):  # both write the same tokens
            tensors = [t.to(DEVICE) for t in (q, c.k, c.v, k, v)]
            out = flash_attn_with_kvcache(*tensors, **given, return_softmax_lse=return_lse)
            result = out if return_lse else (out,)
            check_dense(expected(list(zip(q, keys, values, strict=True))), *result)


def test_equal_offsets_of_rows_and_keys() -> None:
    """One tensor in two places, as in the prompts of a batch."""
    r = Requests((5, 3, 9), (5, 3, 9))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(17, n, 64, generator=generator).to(torch.float16) for n in (4, 2, 2))
        out = flash_attn_varlen_func(*(t.to(DEVICE) for t in (q, k, v)), r.kv_indptr, r.kv_indptr, 9, 9, causal=True)
        parts = zip(*(t.split([5, 3, 9]) for t in (q, k, v)), strict=True)
        check_varlen(expected(list(parts), causal=True), out)


BATCHES = ((37, 8, 130, 5), (130, 1, 16, 77), (2, 128, 129, 3))
"""KV lengths of batches whose tensors have equal sizes."""

ROWS = ((9, 1, 40, 5), (1, 20, 16, 18), (50, 2, 1, 2))
"""Their query rows."""


def _of_batch(i: int, several_rows: bool) -> Requests:
    return Requests(BATCHES[i], ROWS[i] if several_rows else (), num_pages=24, seed=i)


def _table(r: Requests) -> Tensor:
    table = r.block_tables()
    return torch.nn.functional.pad(table, (0, 10 - table.shape[1]), value=-1)


@pytest.mark.usefixtures("poisoned_memory")
def test_repeated_calls_that_plan_attend_to_their_own_batch() -> None:
    """On a GPU the second and the third launch what the first did, with plans in new memory."""
    for i in (0, 1, 2, 0):
        r = _of_batch(i, several_rows=False)
        out = flash_attn_with_kvcache(r.q[:, None], *r.cache(), block_table=_table(r), cache_seqlens=r.seq_lens)
        r.expected().check(out[:, 0])
        r = _of_batch(i, several_rows=True)
        given = {"block_table": _table(r), "seqused_k": r.seq_lens, "causal": True}
        out = flash_attn_varlen_func(r.q, *r.cache(), r.qo_indptr, None, 64, 160, **given)
        r.expected(causal=True).check(out)
        padding = 300 - sum(r.kv_lens)
        k, v = (torch.nn.functional.pad(t, (0, 0, 0, 0, 0, padding), value=torch.nan) for t in r.ragged())
        out = flash_attn_varlen_func(r.q, k, v, r.qo_indptr, r.kv_indptr, 64, 160, causal=True)
        r.expected(causal=True).check(out)
        c = DenseCache((17 + i, 4, 40 - i), seed=i)
        q = torch.randn(3, 5, 4, 64, generator=torch.Generator().manual_seed(i)).to(DEVICE, torch.float16)
        want = expected(list(zip(q.cpu(), c.keys, c.values, strict=True)), causal=True)
        check_dense(want, flash_attn_with_kvcache(q, c.k, c.v, cache_seqlens=c.cache_seqlens, causal=True))


@pytest.mark.gpu
def test_a_call_that_plans_is_captured_and_replayed_with_other_lengths() -> None:
    """In a CUDA graph, on another stream, and within a block of shared plans, after it was repeated without."""
    batches = [_of_batch(i, several_rows=False) for i in range(3)]
    q, table, lens = batches[0].q[:, None].clone(), _table(batches[0]), batches[0].seq_lens
    k, v = (t.contiguous().clone() for t in batches[0].cache())

    def load(r: Requests) -> None:
        for to, t in ((q, r.q[:, None]), (table, _table(r)), (lens, r.seq_lens)):
            to.copy_(t)
        for to, t in zip((k, v), r.cache(), strict=True):
            to.copy_(t)

    def call() -> Tensor:
        return flash_attn_with_kvcache(q, k, v, block_table=table, cache_seqlens=lens)

    for r in batches:
        load(r)
        r.expected().check(call()[:, 0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = call(), call()
    other = torch.cuda.Stream()
    for r in batches:
        load(r)
        graph.replay()
        for out in (first, second):
            r.expected().check(out[:, 0])
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            r.expected().check(call()[:, 0])
        torch.cuda.current_stream().wait_stream(other)
        with SharedPlans():
            for _ in range(2):
                r.expected().check(call()[:, 0])


@pytest.mark.gpu
def test_a_call_of_several_rows_on_two_streams() -> None:
    """The offsets of its rows are written on one of them."""
    c, other = DenseCache((17, 4, 40)), torch.cuda.Stream()
    q = torch.randn(3, 5, 4, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    want = expected(list(zip(q.cpu(), c.keys, c.values, strict=True)), causal=True)
    for stream in (torch.cuda.current_stream(), other, torch.cuda.current_stream(), other):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            check_dense(want, flash_attn_with_kvcache(q, c.k, c.v, cache_seqlens=c.cache_seqlens, causal=True))
