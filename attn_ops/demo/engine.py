"""Continuous batching over a paged cache.

``max_batch`` slots. A request waits until it has arrived, a slot is free and the cache has pages for its
prompt and all the tokens it may produce; those pages are then its own until it finishes. Every turn of the
loop first prefills, up to ``prefill_tokens`` prompt tokens packed together (a longer prompt takes several
turns), and then decodes one token for every request whose prompt is complete.
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
    """A prompt, and what becomes of it. ``cached`` tokens of prompt and output are in ``pages``."""

    prompt: Sequence[int]
    max_new_tokens: int
    arrival: int = 0
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def max_tokens(self) -> int:
        """Tokens that ever enter the cache: the last one produced does not."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def prefilling(self) -> bool:
        return self.cached < len(self.prompt)

    def fresh(self) -> Request:
        return Request(self.prompt, self.max_new_tokens, self.arrival)


class Snapshot(NamedTuple):
    """A batch at the beginning of decoding, one entry per slot; an idle slot has no pages and length 0.

    prompts  as submitted
    tokens   newest token, not in the cache yet
    pages    pages for the whole of the request's output
    lengths  tokens in the cache
    """

    prompts: list[Sequence[int]]
    tokens: list[int]
    pages: list[list[int]]
    lengths: list[int]

    def sequences(self, tokens: Sequence[Sequence[int]]) -> list[tuple[Sequence[int], list[int]]]:
        """``(prompt, output)`` of every request after decoding ``tokens [steps][max_batch]`` from here."""
        return [
            (prompt, [self.tokens[slot], *(row[slot] for row in tokens)])
            for slot, prompt in enumerate(self.prompts)
            if self.lengths[slot]
        ]


class Engine:
    """Runs requests through a prefill and a decode step, eager or compiled alike."""

    def __init__(self, memory: Memory, prefill: Step, decode: Step, stop_tokens: Collection[int] = ()) -> None:
        self.memory, self.capacity = memory, memory.capacity
        self._prefill, self._decode, self._stop_tokens = prefill, decode, stop_tokens
        self.allocator = PageAllocator(self.capacity.num_pages)
        self.slots: list[Request | None] = [None] * self.capacity.max_batch
        self.waiting: deque[Request] = deque()
        self.turn = 0

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests in order of arrival; DemoError for one that could never run."""
        for request in requests:
            if not request.prompt:
                raise DemoError("a prompt has no tokens; give at least one")
            need, room = request.max_tokens, self.capacity
            if need > room.max_tokens or pages_for(need, room.page_size) > room.num_pages:
                raise DemoError(
                    f"a request needs {need} tokens of cache; the engine has room for {room.max_tokens} per request "
                    f"in {room.num_pages} pages of {room.page_size}; shorten the prompt or ask for fewer tokens"
                )
        self.waiting.extend(sorted(requests, key=lambda r: r.arrival))

    def run(self, on_tokens: Callable[[int], object] = lambda count: None) -> float:
        """Serve until nothing is left; seconds taken. ``on_tokens`` hears of every turn's new tokens."""
        start = time.perf_counter()
        while self.waiting or any(self.slots):
            self.admit()
            on_tokens(self.prefill() + self.decode())
            self.turn += 1
        return time.perf_counter() - start

    def admit(self) -> None:
        """Fill free slots with arrived requests, first come first served, as long as there are pages."""
        for slot, occupant in enumerate(self.slots):
            if occupant is not None or not self.waiting or self.waiting[0].arrival > self.turn:
                continue
            need = pages_for(self.waiting[0].max_tokens, self.capacity.page_size)
            if need > self.allocator.num_free:
                return
            request = self.slots[slot] = self.waiting.popleft()
            request.pages = self.allocator.allocate(need)

    def prefill(self) -> int:
        """One packed step over unfinished prompts; the number of tokens produced."""
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
        return self._produce(next_tokens, [chunk > 0 for chunk in chunks])

    def decode(self) -> int:
        """One step for every request that is past its prompt; the number of tokens produced."""
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
        return self._produce(next_tokens, active)

    def snapshot(self, requests: Sequence[Request]) -> Snapshot:
        """Admit as many as there is room for, prefill them, and hand them over just before decoding begins."""
        self.submit(requests)
        self.admit()
        while any(request is not None and request.prefilling for request in self.slots):
            self.prefill()
        return Snapshot(
            prompts=[r.prompt if r else [] for r in self.slots],
            tokens=[r.output[-1] if r else 0 for r in self.slots],
            pages=[r.pages if r else [] for r in self.slots],
            lengths=[r.cached if r else 0 for r in self.slots],
        )

    def _pages(self) -> list[list[int]]:
        return [request.pages if request is not None else [] for request in self.slots]

    def _produce(self, next_tokens: Sequence[int], took_part: Sequence[bool]) -> int:
        produced = 0
        for slot, request in enumerate(self.slots):
            if request is None or not took_part[slot] or request.prefilling:
                continue
            token = next_tokens[slot]
            request.output.append(token)
            produced += 1
            if len(request.output) == request.max_new_tokens or token in self._stop_tokens:
                self.allocator.release(request.pages)
                request.pages, self.slots[slot] = [], None
        return produced
