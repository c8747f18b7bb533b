"""Wrappers with inputs at fixed addresses, whose run() is captured once and replayed after every plan().

On a GPU the step is a CUDA graph. On the CPU it is called again, which tests everything but the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import attn_ops as flashinfer
from helpers.mla_requests import Latents
from helpers.wrapper_requests import DEVICE, Requests, workspace

BATCH, PAGES, SCRATCH = 4, 80, 1 << 26

DECODES = [
    Requests(kv_lens, num_pages=PAGES, seed=i)
    for i, kv_lens in enumerate(((255, 37, 0, 130), (1, 700, 3, 0), (0, 0, 0, 0), (200, 200, 200, 200)))
]
ROWS_EACH = [
    Requests(kv_lens, (3,) * BATCH, num_pages=PAGES, seed=i)
    for i, kv_lens in enumerate(((255, 37, 9, 130), (3, 600, 3, 4), (200, 200, 200, 200)))
]
PREFILLS = [
    Requests((700, 200, 90, 130), (20, 5, 0, 39), num_pages=PAGES),
    Requests((1, 600, 9, 30), (1, 40, 3, 2), num_pages=PAGES, seed=1),
    Requests((50, 0, 0, 50), (23, 0, 0, 23), num_pages=PAGES, seed=2),
]
# Batches of equal numbers of rows. Every row sees the whole first page of its request.
EVEN = [
    Requests((700, 200, 90, 130), (20, 5, 0, 39), num_pages=PAGES),
    Requests((120, 250, 60, 60), (1, 20, 3, 40), num_pages=PAGES, seed=1),
]
LATENTS = [
    Latents(((1, 300), (5, 90), (0, 3), (20, 130)), dims=(128, 64), dtype=torch.bfloat16),
    Latents(((1, 1), (20, 200), (1, 0), (4, 16)), dims=(128, 64), dtype=torch.bfloat16),
]


def buffer(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(size, dtype=dtype, device=DEVICE)


class Step:
    """``plan`` and ``run`` of a wrapper over ``batches``, with one query and one KV cache whose addresses are fixed."""

    batches: Sequence[Any]
    wrapper: Any

    def __init__(self) -> None:
        first = self.batches[0]
        self.q = torch.zeros(
            max(len(r.q) for r in self.batches), *first.q.shape[1:], dtype=first.q.dtype, device=DEVICE
        )
        self.kv = [torch.zeros_like(t) for t in self.kv_of(first)]

    def kv_of(self, r: Any) -> Sequence[Tensor]:
        return (r.cache("tensor"),)

    def load(self, r: Any) -> None:
        """Copy the tensors of a batch to where the step reads them, with NaN behind them."""
        self.q.fill_(torch.nan)[: len(r.q)] = r.q
        for t, source in zip(self.kv, self.kv_of(r), strict=True):
            t.fill_(torch.nan)[: len(source)] = source

    def plan(self, r: Any) -> None:
        raise NotImplementedError

    def run(self) -> tuple[Tensor, ...]:
        return self.wrapper.run(self.q, *self.kv, return_lse=True)

    def check(self, r: Any, results: Sequence[Tensor]) -> None:
        r.expected(causal=True).check(*(t[: len(r.q)] for t in results))

    def addresses(self) -> tuple[int, ...]:
        """Addresses of the plans and workspaces, which a captured run() reads."""
        parts = getattr(self.wrapper, "_levels", [getattr(self.wrapper, "_decode", self.wrapper)])
        tensors = [t for part in parts for t in (*part._planned.plan, part._planned.workspace)]
        return tuple(t.data_ptr() for t in tensors)


class Decode(Step):
    batches = DECODES

    def __init__(self) -> None:
        super().__init__()
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace(SCRATCH), "NHD", True, False, buffer(BATCH + 1), buffer(PAGES), buffer(BATCH)
        )

    def plan(self, r: Requests) -> None:
        self.wrapper.plan(*r.table, *r.sizes)


class GraphDecode(Decode):
    def __init__(self) -> None:
        super().__init__()
        self.wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            workspace(SCRATCH), buffer(BATCH + 1), buffer(PAGES), buffer(BATCH)
        )


class FastDecode(GraphDecode):
    def plan(self, r: Requests) -> None:
        flashinfer.fast_decode_plan(self.wrapper, *r.table, *r.sizes, q_data_type="float16", fixed_split_size=8)


class DecodeOfRows(GraphDecode):
    batches = ROWS_EACH

    def plan(self, r: Requests) -> None:
        self.wrapper.plan(*r.table, *r.sizes, q_len_per_req=3)


class Prefill(Step):
    batches = PREFILLS
    make: Callable[..., Any] = flashinfer.BatchPrefillWithPagedKVCacheWrapper

    def __init__(self) -> None:
        super().__init__()
        self.wrapper = type(self).make(workspace(SCRATCH), "NHD", True, **self.buffers())

    def buffers(self) -> dict[str, Tensor]:
        return {
            "qo_indptr_buf": buffer(BATCH + 1),
            "paged_kv_indptr_buf": buffer(BATCH + 1),
            "paged_kv_indices_buf": buffer(PAGES),
            "paged_kv_last_page_len_buf": buffer(BATCH),
            "custom_mask_buf": buffer(1 << 14, torch.uint8),
        }

    def plan(self, r: Requests) -> None:
        self.wrapper.plan(r.qo_indptr, *r.table, *r.sizes, causal=True)


class MaskedPrefill(Prefill):
    def plan(self, r: Requests) -> None:
        self.wrapper.plan(r.qo_indptr, *r.table, *r.sizes, custom_mask=r.mask)

    def check(self, r: Requests, results: Sequence[Tensor]) -> None:
        r.expected(masked=True).check(*(t[: len(r.q)] for t in results))


class SinkPrefill(Prefill):
    make = flashinfer.BatchAttentionWithAttentionSinkWrapper

    def __init__(self) -> None:
        super().__init__()
        self.sinks = torch.zeros_like(self.batches[0].sinks)

    def load(self, r: Requests) -> None:
        super().load(r)
        self.sinks.copy_(r.sinks)

    def plan(self, r: Requests) -> None:
        self.wrapper.plan(r.qo_indptr, *r.table, *r.sizes, head_dim_vo=64, causal=True, data_type=torch.float16)

    def run(self) -> tuple[Tensor, ...]:
        return self.wrapper.run(self.q, *self.kv, self.sinks, 0.2, return_lse=True)

    def check(self, r: Requests, results: Sequence[Tensor]) -> None:
        r.expected(causal=True, sinks=True, sm_scale=0.2).check(*(t[: len(r.q)] for t in results))


class Ragged(Prefill):
    make = flashinfer.BatchPrefillWithRaggedKVCacheWrapper

    def kv_of(self, r: Requests) -> Sequence[Tensor]:
        k, v = r.ragged()
        return [torch.cat((t, t.new_full((1200 - len(t), *t.shape[1:]), torch.nan))) for t in (k, v)]

    def buffers(self) -> dict[str, Tensor]:
        return {"qo_indptr_buf": buffer(BATCH + 1), "kv_indptr_buf": buffer(BATCH + 1)}

    def plan(self, r: Requests) -> None:
        self.wrapper.plan(r.qo_indptr, r.kv_indptr, *r.sizes[:3], causal=True)


class Attention(Step):
    """``BatchAttention``, without CUDA-graph mode: batches fit the first plan and have its number of rows."""

    batches = EVEN

    def __init__(self) -> None:
        super().__init__()
        self.wrapper = flashinfer.BatchAttention("NHD", DEVICE)

    def plan(self, r: Requests) -> None:
        self.wrapper.plan(r.qo_indptr, *r.table[:2], r.seq_lens, *r.heads, 64, 64, r.page_size, causal=True)

    def run(self) -> tuple[Tensor, ...]:
        return self.wrapper.run(self.q, *self.kv)


class Latent(Step):
    batches = LATENTS

    def __init__(self) -> None:
        super().__init__()
        names, sizes = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), (BATCH + 1, BATCH + 1, PAGES, BATCH)
        buffers = {name: buffer(size) for name, size in zip(names, sizes, strict=True)}
        self.wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(SCRATCH), True, **buffers)

    def kv_of(self, r: Latents) -> Sequence[Tensor]:
        spare = r.cache.new_full((PAGES - len(r.cache), *r.cache.shape[1:]), torch.nan)
        return [torch.cat((r.cache, spare))]

    def plan(self, r: Latents) -> None:
        self.wrapper.plan(r.qo_indptr, *r.table, 3, *r.dims, r.page_size, True, 0.1, q_data_type=torch.bfloat16)

    def run(self) -> tuple[Tensor, ...]:
        return self.wrapper.run(query=self.q, kv_cache=self.kv[0], return_lse=True)

    def check(self, r: Latents, results: Sequence[Tensor]) -> None:
        r.expected(causal=True, sm_scale=0.1).check(*(t[: len(r.q)] for t in results))


class Cascade(Step):
    """A cascade of two levels: the first page of every request, and its other pages."""

    batches = EVEN

    def __init__(self) -> None:
        super().__init__()
        buffers = [[buffer(size) for _ in range(2)] for size in (BATCH + 1, BATCH + 1, PAGES, BATCH)]
        self.wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(SCRATCH), "NHD", True, *buffers)

    def plan(self, r: Requests) -> None:
        indptr, indices, last = r.table
        steps = torch.arange(BATCH + 1, dtype=torch.int32, device=DEVICE)
        later = torch.ones_like(indices, dtype=torch.bool)
        later[indptr[:-1].long()] = False
        tables = [steps, indptr - steps], [indices[~later], indices[later]], [torch.full_like(last, 16), last]
        self.wrapper.plan([r.qo_indptr] * 2, *tables, *r.sizes, causal=True)

    def run(self) -> tuple[Tensor, ...]:
        return (self.wrapper.run(self.q, *self.kv),)

    def check(self, r: Requests, results: Sequence[Tensor]) -> None:
        expected = r.expected(causal=True)
        expected.spread *= 2  # two levels are rounded, and so is their merge
        expected.check(*results)


class Pod(Decode):
    """Decode with a prefill in one call (POD). The prefill is part of the graph, and stays the same."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = Requests((50,), (12,))
        self.prompt_kv = self.prompt.ragged()
        self.wrapper = flashinfer.PODWithPagedKVCacheWrapper(
            workspace(SCRATCH), "NHD", True, buffer(BATCH + 1), buffer(PAGES), buffer(BATCH)
        )

    def run(self) -> tuple[Tensor, ...]:
        options = {"causal_p": True, "return_lse_p": True, "return_lse_d": True}
        prompt, decoded = self.wrapper.run(self.prompt.q, *self.prompt_kv, self.q, *self.kv, **options)
        return *prompt, *decoded

    def check(self, r: Requests, results: Sequence[Tensor]) -> None:
        self.prompt.expected(causal=True).check(*results[:2])
        super().check(r, results[2:])


STEPS: dict[str, type[Step]] = {
    "decode": Decode,
    "CUDAGraph decode": GraphDecode,
    "fast_decode_plan": FastDecode,
    "decode of several rows": DecodeOfRows,
    "prefill": Prefill,
    "masked prefill": MaskedPrefill,
    "prefill with sinks": SinkPrefill,
    "ragged": Ragged,
    "BatchAttention": Attention,
    "MLA": Latent,
    "cascade": Cascade,
    "POD": Pod,
}


def replays(step: Step) -> Iterator[tuple[Any, Sequence[Tensor]]]:
    """Each batch, the first one twice, and the results of the step that was captured for the first."""
    step.plan(step.batches[0])
    step.load(step.batches[0])
    results = step.run()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step.run()
    for r in (*step.batches, step.batches[0]):
        step.plan(r)
        step.load(r)
        for t in results:
            t.fill_(torch.nan)
        if DEVICE == "cuda":
            graph.replay()
        else:
            for t, now in zip(results, step.run(), strict=True):
                t.copy_(now)
        yield r, results
