"""Eager continuous batching compared with the dense reference: pages, chunks, windows, stop tokens, capacity."""

from __future__ import annotations

import time

import pytest
import torch
from helpers import demo_tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_ops.demo import dense
from attn_ops.demo.engine import Request
from attn_ops.demo.errors import DemoError
from attn_ops.demo.memory import Capacity

CAPACITY = Capacity(max_batch=3, page_size=4, num_pages=12, max_tokens=24, prefill_tokens=16)


@pytest.fixture(autouse=True)
def _inference() -> object:
    with torch.no_grad():
        yield


def check(m: object, served: list[Request]) -> dense.Comparison:
    return dense.compare(m, [(request.prompt, request.output) for request in served])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [{}, {"windows": (3, 3)}, {"windows": (-1, 5)}, {"qk_norm": True, "qkv_bias": True}, {"num_kv_heads": 4}],
    ids=["full", "window", "mixed-windows", "qk-norm-bias", "mha"],
)
def test_tokens_equal_the_dense_reference_and_pages_are_freed(changes: dict[str, object]) -> None:
    m = demo_tiny.model(**changes)
    served = demo_tiny.requests([1, 4, 5, 13, 16, 9, 2], max_new_tokens=8, every=2)
    engine = demo_tiny.engine(m, CAPACITY)
    engine.submit(served)
    counts: list[int] = []
    engine.run(counts.append)
    assert [len(request.output) for request in served] == [8] * 7
    assert sum(counts) == 7 * 8
    assert check(m, served) == dense.Comparison(tokens=56)
    assert engine.allocator.num_free == CAPACITY.num_pages
    assert engine.slots == [None] * 3


@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    new=st.integers(1, 5),
    every=st.integers(0, 3),
    max_batch=st.integers(1, 4),
    page_size=st.sampled_from([1, 3, 16]),
    prefill_tokens=st.sampled_from([1, 7, 32]),
    spare=st.integers(0, 10),
)
def test_any_capacity_serves_the_same_tokens(
    lengths: list[int], new: int, every: int, max_batch: int, page_size: int, prefill_tokens: int, spare: int
) -> None:
    m = demo_tiny.model(num_layers=1, windows=(-1,))
    longest = max(lengths) + new - 1
    capacity = Capacity(max_batch, page_size, -(-longest // page_size) + spare, longest, prefill_tokens)
    engine = demo_tiny.engine(m, capacity)
    served = demo_tiny.requests(lengths, new, every)
    engine.submit(served)
    engine.run()
    assert check(m, served) == dense.Comparison(tokens=new * len(lengths))
    assert engine.allocator.num_free == capacity.num_pages


def test_a_request_stops_at_a_stop_token() -> None:
    m = demo_tiny.model()
    free = demo_tiny.requests([6], max_new_tokens=8)
    engine = demo_tiny.engine(m, CAPACITY)
    engine.submit(free)
    engine.run()
    stop = free[0].output[3]
    first = free[0].output.index(stop)

    stopped = demo_tiny.requests([6], max_new_tokens=8)
    engine = demo_tiny.engine(m, CAPACITY, frozenset({stop}))
    engine.submit(stopped)
    engine.run()
    assert stopped[0].output == free[0].output[: first + 1]
    assert engine.allocator.num_free == CAPACITY.num_pages


@pytest.mark.parametrize(
    ("length", "new", "message"), [(20, 6, "needs 25 tokens"), (0, 4, "no tokens")], ids=["too-long", "empty"]
)
def test_a_request_beyond_capacity_raises(length: int, new: int, message: str) -> None:
    engine = demo_tiny.engine(demo_tiny.model(), CAPACITY)
    with pytest.raises(DemoError, match=message):
        engine.submit(demo_tiny.requests([length], new))


def test_the_comparison_detects_a_wrong_page() -> None:
    m = demo_tiny.model()
    served = demo_tiny.requests([8, 12], max_new_tokens=6)
    engine = demo_tiny.engine(m, CAPACITY)
    engine.submit(served)
    engine.admit()
    while any(request.prefilling for request in served):
        engine.prefill()
    a, b = (request.pages for request in served)
    a[0], b[0] = b[0], a[0]
    engine.run()
    assert check(m, served).different > 5


def test_rates_are_of_decode_steps_and_of_the_whole_run() -> None:
    m = demo_tiny.model()
    engine = demo_tiny.engine(m, CAPACITY)
    engine.submit(demo_tiny.requests([5, 9], max_new_tokens=4))
    start = time.perf_counter()
    rates = engine.run()
    seconds = time.perf_counter() - start
    assert rates.serving >= 8 / seconds
    assert rates.decode > 6 / 8 * rates.serving


def test_a_near_tie_is_counted_apart() -> None:
    m = demo_tiny.model()
    prompt = demo_tiny.prompts([7])[0]
    best = int(dense.logits(m, torch.tensor(prompt))[-1].argmax())
    twin = (best + 1) % m.config.vocab_size
    m.lm_head.weight[twin] = m.lm_head.weight[best]
    both = dense.compare(m, [(prompt, [best])]) + dense.compare(m, [(prompt, [twin])])
    assert both == dense.Comparison(tokens=2, near_ties=1)
    other = (best + 2) % m.config.vocab_size
    assert dense.compare(m, [(prompt, [other])]) == dense.Comparison(tokens=1, different=1)
