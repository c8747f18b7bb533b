"""A two-layer decode step over paged caches, small enough to compile in seconds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import attn_ops

BATCH, PAGE, QO_HEADS, KV_HEADS, DIM, PAGES, MAX_KV_LEN = 4, 4, 4, 2, 16, 128, 48
WIDTH = QO_HEADS * DIM


class Decoder(nn.Module):
    """Two layers that append keys and values of ``x [batch, WIDTH]`` at each request's last position, and attend."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * KV_HEADS * DIM, bias=False)
        self.options = options

    def forward(self, x: Tensor, first: Tensor, second: Tensor, plan: attn_ops.DecodePlan, workspace: Tensor) -> Tensor:
        batch = x.shape[0]
        rows = torch.arange(batch, dtype=torch.int32, device=x.device)
        position = plan.kv_len[:batch] - 1
        for cache in (first, second):
            k_cache, v_cache = cache[:, 0], cache[:, 1]
            q = self.query(x).view(batch, QO_HEADS, DIM)
            k, v = self.key_value(x).view(batch, 2, KV_HEADS, DIM).unbind(1)
            torch.ops.attn.append_kv(k, v, k_cache, v_cache, rows, position, plan.kv_indices, plan.kv_indptr)
            out, _ = torch.ops.attn.batch_decode(q, k_cache, v_cache, plan, workspace, **self.options)
            x = x + out.flatten(1)
        return x


def decoder(**options: object) -> Decoder:
    torch.manual_seed(0)
    return Decoder(**options).eval().requires_grad_(False)


def planner(device: str = "cpu", max_batch: int = BATCH) -> attn_ops.DecodePlanner:
    return attn_ops.DecodePlanner(
        max_batch,
        PAGES,
        page_size=PAGE,
        num_qo_heads=QO_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        max_kv_len=MAX_KV_LEN,
        num_ctas=3,
        cache_pages=PAGES,
        device=device,
    )


def page_table(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The page table of requests with these lengths on shuffled pages, on the host."""
    pages = [-(-length // PAGE) for length in lengths]
    indptr = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=torch.int32)
    shuffled = torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed))
    last = torch.tensor([(length - 1) % PAGE + 1 if length else 1 for length in lengths], dtype=torch.int32)
    return indptr, shuffled[: sum(pages)].int(), last


def inputs(device: str = "cpu", batch: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    """``x`` and two caches."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, WIDTH, generator=generator)
    caches = [torch.randn(PAGES, 2, PAGE, KV_HEADS, DIM, generator=generator) for _ in range(2)]
    return x.to(device), caches[0].to(device), caches[1].to(device)


def clone(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.clone() for t in tensors)
