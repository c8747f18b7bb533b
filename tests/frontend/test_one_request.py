"""One request of few query rows over many keys: it is planned, its keys are split, and the result is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.oracle import Expected
from helpers.wrapper_requests import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode

import attn_ops
from attn_ops import flash_attn
from attn_ops.errors import ShapeError
from attn_ops.frontend import call_plans, one_shot
from attn_ops.frontend.flash import calls
from attn_ops.frontend.shared_plans import host_plans

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 64, 5000


class Ops(TorchDispatchMode):
    """The ops of this library that are called, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "attn":
            self.called.append(func._opname)
        return func(*args, **kwargs or {})


@pytest.fixture(autouse=True)
def many_ctas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of plans for a device that computes eight query tiles at a time."""
    monkeypatch.setattr(call_plans, "splits_per_head", lambda *_: 16)
    monkeypatch.setattr(call_plans, "ctas_per_head", lambda *_: 8)


def tensors(rows: int, tokens: int = TOKENS, layout: str = "NHD") -> tuple[torch.Tensor, ...]:
    """``(q, k, v)`` with keys and values in that layout."""
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(rows, HEADS, DIM, generator=generator).to(DEVICE)
    kv = (torch.randn(tokens, KV_HEADS, DIM, generator=generator).to(DEVICE) for _ in range(2))
    return q, *(t if layout == "NHD" else t.transpose(0, 1).contiguous() for t in kv)


def tokens_first(layout: str, *kv: torch.Tensor) -> list[torch.Tensor]:
    return [t if layout == "NHD" else t.transpose(0, 1) for t in kv]


OPTIONS = [
    {},
    {"window_left": 4800},
    {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 1e5},
    {"logits_soft_cap": 5.0, "sm_scale": 0.3},
]


def oracle_options(options: dict[str, Any]) -> dict[str, Any]:
    return {{"pos_encoding_mode": "pos_encoding"}.get(name, name): value for name, value in options.items()}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_single_decode(layout: str, options: dict[str, Any]) -> None:
    q, k, v = tensors(1, layout=layout)
    with Ops() as ops:
        out, lse = attn_ops.single_decode_with_kv_cache(q[0], k, v, layout, return_lse=True, **options)
    assert ops.called == ["page_table", "plan_decode", "batch_decode"]
    expected = Expected.of([(q, *tokens_first(layout, k, v))], **oracle_options(options))
    expected.check(out[None], lse[None])


@pytest.mark.parametrize("options", [*OPTIONS, {"causal": True}, {"window_right": 3}], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("rows", [1, 7])
def test_single_prefill(rows: int, layout: str, options: dict[str, Any]) -> None:
    q, k, v = tensors(rows, layout=layout)
    with Ops() as ops:
        out, lse = attn_ops.single_prefill_with_kv_cache(q, k, v, kv_layout=layout, return_lse=True, **options)
    assert ops.called[-1] == ("batch_decode" if rows == 1 else "ragged_prefill")
    Expected.of([(q, *tokens_first(layout, k, v))], **oracle_options(options)).check(out, lse)


@pytest.mark.parametrize("rows", [1, 7])
def test_a_custom_mask_takes_the_place_of_causal(rows: int) -> None:
    q, k, v = tensors(rows)
    mask = torch.rand(rows, TOKENS, generator=torch.Generator().manual_seed(0)) < 0.5
    with Ops() as ops:
        out = attn_ops.single_prefill_with_kv_cache(q, k, v, custom_mask=mask.to(DEVICE), causal=True)
    assert ops.called[-1] == "ragged_prefill"
    Expected.of([(q, k, v, mask)]).check(out)


@pytest.mark.parametrize("fp8", ["cache", "all"])
def test_fp8(fp8: str) -> None:
    q, k, v = tensors(1)
    k, v = (t.to(torch.float8_e4m3fn) for t in (k, v))
    q = q.to(torch.float8_e4m3fn if fp8 == "all" else torch.float16)
    with Ops() as ops:
        out = attn_ops.single_decode_with_kv_cache(q[0], k, v, k_scale=0.5, v_scale=2.0)
    assert ops.called[-1] == ("ragged_prefill" if fp8 == "all" else "batch_decode")
    expected = Expected.of([(q.float(), k.float(), 2 * v.float())], sm_scale=0.5 * DIM**-0.5)
    expected.check(out[None], eps=2.0**-3 if fp8 == "all" else 0.0)


def test_flash_attn_func_shares_the_plan_between_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, q, (k, v) = [], tensors(7)[0], (t[: TOKENS - 1] for t in tensors(7)[1:])  # lengths of no other test
    make = calls.ragged_plan
    monkeypatch.setattr(calls, "ragged_plan", lambda *args: plans.append(args) or make(*args))
    for _ in range(2):
        out = flash_attn.flash_attn_func(q[None], k[None], v[None], causal=True)
        Expected.of([(q, k, v)], causal=True).check(out[0])
    assert len(plans) == 1
    with Ops() as ops:
        flash_attn.flash_attn_func(q[None], k[None], v[None], causal=True)
    assert ops.called[-1] == "ragged_prefill"


@pytest.mark.parametrize("rows", [1, 7])
def test_calls_of_the_same_sizes_share_a_plan(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, call_op = [], call_plans.call_op
    monkeypatch.setattr(call_plans, "call_op", lambda op, *args, **kw: planned.append(op) or call_op(op, *args, **kw))
    for tokens in (TOKENS + rows, TOKENS + rows, TOKENS + 10 + rows):  # lengths of no other test
        q, k, v = tensors(rows, tokens)
        Expected.of([(q, k, v)]).check(attn_ops.single_prefill_with_kv_cache(q, k, v))
    q, k, v = tensors(rows + 2, TOKENS + rows)
    Expected.of([(q, k, v)]).check(attn_ops.single_prefill_with_kv_cache(q, k, v))
    plans = ["plan_decode" if rows == 1 else "plan_prefill"] * 2
    assert [op for op in planned if op != "page_table"] == [*plans, "plan_prefill"]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("rows", [1, 7])
def test_a_repeated_call_finds_its_plan(rows: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not written again, until its plan is gone."""

    def call(seed: int) -> None:
        torch.manual_seed(seed)
        q, k, v = (torch.randn_like(t) for t in tensors(rows, TOKENS + 77, layout))
        if rows == 1:
            out = attn_ops.single_decode_with_kv_cache(q[0], k, v, layout)[None]
        else:
            out = attn_ops.single_prefill_with_kv_cache(q, k, v, kv_layout=layout)
        Expected.of([(q, *tokens_first(layout, k, v))]).check(out)

    call(0)
    with monkeypatch.context() as patch:
        patch.setattr(one_shot, "splits_pay", None)
        call(1)
        host_plans().entries.clear()
        with pytest.raises(TypeError):
            call(2)
    call(3)


def test_what_fills_the_device_or_is_short_is_not_planned() -> None:
    """Eight tiles of 128 rows fill it. 1500 keys take as long as a plan, and so does a window of as many.

    Of 3400 keys, four tiles of 500 rows see 2900 all, of which the other half of a wave would save too few.
    """
    for rows, tokens, options in (
        (8 * 128, TOKENS, {}),
        (7, 1500, {}),
        (7, TOKENS, {"window_left": 1500}),
        (500, 3400, {"causal": True}),
        (0, TOKENS, {}),
        (7, 0, {}),
    ):
        with Ops() as ops:
            attn_ops.single_prefill_with_kv_cache(*tensors(rows, tokens), **options)
        assert ops.called == ["single_prefill"], (rows, tokens, options)


@pytest.mark.parametrize(("batch", "planned"), [(2, True), (4, False)])
def test_a_batch_is_planned_if_half_of_the_device_would_read_it_faster(batch: int, planned: bool) -> None:
    """A wave is eight tiles. Half of the CTAs read keys as fast as all."""
    q, k, v = (torch.stack([t] * batch) for t in tensors(1))
    with Ops() as ops:
        out = flash_attn.flash_attn_func(q, k, v)
    assert ops.called[-1] == ("ragged_prefill" if planned else "single_prefill")
    Expected.of([(q[0], k[0], v[0])]).check(out[0])


def test_errors_are_those_of_a_call_without_a_plan() -> None:
    q, k, v = tensors(7)
    with pytest.raises(ShapeError, match="single_prefill"):
        attn_ops.single_prefill_with_kv_cache(q, k, v[:-1])
    with pytest.raises(ShapeError, match="KV heads"):
        attn_ops.single_prefill_with_kv_cache(q, k[:, :0], v[:, :0])
    with pytest.raises(ShapeError, match=r"num_qo_heads|query heads|multiple"):
        attn_ops.single_prefill_with_kv_cache(q[:, :3], k, v)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_left": 4800}], ids=str)
def test_it_compiles_to_the_same(options: dict[str, Any], rows: int, dynamic: bool) -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attn_ops.single_prefill_with_kv_cache(q, k, v, **options)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (TOKENS, TOKENS + 100):
        given = tensors(rows, tokens)
        torch.testing.assert_close(compiled(*given), step(*given))
