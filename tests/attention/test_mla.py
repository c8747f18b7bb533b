"""``attn::batch_mla`` and ``attn::append_mla_kv``: one KV head with key ``[ckv, kpe]`` and value ``ckv``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.backends import each_backend, each_case
from helpers.calls import arguments
from helpers.cases import rounds_in_the_interpreter
from helpers.harness import CPU_BACKENDS
from helpers.mla_cases import CASES, Mla, check, random_tensor
from helpers.page_tables import indptr, page_table

import attn_ops

pytestmark = pytest.mark.usefixtures("poisoned_memory")

INTERPRETED = [
    case
    for case in CASES
    if case.dtype != torch.bfloat16 and case.dims[0] * case.heads < 1000 and rounds_in_the_interpreter(case)
]
"""Small ones: the interpreter is slow, and NumPy multiplies no bfloat16."""


@each_case(CASES, INTERPRETED)
def test_matches_oracle(case: Mla, device: str, backend: str) -> None:
    check(case, device, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [16, 64])
def test_rows_beyond_the_batch_are_zero(page_size: int) -> None:
    planner = attn_ops.PrefillPlanner(
        4, 9, 30, page_size=page_size, num_qo_heads=48, num_kv_heads=1, head_dim=576, head_dim_vo=512, device="cuda"
    )
    plan = planner.plan(indptr((1, 1)), *page_table((100, 70), page_size))
    q = torch.ones(9, 48, 576, device="cuda", dtype=torch.bfloat16)
    cache = torch.ones(30, page_size, 576, device="cuda", dtype=torch.bfloat16)
    parts = (*q.split((512, 64), -1), *cache.split((512, 64), -1))
    out, lse = torch.ops.attn.batch_mla(*parts, plan, planner.workspace, return_lse=True, backend="triton")
    assert out[2:].eq(0).all()
    assert lse[2:].eq(-torch.inf).all()
    assert out[:2].eq(1).all()


@each_backend
@pytest.mark.parametrize("planner", [{}, {"fixed_split_size": 4}], ids=["balanced", "fixed"])
def test_a_cache_without_pages_has_no_keys(planner: dict[str, Any], device: str, backend: str) -> None:
    """Every split of the plan begins after the end of the cache, and has a partial result all the same."""
    planner = planner | {"num_ctas": 60, "tile_rows": 16, "device": device}
    call = arguments("batch_mla", kv_lens=(37, 0, 900, 190), planner=planner)
    assert call["plan"].split_tiles.any()
    call = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in call.items()}
    call |= {name: call[name][:0] for name in ("ckv_cache", "kpe_cache")}
    for name in CPU_BACKENDS if backend == "reference" else (backend,):
        call["workspace"].fill_(math.nan)
        out, lse = torch.ops.attn.batch_mla(**call, backend=name)
        assert (out == 0).all()
        assert (lse == -math.inf).all()


@each_backend
def test_a_plan_for_ragged_keys_has_no_pages(device: str, backend: str) -> None:
    """Its places are no pages of a cache, although both have one token each."""
    sizes = {"num_qo_heads": 3, "num_kv_heads": 1, "head_dim": 40, "head_dim_vo": 32}
    planner = attn_ops.PrefillPlanner(2, 6, 0, max_kv_len=50, device=device, **sizes)
    plan = planner.plan(*(torch.tensor(t, device=device).int() for t in ([0, 5, 6], [0, 37, 50])))
    q, cache = torch.randn(6, 3, 40, device=device), torch.randn(50, 1, 40, device=device)
    tensors = (*q.split((32, 8), -1), *cache.split((32, 8), -1))
    for name in CPU_BACKENDS if backend == "reference" else (backend,):
        out, lse = torch.ops.attn.batch_mla(
            *tensors, plan, planner.workspace, sm_scale=0.2, return_lse=True, backend=name
        )
        assert (out == 0).all()
        assert (lse == -math.inf).all()


def test_head_dims_other_than_512_and_64_need_sm_scale() -> None:
    planner = attn_ops.PrefillPlanner(1, 1, 1, num_qo_heads=1, num_kv_heads=1, head_dim=40, head_dim_vo=32)
    q, cache = torch.zeros(1, 1, 40), torch.zeros(1, 1, 40)
    arguments = (q[..., :32], q[..., 32:], cache[..., :32], cache[..., 32:], planner.state, planner.workspace)
    with pytest.raises(attn_ops.errors.OptionError, match=r"sm_scale is None with head_dim 32 \+ 8; expected .*; pass"):
        torch.ops.attn.batch_mla(*arguments)
    assert torch.ops.attn.batch_mla(*arguments, sm_scale=1.0)[0].shape == (1, 1, 32)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_append(dtype: torch.dtype, packed: bool) -> None:
    """A row of no request and one beyond the pages are skipped. The rest of the cache keeps its bits."""
    case = Mla("append", packed=packed)
    kv_indptr, kv_indices, _ = page_table(case.kv_lens, case.page_size)
    rows = [(0, 69), (-1, 0), (3, 17), (1, 16), (2, 8), (3, 0)]
    request, position = torch.tensor(rows, dtype=torch.int32).T.contiguous()
    new = random_tensor((len(rows), sum(case.dims)), dtype, 1)
    before = torch.full((len(kv_indices) + 1, case.page_size, sum(case.dims)), math.nan).to(dtype)
    ckv, kpe = (t if packed else t.contiguous() for t in before.clone().split(case.dims, -1))
    new_ckv, new_kpe = new.split(case.dims, -1)
    torch.ops.attn.append_mla_kv(new_ckv, new_kpe, ckv, kpe, request, position, kv_indices, kv_indptr)
    expected = before.float()
    for i, (b, p) in enumerate(rows):
        if b >= 0 and p // case.page_size < kv_indptr[b + 1] - kv_indptr[b]:
            expected[kv_indices[kv_indptr[b] + p // case.page_size], p % case.page_size] = new[i].float()
    actual = torch.cat((ckv.float(), kpe.float()), -1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
