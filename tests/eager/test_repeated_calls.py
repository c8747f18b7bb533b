"""Ops on a GPU whose calls replay cached launches: results, alignment, errors, plans that are gone."""

from __future__ import annotations

import gc

import pytest
import torch
from helpers.cases import DECODE, PREFILL
from helpers.harness import Setup

import attn_ops
from attn_ops.errors import AttnOpsError

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

BASE = next(case for case in DECODE if str(case) == "base")


def _fresh(setup: Setup) -> dict:
    """The call's arguments with tensors of other addresses and the same contents."""
    arguments = setup.arguments
    return {name: t.clone() if name in ("q", "k_cache", "v_cache") else t for name, t in arguments.items()}


@pytest.mark.parametrize("case", DECODE[::7] + PREFILL[::11], ids=str)
def test_replayed_calls_are_right_on_other_tensors(case) -> None:
    setup = Setup("decode" if case in DECODE else "prefill", case, "cuda")
    op = torch.ops.attn.batch_decode if case in DECODE else torch.ops.attn.batch_prefill
    for _ in range(3):
        setup.check(*op(**_fresh(setup), backend="triton"))


def test_unaligned_tensors_after_aligned_ones() -> None:
    setup = Setup("decode", BASE, "cuda")
    setup.check(*setup.run("triton"))
    setup.check(*setup.run("triton"))
    q = setup.arguments["q"]
    storage = torch.empty(q.numel() + 1, dtype=q.dtype, device="cuda")
    unaligned = storage[1:].view(q.shape).copy_(q)
    assert unaligned.data_ptr() % 16
    setup.check(*setup.run("triton", q=unaligned))


def test_errors_are_raised_after_cached_calls() -> None:
    setup = Setup("decode", BASE, "cuda")
    for _ in range(2):
        setup.run("triton")
    arguments = setup.arguments
    for bad in (
        {"q": arguments["q"].double()},
        {"kv_layout": "HDN"},
        {"workspace": arguments["workspace"].cpu()},
        {"k_cache": arguments["k_cache"].cpu()},
        {"q": arguments["q"].requires_grad_()},
    ):
        with pytest.raises(AttnOpsError):
            setup.run("triton", **bad)


def test_an_entry_goes_with_its_plan() -> None:
    """Tensors of a new plan may get the identity of those of a freed plan."""
    for max_batch in (8, 64, 8, 256):
        planner = attn_ops.DecodePlanner(
            max_batch, 64, page_size=16, num_qo_heads=4, num_kv_heads=2, head_dim=64, device="cuda"
        )
        plan = planner.plan(torch.tensor([0, 2]), torch.tensor([1, 2]), torch.tensor([5]))
        q = torch.randn(1, 4, 64, device="cuda")
        cache = torch.randn(64, 2, 16, 2, 64, device="cuda")
        results = [
            torch.ops.attn.batch_decode(q, cache[:, 0], cache[:, 1], plan, planner.workspace, backend=backend)[0]
            for backend in ("triton", "triton", "reference")
        ]
        torch.testing.assert_close(results[0], results[2], rtol=1e-4, atol=1e-4)
        assert torch.equal(results[0], results[1])
        del planner, plan
        gc.collect()
