"""What steps read and write on the device, and how they are called on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_ops.demo.model import ModelConfig
from attn_ops.demo.pages import page_table, pages_for
from attn_ops.ops.inductor import mark_static
from attn_ops.planner import DecodePlanner, PrefillPlanner

Step = Callable[..., Tensor]


@dataclass(frozen=True)
class Capacity:
    """What an engine has room for: slots, pages, tokens per request, prompt tokens per prefill step."""

    max_batch: int
    page_size: int
    num_pages: int
    max_tokens: int
    prefill_tokens: int

    @property
    def pages_per_request(self) -> int:
        return pages_for(self.max_tokens, self.page_size)


class Memory:
    """Device state that steps read and write; its addresses hold for as long as it lives.

    caches  per layer ``[num_pages, 2, page_size, num_kv_heads, head_dim]``, keys at 0 and values at 1
    """

    def __init__(self, config: ModelConfig, capacity: Capacity, dtype: torch.dtype, device: torch.device) -> None:
        self.capacity, self.device = capacity, device
        table_pages = capacity.max_batch * capacity.pages_per_request
        shared: dict[str, Any] = {
            "num_qo_heads": config.num_qo_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "page_size": capacity.page_size,
            "max_kv_len": capacity.max_tokens,
            "window_left": config.plan_window,
            "cache_pages": capacity.num_pages,
            "device": device,
        }
        self.decode = DecodePlanner(capacity.max_batch, table_pages, **shared)
        self.prefill = PrefillPlanner(capacity.max_batch, capacity.prefill_tokens, table_pages, causal=True, **shared)
        shape = (capacity.num_pages, 2, capacity.page_size, config.num_kv_heads, config.head_dim)
        self.caches = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        mark_static(*self.caches)

    def forget(self) -> None:
        """Fill the caches with NaN, so that reading a place that nobody has written since shows in the tokens."""
        for cache in self.caches:
            cache.fill_(torch.nan)

    def plan_decode(self, pages: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        self.decode.plan(*page_table(pages, lengths, self.capacity.page_size, self.decode.max_pages))

    def plan_prefill(self, pages: Sequence[Sequence[int]], lengths: Sequence[int], chunks: Sequence[int]) -> None:
        """``lengths`` count the ``chunks`` of new tokens already."""
        qo_indptr = torch.tensor([0, *chunks], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.prefill.plan(qo_indptr, *page_table(pages, lengths, self.capacity.page_size, self.prefill.max_pages))


def run_prefill(step: Step, memory: Memory, tokens: Sequence[int]) -> Tensor:
    """The prefill step on packed tokens, padded to its fixed number of rows; next tokens ``[max_batch]``."""
    padded = torch.zeros(memory.capacity.prefill_tokens, dtype=torch.int64)
    padded[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    torch.compiler.cudagraph_mark_step_begin()
    return step(padded.to(memory.device), memory.caches, memory.prefill.state, memory.prefill.workspace)


def run_decode(step: Step, memory: Memory, tokens: Tensor) -> Tensor:
    """The decode step on each slot's newest token ``[max_batch]``; next tokens ``[max_batch]``."""
    torch.compiler.cudagraph_mark_step_begin()
    return step(tokens.to(memory.device), memory.caches, memory.decode.state, memory.decode.workspace)
