"""FlashInfer and FlashAttention 2, as the benchmarks of decode, prefill, MLA and serving steps use them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.comparison import NotMeasuredError
from benchmarks.page_table import PageTable

FLASHINFER_WORKSPACE_BYTES = 256 << 20

FLASHINFER_HEAD_DIMS = frozenset({(64, 64), (128, 128), (192, 128), (256, 256), (512, 512)})
"""Head dims of keys and of values with which FlashInfer is measured. Nobody tried whether it builds for others."""


def module(name: str) -> Any:
    """The module of a peer.

    Raises:
        NotMeasuredError: it is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise NotMeasuredError(f"{name} is not installed")
    return importlib.import_module(name)


def flashinfer(submodule: str = "") -> Any:
    """FlashInfer, or one of its modules.

    Raises:
        NotMeasuredError: it is not installed.
    """
    package = module("flashinfer")
    return importlib.import_module(f"flashinfer.{submodule}") if submodule else package


def flashinfer_with(head_dim: int, head_dim_vo: int) -> Any:
    """FlashInfer, for heads of keys and values of these sizes.

    Raises:
        NotMeasuredError: it is not installed, or the heads have a size with which it is not measured.
    """
    if (head_dim, head_dim_vo) not in FLASHINFER_HEAD_DIMS:
        raise NotMeasuredError("it is measured with heads of 64, 128, 192/128, 256 and 512")
    return flashinfer()


def flash_attn() -> Any:
    """FlashAttention 2.

    Raises:
        NotMeasuredError: it is not installed.
    """
    return module("flash_attn")


def xqa_call(q: Tensor, table: PageTable, kv_layout: str = "NHD", **options: Any) -> Callable[..., Tensor]:
    """``xqa_batch_decode_with_kv_cache`` of ``q [rows, num_qo_heads, head_dim]``, to call with caches."""
    function, workspace = flashinfer().decode.xqa_batch_decode_with_kv_cache, flashinfer_workspace(str(q.device))
    tables, longest = table.block_tables(), int(table.kv_len.max())
    options |= {"bmm1_scale": q.shape[-1] ** -0.5, "bmm2_scale": 1.0, "kv_layout": kv_layout}
    return lambda caches, out=None: function(q, caches, workspace, tables, table.kv_len, longest, out=out, **options)


def batch_attention(
    q: Tensor,
    out: Tensor,
    qo_indptr: Tensor,
    table: PageTable,
    sizes: tuple[int, int, int, int, int],
    kv_dtype: torch.dtype,
    *,
    causal: bool = False,
    kv_layout: str = "NHD",
) -> tuple[Callable[[], object], Callable[[tuple[Tensor, Tensor]], Tensor]]:
    """``(plan, run)`` of FlashInfer's ``BatchAttention``. ``run(caches)`` writes ``out``, and returns it.

    ``sizes`` are the query heads, the KV heads, the head dims of keys and of values, and the page size.
    """
    wrapper = flashinfer().BatchAttention(kv_layout, str(q.device))
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    batch = qo_indptr, table.indptr, table.indices, table.kv_len
    options: dict[str, Any] = {"causal": causal, "q_data_type": q.dtype, "kv_data_type": kv_dtype}
    return (
        lambda: wrapper.plan(*batch, *sizes, **options),
        lambda caches: wrapper.run(q, caches, out=out, lse=lse)[0],
    )


def flashinfer_workspace(device: str) -> Tensor:
    """A workspace buffer of a wrapper."""
    return torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
