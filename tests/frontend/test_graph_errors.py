"""Wrong calls of wrappers in CUDA-graph mode raise typed errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.error_cases import Case, check_raises
from helpers.wrapper_requests import DEVICE, Requests, workspace

import attn_ops as flashinfer
from attn_ops import errors

R = Requests()
P = Requests((70, 3, 9, 130), (1, 5, 0, 40))


def graph(pages: int = 20, batch: int = 4) -> Any:
    sizes = batch + 1, pages, batch
    buffers = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in sizes)
    return flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers)


def replanned_graph(first: int, then: int) -> None:
    wrapper = graph()
    for rows in (first, then):
        wrapper.plan(*R.table, *R.sizes, q_len_per_req=rows)


def int32_zeros(length: int) -> torch.Tensor:
    return torch.zeros(length, dtype=torch.int32, device=DEVICE)


def masked_graph(mask_bytes: int) -> None:
    mask = torch.zeros(mask_bytes, dtype=torch.uint8, device=DEVICE)
    buffers = *map(int32_zeros, (5, 5, 20, 4)), mask
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers)
    wrapper.plan(P.qo_indptr, *P.table, *P.sizes, custom_mask=P.mask)


def planned_graph() -> Any:
    wrapper = graph()
    wrapper.plan(*R.table, *R.sizes)
    return wrapper


def graph_buffers_of_inference_mode() -> None:
    with torch.inference_mode():
        wrapper = graph()
    wrapper.plan(*R.table, *R.sizes)


CASES: dict[str, Case] = {
    "other batch in graph mode": (
        lambda: graph(batch=5).plan(*R.table, *R.sizes),
        errors.PlanError,
        "the batch has 4 requests and the buffers are for 5",
    ),
    "other rows of a request in graph mode": (
        lambda: replanned_graph(2, 1),
        errors.PlanError,
        "q_len_per_req is 1; expected 2 as in the first plan, in CUDA-graph mode",
    ),
    "too many pages in graph mode": (
        lambda: graph(pages=7).plan(R.table[0], R.table[1][:13], R.table[2], *R.sizes),
        errors.CapacityError,
        "the batch has 13 pages and paged_kv_indices_buffer capacity for 7; expected capacity for at least 13",
    ),
    "missing buffer": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True),
        errors.ArgumentError,
        "paged_kv_indptr_buffer is missing",
    ),
    "dtype of a buffer": (
        lambda: flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            workspace(), *(torch.zeros(n, device=DEVICE) for n in (5, 9, 4))
        ),
        errors.DTypeError,
        "paged_kv_indptr_buffer is float32; expected int32",
    ),
    "fewer rows than planned in CUDA-graph mode": (
        lambda: planned_graph().run(R.q[:3], R.cache()),
        errors.ShapeError,
        "q has 3 rows; expected 4 as planned, or more; call plan()",
    ),
    "a mask beyond its buffer": (
        lambda: masked_graph(sum(-(-n * m // 8) for n, m in zip(P.rows, P.kv_lens, strict=True)) - 1),
        errors.CapacityError,
        "the packed mask has 661 bytes and custom_mask_buf 660; expected at least 661",
    ),
    "last page lengths of another batch": (
        lambda: flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *map(int32_zeros, (5, 20, 5))),
        errors.ShapeError,
        "paged_kv_last_page_len_buffer has 5 elements and paged_kv_indptr_buffer 5; expected 4, for the 4 requests",
    ),
    "buffers of inference mode": (
        graph_buffers_of_inference_mode,
        errors.ArgumentError,
        "plan: paged_kv_indptr_buffer was made in inference mode",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_call_raises(name: str) -> None:
    check_raises(CASES[name])
