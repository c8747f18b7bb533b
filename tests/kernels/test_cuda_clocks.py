"""The clock-based accounts of the CUDA kernels, which run on the host (``helpers/cuda_host``)."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")  # whose call of the prefill kernels the CUDA kernel shares

from helpers import masks
from helpers.cuda_host import Host, needs_a_compiler
from helpers.cuda_kernels import PTX_TYPES, check_syntax, compiled_parameters, declared_parameters, needs_nvrtc
from helpers.page_tables import indptr, page_table

import attn_ops
from attn_ops.kernels.cuda import mla, prefill
from attn_ops.ops.cuda_kernels import PrefillKey
from benchmarks import clocks

KV_LENS, TILES = (300, 64, 129), 5 + 1 + 3

KERNELS = {
    "mla": mla.SPECIALIZATIONS["mla", 128, 1, torch.bfloat16, False, False],
    "mla, one consumer": mla.SPECIALIZATIONS["mla_swap_ab", 16, 2, torch.bfloat16, False, False],
    "mla, FP8": mla.SPECIALIZATIONS["mla_swap_ab", 16, 1, torch.bfloat16, True, False],
    "prefill": prefill.SPECIALIZATIONS[PrefillKey(128, 128, "pages", torch.bfloat16, False)],
    "prefill mask": prefill.SPECIALIZATIONS[PrefillKey(128, 128, "pages", torch.bfloat16, False, custom_mask=True)],
    "prefill FP8": prefill.SPECIALIZATIONS[PrefillKey(128, 128, "pages", torch.bfloat16, True)],
    "prefill FP8, few rows": prefill.SPECIALIZATIONS[PrefillKey(64, 64, "pages", torch.float16, True, "few rows")],
    "prefill RoPE": prefill.SPECIALIZATIONS[
        PrefillKey(128, 128, "pages", torch.bfloat16, False, pos_encoding="ROPE_LLAMA")
    ],
}


@pytest.mark.parametrize("row", clocks.MLA_ROWS, ids=lambda row: row.name)
def test_every_row_of_mla_has_the_roles_of_its_kernel(row: Any) -> None:
    by_tokens = row.page_size % mla.TILE != 0
    units = mla.units_of(row.num_heads, row.fp8, by_tokens)
    one = mla.SPECIALIZATIONS[units.kernel, units.rows, 1, torch.bfloat16, row.fp8, by_tokens]
    roles = clocks.ROLES[clocks.roles(one)]
    assert sorted(warp for warps in roles.values() for warp in warps)[-1] < one.threads // 32


PHASES = {
    "producer": {"Prologue", "Schedule", "WaitEmpty", "Issue"},
    "converter": {"Prologue", "WaitKeys", "Issue"},
    "consumer": {"WaitUnit", "Qk", "Softmax", "Pv", "Idle"},
}
"""Phases in which each role is seen."""


def _planner(
    heads: int,
    kv_heads: int,
    head_dim: int,
    head_dim_vo: int,
    rows: int,
    tile_rows: int | None = None,
    short_kv: bool = False,
) -> attn_ops.PrefillPlanner:
    tables = page_table(KV_LENS, 64)
    batch = len(KV_LENS)
    planner = attn_ops.PrefillPlanner(
        batch,
        batch * rows,
        tables[1].shape[0],
        page_size=64,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_vo=head_dim_vo,
        max_kv_len=max(KV_LENS),
        tile_rows=tile_rows,
        short_kv=short_kv,
    )
    planner.plan(indptr((rows,) * batch), *tables)
    return planner


def _mla(heads: int, kv_dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    planner = _planner(heads, 1, 576, 512, 1)
    q_nope, q_pe = torch.randn(3, heads, 512).bfloat16(), torch.randn(3, heads, 64).bfloat16()
    ckv, kpe = (torch.randn(planner.max_pages, 64, columns).to(kv_dtype) for columns in (512, 64))
    return mla.batch_mla(q_nope, q_pe, ckv, kpe, list(planner.state), planner.workspace)


def _prefill(
    kv_dtype: torch.dtype = torch.bfloat16,
    dim: int = 128,
    tile_rows: int | None = None,
    rows: int = 100,
    short_kv: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    planner = _planner(2, 1, dim, dim, rows, tile_rows, short_kv)
    q = torch.randn(3 * rows, 2, dim).bfloat16()
    k, v = (torch.randn(planner.max_pages, 64, 1, dim).to(kv_dtype) for _ in range(2))
    return prefill.batch_prefill(q, k, v, list(planner.state), planner.workspace, **options)


FEW_ROWS = functools.partial(_prefill, torch.float8_e4m3fn, tile_rows=32)
LARGE_BATCH = functools.partial(_prefill, tile_rows=96)


@needs_a_compiler
@pytest.mark.parametrize(
    ("kernel", "call"),
    [
        ("mla", functools.partial(_mla, 128)),
        ("mla", functools.partial(_mla, 64)),
        ("mla, one consumer", functools.partial(_mla, 16)),
        ("mla, one consumer KV_FP8", functools.partial(_mla, 16, torch.float8_e4m3fn)),
        ("prefill", _prefill),
        ("prefill, three consumers", functools.partial(_prefill, dim=64, tile_rows=96)),
        ("prefill, three consumers", LARGE_BATCH),
        ("prefill, one consumer", functools.partial(_prefill, short_kv=True)),
        ("prefill KV_FP8", functools.partial(_prefill, torch.float8_e4m3fn)),
        ("prefill KV_FP8, few rows", FEW_ROWS),
        ("prefill RoPE", functools.partial(_prefill, pos_encoding="ROPE_LLAMA")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_clocks_are_kept_and_change_no_result(kernel: str, call: Any) -> None:
    results = []
    with Host(sms=4, seed=1).installed():
        for record in (False, True):
            torch.manual_seed(0)
            if not record:
                results.append(call())
                continue
            with clocks.recording() as launches:
                results.append(call())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    ((one, found),) = launches
    phases, others = clocks.columns()
    of = dict(zip((*phases, *others), found.unbind(2), strict=True))
    assert (found >= 0).all()
    assert (found[:, :, : len(phases)].sum(2) <= of["Whole"]).all()
    assert (16 * (of["Whole"] - 1) <= of["EndNs"] - of["BeginNs"]).all(), "a cycle of the host has 16 ns"
    assert clocks.roles(one) == kernel
    roles = clocks.ROLES[kernel]
    for name, warps in roles.items():
        seen = {phase for phase in phases if of[phase][:, list(warps)].any()}
        assert PHASES[name.split()[0]] <= seen, name
        assert name.startswith("consumer") == bool(of["Tiles"][:, list(warps)].any())
    consumers = [of["Tiles"][:, warps[0]].sum().item() for name, warps in roles.items() if name.startswith("consumer")]
    if kernel == "mla":  # consumers have tiles in turn, in each CTA of a cluster
        assert sum(consumers) == TILES * (2 if call.args == (128,) else 1)
    elif kernel.startswith("mla, one consumer"):
        assert consumers == [TILES]
    elif call is FEW_ROWS:  # four query tiles of each request; consumers take KV tiles of 64 tokens in turn
        assert sum(consumers) == 4 * TILES
    else:  # 200 packed rows, of which each consumer has 64 of every 128 or 192; tiles of 128 tokens, or of 64 as in MLA
        tiles = TILES if call is LARGE_BATCH or "one" in kernel else 3 + 1 + 2
        assert consumers == ([4 * tiles] if "one" in kernel else [2 * tiles] * (3 if "three" in kernel else 2))
    assert len(clocks.account(found[None], roles)) == len(roles)
    assert clocks.span(found[None]).startswith("last start ")


@needs_a_compiler
@pytest.mark.parametrize("rows", [200, 100])
@pytest.mark.parametrize("name", [*masks.SHAPES, "first token", "last token", "nothing"])
def test_kv_tiles_at_both_ends_that_a_mask_hides_are_not_computed(name: str, rows: int) -> None:
    """Two heads: a unit has 64 rows, and the KV tiles that one of its consumers needs. Few rows have all tiles."""

    def seen(length: int) -> Tensor:
        if name in masks.SHAPES:
            return masks.SHAPES[name](rows, length)
        tokens = {"first token": 0, "last token": length - 1}
        return (torch.arange(length) == tokens.get(name, -1)).expand(rows, -1)

    requests = [seen(length) for length in KV_LENS]
    with Host(sms=2, seed=1).installed(), clocks.recording() as launches:
        _prefill(rows=rows, mask=masks.pack(requests))
    ((_, found),) = launches
    phases, others = clocks.columns()
    tiles = found[:, :, len(phases) + others.index("Tiles")]
    if rows == 200:
        units = [part.any(0).nonzero().flatten() // 128 for mask in requests for part in mask.split(64)]
        expected = sum((unit[-1] - unit[0] + 1).item() for unit in units if unit.numel())
        assert (expected > 0) == (name != "nothing")
    else:
        expected = 2 * (3 + 1 + 2)
    for role, warps in clocks.ROLES["prefill"].items():
        if role.startswith("consumer"):
            assert tiles[:, warps[0]].sum() == expected


@needs_nvrtc
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_with_clocks_has_the_parameters_that_it_is_launched_with(name: str) -> None:
    one = clocks.clocked(KERNELS[name])
    phases, others = clocks.columns()
    size = len(phases) + len(others)
    check_syntax(one, f"static_assert(kClockColumns == {size} && sizeof(WarpClock) == {clocks.CLOCK_BYTES});\n")
    kinds = declared_parameters(one)
    assert kinds == dict(one.kernel.parameters)
    assert compiled_parameters(one) == [PTX_TYPES[kind] for kind in kinds.values()]
    assert declared_parameters(KERNELS[name]) == dict(KERNELS[name].kernel.parameters)
