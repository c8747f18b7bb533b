"""``batch_mla`` of the triton backend against the oracle."""

from __future__ import annotations

import pytest
import torch
from helpers.mla_cases import CASES, Mla, check
from helpers.page_tables import indptr, page_table

import attn_ops

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(case: Mla) -> None:
    check(case, "cuda", "triton")


@pytest.mark.parametrize("case", [case for case in CASES if case.dims == (512, 64)], ids=str)
@pytest.mark.usefixtures("general_kernels")
def test_general_kernel_matches_oracle(case: Mla) -> None:
    """What packages run."""
    check(case, "cuda", "triton")


@pytest.mark.parametrize("page_size", [16, 64])
def test_rows_beyond_the_batch(page_size: int) -> None:
    """Both kernels give query rows of no request zeros."""
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
