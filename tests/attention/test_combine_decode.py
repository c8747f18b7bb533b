"""The combine kernel of decode: slices of heads where few heads are split, and whole heads where many are."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.backends import each_triton
from helpers.oracle import merge

from attn_ops import DecodePlanner

pytestmark = pytest.mark.usefixtures("poisoned_memory")

KV_LENS = (700, 0, 64, 1300, 130)  # several splits, none, one, and two of them
HEADS, DIM = 6, 96


@each_triton
@pytest.mark.parametrize("programs", [1, 7, 24, 512], ids=lambda n: f"{n} programs")
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_matches_oracle(device: str, backend: str, programs: int, sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few programs combine whole heads of the four rows that are split or empty, and many slices of them."""
    from attn_ops.kernels.triton import combine_decode

    monkeypatch.setattr(combine_decode, "MAX_PROGRAMS", programs)
    pages = [-(-n // 16) for n in KV_LENS]
    indptr = torch.tensor([0, *pages]).cumsum(0).to(device)
    indices = torch.arange(sum(pages), device=device)
    last_page_len = torch.tensor([(n - 1) % 16 + 1 if n else 0 for n in KV_LENS], device=device)
    sizes = {"page_size": 16, "num_qo_heads": HEADS, "num_kv_heads": 2, "head_dim": DIM, "num_ctas": 120}
    planner = DecodePlanner(len(KV_LENS), sum(pages), **sizes, device=device)
    plan = planner.plan(indptr, indices, last_page_len)

    slots = plan.merge_indptr.tolist()
    v = torch.randn(slots[-1], HEADS, DIM, device=device)
    s = torch.randn(slots[-1], HEADS, device=device) * 4
    capacity = planner.workspace.numel() // (HEADS * (DIM + 1))
    partial = planner.workspace.fill_(torch.nan)
    partial[: v.numel()] = v.flatten()
    partial[capacity * HEADS * DIM :][: s.numel()] = s.flatten()
    out = torch.full((len(KV_LENS), HEADS, DIM), torch.nan, device=device)
    lse = torch.full((len(KV_LENS), HEADS), torch.nan, device=device)
    of_sinks = torch.randn(HEADS, device=device) if sinks else None
    combine_decode.combine_split_rows(out, lse, partial, of_sinks, plan, True)

    out, lse, v, s = out.cpu(), lse.cpu(), v.cpu(), s.cpu()
    split = 0
    for row, (first, stop) in enumerate(itertools.pairwise(slots)):
        if stop == first and KV_LENS[row]:
            assert out[row].isnan().all(), "a row that is not split is the attention kernel's"
            continue
        values, states = v[first:stop, None].double(), s[first:stop, None].double()
        if of_sinks is not None:  # in base 2 as the LSE
            values = torch.cat([values, torch.zeros(1, 1, HEADS, DIM, dtype=torch.float64)])
            states = torch.cat([states, of_sinks.cpu().double()[None, None] / math.log(2)])
        if not len(values):
            assert not out[row].any()
            assert (lse[row] == -torch.inf).all()
            continue
        expected, expected_lse = merge(values.transpose(0, 1), states.transpose(0, 1))
        torch.testing.assert_close(out[row], expected[0].float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[row], expected_lse[0].float(), rtol=1e-5, atol=1e-5)
        split += stop - first > 2
    assert split >= 2, "rows of many splits are not tested"
