"""Eager attention on the CPU: ops compared with PyTorch's scaled_dot_product_attention on tensors of the same sizes."""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import attn_ops
from attn_ops.demo.memory import Capacity, Memory, run_decode
from attn_ops.demo.model import LanguageModel, ModelConfig
from attn_ops.demo.steps import DecodeStep
from attn_ops.flash_attn import flash_attn_func, flash_attn_with_kvcache
from benchmarks import report

NOTE = (
    "Eager calls on the CPU, in interleaved rounds. `op`, `reference` and `sdpa` are the shortest round, since other "
    "load only adds to it. `sdpa` is scaled_dot_product_attention on dense tensors of the same lengths, prepared "
    "outside of the measurement; `ratio` is `op` over `sdpa`."
)
PAGE = 16
MAX_RATIO = 3
"""Largest ratio to the peer that the headline counts."""

ROUND_SECONDS = 0.01
Calls = dict[str, Callable[[], object]]


class Shape(NamedTuple):
    """``batch`` requests of ``rows`` query rows and ``length`` tokens; ``heads`` of queries, of KV, and their dim."""

    batch: int
    rows: int
    length: int
    heads: tuple[int, int, int] = (8, 2, 64)
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.batch} x ({self.rows} on {self.length}), heads {'/'.join(map(str, self.heads))}, {dtype}"


LARGE = (32, 8, 128)
HEADS = ((8, 2, 64), LARGE)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {
    "single_prefill": (Shape(1, 21, 21), Shape(1, 21, 21, LARGE), Shape(1, 512, 512, LARGE)),
    "batch_decode": (Shape(4, 1, 128), Shape(4, 1, 128, LARGE), Shape(4, 1, 128, LARGE, torch.bfloat16)),
    "batch_prefill": (Shape(2, 64, 64), Shape(2, 64, 64, LARGE)),
    "batch_mla": (Shape(4, 1, 128, (16, 1, 576)),),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    report.add_output(parser)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each call")


def _table(s: Shape) -> tuple[Tensor, Tensor, Tensor]:
    pages = -(-s.length // PAGE)
    indptr = torch.arange(s.batch + 1, dtype=torch.int32) * pages
    last = torch.full((s.batch,), (s.length - 1) % PAGE + 1, dtype=torch.int32)
    return indptr, torch.randperm(s.batch * pages).int(), last


def _paged(op: str, s: Shape) -> Callable[[str], object]:
    """``call(backend)`` of an op over a paged cache."""
    (heads, kv_heads, dim), table = s.heads, _table(s)
    pages, rows = table[1].shape[0], s.batch * s.rows
    sizes: dict[str, Any] = {"page_size": PAGE, "num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    q, ops = torch.randn(rows, heads, dim, dtype=s.dtype), torch.ops.attn
    if op == "batch_decode":
        decode = attn_ops.DecodePlanner(s.batch, pages, **sizes)
        k, v = torch.randn(pages, 2, PAGE, kv_heads, dim, dtype=s.dtype).unbind(1)
        plan = decode.plan(*table)
        return lambda backend: ops.batch_decode(q, k, v, plan, decode.workspace, backend=backend)
    dim_vo = 512 if op == "batch_mla" else dim
    prefill = attn_ops.PrefillPlanner(s.batch, rows, pages, head_dim_vo=dim_vo, **sizes)
    planned = prefill.plan(torch.arange(s.batch + 1, dtype=torch.int32) * s.rows, *table)
    if op == "batch_mla":
        cache = torch.randn(pages, PAGE, dim, dtype=s.dtype)
        parts = (*q.split((512, dim - 512), -1), *cache.split((512, dim - 512), -1))
        return lambda backend: ops.batch_mla(*parts, planned, prefill.workspace, backend=backend)
    k, v = torch.randn(pages, 2, PAGE, kv_heads, dim, dtype=s.dtype).unbind(1)
    return lambda backend: ops.batch_prefill(q, k, v, planned, prefill.workspace, causal=True, backend=backend)


def _single(s: Shape) -> Callable[[str], object]:
    heads, kv_heads, dim = s.heads
    q, k, v = (torch.randn(n, h, dim, dtype=s.dtype) for n, h in ((s.rows, heads), *[(s.length, kv_heads)] * 2))
    return lambda backend: torch.ops.attn.single_prefill(q, k, v, causal=True, backend=backend)


def _sdpa(s: Shape) -> Callable[[], object]:
    heads, kv_heads, dim = s.heads
    q, k, v = (
        torch.randn(s.batch, h, n, dim, dtype=s.dtype) for n, h in ((s.rows, heads), *[(s.length, kv_heads)] * 2)
    )
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=s.rows > 1, enable_gqa=heads > kv_heads)


def _append_and_attend(s: Shape) -> Callable[[], object]:
    """An assignment of the new rows to slices of dense caches, and SDPA over the caches."""
    heads, kv_heads, dim = s.heads
    q = torch.randn(s.batch, heads, s.rows, dim, dtype=s.dtype)
    caches = torch.randn(2, s.batch, kv_heads, 2 * s.length, dim, dtype=s.dtype).unbind()
    new, begin = torch.randn(2, s.batch, kv_heads, s.rows, dim, dtype=s.dtype), s.length - s.rows

    def call() -> object:
        for cache, t in zip(caches, new, strict=True):
            cache[:, :, begin : s.length] = t
        k, v = (t[:, :, : s.length] for t in caches)
        return scaled_dot_product_attention(q, k, v, enable_gqa=heads > kv_heads)

    return call


def _dense(s: Shape, times: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values. Keys and values have ``times`` as many tokens as the query."""
    heads, kv_heads, dim = s.heads
    q = torch.randn(s.batch, s.rows, heads, dim, dtype=s.dtype)
    return q, *torch.randn(2, s.batch, times * s.length, kv_heads, dim, dtype=s.dtype)


def _single_decode(s: Shape) -> Callable[[], object]:
    (q, k, v), (heads, _, dim) = (t[0] for t in _dense(s)), s.heads
    row = q.view(heads, dim)
    return lambda: attn_ops.single_decode_with_kv_cache(row, k, v)


def _single_prefill(s: Shape) -> Callable[[], object]:
    tensors = [t[0] for t in _dense(s)]
    return lambda: attn_ops.single_prefill_with_kv_cache(*tensors, causal=True)


def _flash_attn(s: Shape) -> Callable[[], object]:
    tensors = _dense(s)
    return lambda: flash_attn_func(*tensors, causal=True)


def _with_kvcache(s: Shape) -> Callable[[], object]:
    tensors, lengths = _dense(s, 2), torch.full((s.batch,), s.length, dtype=torch.int32)
    return lambda: flash_attn_with_kvcache(*tensors, cache_seqlens=lengths)


def _appending(s: Shape) -> Callable[[], object]:
    tensors, before = _dense(s, 2), torch.full((s.batch,), s.length - 1, dtype=torch.int32)
    k, v = torch.randn(2, s.batch, 1, *s.heads[1:], dtype=s.dtype).unbind()
    return lambda: flash_attn_with_kvcache(*tensors, k, v, cache_seqlens=before)


def _wrapper(s: Shape) -> Callable[[], object]:
    """``run()`` of the wrapper for decode, or for prefill if requests have several rows."""
    (heads, kv_heads, dim), table, memory = s.heads, _table(s), torch.empty(1 << 20, dtype=torch.uint8)
    q = torch.randn(s.batch * s.rows, heads, dim, dtype=s.dtype)
    cache = torch.randn(table[1].shape[0], 2, PAGE, kv_heads, dim, dtype=s.dtype)
    sizes, dtypes = (heads, kv_heads, dim, PAGE), {"q_data_type": s.dtype, "kv_data_type": s.dtype}
    if s.rows == 1:
        decode = attn_ops.BatchDecodeWithPagedKVCacheWrapper(memory)
        decode.plan(*table, *sizes, **dtypes)
        return lambda: decode.run(q, cache)
    prefill = attn_ops.BatchPrefillWithPagedKVCacheWrapper(memory)
    qo_indptr = torch.arange(s.batch + 1, dtype=torch.int32) * s.rows
    prefill.plan(qo_indptr, *table, *sizes, causal=True, **dtypes)
    return lambda: prefill.run(q, cache)


class Function(NamedTuple):
    """A public function, what it is compared with, and its sizes: requests, and rows and tokens of each."""

    make: Callable[[Shape], Callable[[], object]]
    peer: Callable[[Shape], Callable[[], object]]
    sizes: tuple[tuple[int, int, int], ...]


DECODE, PREFILL = ((1, 1, 16), (4, 1, 128), (4, 1, 1024)), ((1, 8, 8), (2, 64, 64), (1, 256, 256))
FUNCTIONS = {
    "single_decode_with_kv_cache": Function(_single_decode, _sdpa, ((1, 1, 1), (1, 1, 128), (1, 1, 1024))),
    "single_prefill_with_kv_cache": Function(_single_prefill, _sdpa, ((1, 8, 8), (1, 21, 21), (1, 256, 256))),
    "flash_attn_func": Function(_flash_attn, _sdpa, PREFILL),
    "flash_attn_with_kvcache": Function(_with_kvcache, _sdpa, DECODE),
    "flash_attn_with_kvcache, appending one token each": Function(_appending, _append_and_attend, DECODE),
    "BatchDecodeWithPagedKVCacheWrapper.run": Function(_wrapper, _sdpa, DECODE),
    "BatchPrefillWithPagedKVCacheWrapper.run": Function(_wrapper, _sdpa, PREFILL),
}
"""Each is called with every number of heads and dtype of :data:`HEADS` and :data:`DTYPES`."""


def _demo_step() -> Callable[[], object]:
    """Planning and one eager decode step of the demo's model: four requests of 128 tokens."""
    config = ModelConfig(1024, 512, 1024, num_layers=4, num_qo_heads=8, num_kv_heads=2, head_dim=64, windows=(-1,) * 4)
    capacity = Capacity(max_batch=4, page_size=PAGE, num_pages=64, max_tokens=256, prefill_tokens=64)
    memory = Memory(config, capacity, torch.float32, torch.device("cpu"))
    step, tokens = DecodeStep(LanguageModel(config).eval()), torch.zeros(4, dtype=torch.int64)
    pages = torch.randperm(32).view(4, 8).tolist()

    def call() -> object:
        memory.plan_decode(pages, [128] * 4)
        return run_decode(step, memory, tokens)

    return call


def _others() -> Calls:
    """Planning, ops around attention and the demo, which have no peer here."""
    table = _table(Shape(4, 1, 128))
    planner = attn_ops.DecodePlanner(4, 32, page_size=PAGE, num_qo_heads=8, num_kv_heads=2, head_dim=64)
    k, v = torch.randn(32, 2, PAGE, 2, 64).unbind(1)
    prefill = attn_ops.PrefillPlanner(4, 64, 32, page_size=PAGE, num_qo_heads=8, num_kv_heads=2, head_dim=64)
    qo_indptr = torch.arange(5, dtype=torch.int32) * 16
    wrapper = attn_ops.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    new, rows, ops = torch.randn(4, 2, 64), torch.arange(4, dtype=torch.int32), torch.ops.attn
    states, lse = torch.randn(2, 64, 8, 64), torch.randn(2, 64, 8)
    return {
        "DecodePlanner.plan 4 x 128": lambda: planner.plan(*table),
        "PrefillPlanner.plan 4 x (16 on 128)": lambda: prefill.plan(qo_indptr, *table),
        "BatchDecodeWithPagedKVCacheWrapper.plan 4 x 128": lambda: wrapper.plan(*table, 8, 2, 64, PAGE),
        "demo: plan and decode step of 4 requests, 4 layers": _demo_step(),
        "append_kv 4 tokens": lambda: ops.append_kv(new, new, k, v, rows, rows, table[1], table[0]),
        "merge_state 64 rows": lambda: ops.merge_state(states[0], lse[0], states[1], lse[1]),
    }


def _cases() -> Iterator[tuple[str, Calls]]:
    """Each op and public function with its peer, then the calls without a peer."""
    for op, shapes in SHAPES.items():
        for shape in shapes:
            call = _single(shape) if op == "single_prefill" else _paged(op, shape)
            by_backend = {"op": functools.partial(call, "auto"), "reference": functools.partial(call, "reference")}
            yield f"{op} {shape}", {**by_backend, "sdpa": _sdpa(shape)}
    for name, function in FUNCTIONS.items():
        for size, heads, dtype in itertools.product(function.sizes, HEADS, DTYPES):
            shape = Shape(*size, heads, dtype)
            yield f"{name} {shape}", {"op": function.make(shape), "sdpa": function.peer(shape)}
    for name, alone in _others().items():
        yield name, {"op": alone}


def _microseconds(calls: Calls, rounds: int) -> dict[str, float]:
    """Least time of each call over interleaved rounds."""
    least = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            count, start = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - start) < ROUND_SECONDS:
                call()
                count += 1
            least[name] = min(least[name], elapsed / count * 1e6)
    return least


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Measure and save, with one thread and with two."""
    rows: list[report.Row] = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        for name, calls in _cases():
            least = _microseconds(calls, args.rounds)
            ratio = least["op"] / least["sdpa"] if "sdpa" in least else None
            rows.append({"what": name, "threads": threads, **least, "ratio": ratio})
            print(rows[-1])
    found = [row["ratio"] for row in rows if row["ratio"]]
    within = sum(ratio <= MAX_RATIO for ratio in found)
    headline = (
        f"Calls take {min(found):.1f} to {max(found):.1f} times as long as scaled_dot_product_attention, "
        f"{within} of {len(found)} at most {MAX_RATIO} times."
    )
    report.save("cpu", "Eager attention on the CPU", NOTE, rows, args.output, headline)
