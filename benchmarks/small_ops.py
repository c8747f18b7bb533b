"""Merging states and writing tokens into a cache, compared with FlashInfer: microseconds in CUDA graphs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.comparison import METHOD, Comparison, Prepare, add_peers, add_rows, largest_error
from benchmarks.page_table import PageTable
from benchmarks.peers import flashinfer
from benchmarks.timing import Call, copies_for, device_microseconds

NOTE = (
    "Microseconds per launch: bf16, heads of 128, pages of 16. Bytes are those of all inputs read once and of outputs, "
    "or new tokens in the cache, written once; `TB/s` counts them. `copy` is a `copy_` that reads and writes as many. "
    f"`{report.SPEEDUP}` is the time of FlashInfer divided by that of attn_ops. "
    f"{METHOD} The copy is timed after them."
)
OURS, COPY = "attn_ops", "copy"
HEAD_DIM, PAGE = 128, 16
MAX_COPIES = 64
"""Most copies of an input. L2 holds those of the smallest ones, as it does in a server."""


class SmallRow(NamedTuple):
    """States of ``tokens`` rows that are merged, or ``new`` tokens of each request that are appended to ``context``."""

    name: str
    kind: str
    heads: int
    tokens: int
    states: int = 0
    context: int = 0
    batch: int = 0


ROWS = (
    SmallRow("merge_states, 8 of 2048 tokens, 32 heads", "merge_states", 32, 2048, 8),
    SmallRow("merge_states, 2 of 8192 tokens, 32 heads", "merge_states", 32, 8192, 2),
    SmallRow("merge_states, 16 of 64 tokens, 32 heads", "merge_states", 32, 64, 16),
    SmallRow("merge_state, 2048 tokens, 32 heads", "merge_state", 32, 2048, 2),
    SmallRow("merge_state, 64 tokens, 32 heads", "merge_state", 32, 64, 2),
    SmallRow("append, 64 x (1 on 2k), 8 heads", "append", 8, 1, context=2048, batch=64),
    SmallRow("append, 1 x 8k, 8 heads", "append", 8, 8192, context=8192, batch=1),
    SmallRow("append, 64 x 512, 8 heads", "append", 8, 512, context=512, batch=64),
)


class MergeProblem:
    """Copies of states: ``v[i] [tokens, states, heads, HEAD_DIM]`` and ``s[i] [tokens, states, heads]``."""

    def __init__(self, row: SmallRow, device: str = "cuda") -> None:
        self.row, self.device = row, device
        generator = torch.Generator(device).manual_seed(0)
        shape = (row.tokens, row.states, row.heads)
        self.copies = min(copies_for(self.bytes()), MAX_COPIES)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        self.v = [random(*shape, HEAD_DIM).bfloat16() for _ in range(self.copies)]
        self.s = [random(*shape) for _ in range(self.copies)]

    def bytes(self) -> int:
        """Bytes of the states, and of the merged one."""
        return self.row.tokens * self.row.heads * (self.row.states + 1) * (2 * HEAD_DIM + 4)

    def error(self, out: Tensor, copy: int = 0) -> float:
        """Relative error in norm of the merged output."""
        weights = (self.s[copy].double() * torch.log(torch.tensor(2.0)).item()).softmax(1)
        return largest_error([(out, (weights[..., None] * self.v[copy].double()).sum(1).float())])


class AppendProblem:
    """Copies of new tokens ``k[i]``, ``v[i] [tokens, heads, HEAD_DIM]`` and of caches for them."""

    def __init__(self, row: SmallRow, device: str = "cuda") -> None:
        self.row, self.device = row, device
        generator = torch.Generator(device).manual_seed(0)
        self.table = PageTable((row.context,) * row.batch, PAGE, generator, device)
        self.copies = min(copies_for(self.bytes()), MAX_COPIES)
        new = torch.arange(row.batch * row.tokens, device=device, dtype=torch.int32)
        self.batch_indices = new // row.tokens
        self.positions = row.context - row.tokens + new % row.tokens
        tokens, pages = (len(new), row.heads, HEAD_DIM), (self.table.num_pages, PAGE, row.heads, HEAD_DIM)

        def random(shape: tuple[int, ...]) -> list[Tensor]:
            made = (torch.randn(shape, generator=generator, device=device) for _ in range(self.copies))
            return [t.bfloat16() for t in made]

        self.k, self.v, self.k_caches, self.v_caches = map(random, (tokens, tokens, pages, pages))

    def bytes(self) -> int:
        """Bytes of the new tokens, read and written."""
        return self.row.batch * self.row.tokens * self.row.heads * HEAD_DIM * 2 * 2 * 2

    def error(self, caches: tuple[Tensor, Tensor], copy: int = 0) -> float:
        """Relative error in norm of the appended tokens in the caches."""
        pairs = []
        for b in range(self.row.batch):
            mine = slice(b * self.row.tokens, (b + 1) * self.row.tokens)
            for cache, new in zip(caches, (self.k[copy], self.v[copy]), strict=True):
                found = self.table.tokens(cache, b, self.row.context)[-self.row.tokens :]
                pairs.append((found, new[mine].float()))
        return largest_error(pairs)


def _merge_states(p: MergeProblem) -> Call:
    return lambda i: torch.ops.attn.merge_states(p.v[i], p.s[i])[0]


def _pairs(p: MergeProblem) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Both states of every copy."""
    return [
        (v[:, 0].contiguous(), s[:, 0].contiguous(), v[:, 1].contiguous(), s[:, 1].contiguous())
        for v, s in zip(p.v, p.s, strict=True)
    ]


def _merge_state(p: MergeProblem) -> Call:
    pairs = _pairs(p)
    return lambda i: torch.ops.attn.merge_state(*pairs[i])[0]


def _append(p: AppendProblem) -> Call:
    indptr, indices, _ = p.table.arguments

    def call(i: int) -> tuple[Tensor, Tensor]:
        caches = p.k_caches[i], p.v_caches[i]
        torch.ops.attn.append_kv(p.k[i], p.v[i], *caches, p.batch_indices, p.positions, indices, indptr)
        return caches

    return call


def _flashinfer_merge_states(p: MergeProblem) -> Call:
    function = flashinfer("cascade").merge_states
    return lambda i: function(p.v[i], p.s[i])[0]


def _flashinfer_merge_state(p: MergeProblem) -> Call:
    function, pairs = flashinfer("cascade").merge_state, _pairs(p)
    return lambda i: function(*pairs[i])[0]


def _flashinfer_append(p: AppendProblem) -> Call:
    function = flashinfer("page").append_paged_kv_cache
    indptr, indices, last = p.table.arguments

    def call(i: int) -> tuple[Tensor, Tensor]:
        caches = p.k_caches[i], p.v_caches[i]
        function(p.k[i], p.v[i], p.batch_indices, p.positions, caches, indices, indptr, last)
        return caches

    return call


class Kind(NamedTuple):
    """The problem of a kind of row, and its implementations."""

    problem: Callable[[SmallRow], Any]
    ours: Callable[[Any], Call]
    flashinfer: Callable[[Any], Call]


KINDS = {
    "merge_states": Kind(MergeProblem, _merge_states, _flashinfer_merge_states),
    "merge_state": Kind(MergeProblem, _merge_state, _flashinfer_merge_state),
    "append": Kind(AppendProblem, _append, _flashinfer_append),
}


def _ours(p: Any) -> Call:
    return KINDS[p.row.kind].ours(p)


def _flashinfer(p: Any) -> Call:
    return KINDS[p.row.kind].flashinfer(p)


PEERS: dict[str, Prepare] = {"flashinfer": _flashinfer}


def _copy(p: Any) -> Call:
    """``copy_`` that reads and writes as many bytes as the op."""
    sources = [torch.randn(p.bytes() // 8, device=p.device) for _ in range(p.copies)]
    target = torch.empty_like(sources[0])
    return lambda i: target.copy_(sources[i])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_rows(parser)
    report.add_output(parser)
    add_peers(parser)


def _measure(row: SmallRow, comparison: Comparison) -> report.Row:
    problem = KINDS[row.kind].problem(row)
    expected = problem.bytes() / report.PEAK_BYTES_PER_US + 3
    times = comparison.times(row.name, problem, expected)
    return {
        "row": row.name,
        OURS: times[OURS],
        "TB/s": problem.bytes() / times[OURS] / 1e6,
        COPY: device_microseconds({COPY: _copy(problem)}, problem.copies, expected)[COPY],
        **{name: times.get(name) for name in comparison.peers},
    }


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Measure and save the rows."""
    title = "Merging states and appending tokens"
    report.compare(args, "small_ops", NOTE, ROWS, {OURS: _ours}, PEERS, _measure, title=title)
