"""Scales of FP8 tensors with a value for each request and KV head, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.flash_requests import check_dense, check_varlen, dense, expected
from helpers.fp8_products import tolerance_of_fp8_queries
from helpers.wrapper_requests import DEVICE
from torch import Tensor

from attn_ops import errors
from attn_ops.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("poisoned_memory")

E4M3 = torch.float8_e4m3fn
BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS = 3, 4, 21, 4, 2
EQUAL = 2.0 ** torch.tensor([[0, -2], [1, 3], [-1, 0]]).float()
"""Powers of 2, by which a query is multiplied without rounding."""

SCALES = {
    "q_descale": EQUAL.to(DEVICE),
    "k_descale": EQUAL.flip(0).to(DEVICE) / 4,
    "v_descale": torch.tensor([[0.3, 1.7], [0.9, 0.1], [2.0, 1.0]], device=DEVICE),
}


def tensors(q_dtype: torch.dtype = E4M3) -> tuple[Tensor, ...]:
    q, k, v = dense(BATCH, Q_LEN, KV_LEN, heads=(HEADS, KV_HEADS))
    return q.to(q_dtype), k.to(E4M3), v.to(E4M3)


def requests(q: Tensor, k: Tensor, v: Tensor, names: Any = SCALES) -> list[tuple[Tensor, ...]]:
    def scaled(t: Tensor, name: str) -> Tensor:
        if name not in names:
            return t.double()
        return t.double() * SCALES[name].repeat_interleave(t.shape[2] // KV_HEADS, 1)[:, None, :, None]

    return list(zip(scaled(q, "q_descale"), scaled(k, "k_descale"), scaled(v, "v_descale"), strict=True))


@pytest.mark.parametrize("names", [("q_descale",), ("k_descale",), ("v_descale",), tuple(SCALES)], ids="-".join)
@pytest.mark.parametrize("q_dtype", [E4M3, torch.bfloat16], ids=str)
def test_dense(q_dtype: torch.dtype, names: tuple[str, ...]) -> None:
    q, k, v = tensors(q_dtype)
    given = {name: SCALES[name] for name in names}
    out, lse = flash_attn_func(q, k, v, causal=True, return_softmax_lse=True, **given)
    assert out.dtype == torch.bfloat16
    effective = [name for name in names if q_dtype == E4M3 or name != "q_descale"]
    products = q_dtype == E4M3 and names == ("v_descale",)  # with one scale of the logits for all
    tolerance = tolerance_of_fp8_queries() if products else {}
    check_dense(expected(requests(q, k, v, effective), causal=True), out, lse, **tolerance)


@pytest.mark.parametrize("value", [lambda name: SCALES[name], lambda name: 0.5], ids=["tensors", "numbers"])
def test_those_of_16_bit_tensors_are_ignored(value: Callable[[str], Any]) -> None:
    q, k, v = (t.to(torch.bfloat16) for t in tensors())
    given = {name: value(name) for name in SCALES}
    q_lens, kv_lens = (torch.arange(BATCH + 1, device=DEVICE) * n for n in (Q_LEN, KV_LEN))
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    table = torch.arange(BATCH, dtype=torch.int32, device=DEVICE)[:, None]
    want = expected(requests(q, k, v, ()), causal=True)
    check_dense(want, flash_attn_func(q, k, v, causal=True, **given))
    check_dense(want, flash_attn_with_kvcache(q, k, v, causal=True, **given))
    check_varlen(want, flash_attn_varlen_func(*packed, q_lens, kv_lens, Q_LEN, KV_LEN, causal=True, **given))
    paged = packed[0], k, v, q_lens, kv_lens, Q_LEN, KV_LEN
    check_varlen(want, flash_attn_varlen_func(*paged, causal=True, block_table=table, **given))


def test_packed_and_over_a_cache() -> None:
    q, k, v = tensors()
    want = expected(requests(q, k, v), causal=True)
    check_dense(want, flash_attn_with_kvcache(q, k, v, causal=True, **SCALES))
    q_lens, kv_lens = (torch.arange(BATCH + 1, device=DEVICE) * n for n in (Q_LEN, KV_LEN))
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    check_varlen(want, flash_attn_varlen_func(*packed, q_lens, kv_lens, Q_LEN, KV_LEN, causal=True, **SCALES))
    paged = packed[0], k, v, q_lens, kv_lens, Q_LEN, KV_LEN
    table = torch.arange(BATCH, dtype=torch.int32, device=DEVICE)[:, None]
    check_varlen(want, flash_attn_varlen_func(*paged, causal=True, block_table=table, **SCALES))
    one = expected(requests(q[:, -1:], k, v))
    check_dense(one, flash_attn_with_kvcache(q[:, -1:], k, v, **SCALES))


def test_rows_of_different_numbers() -> None:
    q, k, v = tensors()
    counts = (2, 0, 4)
    parts = requests(q, k, v)
    given = [(a[:n], b, c) for (a, b, c), n in zip(parts, counts, strict=True)]
    rows = torch.cat([q[b, :n].view(torch.uint8) for b, n in enumerate(counts)]).view(E4M3)
    q_lens = torch.tensor([0, 2, 2, 6], device=DEVICE)
    kv_lens = torch.arange(BATCH + 1, device=DEVICE) * KV_LEN
    keys = k.flatten(0, 1), v.flatten(0, 1)
    check_varlen(expected(given), flash_attn_varlen_func(rows, *keys, q_lens, kv_lens, 4, KV_LEN, **SCALES))
    none = flash_attn_varlen_func(rows[:0], *keys, torch.zeros_like(q_lens), kv_lens, 4, KV_LEN, **SCALES)
    assert none.shape == (0, HEADS, 64)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    q, k, v = tensors()
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    check_dense(expected(requests(q, k, v), causal=True), compiled(q, k, v, causal=True, **SCALES))


FORMS: dict[str, Callable[[float], Any]] = {
    "a number": lambda value: value,
    "one element": lambda value: torch.tensor(value),
    "one element, expanded": lambda value: torch.tensor([value]).expand(BATCH, KV_HEADS),
    "one of many": lambda value: torch.tensor([[1.0, value]] * BATCH),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SCALES)
def test_scales_are_positive(name: str, form: str) -> None:
    """Where their contents can be read without waiting for a device."""
    q, k, v = tensors()
    for value, wanted in (
        (-1.0, "a positive number"),
        (0.0, "a positive number"),
        (float("nan"), "a finite number"),
        (float("inf"), "a finite number"),
    ):
        with pytest.raises(errors.OptionError, match=f"^flash_attn_func: {name} is {value}; expected {wanted}"):
            flash_attn_func(q, k, v, **{name: FORMS[form](value)})


@pytest.mark.parametrize("name", SCALES)
def test_strings_and_bools_are_no_scales(name: str) -> None:
    q, k, v = tensors()
    for value in ("2", True):
        message = f"^flash_attn_func: {name} is {value!r}, of type {type(value).__name__}; expected a number"
        for _ in range(2):
            with pytest.raises(errors.ArgumentError, match=message):
                flash_attn_func(q, k, v, **{name: value})
            flash_attn_func(q, k, v, **{name: 1.0})


def test_other_shapes() -> None:
    q, k, v = tensors()
    offsets = [torch.arange(BATCH + 1, device=DEVICE) * n for n in (Q_LEN, KV_LEN)]
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    for name in SCALES:
        other: dict[str, Any] = {name: torch.ones(2, 2, device=DEVICE)}
        for call in (
            lambda other=other: flash_attn_func(q, k, v, **other),
            lambda other=other: flash_attn_varlen_func(*packed, *offsets, Q_LEN, KV_LEN, **other),
            lambda other=other: flash_attn_with_kvcache(q, k, v, **other),
        ):
            with pytest.raises(errors.ShapeError, match=rf"{name} is \[2, 2\]; expected one value, or \[3, 2\]"):
                call()
    with pytest.raises(errors.ShapeError, match="3 query heads do not share 2 KV heads evenly"):
        flash_attn_func(q[:, :, :3], k, v, **SCALES)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager", dynamic=True)
    with pytest.raises(Exception, match=r"\[2, 2\]; expected one value, or \[3, 2\]: one per request and KV head"):
        compiled(q, k, v, q_descale=torch.ones(2, 2, device=DEVICE))
