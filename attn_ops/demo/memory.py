"""Device memory of the engine: KV caches, plans and workspaces. Runs model steps on it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attn_ops.demo.errors import DemoError
from attn_ops.demo.model import ModelConfig
from attn_ops.demo.pages import page_table, pages_for
from attn_ops.ops.inductor import mark_static
from attn_ops.plan.state import DecodePlan, PrefillPlan
from attn_ops.planner import DecodePlanner, PrefillPlanner

Step = Callable[..., Tensor]


@dataclass(frozen=True)
class Capacity:
    """The capacity of an engine.

    Attributes:
        max_batch: slots, that is, requests that run at once.
        page_size: tokens per page.
        num_pages: pages of the KV cache.
        max_tokens: tokens of the longest request in the cache, prompt and output.
        prefill_tokens: prompt tokens per prefill step.
    """

    max_batch: int
    page_size: int
    num_pages: int
    max_tokens: int
    prefill_tokens: int

    @property
    def pages_per_request(self) -> int:
        return pages_for(self.max_tokens, self.page_size)


class Memory:
    """KV caches and planners at fixed addresses, as CUDA graphs require.

    With a ``mesh``, its ranks divide the heads, and this is the memory of one of them.

    Attributes:
        caches: per layer ``[num_pages, 2, page_size, num_kv_heads, head_dim]``, keys at index 0, values at index 1.
        decode: planner of decode steps.
        prefill: planner of prefill steps.
        plans: the plans that the prefill step and the decode step are called with.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: Capacity,
        dtype: torch.dtype,
        device: torch.device,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.capacity, self.device = capacity, device
        ranks = 1 if mesh is None else mesh.size()
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
            "head_shards": ranks,
        }
        self.decode = DecodePlanner(capacity.max_batch, table_pages, **shared)
        self.prefill = PrefillPlanner(capacity.max_batch, capacity.prefill_tokens, table_pages, causal=True, **shared)
        self.plans: tuple[PrefillPlan, DecodePlan] = (self.prefill.state, self.decode.state)
        if mesh is not None:
            from attn_ops.distributed import shard_plan  # imports torch.distributed.tensor

            self.plans = (shard_plan(self.prefill.state, mesh), shard_plan(self.decode.state, mesh))
        heads = self.decode.problem.shard(ranks).num_kv_heads
        shape = (capacity.num_pages, 2, capacity.page_size, heads, config.head_dim)
        _check_fits(config.num_layers * math.prod(shape) * dtype.itemsize, device)
        self.caches = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        mark_static(*self.caches)

    def poison_caches(self) -> None:
        """Fill the KV caches with NaN, so that a read of an unwritten position changes the tokens."""
        for cache in self.caches:
            cache.fill_(torch.nan)

    def plan_decode(self, pages: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Plan a decode step. ``lengths`` include the new token; an empty slot has no pages and length 0."""
        self.decode.plan(*page_table(pages, lengths, self.capacity.page_size, self.decode.max_pages))

    def plan_prefill(self, pages: Sequence[Sequence[int]], lengths: Sequence[int], chunks: Sequence[int]) -> None:
        """Plan a prefill step of ``chunks[b]`` new tokens of request b. ``lengths`` include the new tokens."""
        qo_indptr = torch.tensor([0, *chunks], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.prefill.plan(qo_indptr, *page_table(pages, lengths, self.capacity.page_size, self.prefill.max_pages))


def _check_fits(cache_bytes: int, device: torch.device) -> None:
    """Raise DemoError for KV caches beyond the memory of the device. Linux would end the process at the first write."""
    if device.type == "cuda":
        available, _ = torch.cuda.mem_get_info(device)
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if cache_bytes > available:
        raise DemoError(
            f"the KV cache needs {cache_bytes / 2**30:.1f} GiB and {device} has {available / 2**30:.1f} GiB; lower "
            "--batch or --max-new-tokens"
        )


def run_prefill(step: Step, memory: Memory, tokens: Sequence[int]) -> Tensor:
    """Run the prefill step on packed tokens, padded to ``prefill_tokens``. Returns next tokens ``[max_batch]``."""
    padded = torch.zeros(memory.capacity.prefill_tokens, dtype=torch.int64)
    padded[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    torch.compiler.cudagraph_mark_step_begin()
    return step(padded.to(memory.device), memory.caches, memory.plans[0], memory.prefill.workspace)


def run_decode(step: Step, memory: Memory, tokens: Tensor) -> Tensor:
    """Run the decode step on the last token of each slot, ``[max_batch]``. Returns next tokens ``[max_batch]``."""
    torch.compiler.cudagraph_mark_step_begin()
    return step(tokens.to(memory.device), memory.caches, memory.plans[1], memory.decode.workspace)
