"""``out`` and ``lse`` whose elements share memory are refused, eager and traced; those of other strides are filled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.wrapper_requests import DEVICE, Requests, workspace
from torch import Tensor

import attn_ops as flashinfer
from attn_ops import errors, flash_attn
from attn_ops.symbolic_sizes import overlapping_dim

R = Requests((37, 5, 130, 1), kv_layout="HND")

Call = Callable[[Tensor | None, Tensor | None], Any]
"""Attention of ``R.q [4, 4, 64]`` into ``out`` and ``lse``."""


def run() -> Call:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "HND")
    wrapper.plan(*R.table, *R.sizes, q_data_type=R.dtype)
    return lambda out, lse: wrapper.run(R.q, R.cache(), out=out, lse=lse, return_lse=True)


def block_tables() -> Call:
    tables, scratch = R.block_tables(), workspace()

    def call(out: Tensor | None, lse: Tensor | None) -> Any:
        decode = flashinfer.trtllm_batch_decode_with_kv_cache
        return decode(R.q, R.cache(), scratch, tables, R.seq_lens, 130, 0.125, out=out, lse=lse, return_lse=True)

    return call


CALLS = {"BatchDecodeWithPagedKVCacheWrapper.run": run, "trtllm_batch_decode_with_kv_cache": block_tables}

SHARED = {
    "expanded": ((0, 64, 1), 0),
    "rows": ((64, 64, 1), 0),
    "rows by an element": ((255, 64, 1), 0),
    "heads": ((256, 63, 1), 1),
    "columns": ((256, 64, 0), 2),
    "heads first": ((64, 255, 1), 1),
}
"""Strides of ``out``, and the dimension that the message names."""

APART = {"heads first": (64, 256, 1), "every other column": (512, 128, 2), "columns first": (4, 1, 16)}


def strided(strides: tuple[int, ...], dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.zeros(4096, dtype=dtype, device=DEVICE).as_strided((4, 4, 64)[: len(strides)], strides)


@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("function", CALLS)
def test_elements_that_share_memory_are_refused(function: str, name: str, traced: bool) -> None:
    strides, dim = SHARED[name]
    out, lse = strided(strides), strided((4, 1), torch.float32)
    call = CALLS[function]()
    if traced:
        call = torch.compile(call, fullgraph=True, backend="eager")
    message = (
        f"{function}: out is written and its elements overlap, with stride {strides[dim]} in dimension {dim}; "
        "expected memory of its own for each element; use out.contiguous(), or pass no out"
    )
    with pytest.raises(Exception, match=re.escape(message)) as raised:
        call(out, lse)
    assert traced or raised.type is errors.ShapeError
    assert not out.any()
    assert not lse.any()


@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
def test_an_lse_that_shares_memory_is_refused(traced: bool) -> None:
    call = torch.compile(run(), fullgraph=True, backend="eager") if traced else run()
    with pytest.raises(Exception, match="lse is written and its elements overlap, with stride 2 in dimension 0"):
        call(None, strided((2, 1), torch.float32))


def test_an_out_of_flash_attention_that_shares_memory_is_refused() -> None:
    q, kv = R.q[None], torch.zeros(1, 9, 2, 64, dtype=R.dtype, device=DEVICE)
    with pytest.raises(errors.ShapeError, match="flash_attn_func: out is written and its elements overlap"):
        flash_attn.flash_attn_func(q, kv, kv, out=strided((64, 64, 1))[None])


@pytest.mark.parametrize("function", CALLS)
def test_an_lse_in_the_memory_of_out_is_refused(function: str) -> None:
    memory = torch.zeros(4 * 4 * 64 + 32, dtype=torch.float16, device=DEVICE)
    with pytest.raises(errors.ArgumentError, match=f"{function}: lse shares memory with out; expected memory"):
        CALLS[function]()(memory[:1024].view(4, 4, 64), memory[992:1024].view(torch.float32).view(4, 4))
    assert not memory.any()
    CALLS[function]()(memory[:1024].view(4, 4, 64), memory[1024:].view(torch.float32).view(4, 4))
    R.expected(sm_scale=0.125).check(memory[:1024].view(4, 4, 64), memory[1024:].view(torch.float32).view(4, 4))


def test_tensors_without_memory_share_none() -> None:
    """All of them begin at address 0."""
    q, cache = R.q.to("meta"), tuple(t.to("meta") for t in R.cache())
    out, lse = torch.empty_like(q), torch.empty(4, 4, device="meta")
    tables, lens = R.block_tables().to("meta"), R.seq_lens.to("meta")
    decode = flashinfer.trtllm_batch_decode_with_kv_cache
    got = decode(q, cache, None, tables, lens, 130, 0.125, out=out, lse=lse, return_lse=True)
    assert got == (out, lse)


@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("function", CALLS)
def test_strides_of_views_are_filled(function: str, name: str, traced: bool) -> None:
    out, lse = strided(APART[name]), strided((1, 4), torch.float32)
    call = CALLS[function]()
    if traced:
        call = torch.compile(call, fullgraph=True, backend="eager")
    call(out, lse)
    R.expected(sm_scale=0.125).check(out, lse)


def test_dimensions_without_steps_share_nothing() -> None:
    one = torch.zeros(64)
    for t in (one.expand(1, 64), one.as_strided((1, 1, 64), (0, 3, 1)), one[:0].expand(4, 0), one.unfold(0, 64, 1)):
        assert overlapping_dim(t) is None
    assert overlapping_dim(one.unfold(0, 8, 7)) == 0
    assert overlapping_dim(torch.zeros(5, 5).diagonal()) is None


def test_any_number_of_rows_is_one_graph() -> None:
    """The condition makes no guard on the number of rows."""

    def forward(t: Tensor) -> Tensor:
        assert overlapping_dim(t) is None
        return t + 1

    for heads in (1, 4):
        example = torch.zeros(5, heads, 64)
        rows = torch.export.Dim("rows", min=0, max=1 << 20)
        program = torch.export.export(_Module(forward), (example,), dynamic_shapes=({0: rows},))
        assert program.module()(torch.zeros(1, heads, 64)).shape[0] == 1


class _Module(torch.nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = function
