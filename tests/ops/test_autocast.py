"""Autocast does not reach into an op or a public function: on the CPU the results are bit for bit those without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.calls import MAKERS, arguments, observed
from helpers.flash_requests import DenseCache, dense
from helpers.surfaces import SURFACES
from helpers.surfaces.base import Surface
from helpers.wrapper_requests import DEVICE
from torch.utils import _pytree as pytree

from attn_ops.flash_attn import flash_attn_func, flash_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("no_grad")

LOWER = (torch.bfloat16, torch.float16)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _assert_same(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> None:
    assert [t.dtype for t in expected] == [t.dtype for t in actual]
    for a, b in zip(expected, actual, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("region", LOWER, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *LOWER], ids=str)
@pytest.mark.parametrize("op", MAKERS)
def test_an_op_under_autocast(op: str, dtype: torch.dtype, region: torch.dtype) -> None:
    call = getattr(torch.ops.attn, op)

    def outputs() -> list[torch.Tensor]:
        torch.manual_seed(0)
        kwargs = arguments(op, dtype=dtype)
        return observed(op, kwargs, call(**kwargs))

    expected = outputs()
    torch.manual_seed(0)
    kwargs = arguments(op, dtype=dtype)
    with torch.autocast("cpu", dtype=region):
        result = call(**kwargs)
    _assert_same(expected, observed(op, kwargs, result))


@pytest.mark.parametrize("region", LOWER, ids=str)
@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.name)
def test_a_public_function_under_autocast(surface: Surface, region: torch.dtype) -> None:
    expected = _tensors(surface.outcome())
    with torch.autocast(DEVICE, dtype=region):
        actual = _tensors(surface.outcome())
    _assert_same(expected, actual)


@pytest.mark.parametrize("region", LOWER, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *LOWER], ids=str)
def test_functions_of_flash_attention_under_autocast(dtype: torch.dtype, region: torch.dtype) -> None:
    """They join latents to queries, and rotated columns to the others."""
    q, k, v = (t.to(dtype) for t in dense(2, 3, 9))
    cache, table = DenseCache((9, 5), dtype=dtype), torch.randn(64, 8, device=DEVICE)

    def results() -> list[torch.Tensor]:
        caches, new = (cache.k.clone(), cache.v.clone()), (k[:, :1], v[:, :1])
        rotary = {"rotary_cos": table, "rotary_sin": table, "cache_seqlens": cache.cache_seqlens}
        return [flash_attn_func(q, k, v, qv=q), flash_attn_with_kvcache(q[:, :1], *caches, *new, **rotary), *caches]

    expected = results()
    with torch.autocast(DEVICE, dtype=region):
        actual = results()
    _assert_same(expected, actual)


@pytest.mark.slow
def test_a_compiled_op_under_autocast() -> None:
    inputs = arguments("merge_states", dtype=torch.float16)
    expected = torch.ops.attn.merge_states(**inputs)
    compiled = torch.compile(lambda v, s: torch.ops.attn.merge_states(v, s), fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = compiled(**inputs)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])
