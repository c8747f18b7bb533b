"""Which calls on Hopper are planned for the kernel of short KV: 16-bit calls without a mask or positional encoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.cuda_graph_steps import STEPS, replays
from helpers.page_tables import indptr
from helpers.wrapper_requests import int32
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import attn_ops
from attn_ops import flash_attn
from attn_ops.frontend import call_plans
from attn_ops.plan import sizing
from attn_ops.plan.state import PlanProblem

LENGTHS = (100, 7, 0, 200)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "hopper_sms", lambda device: 132)


def _ragged(**options: Any) -> attn_ops.BatchPrefillWithRaggedKVCacheWrapper:
    wrapper = attn_ops.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8), "NHD")
    lengths = options.pop("lengths", LENGTHS)
    wrapper.plan(indptr(lengths), indptr(lengths), 4, 2, 64, **{"q_data_type": torch.bfloat16, **options})
    return wrapper


def _short_kv(wrapper: attn_ops.BatchPrefillWithRaggedKVCacheWrapper) -> bool:
    assert wrapper._planned is not None
    return bool(PlanProblem.of(wrapper._planned.plan.problem).short_kv)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"causal": True, "window_left": 20, "logits_soft_cap": 5.0}, True),
        ({"lengths": (513, 2)}, False),
        ({"q_data_type": torch.float32}, False),
        ({"kv_data_type": torch.float8_e4m3fn}, False),
        ({"q_data_type": torch.float8_e4m3fn}, False),
        ({"pos_encoding_mode": "ALIBI"}, False),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, False),
        ({"custom_mask": torch.ones(sum(n * n for n in LENGTHS), dtype=torch.bool)}, False),
        ({"disable_split_kv": True}, False),
    ],
    ids=str,
)
def test_plans_of_wrappers(options: dict[str, Any], expected: bool) -> None:
    assert _short_kv(_ragged(**options)) == expected


@pytest.mark.parametrize("name", STEPS)
def test_plans_of_a_captured_run_keep_their_addresses(name: str) -> None:
    """Of batches that fit the first one, with fewer keys too."""
    step = STEPS[name]()
    assert len({step.addresses() for _ in replays(step)}) == 1


def test_results_of_a_wrapper_whose_batches_are_short_and_longer() -> None:
    wrapper, g = _ragged(), torch.Generator().manual_seed(0)
    for lengths in (LENGTHS, (600, 3), (5, 40)):
        wrapper.plan(indptr(lengths), indptr(lengths), 4, 2, 64, causal=True, q_data_type=torch.bfloat16)
        assert _short_kv(wrapper) == (lengths == LENGTHS)
        q, k, v = (torch.randn(sum(lengths), heads, 64, generator=g).bfloat16() for heads in (4, 2, 2))
        outs = []
        for of_q, of_k, of_v in zip(*(t.double().split(lengths) for t in (q, k, v)), strict=True):
            keys, values = (t.repeat_interleave(2, 1) for t in (of_k, of_v))
            logits = torch.einsum("qhd,khd->hqk", of_q, keys) / 8
            hidden = torch.ones(logits.shape[1:]).triu(1).bool()
            outs.append(torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), values))
        torch.testing.assert_close(wrapper.run(q, k, v).double(), torch.cat(outs), rtol=2e-2, atol=2e-2)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the plans that calls make are for short KV."""
    found: list[bool] = []
    allocate = call_plans.allocate_prefill

    def recorded(problem: PlanProblem, *args: Any, **kwargs: Any) -> Any:
        found.append(bool(problem.short_kv))
        return allocate(problem, *args, **kwargs)

    monkeypatch.setattr(call_plans, "allocate_prefill", recorded)
    return found


@pytest.mark.parametrize(("longest", "expected"), [(200, True), (512, True), (513, False)])
def test_plans_of_flash_attention(longest: int, expected: bool, planned: list[bool]) -> None:
    """By the longest request that the call names."""
    lengths = (*LENGTHS, 200, 200)
    q, k = (torch.ones(sum(lengths), heads, 64).bfloat16() for heads in (4, 2))
    flash_attn.flash_attn_varlen_func(q, k, k, indptr(lengths), indptr(lengths), longest, longest)
    assert planned == [expected]


@pytest.mark.parametrize(
    ("width", "longest", "dtype", "expected"),
    [
        (32, 5000, "bf16", True),
        (33, 513, "bf16", False),
        (33, 512, "bf16", True),
        (33, 0, "bf16", False),
        (8, 30, "fp8", False),
    ],
)
def test_plans_of_block_tables(width: int, longest: int, dtype: str, expected: bool, planned: list[bool]) -> None:
    """By the width of the table, and by the longest request that the call names."""
    cache: Tensor = torch.ones(100, 2, 2, 16, 64).to({"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[dtype])
    attn_ops.trtllm_batch_context_with_kv_cache(
        query=torch.ones(5, 4, 64).bfloat16(),
        kv_cache=cache,
        workspace_buffer=torch.empty(1 << 20, dtype=torch.uint8),
        block_tables=torch.zeros(2, width, dtype=torch.int32),
        seq_lens=torch.tensor([20, 30], dtype=torch.int32),
        max_q_len=3,
        max_kv_len=longest,
        bmm1_scale=0.1,
        bmm2_scale=1.0,
        batch_size=2,
        cum_seq_lens_q=indptr((2, 3)),
        cum_seq_lens_kv=indptr((20, 30)),
    )
    assert planned == [expected]


@pytest.mark.parametrize(("longest", "expected"), [(512, True), (513, False)])
def test_plans_of_ragged_functions(longest: int, expected: bool, planned: list[bool]) -> None:
    rows, keys = (3, 4), (500, 40)
    q, k = torch.ones(sum(rows), 4, 64).bfloat16(), torch.ones(sum(keys), 2, 64).bfloat16()
    attn_ops.trtllm_ragged_attention_deepseek(
        q, k, k, None, int32(*keys), 4, longest, 0.1, 1.0, None, 2, -1, indptr(rows), indptr(keys), None, True, False
    )
    attn_ops.cudnn_batch_prefill_with_kv_cache(
        q, k, k, 0.1, None, max_token_per_sequence=4, max_sequence_kv=longest, actual_seq_lens_q=int32(*rows),
        actual_seq_lens_kv=int32(*keys), causal=True, return_lse=False,
    )  # fmt: skip
    assert planned == [expected, expected]


@pytest.mark.parametrize(("longest", "expected"), [(512, True), (torch.tensor(512), False), (513, False)])
def test_plans_of_flash_attention_over_block_tables(longest: int | Tensor, expected: bool, planned: list[bool]) -> None:
    cache = torch.ones(3, 256, 2, 64).bfloat16()
    table, lengths = torch.tensor([[0, 1, 2]] * 2, dtype=torch.int32), indptr((600, 30))
    flash_attn.flash_attn_varlen_func(
        torch.ones(5, 4, 64).bfloat16(), cache, cache, indptr((2, 3)), lengths, 3, longest, block_table=table
    )
    assert planned == [expected]


def test_a_traced_call_over_block_tables_is_not_compiled_again_for_another_longest_request() -> None:
    q, cache = torch.ones(5, 4, 64).bfloat16(), torch.ones(3, 256, 2, 64).bfloat16()
    table = torch.tensor([[0, 1, 2]] * 2, dtype=torch.int32)
    graphs = CompileCounter()

    @torch.compile(fullgraph=True, backend=graphs)
    def compiled(longest: int) -> Tensor:
        out: Tensor = flash_attn.flash_attn_varlen_func(
            q, cache, cache, indptr((2, 3)), indptr((600, 30)), 3, longest, block_table=table
        )
        return out

    for longest in (300, 600, 700):
        compiled(longest)
    assert graphs.frame_count == 1
