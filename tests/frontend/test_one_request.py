"""Functions for one request, and for a batch of equal lengths: they call ``attn::single_prefill``, without a plan."""

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
    assert ops.called == ["single_prefill"]
    expected = Expected.of([(q, *tokens_first(layout, k, v))], **oracle_options(options))
    expected.check(out[None], lse[None])


@pytest.mark.parametrize("options", [*OPTIONS, {"causal": True}, {"window_right": 3}], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("rows", [1, 7])
def test_single_prefill(rows: int, layout: str, options: dict[str, Any]) -> None:
    q, k, v = tensors(rows, layout=layout)
    with Ops() as ops:
        out, lse = attn_ops.single_prefill_with_kv_cache(q, k, v, kv_layout=layout, return_lse=True, **options)
    assert ops.called == ["single_prefill"]
    Expected.of([(q, *tokens_first(layout, k, v))], **oracle_options(options)).check(out, lse)


@pytest.mark.parametrize("rows", [1, 7])
def test_a_custom_mask_takes_the_place_of_causal(rows: int) -> None:
    q, k, v = tensors(rows)
    mask = torch.rand(rows, TOKENS, generator=torch.Generator().manual_seed(0)) < 0.5
    with Ops() as ops:
        out = attn_ops.single_prefill_with_kv_cache(q, k, v, custom_mask=mask.to(DEVICE), causal=True)
    assert ops.called[-1] == "single_prefill"
    Expected.of([(q, k, v, mask)]).check(out)


@pytest.mark.parametrize("fp8", ["cache", "all"])
def test_fp8(fp8: str) -> None:
    q, k, v = tensors(1)
    k, v = (t.to(torch.float8_e4m3fn) for t in (k, v))
    q = q.to(torch.float8_e4m3fn if fp8 == "all" else torch.float16)
    with Ops() as ops:
        out = attn_ops.single_decode_with_kv_cache(q[0], k, v, k_scale=0.5, v_scale=2.0)
    assert ops.called == ["single_prefill"]
    expected = Expected.of([(q.float(), k.float(), 2 * v.float())], sm_scale=0.5 * DIM**-0.5)
    expected.check(out[None], eps=2.0**-3 if fp8 == "all" else 0.0)


@pytest.mark.parametrize("rows", [1, 7])
def test_a_batch_of_equal_lengths(rows: int) -> None:
    requests = [tensors(rows, tokens) for tokens in (TOKENS, TOKENS)]
    with Ops() as ops:
        out = flash_attn.flash_attn_func(*map(torch.stack, zip(*requests, strict=True)), causal=True)
    assert ops.called == ["single_prefill"]
    Expected.of(requests, causal=True).check(out.flatten(0, 1))


def test_errors() -> None:
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
