"""The CUDA prefill kernel against the oracle, and the general kernel in its place."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.calls import positional
from helpers.cases import Case, one_at_a_time
from helpers.harness import Setup
from helpers.page_tables import indptr, page_table
from helpers.tensors import shifted
from torch._inductor.utils import run_and_get_code

import attn_ops
from attn_ops.ops.cuda_kernels import CUDA_PREFILL_HEAD_DIMS, CUDA_PREFILL_SHORT_KV
from attn_ops.ops.inductor import mark_static

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

BASE = Case(
    "base",
    kv_lens=(700, 9, 40, 2, 0, 300),
    qo_lens=(100, 3, 7, 0, 5, 300),
    dtype=torch.bfloat16,
    heads=(8, 2),
    head_dims=(128, 128),
    causal=True,
)
AXES: dict[str, tuple[Any, ...]] = {
    "causal": (False,),
    "dtype": (torch.float16,),
    "out_dtype": (torch.float8_e4m3fn, torch.float8_e5m2, torch.float32),
    "heads": ((4, 4), (8, 1), (7, 1), (10, 2), (32, 1), (72, 1)),
    "kv_layout": ("HND",),
    "storage": ("fused", "padded"),
    "page_size": (8, 48, 64, 256),
    "window_left": (0, 33, 127, 128, 1000),
    "sm_scale": (30.0,),
    "logits_soft_cap": (5.0, 50.0),
    "sinks": (1.0, 100.0),
    "kv_lens": ((5, 0, 33, 1, 1, 60), (0,) * 6, (2048, 3, 7, 64, 5, 300)),
    "planner": ({"tile_rows": 33}, {"tile_rows": 128}, {"causal": True}),
}
_SPLIT: dict[str, Any] = {"kv_lens": (3000, 2000), "qo_lens": (40, 33), "planner": {"num_ctas": 8}}
CASES = [
    *one_at_a_time(BASE, AXES),
    *(
        replace(BASE, name=name, **options)
        for name, options in {
            "rows beyond the batch": {"padding": 70, "spare_batch": 3, "planner": {"tile_rows": 64}},
            "window, planned": {"window_left": 200, "planner": {"window_left": 200, "causal": True}},
            "window, not causal": {"window_left": 100, "causal": False},
            "window on the right": {"window_right": 33, "causal": False},
            "windows on both sides": {"window_left": 20, "window_right": 7, "causal": False},
            "windows on both sides, planned": {
                **{"window_left": 20, "window_right": 7, "causal": False},
                "planner": {"window_left": 20, "window_right": 7},
            },
            "split": _SPLIT,
            "split, not causal": {**_SPLIT, "causal": False},
            "split in pages of 128": {**_SPLIT, "page_size": 128},
            "more rows than keys beside a long request": {
                "qo_lens": (64, 1500, *(64,) * 8),
                "kv_lens": (2048, 10, *(64,) * 8),
                "heads": (16, 16),
            },
            "long query tiles": {
                "qo_lens": (5000,),
                "kv_lens": (300,),
                "heads": (1, 1),
                "planner": {"tile_rows": 8192},
            },
            "split, sinks": {**_SPLIT, "sinks": 1.0},
            "split, FP8 output": {**_SPLIT, "out_dtype": torch.float8_e4m3fn},
            "fixed split": {"planner": {"fixed_split_size": 8, "num_ctas": 80}},
        }.items()
    ),
    *(
        replace(BASE, name=f"alternating warpgroups, {name}", **{"planner": {"tile_rows": 16}, **options})
        for name, options in {
            "causal": {},
            "not causal": {"causal": False},
            "small tiles": {"planner": {"tile_rows": 3}},
            "one row a tile": {"planner": {"tile_rows": 1}, "heads": (7, 1)},
            "few and no keys": {"kv_lens": (129, 0, 300, 128, 1, 256)},
            "window": {"window_left": 100},
            "cap and sinks": {"logits_soft_cap": 5.0, "sinks": 1.0},
            "split": {**_SPLIT, "planner": {"num_ctas": 8, "tile_rows": 16}},
            "64/64": {"head_dims": (64, 64)},
            "192/128": {"head_dims": (192, 128)},
            "256/256": {"head_dims": (256, 256)},
            "256/256, split": {**_SPLIT, "head_dims": (256, 256), "planner": {"num_ctas": 8, "tile_rows": 16}},
            "512/512": {"head_dims": (512, 512)},
            "512/512, split": {**_SPLIT, "head_dims": (512, 512), "planner": {"num_ctas": 8, "tile_rows": 16}},
        }.items()
    ),
    *(
        replace(BASE, name=f"{dims[0]}/{dims[1]}, {name}", head_dims=dims, **options)
        for dims in ((64, 64), (192, 128), (256, 256), (512, 512))
        for name, options in {
            "causal": {},
            "one KV head": {"heads": (7, 1), "causal": False},
            "groups of 5 in pages of 64": {"heads": (10, 2), "page_size": 64, "kv_layout": "HND"},
            "window": {"dtype": torch.float16, "window_left": 100},
            "no keys": {"kv_lens": (0,) * 6},
            "few keys": {"kv_lens": (5, 0, 33, 1, 1, 60), "storage": "padded"},
            "rows beyond the batch": {"padding": 70, "spare_batch": 3, "planner": {"tile_rows": 64}},
            "split": _SPLIT,
            "split, all options": {**_SPLIT, "logits_soft_cap": 5.0, "sinks": 1.0, "window_left": 1500},
            "cap and sinks": {"logits_soft_cap": 5.0, "sinks": 1.0, "heads": (4, 4)},
        }.items()
    ),
    *(
        replace(BASE, name=f"{dims[0]}/{dims[1]}, mask, {name}", head_dims=dims, **{"masked": 0.4, **options})
        for dims in (
            (128, 128),
            (64, 64),
            (192, 128),
            (256, 256),
            (512, 512),
            (80, 80),
            (112, 112),
            (176, 176),
            (240, 240),
        )
        for name, options in {
            "in place of causal": {},
            "few keys seen": {"masked": 0.01, "heads": (4, 4), "page_size": 64, "kv_layout": "HND"},
            "all options": {"window_left": 100, "window_right": 50, "causal": False, "sinks": 1.0, "heads": (10, 2)},
            "cap, rows beyond the batch": {"logits_soft_cap": 5.0, "padding": 70, "spare_batch": 3},
            "split": {**_SPLIT, "causal": False},
            "alternating warpgroups": {"planner": {"tile_rows": 16}},
            "hidden ends": {"masked": "documents", "heads": (4, 4)},
            "hidden ends, split": {**_SPLIT, "qo_lens": (200, 140), "causal": False, "masked": "band", "sinks": 1.0},
        }.items()
    ),
]

CASES += [
    replace(BASE, name=f"{dims[0]}/{dims[1]}, {name}", head_dims=dims, **options)
    for dims in ((96, 96), (80, 80), (112, 112), (96, 64), (192, 192), (160, 128), (240, 240))
    for name, options in {
        "causal": {},
        "one KV head": {"heads": (7, 1), "causal": False},
        "groups of 5 in pages of 64": {"heads": (10, 2), "page_size": 64, "kv_layout": "HND"},
        "window": {"dtype": torch.float16, "window_left": 100, "storage": "padded"},
        "few and no keys": {"kv_lens": (5, 0, 33, 1, 1, 60), "out_dtype": torch.float8_e4m3fn},
        "rows beyond the batch": {"padding": 70, "spare_batch": 3, "planner": {"tile_rows": 64}},
        "split, all options": {**_SPLIT, "logits_soft_cap": 5.0, "sinks": 1.0, "window_left": 1500},
        "alternating warpgroups, split": {**_SPLIT, "planner": {"num_ctas": 8, "tile_rows": 16}},
        "tiles of one and a half units": {"planner": {"tile_rows": 70}},
        "row_max rises": {"sm_scale": 2.0, "dtype": torch.float16, "planner": {"tile_rows": 96}},
    }.items()
]
"""Heads of fewer columns than their kernels have."""

FP8: tuple[dict[str, Any], ...] = (
    {"kv_dtype": torch.float8_e4m3fn, "kv_scale": (0.5, 3.0)},
    {"kv_dtype": torch.float8_e5m2, "dtype": torch.float16},
)
CASES += [
    replace(case, name=f"FP8 KV, {case}", **FP8[i % 2])
    for i, case in enumerate(list(CASES))
    if case.masked is None or case.head_dims in CUDA_PREFILL_HEAD_DIMS  # not of padded heads
]


def _large_batch(case: Case, packed_rows: int) -> Case:
    """With query tiles that fill three consumers, as plans of large batches have."""
    planner = {**case.planner, "tile_rows": packed_rows // (case.heads[0] // case.heads[1])}
    return replace(case, name=f"large batch, {packed_rows} packed rows, {case}", planner=planner)


CASES += [
    _large_batch(case, (192, 384, 768)[i % 3])
    for i, case in enumerate(c for c in CASES if c.head_dims == (128, 128) and not c.kv_dtype)
    if "tile_rows" not in case.planner
]

CASES += [
    replace(case, name=f"short KV, {case}", planner={"short_kv": True, **case.planner})
    for case in list(CASES)
    if case.head_dims in CUDA_PREFILL_SHORT_KV and not case.kv_dtype and case.masked is None
    if not case.name.startswith("large batch")
]
"""Of any length: the kernel for short KV is correct for all plans."""

CASES += [
    replace(BASE, name=f"RoPE {dims[0]}, {name}", head_dims=dims, pos_encoding="ROPE_LLAMA", **options)
    for dims in ((128, 128), (64, 64), (256, 256))
    for name, options in {
        "causal": {},
        "not causal, scaled": {"causal": False, "rope": (4.0, 5e5), "dtype": torch.float16},
        "one KV head, many rows": {"heads": (7, 1), "qo_lens": (700, 9, 40, 2, 5, 300)},
        "groups of 5 in pages of 64": {"heads": (10, 2), "page_size": 64, "kv_layout": "HND"},
        "window, more rows than keys": {"window_left": 100, "qo_lens": (100, 30, 70, 0, 5, 300)},
        "rows beyond the batch": {"padding": 70, "spare_batch": 3, "planner": {"tile_rows": 64}},
        "few and no keys": {"kv_lens": (5, 0, 33, 1, 1, 60), "storage": "padded"},
        "long": {"kv_lens": (40000,), "qo_lens": (20,), "heads": (4, 2)},
        "mask": {"masked": 0.4, "padding": 70, "spare_batch": 3},
        "mask, few keys seen, pages of one token": {"masked": 0.01, "page_size": 1, "kv_layout": "HND"},
        "mask, split, all options": {**_SPLIT, "masked": 0.4, "causal": False, "sinks": 1.0, "window_left": 1500},
        "mask that hides ends": {"masked": "documents", "page_size": 8},
        "split, all options": {**_SPLIT, "logits_soft_cap": 5.0, "sinks": 1.0, "window_left": 1500},
        "alternating warpgroups, split": {**_SPLIT, "planner": {"num_ctas": 8, "tile_rows": 16}},
    }.items()
]

CASES += [
    replace(BASE, name=f"ALiBi {dims[0]}, {name}", head_dims=dims, pos_encoding="ALIBI", **options)
    for dims in ((128, 128), (64, 64), (256, 256))
    for name, options in {
        "causal": {},
        "not causal": {"causal": False, "dtype": torch.float16, "heads": (12, 3)},
        "one KV head, many rows": {"heads": (7, 1), "qo_lens": (700, 9, 40, 2, 5, 300)},
        "groups of 5 in pages of 64": {"heads": (10, 2), "page_size": 64, "kv_layout": "HND"},
        "groups larger than a unit": {"heads": (200, 1), "dtype": torch.float16},
        "MHA, more rows than keys": {"heads": (6, 6), "qo_lens": (100, 30, 70, 0, 5, 300)},
        "windows on both sides": {"window_left": 50, "window_right": 20, "causal": False},
        "cap and sinks": {"logits_soft_cap": 5.0, "sinks": 1.0, "heads": (12, 4)},
        "rows beyond the batch": {"padding": 70, "spare_batch": 3, "planner": {"tile_rows": 64}},
        "few and no keys": {"kv_lens": (5, 0, 33, 1, 1, 60), "storage": "padded"},
        "query tiles that fill three consumers": {"planner": {"tile_rows": 96}},
        "the bias exceeds the logits": {"sm_scale": 0.01, "dtype": torch.float16},
        "long": {"kv_lens": (40000,), "qo_lens": (20,), "heads": (4, 2)},
        "mask": {"masked": 0.4, "padding": 70, "spare_batch": 3},
        "mask, few keys seen, pages of one token": {"masked": 0.01, "page_size": 1, "kv_layout": "HND"},
        "mask, cap, heads of no power of 2": {"masked": 0.4, "logits_soft_cap": 5.0, "heads": (10, 2)},
        "mask, split, all options": {**_SPLIT, "masked": 0.4, "causal": False, "sinks": 1.0, "window_left": 1500},
        "split, all options": {**_SPLIT, "logits_soft_cap": 5.0, "sinks": 1.0, "window_left": 1500},
        "alternating warpgroups, split": {**_SPLIT, "planner": {"num_ctas": 8, "tile_rows": 16}},
    }.items()
]

CASES += [
    replace(case, name=f"FP8 KV, {case}", **FP8[i % 2])
    for i, case in enumerate(c for c in CASES if c.pos_encoding != "NONE" and c.masked is None)
]

BY_TOKENS = [
    replace(case, name=f"pages of {size}, {case}", page_size=size)
    for i, case in enumerate(CASES)
    for size in ((1, 3, 12, 100)[i % 4],)
    if case.page_size == BASE.page_size
]
"""Page sizes that are not multiples of 8."""


@pytest.mark.parametrize("case", BY_TOKENS, ids=str)
def test_pages_of_any_size_match_oracle(case: Case, launches: list[Any]) -> None:
    setup = Setup("prefill", case, "cuda")
    setup.check(*setup.run("cuda"), **setup.tolerance("cuda"))
    assert all(dict(one.macros)["KV_CP_ASYNC"] for one in launches)
    assert launches


@pytest.mark.parametrize("case", CASES, ids=str)
def test_paged_matches_oracle(case: Case, launches: list[Any]) -> None:
    setup = Setup("prefill", case, "cuda")
    setup.check(*setup.run("cuda"), **setup.tolerance("cuda"))
    assert launches


@pytest.mark.parametrize("case", [c for c in CASES if c.storage != "fused" and c.page_size == 16], ids=str)
def test_ragged_matches_oracle(case: Case, launches: list[Any]) -> None:
    setup = Setup("ragged", case, "cuda")
    runs = any(case.kv_lens)  # there is no tensor map of no tokens
    setup.check(*setup.run("cuda" if runs else "auto"), **setup.tolerance("cuda"))
    assert bool(launches) == runs


SINGLE = [BASE, *(c for c in CASES if c.name == "heads=4-4" or ", cap and sinks" in c.name)]


@pytest.mark.parametrize("case", [c for c in SINGLE if "short_kv" not in c.planner], ids=str)
def test_single_matches_oracle(case: Case, launches: list[Any]) -> None:
    """Without a plan, which alone says that KV is short: such cases would repeat the calls of others."""
    Setup("ragged", case, "cuda").check_single("auto")
    assert launches


EQUAL_LENGTHS = {
    "causal": {},
    "not causal": {"causal": False},
    "more units than SMs": {"qo_lens": (700,) * 9, "kv_lens": (900,) * 9},
    "more units than SMs, not causal": {"qo_lens": (700,) * 9, "kv_lens": (900,) * 9, "causal": False},
    "one row": {"qo_lens": (1,) * 70, "kv_lens": (150,) * 70},
    "few rows": {"qo_lens": (5,) * 3, "kv_lens": (1000,) * 3},
    "more rows than keys": {"qo_lens": (200,) * 3, "kv_lens": (70,) * 3, "sinks": 1.0},
    "no group divides a unit": {"heads": (7, 1)},
    "a unit is no whole number of rows": {"heads": (12, 1), "qo_lens": (57,) * 4},
    "HND": {"kv_layout": "HND", "logits_soft_cap": 5.0},
    "windows": {"window_left": 100, "window_right": 30, "causal": False},
    "mask": {"masked": 0.5},
    "mask, rows of no whole bytes": {"masked": 0.5, "qo_lens": (33,) * 5, "kv_lens": (301,) * 5},
    "RoPE": {"pos_encoding": "ROPE_LLAMA"},
    "ALiBi": {"pos_encoding": "ALIBI"},
    "FP8 KV": {"kv_dtype": torch.float8_e4m3fn, "kv_scale": (0.5, 2.0)},
    **{f"heads of {dim}": {"head_dims": (dim, dim), "heads": (6, 2)} for dim in (64, 72, 96, 160, 256, 512)},
    "heads of 192 and 128": {"head_dims": (192, 128)},
    "heads of 64, mask": {"head_dims": (64, 64), "masked": 0.5},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EQUAL_LENGTHS)
def test_requests_of_equal_lengths_match_oracle(name: str, dtype: torch.dtype, launches: list[Any]) -> None:
    sizes: dict[str, Any] = {"qo_lens": (130,) * 4, "kv_lens": (310,) * 4, "dtype": dtype}
    Setup("ragged", replace(BASE, **sizes | EQUAL_LENGTHS[name]), "cuda").check_equal_lengths("cuda")
    assert launches


@pytest.mark.parametrize("tile_rows", [16, 17, 64])
@pytest.mark.parametrize("kind", ["prefill", "ragged"])
@pytest.mark.parametrize("fp8", FP8, ids=["e4m3", "e5m2"])
def test_auto_takes_it_for_every_fp8_cache(fp8: dict[str, Any], kind: str, tile_rows: int, launches: list[Any]) -> None:
    """Query tiles of 64, 68 and 256 packed rows."""
    case = replace(BASE, name="FP8 KV", planner={"tile_rows": tile_rows}, **fp8)
    setup = Setup(kind, case, "cuda")
    setup.check(*setup.run("auto"), **setup.tolerance("cuda"))
    assert launches


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_fp8_number_is_converted_exactly(dtype: torch.dtype, fp8: torch.dtype, launches: list[Any]) -> None:
    """One key, of which every query has one column: its logit is a number of the key, and its output is the value."""
    values = torch.arange(256, dtype=torch.uint8).view(fp8).view(1, 2, 128)
    keys = torch.where(values.float().isfinite(), values.float(), 0.0).to(fp8)
    q = torch.eye(128, dtype=dtype).unsqueeze(1).repeat(1, 2, 1)
    out, lse = torch.ops.attn.single_prefill(
        q.cuda(), keys.cuda(), values.cuda(), sm_scale=1.0, return_lse=True, out_dtype=torch.float32, backend="cuda"
    )
    # The exponent is a fused multiply-add of the logit and a rounded row maximum: the probability is 1 but for that
    # rounding, which is coarse for large logits. Numbers of FP8 that follow each other differ by more than 6%.
    close = {"rtol": 1e-2, "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(out.cpu(), values.float().expand(128, 2, 128), **close)
    torch.testing.assert_close(lse.cpu().T, keys[0].float() / math.log(2), **close)
    assert launches


def test_alternating_warpgroups_give_the_same_bits_while_memory_is_busy(launches: list[Any]) -> None:
    """KV tiles then arrive in no order, and each warpgroup has to wait for its own."""
    batch, rows, tokens, page_size, device = 32, 16, 4096, 16, "cuda"
    pages = batch * tokens // page_size
    sizes = {"page_size": page_size, "num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    planner = attn_ops.PrefillPlanner(batch, batch * rows, pages, **sizes, causal=True, device=device)
    plan = planner.plan(indptr((rows,) * batch), *page_table((tokens,) * batch, page_size))
    q = torch.randn(batch * rows, 32, 128, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, pages, page_size, 8, 128, device=device, dtype=torch.bfloat16).unbind()

    def run() -> torch.Tensor:
        return torch.ops.attn.batch_prefill(q, k, v, plan, planner.workspace, causal=True, backend="cuda")[0]

    alone = run()
    torch.cuda.synchronize()
    assert all(torch.equal(alone, out) for out in [run() for _ in range(100)])
    assert launches


def test_capped_logits_depend_on_their_request_alone(launches: list[Any]) -> None:
    """Bit for bit, although tiles and query boxes of a request reach into the next one."""
    device, qo_lens, kv_lens = "cuda", (20, 30), (70, 90)
    sizes = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    planner = attn_ops.PrefillPlanner(2, 50, 0, max_kv_len=90, **sizes, causal=True, device=device)
    plan = planner.plan(indptr(qo_lens), indptr(kv_lens))
    q, k, v = (torch.randn(n, h, 128, device=device, dtype=torch.float16) for n, h in ((50, 8), (160, 2), (160, 2)))
    outs = []
    for factor in (1, 100):
        rows, keys = q.clone(), k.clone()
        rows[20:] *= factor
        keys[70:] *= factor
        options: dict[str, Any] = {"causal": True, "logits_soft_cap": 30.0, "out_dtype": torch.float32}
        outs.append(torch.ops.attn.ragged_prefill(rows, keys, v, plan, planner.workspace, **options, backend="cuda")[0])
    assert torch.equal(outs[0][:20], outs[1][:20])
    assert launches


def test_plan_and_workspace_may_lie_at_any_multiple_of_four_bytes(launches: list[Any]) -> None:
    setup = Setup("prefill", replace(BASE, name="split", **_SPLIT), "cuda")

    arguments = setup.arguments
    arguments["plan"] = type(arguments["plan"])(*map(shifted, arguments["plan"]))
    arguments["workspace"] = shifted(arguments["workspace"])
    assert arguments["plan"].work.data_ptr() % 8
    assert arguments["workspace"].data_ptr() % 8
    setup.check(*torch.ops.attn.batch_prefill(**arguments, backend="cuda"), **setup.tolerance("cuda"))
    assert launches


@pytest.mark.parametrize("others", [(300,), (600, 200), (300, 300)], ids=str)
def test_other_requests_change_no_bit_of_few_rows(
    others: tuple[int, ...], launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consumers that take alternate KV tiles add their states at the end.

    Which of them has the even tiles depends on the requests that their CTA attends to before.
    """
    kernel = importlib.import_module("attn_ops.kernels.cuda.prefill")
    monkeypatch.setattr(kernel, "persistent_grid", lambda *_: 1)
    device, lengths = "cuda", (170, *others)
    sizes = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 128}
    q, k, v = (
        torch.randn(n, h, 128, device=device, dtype=torch.float16)
        for n, h in ((2 * len(lengths), 2), (sum(lengths), 1), (sum(lengths), 1))
    )

    def attend(requests: int) -> list[torch.Tensor]:
        """The first request's rows in a batch of the first requests."""
        tokens, options = lengths[:requests], {"max_kv_len": 1024, "causal": True, "num_ctas": 1, "tile_rows": 8}
        planner = attn_ops.PrefillPlanner(requests, 2 * requests, 0, **options, **sizes, device=device)
        plan = planner.plan(indptr((2,) * requests), indptr(tokens))
        tensors = q[: 2 * requests], k[: sum(tokens)], v[: sum(tokens)], plan, planner.workspace
        options = {"causal": True, "return_lse": True, "out_dtype": torch.float32, "backend": "cuda"}
        return [t[:2] for t in torch.ops.attn.ragged_prefill(*tensors, **options)]

    assert all(torch.equal(a, b) for a, b in zip(attend(1), attend(len(lengths)), strict=True))
    assert len(launches) == 2


@pytest.mark.parametrize("kv", [{}, FP8[0]], ids=["16-bit KV", "FP8 KV"])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_graphs_call_the_op(mode: str | None, kv: dict[str, Any], launches: list[Any]) -> None:
    """The op stays a call, since Inductor generates Triton only, and no cache is copied for it."""
    torch._dynamo.reset()
    setup = Setup("prefill", replace(BASE, **kv), "cuda")
    mark_static(*setup.planner.state, setup.planner.workspace)
    inputs, options = positional("batch_prefill", setup.arguments)

    def step(*args: Any) -> Any:
        return torch.ops.attn.batch_prefill(args[0] * 1, *args[1:], **options)

    compiled = torch.compile(step, fullgraph=True, mode=mode)
    with torch.no_grad():
        (out, lse), code = run_and_get_code(compiled, *inputs)
        setup.check(out.clone(), lse.clone())
        for _ in range(3):
            setup.check(*(t.clone() for t in compiled(*inputs)))
    assert launches
    assert "torch.ops.attn.batch_prefill" in "".join(code)
