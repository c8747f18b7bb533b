"""Plans of the layers of a step. The tensors of a plan that a step has left are written again for a later one.

A plan lasts as long as the mask of its step. Then its tensors are free for steps of the same sizes on the same stream,
as memory of PyTorch's allocator is.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.eager.bounded_cache import BoundedCache
from attn_ops.eager.checked_call import call_op
from attn_ops.eager.interposition import is_traced
from attn_ops.flash_attn import SchedulerMetadata, get_scheduler_metadata
from attn_ops.gpu import current_stream, is_capturing

Caches = tuple[Tensor, Tensor]
"""Keys and values: of transformers ``[batch, num_kv_heads, tokens, head_dim]``."""

WIDTH = 256
"""Tokens that the width of a page table is rounded up to on CUDA, so that the plans of many steps have one size."""

MAX_SIZES = 16
"""Sizes of which free plans are held. One more first drops all."""


class Places(NamedTuple):
    """Where the tokens of requests are in memory, as pages of one token.

    begin           int32 ``[batch]``: the first key of each request; None for 0
    capacity        tokens of a request
    request_stride  tokens from one request to the next
    """

    begin: Tensor | None
    capacity: int
    request_stride: int

    def table(self, batch: int, device: torch.device) -> Tensor:
        """int32 ``[batch, tokens]``, from the first key on. Pages behind the last key are any."""
        eager = device.type == "cuda" and not is_traced()
        width = -(-self.capacity // WIDTH) * WIDTH if eager else self.capacity
        tokens = torch.arange(width, dtype=torch.int32, device=device)
        tokens = tokens[None] if self.begin is None else tokens + self.begin[:, None]
        requests = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
        return tokens.clamp(max=self.capacity - 1) + requests * self.request_stride


Free = list[tuple[SchedulerMetadata, Tensor]]
"""Plans that no step uses, with the tables that they were made of."""


class Lease:
    """Holds a plan that is in use. When this object is freed, other steps may use the plan."""

    def __init__(self, metadata: SchedulerMetadata, table: Tensor, free: Free) -> None:
        self.metadata, self.table, self.free = metadata, table, free

    def __del__(self) -> None:
        self.free.append((self.metadata, self.table))


class _Free(threading.local):
    """The free plans of a thread."""

    def __init__(self) -> None:
        self.plans: BoundedCache[Hashable, Free] = BoundedCache(MAX_SIZES)
        """The free plans, by size."""


_free = _Free()


def plan(
    query: Tensor, caches: Caches, qv: Tensor | None, places: Places | None, keywords: dict[str, Any]
) -> tuple[dict[str, Any], Lease | None]:
    """The plan, as arguments of ``flash_attn_with_kvcache`` that are added to ``keywords``, and its lease.

    ``places`` is None for dense caches. There is no lease where plans are not used again: in captures, with several
    rows, with latents and on the CPU.
    """
    key, value = caches
    batch, num_heads, rows, head_dim = query.shape
    heads = num_heads, key.shape[1], head_dim, value.shape[3]
    page_size, device = key.shape[2] if places is None else 1, query.device
    free: Free | None = None
    if query.is_cuda and rows == 1 and qv is None and not is_capturing():
        where = None if places is None else (places.begin is None, *places[1:])
        mask = keywords["causal"], keywords["window_size"]
        sizes = device, current_stream(device), batch, *heads, page_size, where, mask
        free = _free.plans.get(sizes)
        if free is None:
            free = _free.plans.insert(sizes, [])
    if free:
        metadata, table = free.pop()
        if places is not None and places.begin is not None:
            table = places.table(batch, device)
        call_op("plan_decode", *call_op("page_table", table, keywords["cache_seqlens"], page_size), metadata.plan)
    else:
        pages = None if places is None else places.table(batch, device)
        metadata = get_scheduler_metadata(
            batch,
            rows,
            page_size,
            *heads[:3],
            headdim_v=heads[3],
            page_size=None if places is None else 1,
            block_table=pages,
            has_qv=qv is not None,
            device=device,
            **keywords,
        )
        table = torch.arange(batch, dtype=torch.int32, device=device)[:, None] if pages is None else pages
    found = {"scheduler_metadata": metadata, **({} if places is None else {"block_table": table})}
    return found, None if free is None else Lease(metadata, table, free)
