"""Compiles Triton kernels for GPUs that are absent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from unittest.mock import patch

import torch
import triton

import attn_ops
from attn_ops.distributed import ContextShard
from attn_ops.kernels import triton as backend
from attn_ops.kernels.triton import config_decode, config_prefill, decode_call, launch
from attn_ops.kernels.triton.pdl import publish_plan

Compiled = list[tuple[Any, dict[str, Any]]]

SHARED_MEMORY = {80: (163, 164), 86: (99, 100), 89: (99, 100), 90: (227, 228), 100: (227, 228), 120: (99, 100)}
"""KiB of a CTA and of a multiprocessor, by compute capability."""


class Driver:
    """The part of a Triton driver that compilation needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.target = triton.backends.compiler.GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        """Another number for each target: a kernel caches what it compiles by device."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(capability: int, compiles: bool | Callable[..., bool] = True) -> Iterator[Compiled]:
    """Compile launches instead of running them, with the tile sizes of that GPU.

    The list gets each kernel and its arguments: the function of the kernel, where it does not compile. ``compiles`` may
    decide by the function, its arguments and the options of the launch.
    """
    compiled: Compiled = []

    def compile_only(kernel: Any, grid: Any, values: Any, options: Any) -> None:
        result, arguments = kernel, dict(zip(kernel.arg_names, values, strict=True))
        if compiles(kernel, arguments, options.keywords()) if callable(compiles) else compiles:
            result = kernel.warmup(*values, grid=tuple(grid), **options.keywords())
            result = result.result() if hasattr(result, "result") else result
        compiled.append((result, arguments))

    def shared_memory(device: torch.device) -> tuple[int, int]:
        per_block, per_multiprocessor = SHARED_MEMORY[capability]
        return per_block << 10, per_multiprocessor << 10

    def clear_tile_caches() -> None:
        config_decode.decode_tile.cache_clear()
        config_prefill.prefill_tile.cache_clear()

    usual = triton.runtime.driver._active
    triton.runtime.driver.set_active(Driver(capability))
    clear_tile_caches()
    try:
        with (
            patch.object(launch, "is_available", lambda: True),
            patch.object(launch, "_launch_direct", compile_only),
            patch.object(config_decode, "shared_memory", shared_memory),
            patch.object(config_prefill, "shared_memory", shared_memory),
            patch.object(config_prefill, "tensor_memory", lambda device: capability // 10 == 10),
            patch.object(launch, "_has_pdl", lambda device: capability >= 90),
            patch.object(decode_call, "min_shared_for_even_spread", lambda device, programs: 0),
        ):
            yield compiled
    finally:
        triton.runtime.driver._active = usual
        clear_tile_caches()


def decode(
    dtype: torch.dtype,
    dims: tuple[int, int],
    heads: tuple[int, int],
    page_size: int = 16,
    kv_dtype: torch.dtype | None = None,
    pages: int = 10_000,
    **options: Any,
) -> None:
    sizes: dict[str, Any] = {
        "num_qo_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": dims[0],
        "head_dim_vo": dims[1],
    }
    planner = attn_ops.DecodePlanner(8, pages, page_size=page_size, num_ctas=33, **sizes)
    q = torch.zeros(5, heads[0], dims[0], dtype=dtype)
    k, v = (torch.zeros(10, page_size, heads[1], dim, dtype=kv_dtype or dtype) for dim in dims)
    backend.batch_decode(q, k, v, list(planner.state), planner.workspace, **options)


def eager(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Call ``function`` as in eager mode, where the last CTA combines."""
    with mock.patch("attn_ops.kernels.triton.decode_call.is_eager", return_value=True):
        function(*args, **kwargs)


def prefill(
    dtype: torch.dtype,
    dims: tuple[int, int],
    heads: tuple[int, int],
    page_size: int | None = 16,
    kv_dtype: torch.dtype | None = None,
    tile_rows: int | None = None,
    **options: Any,
) -> None:
    """Call ``batch_prefill``, or ``ragged_prefill`` without a page size."""
    sizes: dict[str, Any] = {
        "num_qo_heads": heads[0],
        "num_kv_heads": heads[1],
        "head_dim": dims[0],
        "head_dim_vo": dims[1],
    }
    planner = attn_ops.PrefillPlanner(
        8,
        500,
        100 if page_size else 0,
        page_size=page_size or 1,
        max_kv_len=500,
        num_ctas=33,
        tile_rows=tile_rows,
        **sizes,
    )
    pages = (10, page_size) if page_size else (160,)
    q = torch.zeros(40, heads[0], dims[0], dtype=dtype)
    k, v = (torch.zeros(*pages, heads[1], dim, dtype=kv_dtype or dtype) for dim in dims)
    run = backend.batch_prefill if page_size else backend.ragged_prefill
    run(q, k, v, list(planner.state), planner.workspace, **options)


def mla(dtype: torch.dtype, dims: tuple[int, int], heads: int, **options: Any) -> None:
    planner = attn_ops.PrefillPlanner(
        8,
        8,
        100,
        page_size=64,
        num_qo_heads=heads,
        num_kv_heads=1,
        head_dim=sum(dims),
        head_dim_vo=dims[0],
        num_ctas=33,
    )
    q, cache = torch.zeros(8, heads, sum(dims), dtype=dtype), torch.zeros(10, 64, sum(dims), dtype=dtype)
    (q_nope, q_pe), (ckv, kpe) = q.split(dims, -1), cache.split(dims, -1)
    backend.batch_mla(q_nope, q_pe, ckv, kpe, list(planner.state), planner.workspace, **options)


def small_ops() -> None:
    """One call of every op that does not attend."""
    v, s = torch.zeros(5, 3, 32, 128, dtype=torch.bfloat16), torch.zeros(5, 3, 32)
    i = torch.zeros(6, dtype=torch.int32)
    backend.merge_states(v, s)
    backend.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    backend.merge_state_in_place(v[:, 0], s[:, 0], v[:, 1], s[:, 1], torch.zeros(5, dtype=torch.bool))
    backend.merge_states_varlen(v[:, 0], s[:, 0], i)
    cache = torch.zeros(10, 16, 8, 128, dtype=torch.bfloat16)
    backend.append_kv(cache[0, :6], cache[0, :6], cache, cache, i, i, i, i)
    ckv, kpe = torch.zeros(10, 64, 576, dtype=torch.bfloat16).split((512, 64), -1)
    backend.append_mla_kv(ckv[0, :6], kpe[0, :6], ckv, kpe, i, i, i, i)
    backend.batch_indices_positions(i, i[1:], 7)
    backend.seq_lens(i, i[1:], 16)
    backend.page_table(torch.zeros(6, 8, dtype=torch.int32), i, 16)
    backend.shard_page_table(i, i, i[1:], 16, 1, 2, 32)
    backend.packbits(torch.zeros(100, dtype=torch.bool))
    backend.segment_packbits(torch.zeros(100, dtype=torch.bool), i, 13)
    sizes: dict[str, Any] = {"page_size": 16, "num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "num_ctas": 33}
    for split in (None, 8):
        decodes = attn_ops.DecodePlanner(5, 100, **sizes, fixed_split_size=split)
        prefills = attn_ops.PrefillPlanner(5, 50_000, 100, **sizes, fixed_split_size=split)  # the most tiles at a time
        backend.plan_decode(i, i, i[1:], list(decodes.state))
        backend.plan_prefill(i, i, i, i[1:], list(prefills.state))
    publish_plan([i])


def context_ops() -> None:
    """Planning and attention on the keys of one rank, with every option that depends on positions."""
    i = torch.zeros(6, dtype=torch.int32)
    sizes: dict[str, Any] = {"page_size": 16, "num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "num_ctas": 33}
    sizes |= {"context": ContextShard(1, 3, 48), "window_left": 100}
    cache, q = torch.zeros(10, 16, 2, 64, dtype=torch.bfloat16), torch.zeros(5, 8, 64, dtype=torch.bfloat16)
    for split in (None, 8):
        decodes = attn_ops.DecodePlanner(5, 100, **sizes, fixed_split_size=split)
        prefills = attn_ops.PrefillPlanner(5, 500, 100, **sizes, fixed_split_size=split, window_right=50)
        backend.plan_decode(i, i, i[1:], list(decodes.state), seq_lens=i[1:])
        backend.plan_prefill(i, i, i, i[1:], list(prefills.state), seq_lens=i[1:])
    options: dict[str, Any] = {"window_left": 100, "pos_encoding": "ROPE_LLAMA"}
    backend.batch_decode(q, cache, cache, list(decodes.state), decodes.workspace, **options)
    options = {"window_left": 100, "window_right": 50, "pos_encoding": "ALIBI"}
    backend.batch_prefill(q, cache, cache, list(prefills.state), prefills.workspace, **options)
