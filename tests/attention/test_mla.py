"""``attn::batch_mla`` and ``attn::append_mla_kv``: one KV head whose key is ``[ckv, kpe]`` and value ``ckv``."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.mla_cases import CASES, Mla, check, random
from helpers.page_tables import page_table

import attn_ops

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(case: Mla) -> None:
    check(case)


def test_other_sizes_must_name_their_scale() -> None:
    planner = attn_ops.PrefillPlanner(1, 1, 1, num_qo_heads=1, num_kv_heads=1, head_dim=40, head_dim_vo=32)
    q, cache = torch.zeros(1, 1, 40), torch.zeros(1, 1, 40)
    arguments = (q[..., :32], q[..., 32:], cache[..., :32], cache[..., 32:], planner.state, planner.workspace)
    with pytest.raises(attn_ops.errors.OptionError, match=r"sm_scale is None with head_dim 32 \+ 8; expected .*; pass"):
        torch.ops.attn.batch_mla(*arguments)
    torch.ops.attn.batch_mla(*arguments, sm_scale=1.0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_append(dtype: torch.dtype, packed: bool) -> None:
    """Skipped: a row of no request, one beyond the pages. Everything else of the cache stays."""
    case = Mla("append", packed=packed)
    kv_indptr, kv_indices, _ = page_table(case.kv_lens, case.page_size)
    rows = [(0, 69), (-1, 0), (3, 17), (1, 16), (2, 8), (3, 0)]
    request, position = torch.tensor(rows, dtype=torch.int32).T.contiguous()
    new = random((len(rows), sum(case.dims)), dtype, 1)
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
