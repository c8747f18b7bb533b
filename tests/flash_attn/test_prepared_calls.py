"""Calls of FlashAttention's functions like an earlier one launch its kernels again, over a fake driver; and what they
compute for other contents, where the tests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import fake_driver as f
from helpers.fake_driver import FakeDriver
from helpers.flash_requests import DenseCache, check_dense, check_varlen, dense, expected
from helpers.wrapper_requests import DEVICE, Requests
from torch import Tensor

from attn_ops.eager import op_cache
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
    """Tensors say that they are on CUDA. Each op of ``OPS`` launches a kernel on its query and its last tensor."""
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

    for op in OPS:
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
    """The first of a step plans, in Python; without a block every call does."""
    q, given = paged()
    r = Requests((33, 3, 9, 70), (4, 5, 2, 40))
    ragged = (r.q, *r.ragged(), r.qo_indptr, r.kv_indptr, 40, 70)
    calls = {
        "cache": lambda: flash_attn_with_kvcache(q, **given),
        "varlen": lambda: flash_attn_varlen_func(*ragged, causal=True),
    }
    assert replays.of(calls[function])[0] == 1
    for _ in range(2):
        with SharedPlans():
            assert [replays.of(calls[function])[0] for _ in range(3)] == [1, 0, 0]
    assert replays.of(calls[function])[0] == 1


def test_a_write_to_the_lengths_plans_again(replays: Replays) -> None:
    q, given = paged()
    call = lambda: flash_attn_with_kvcache(q, **given)  # noqa: E731
    call()
    with SharedPlans():
        assert [replays.of(call)[0] for _ in range(2)] == [1, 0]
        given["cache_seqlens"].sub_(1)
        assert [replays.of(call)[0] for _ in range(2)] == [1, 0]


def test_results_that_are_converted_are_not_replayed(replays: Replays) -> None:
    q, given = paged()
    made = planned(given)
    call = lambda: flash_attn_with_kvcache(q, **given, scheduler_metadata=made, return_softmax_lse=True)  # noqa: E731
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


def test_repeated_appends_write_their_own_tokens() -> None:
    for seed in range(3):
        c, generator = DenseCache((16, 3, 39), seed=seed), torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(3, 1, n, 64, generator=generator).to(torch.float16) for n in (4, 2, 2))
        made = get_scheduler_metadata(3, 1, 40, 4, 2, 64, c.cache_seqlens, max_seqlen_k_new=1)
        given = {"cache_seqlens": c.cache_seqlens, "scheduler_metadata": made}
        out = flash_attn_with_kvcache(*(t.to(DEVICE) for t in (q, c.k, c.v, k, v)), **given)
        keys = [torch.cat((a, b)) for a, b in zip(c.keys, k, strict=True)]
        values = [torch.cat((a, b)) for a, b in zip(c.values, v, strict=True)]
        check_dense(expected(list(zip(q, keys, values, strict=True))), out)


def test_equal_offsets_of_rows_and_keys() -> None:
    """One tensor in two places, as in the prompts of a batch."""
    r = Requests((5, 3, 9), (5, 3, 9))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(17, n, 64, generator=generator).to(torch.float16) for n in (4, 2, 2))
        out = flash_attn_varlen_func(*(t.to(DEVICE) for t in (q, k, v)), r.kv_indptr, r.kv_indptr, 9, 9, causal=True)
        parts = zip(*(t.split([5, 3, 9]) for t in (q, k, v)), strict=True)
        check_varlen(expected(list(parts), causal=True), out)
