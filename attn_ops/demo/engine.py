"""Continuous batching over a paged KV cache.

The engine has ``max_batch`` slots. It admits a request when the request has arrived, a slot is free, and the cache has
free pages for its prompt and all its output. The request owns the slot and the pages until it finishes.

Each iteration runs a prefill step, of up to ``prefill_tokens`` packed prompt tokens (a longer prompt takes several
iterations), then a decode step, of one token for every request whose prompt is complete.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from attn_ops.demo.errors import DemoError
from attn_ops.demo.memory import Memory, Step, run_decode, run_prefill
from attn_ops.demo.pages import PageAllocator, pages_for


@dataclass
class Request:
    """A prompt and its state in the engine.

    Attributes:
        prompt: tokens.
        max_new_tokens: output tokens, fewer if a stop token comes first.
        arrival: iteration of the engine in which the request arrives.
        output: tokens generated so far.
        pages: allocated pages, empty if the request does not run.
        cached: tokens of prompt and output in the KV cache.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    arrival: int = 0
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens in the KV cache. The last output token is not stored."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens remain to be prefilled."""
        return self.cached < len(self.prompt)

    def fresh(self) -> Request:
        """The same request before it ran."""
        return Request(self.prompt, self.max_new_tokens, self.arrival)


class Rates(NamedTuple):
    """Output tokens per second: of decode steps, and of serving as a whole."""

    decode: float
    serving: float

    @staticmethod
    def of(decoded: float, decode_seconds: float, total: float, seconds: float) -> Rates:
        return Rates(decoded / max(decode_seconds, 1e-9), total / max(seconds, 1e-9))


class Engine:
    """Serves requests with a prefill step and a decode step, eager or compiled."""

    def __init__(self, memory: Memory, prefill: Step, decode: Step, stop_tokens: Collection[int] = ()) -> None:
        self.memory, self.capacity = memory, memory.capacity
        self._prefill, self._decode, self._stop_tokens = prefill, decode, stop_tokens
        self.allocator = PageAllocator(self.capacity.num_pages)
        self.slots: list[Request | None] = [None] * self.capacity.max_batch
        self.waiting: deque[Request] = deque()
        self.iteration = 0

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests in order of arrival.

        Raises:
            DemoError: a prompt is empty, or a request exceeds the capacity.
        """
        for request in requests:
            if not request.prompt:
                raise DemoError("a prompt has no tokens; expected at least one; give another prompt")
            need, capacity = request.max_tokens, self.capacity
            if need > capacity.max_tokens or pages_for(need, capacity.page_size) > capacity.num_pages:
                raise DemoError(
                    f"a request needs {need} tokens of KV cache; the engine holds {capacity.max_tokens} per request in "
                    f"{capacity.num_pages} pages of {capacity.page_size}; shorten the prompt or ask for fewer tokens"
                )
        self.waiting.extend(sorted(requests, key=lambda r: r.arrival))

    def run(self, on_tokens: Callable[[int], object] = lambda count: None) -> Rates:
        """Serve all requests. ``on_tokens`` is called with each iteration's number of new tokens."""
        start, decode_seconds, decoded, total = time.perf_counter(), 0.0, 0, 0
        while self.waiting or any(self.slots):
            self.admit()
            prefilled = self.prefill()
            before = time.perf_counter()
            chosen = self.decode()
            decode_seconds += time.perf_counter() - before
            decoded += chosen
            total += prefilled + chosen
            on_tokens(prefilled + chosen)
            self.iteration += 1
        return Rates.of(decoded, decode_seconds, total, time.perf_counter() - start)

    def admit(self) -> None:
        """Assign free slots and pages to arrived requests, in order of arrival, until one does not fit."""
        for slot, occupant in enumerate(self.slots):
            if occupant is not None or not self.waiting or self.waiting[0].arrival > self.iteration:
                continue
            need = pages_for(self.waiting[0].max_tokens, self.capacity.page_size)
            if need > self.allocator.num_free:
                return
            request = self.slots[slot] = self.waiting.popleft()
            request.pages = self.allocator.allocate(need)

    def prefill(self) -> int:
        """Run a prefill step on unfinished prompts. Returns the number of output tokens."""
        budget = self.capacity.prefill_tokens
        lengths, chunks = [0] * len(self.slots), [0] * len(self.slots)
        tokens: list[int] = []
        for slot, request in enumerate(self.slots):
            if request is None or not request.prefilling:
                continue
            end = min(len(request.prompt), request.cached + budget - len(tokens))
            chunk = request.prompt[request.cached : end]
            if chunk:
                tokens += chunk
                chunks[slot] = len(chunk)
                request.cached = lengths[slot] = end
        if not tokens:
            return 0
        self.memory.plan_prefill(self._pages(), lengths, chunks)
        next_tokens = run_prefill(self._prefill, self.memory, tokens).tolist()
        return self._append_output(next_tokens, [chunk > 0 for chunk in chunks])

    def decode(self) -> int:
        """Run a decode step for every prefilled request. Returns the number of output tokens."""
        active = [request is not None and not request.prefilling for request in self.slots]
        if not any(active):
            return 0
        tokens, lengths = [0] * len(self.slots), [0] * len(self.slots)
        for slot, request in enumerate(self.slots):
            if request is not None and active[slot]:
                tokens[slot] = request.output[-1]
                request.cached += 1
                lengths[slot] = request.cached
        self.memory.plan_decode(self._pages(), lengths)
        next_tokens = run_decode(self._decode, self.memory, torch.tensor(tokens)).tolist()
        return self._append_output(next_tokens, active)

    def _pages(self) -> list[list[int]]:
        return [request.pages if request is not None else [] for request in self.slots]

    def _append_output(self, next_tokens: Sequence[int], active: Sequence[bool]) -> int:
        """Append each active slot's token to its output, unless its prompt is unfinished. Release finished requests."""
        count = 0
        for slot, request in enumerate(self.slots):
            if request is None or not active[slot] or request.prefilling:
                continue
            token = next_tokens[slot]
            request.output.append(token)
            count += 1
            if len(request.output) == request.max_new_tokens or token in self._stop_tokens:
                self.allocator.release(request.pages)
                request.pages, self.slots[slot] = [], None
        return count
