"""CUDA kernels run on the host (``helpers/cuda_host``): results of prefill and merges against the oracle."""

from __future__ import annotations

import importlib
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")  # whose call of the prefill kernels the CUDA kernel shares

from helpers import oracle
from helpers.cases import Case
from helpers.cuda_host import Host, HostError, needs_a_compiler
from helpers.cuda_host.calls import FP8_KV, OPS, SPLIT, attend
from helpers.cuda_host.calls import prefill_case as _case
from helpers.harness import Setup
from helpers.hostile_plans import random_plan
from helpers.masks import pack, truncated

from attn_ops.kernels.cuda import prefill
from attn_ops.kernels.triton import prefill_call
from attn_ops.ops.cuda_kernels import padded_prefill_head_dims
from attn_ops.plan import equal_requests
from attn_ops.plan.state import WORK_FIELDS, PrefillPlan

merges = importlib.import_module("attn_ops.kernels.cuda.merge_states")

pytestmark = [needs_a_compiler, pytest.mark.usefixtures("poisoned_memory")]

F16_64: dict[str, Any] = {"dtype": torch.float16, "head_dims": (64, 64)}
LONGER: dict[str, Any] = {"kv_lens": (470, 0, 210, 2)}
LONGER_64 = F16_64 | LONGER
UNSEEN: dict[str, Any] = {"qo_lens": (300, 2), "kv_lens": (500, 2), "heads": (2, 2), "window_left": 30, "sinks": 1.0}
LARGE_BATCH: dict[str, Any] = {"qo_lens": (110, 0, 33, 2), "kv_lens": (200, 0, 150, 2), "planner": {"tile_rows": 48}}
SPLIT_LARGE = SPLIT | {"qo_lens": (110, 0, 33, 2), "planner": {"num_ctas": 12, "tile_rows": 192}}
"""Query tiles of heads of 128 that fill three consumers, as plans of large batches have."""
ENDS: dict[str, Any] = {"qo_lens": (180, 0, 33, 2), "kv_lens": (1300, 0, 500, 2), "heads": (2, 1)}
F16_256: dict[str, Any] = {"dtype": torch.float16, "head_dims": (256, 256), "heads": (4, 2)}
OF_512: dict[str, Any] = {"head_dims": (512, 512), "heads": (4, 2)}
F16_512 = OF_512 | {"dtype": torch.float16}
FEW_512: dict[str, Any] = {"qo_lens": (9, 0, 2, 1), "kv_lens": (900, 0, 330, 2), "causal": True}

SHORT_KV: list[tuple[str, str, dict[str, Any]]] = [
    ("prefill", "rows after the last", {"causal": True, "padding": 3, "storage": "padded", "page_size": 8}),
    ("prefill", "window, cap, sinks", {"window_left": 33, "logits_soft_cap": 5.0, "sinks": 1.0, "page_size": 8}),
    ("prefill", "odd group, small tiles", {"heads": (7, 1), "planner": {"tile_rows": 3}, "out_dtype": torch.float32}),
    ("prefill", "splits", SPLIT | {"sinks": 1.0, "page_size": 64, "planner": {"num_ctas": 12}}),
    ("ragged", "row_max rises", LONGER | {"causal": True, "sm_scale": 2.0}),
    ("ragged", "first tile unseen", UNSEEN),
    ("prefill", "64, cap", LONGER_64 | {"causal": True, "logits_soft_cap": 5.0, "kv_layout": "HND"}),
    ("prefill", "64, row_max rises", LONGER_64 | {"sm_scale": 2.0, "page_size": 48}),
    ("ragged", "64, windows", F16_64 | {"window_left": 40, "window_right": 3, "heads": (6, 2), "kv_layout": "HND"}),
    ("ragged", "64, first tile unseen", UNSEEN | F16_64),
]

PREFILL = [
    ("prefill", _case("causal", causal=True)),
    (
        "prefill",
        _case("rows after the last", causal=True, padding=3, spare_batch=2, storage="padded", page_size=8),
    ),
    ("prefill", _case("window, cap, sinks", window_left=33, logits_soft_cap=5.0, sinks=1.0, page_size=8)),
    ("prefill", _case("both windows", window_left=20, window_right=9, heads=(7, 1), out_dtype=torch.float32)),
    ("prefill", _case("splits", **SPLIT, sinks=1.0, page_size=64, storage="fused", kv_layout="HND")),
    ("prefill", _case("splits, window", **SPLIT, causal=True, window_left=200, heads=(10, 2), page_size=24)),
    ("prefill", _case("FP8", out_dtype=torch.float8_e4m3fn, heads=(5, 1), planner={"tile_rows": 64})),
    ("prefill", _case("boxes beyond a warp's lanes", kv_lens=(700, 0, 150, 2), window_left=420, page_size=8)),
    # Rows of one head: the last ones of a unit see no token of its first KV tile.
    ("prefill", _case("first tile unseen", **UNSEEN, page_size=16)),
    ("ragged", _case("64, first tile unseen", **UNSEEN | F16_64)),
    ("prefill", _case("row_max rises in most tiles", **LONGER, causal=True, sm_scale=2.0)),
    ("prefill", _case("256, row_max rises", **F16_256 | LONGER, sm_scale=2.0)),
    ("ragged", _case("64, row_max rises", **LONGER_64, sm_scale=2.0)),
    ("ragged", _case("192/128, row_max rises", head_dims=(192, 128), heads=(4, 1), **LONGER, sm_scale=2.0)),
    ("prefill", _case("256", **F16_256, causal=True, logits_soft_cap=5.0, page_size=16)),
    ("prefill", _case("256, splits", **F16_256 | SPLIT, sinks=1.0, window_left=300)),
    ("ragged", _case("ragged", **F16_64, causal=True, storage="padded", planner={"tile_rows": 32})),
    (
        "ragged",
        _case("ragged, windows", **F16_64, window_left=40, window_right=3, heads=(6, 2), kv_layout="HND"),
    ),
    ("ragged", _case("ragged, E5M2", **F16_64 | SPLIT, causal=True, out_dtype=torch.float8_e5m2)),
    ("prefill", _case("64, pages, cap", **LONGER_64, causal=True, logits_soft_cap=5.0, page_size=8)),
    ("prefill", _case("64, window", **LONGER_64, window_left=230, sinks=1.0, page_size=48)),
    *(
        (
            "prefill",
            _case(
                f"64, tiles of {4 * rows} packed rows",
                **F16_64 | SPLIT | {"qo_lens": (110, 0, 33, 2), "planner": {"num_ctas": 12, "tile_rows": rows}},
                causal=True,
            ),
        )
        for rows in (16, 32, 48, 50, 64, 96)
    ),
    (
        "ragged",
        _case("192/128", head_dims=(192, 128), heads=(4, 1), causal=True, sinks=1.0, logits_soft_cap=30.0),
    ),
    ("prefill", _case("large batch", **LARGE_BATCH, causal=True, padding=3, page_size=8)),
    ("ragged", _case("large batch, cap", **LARGE_BATCH, window_left=100, logits_soft_cap=5.0, sinks=1.0)),
    ("ragged", _case("large batch, row_max rises", **LARGE_BATCH | LONGER, dtype=torch.float16, sm_scale=2.0)),
    ("prefill", _case("large batch, splits", **LARGE_BATCH | SPLIT_LARGE, causal=True, page_size=64)),
    *(
        (kind, _case(f"short KV, {name}", **options | {"planner": {"short_kv": True, **options.get("planner", {})}}))
        for kind, name, options in SHORT_KV
    ),
    ("prefill", _case("mask", masked=0.4, padding=3, spare_batch=2)),
    ("ragged", _case("mask, window, cap, sinks", masked=0.7, window_left=50, logits_soft_cap=5.0, sinks=1.0)),
    ("prefill", _case("mask that hides most tokens", **UNSEEN | {"window_left": -1}, masked=0.01)),
    ("prefill", _case("64, mask, splits", **F16_64 | SPLIT, masked=0.3, page_size=8, kv_layout="HND")),
    ("ragged", _case("192/128, mask", head_dims=(192, 128), heads=(4, 1), **LONGER, masked=0.5)),
    ("prefill", _case("256, mask", **F16_256, masked=0.5, window_right=9, page_size=64)),
    ("prefill", _case("large batch, mask", **LARGE_BATCH, masked=0.5)),
    ("prefill", _case("mask that hides ends", **ENDS, masked="documents")),
    ("ragged", _case("64, mask that hides ends, splits", **F16_64 | SPLIT | ENDS, masked="band", sinks=1.0)),
    ("prefill", _case("512", **F16_512, causal=True, logits_soft_cap=5.0, page_size=16)),
    ("prefill", _case("512, window, odd group", **OF_512 | {"heads": (6, 2)}, window_left=33, sinks=1.0, page_size=8)),
    ("prefill", _case("512, splits", **OF_512 | SPLIT, sinks=1.0, window_left=300, kv_layout="HND")),
    ("prefill", _case("512, mask", **OF_512, masked=0.5, page_size=16)),
    ("ragged", _case("ragged, 512", **OF_512, causal=True, sinks=1.0, out_dtype=torch.float32)),
    ("prefill", _case("512, few rows", **F16_512 | FEW_512, logits_soft_cap=5.0, page_size=8)),
    ("prefill", _case("512, few rows, splits", **OF_512 | FEW_512 | {"planner": {"num_ctas": 12}}, sinks=1.0)),
    ("prefill", _case("512, few rows, mask", **OF_512 | FEW_512 | {"causal": False}, masked=0.5, page_size=24)),
    ("ragged", _case("ragged, 512, few rows", **OF_512 | FEW_512, out_dtype=torch.float32)),
    ("prefill", _case("mask in place of causal", **ENDS, masked="causal", page_size=64)),
    ("prefill", _case("96", head_dims=(96, 96), causal=True, padding=3, spare_batch=2, storage="padded")),
    ("prefill", _case("80, splits", head_dims=(80, 80), **SPLIT, sinks=1.0, page_size=64, kv_layout="HND")),
    ("prefill", _case("72, odd group", head_dims=(72, 72), heads=(6, 2), window_left=33, page_size=8)),
    ("prefill", _case("112, FP8 output", head_dims=(112, 112), out_dtype=torch.float8_e4m3fn, causal=True)),
    ("prefill", _case("96/64, cap", head_dims=(96, 64), **LONGER, causal=True, logits_soft_cap=5.0)),
    ("prefill", _case("192, splits", head_dims=(192, 192), heads=(4, 2), **SPLIT, window_left=300)),
    ("prefill", _case("160/128", head_dims=(160, 128), heads=(4, 2), causal=True, dtype=torch.float16)),
    ("ragged", _case("ragged, 80", head_dims=(80, 80), causal=True, storage="padded", out_dtype=torch.float32)),
    ("ragged", _case("ragged, 128/96", head_dims=(128, 96), **LONGER, causal=True, kv_layout="HND")),
    ("ragged", _case("ragged, 176", head_dims=(176, 176), heads=(4, 2), window_left=40, window_right=3)),
    ("ragged", _case("ragged, 240", head_dims=(240, 240), heads=(4, 2), **LONGER, causal=True, sinks=1.0)),
    *(
        (
            "prefill",
            _case(
                f"88, tiles of {4 * rows} packed rows",
                **SPLIT | {"qo_lens": (110, 0, 33, 2), "planner": {"num_ctas": 12, "tile_rows": rows}},
                head_dims=(88, 88),
                causal=True,
            ),
        )
        for rows in (16, 32, 50, 96)
    ),
    ("ragged", _case("ragged, 96, row_max rises", **LONGER, head_dims=(96, 96), dtype=torch.float16, sm_scale=2.0)),
    ("prefill", _case("96, mask", head_dims=(96, 96), masked=0.4, padding=3, spare_batch=2)),
    ("ragged", _case("ragged, 80, mask", head_dims=(80, 80), masked=0.7, window_left=50, sinks=1.0)),
    ("prefill", _case("80, mask that hides ends, splits", **SPLIT | ENDS, head_dims=(80, 80), masked="band")),
    (
        "prefill",
        _case("112, mask that hides most tokens", **UNSEEN | {"window_left": -1}, head_dims=(112, 112), masked=0.01),
    ),
    ("prefill", _case("176, mask", head_dims=(176, 176), heads=(4, 2), masked=0.5, page_size=64)),
    ("ragged", _case("ragged, 224, mask", head_dims=(224, 224), heads=(4, 2), **LONGER, masked=0.5)),
]

FP8_E5M2: dict[str, Any] = {"kv_dtype": torch.float8_e5m2, "kv_scale": (2.0, 0.25)}

FP8_PREFILL = [
    (kind, replace(case, **(FP8_E5M2 if i % 3 == 2 else FP8_KV)))
    for i, (kind, case) in enumerate(PREFILL)
    if case.head_dims in prefill.KV_FP8_TILES
    or padded_prefill_head_dims(case.head_dims, fp8=True, custom_mask=case.masked is not None)
]
"""The same cases with FP8 keys and values, but no masks with padded heads."""

FEW_ROWS: dict[str, Any] = {"kv_lens": (900, 0, 333, 2), "qo_lens": (4, 0, 3, 2), "causal": True}
OF_256: dict[str, Any] = {"head_dims": (256, 256), "heads": (4, 2)}
FEW_ROWS_PREFILL = [
    _case("few rows", **FP8_KV | FEW_ROWS),
    _case("few rows, splits", **FP8_KV | FEW_ROWS, planner={"num_ctas": 12}, page_size=64, kv_layout="HND"),
    _case("few rows, window", **FP8_E5M2 | FEW_ROWS, window_left=600, page_size=8, sinks=1.0, dtype=torch.float16),
    _case("few rows, mask", **FP8_KV | FEW_ROWS | {"causal": False}, masked=0.5),
    _case("few rows, tokens", **FP8_KV | FEW_ROWS, page_size=1, planner={"num_ctas": 12}),
    _case("few rows, tokens, mask", **FP8_KV | FEW_ROWS | {"causal": False}, masked=0.5, page_size=5),
    _case("few rows, 64", **FP8_KV | FEW_ROWS, head_dims=(64, 64)),
    _case("few rows, 64, mask", **FP8_KV | FEW_ROWS | {"causal": False}, head_dims=(64, 64), masked=0.1),
    _case("few rows, 256", **FP8_KV | FEW_ROWS | OF_256, logits_soft_cap=5.0, dtype=torch.float16),
    _case("few rows, tokens, hidden ends", **FP8_KV | ENDS, masked="band", page_size=5, planner={"tile_rows": 16}),
    _case("few rows, 256, tokens", **FP8_E5M2 | FEW_ROWS | OF_256, page_size=3),
]
"""Query tiles of at most 64 packed rows."""

BY_TOKENS = [
    replace(case, page_size=(1, 3, 12, 5, 100)[i % 5])
    for i, case in enumerate(case for kind, case in (*PREFILL, *FP8_PREFILL) if kind == "prefill")
]
"""Paged ones with page sizes that are not multiples of 8."""


@pytest.mark.parametrize("seed", range(len(PREFILL)), ids=[case.name for _, case in PREFILL])
def test_prefill(seed: int) -> None:
    host = Host(sms=3, seed=seed)
    kind, case = PREFILL[seed]
    attend(kind, case, host)
    (name,) = host.launched
    assert ("PADDED=1" in name) == (case.head_dims not in prefill.TILES)


@pytest.mark.parametrize("seed", range(len(FP8_PREFILL)), ids=[case.name for _, case in FP8_PREFILL])
def test_fp8_prefill(seed: int) -> None:
    host = Host(sms=3, seed=seed)
    attend(*FP8_PREFILL[seed], host)
    (name,) = host.launched
    assert "KV_FP8=1" in name


@pytest.mark.parametrize(("seed", "case"), list(enumerate(FEW_ROWS_PREFILL)), ids=str)
def test_fp8_prefill_of_few_rows(seed: int, case: Case) -> None:
    host = Host(sms=3, seed=seed)
    attend("prefill", case, host)
    (name,) = host.launched
    assert "FEW_ROWS=1" in name


@pytest.mark.parametrize(("seed", "case"), list(enumerate(BY_TOKENS)), ids=str)
def test_prefill_by_tokens(seed: int, case: Case) -> None:
    host = Host(sms=3, seed=seed)
    attend("prefill", case, host)
    (name,) = host.launched
    assert "KV_CP_ASYNC=1" in name


@pytest.mark.parametrize("kv_scale", [None, (0.0, 1.0), (-2.0, -0.5), (2.0**-120, 1.0)], ids=str)
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_scales_of_fp8_are_any_numbers(kv_scale: tuple[float, float] | None, cap: float) -> None:
    fields = {"kv_dtype": torch.float8_e4m3fn, "kv_scale": kv_scale, "logits_soft_cap": cap, "causal": True}
    attend("prefill", _case("scales", **fields, window_left=50), Host())


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize(
    "scales",
    [{"kv_scale": (1e-12, 3.0)}, {"kv_scale": (1e33, 3.0)}, {"sm_scale": 1e-10}, {"sm_scale": 2.0**100}],
    ids=str,
)
def test_queries_of_zeros_have_any_scale_beside_fp8(scales: dict[str, Any], cap: float) -> None:
    """The power of 2 of such a row is the largest, so that its inverse times another scale may underflow."""
    case = _case("zeros", **FEW_ROWS, kv_dtype=torch.float8_e4m3fn, logits_soft_cap=cap, **scales)
    setup = Setup("prefill", case)
    setup.q[::2] = 0
    setup.q[1] *= 2.0**-110
    with Host().installed():
        out, lse = prefill.batch_prefill(**setup.arguments)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    zeros = setup.expected.rows(slice(None, None, 2))
    zeros.check(out[::2], lse[::2], **setup.tolerance("cuda"))


@pytest.mark.parametrize("sm_scale", [-0.5, -0.01, 2.0**-20, 2.0**18], ids=str)
def test_capped_logits_have_any_scale(sm_scale: float) -> None:
    """Scales of both forms of the tanh, and of neither sign alone."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 1, 64, generator=g).to(torch.float16) for n in (20, 150, 150))
    with Host().installed():
        options: dict[str, Any] = {"return_lse": True, "out_dtype": torch.float32}
        out, lse = prefill.single_prefill(q, k, v, sm_scale=sm_scale, logits_soft_cap=5.0, **options)
    logits = 5 * torch.tanh(q[:, 0].double() @ k[:, 0].double().T * sm_scale / 5)
    expected = logits.softmax(1) @ v[:, 0].double()
    torch.testing.assert_close(out[:, 0].double(), expected, rtol=2e-3, atol=2e-3)  # weights are rounded to float16
    torch.testing.assert_close(lse[:, 0].double(), logits.logsumexp(1) / math.log(2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["prefill", "ragged"])
def test_fp8_tokens_before_the_window_may_be_nan(kind: str) -> None:
    case = _case("hidden", kv_lens=(300,), qo_lens=(40,), causal=True, window_left=33, **FP8_KV)
    setup = Setup(kind, case)
    setup.fill_with_nan(torch.arange(300 - 40 - 33))
    with Host().installed():
        out, lse = OPS[kind](**setup.arguments)
    setup.check(out, lse, **setup.tolerance("cuda"))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("masked", [0.02, "band"])
@pytest.mark.parametrize(("kind", "page_size"), [("prefill", 16), ("prefill", 3), ("ragged", 1)])
def test_tokens_that_a_mask_hides_from_all_rows_may_be_nan(
    kind: str, page_size: int, masked: float | str, fp8: bool
) -> None:
    case = _case("hidden", kv_lens=(330,), qo_lens=(20,), masked=masked, page_size=page_size)
    setup = Setup(kind, replace(case, **FP8_KV) if fp8 else case)
    (mask,) = setup.masks
    hidden = (~mask.any(0)).nonzero().flatten()
    assert 50 < hidden.shape[0] < 300
    setup.fill_with_nan(hidden)
    with Host().installed():
        out, lse = OPS[kind](**setup.arguments)
    setup.check(out, lse, **setup.tolerance("cuda"))


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("num_bytes", [0, 1, 7, 63, 64, 350, 10**6])
def test_a_mask_of_any_length_at_any_address(num_bytes: int, offset: int) -> None:
    """Tokens beyond its end are hidden. Its storage has no byte more: the machine reports an access outside of it."""
    setup = Setup("prefill", _case("short", kv_lens=(37, 130), qo_lens=(9, 21), masked=0.8))
    assert setup.packed_mask is not None
    kept = setup.packed_mask[:num_bytes]
    memory = torch.from_numpy(np.empty(kept.shape[0] + offset, np.uint8)[offset:]).copy_(kept)
    assert memory.untyped_storage().nbytes() == kept.shape[0]
    setup.masks = truncated(setup.masks, num_bytes)
    with Host().installed():
        out, lse = prefill.batch_prefill(**setup.arguments | {"mask": memory})
    setup.check(out, lse, **setup.tolerance("cuda"))


@pytest.mark.parametrize("fp8", [False, True])
def test_tokens_of_the_next_ragged_request_may_be_nan(fp8: bool) -> None:
    case = _case("neighbour", kv_lens=(70, 150), qo_lens=(40, 33), causal=True, **(FP8_KV if fp8 else {}))
    outs = []
    for nan in (False, True):
        setup = Setup("ragged", case)
        if nan:
            setup.fill_with_nan(torch.arange(70, 220))
        with Host().installed():
            out, lse = OPS["ragged"](**setup.arguments)
        outs.append((out[:40], lse[:40]))
    assert all(torch.equal(clean, beside) for clean, beside in zip(*outs, strict=True))


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_fp8_number_is_converted_exactly(dtype: torch.dtype, fp8: torch.dtype) -> None:
    """One key, of which every query has one column: its logit is a number of the key, and its output is the value.

    Sizes of heads whose kernels other tests here compile.
    """
    dim = {torch.float16: 64, torch.bfloat16: 128}[dtype]
    values = torch.arange(256, dtype=torch.uint8).view(fp8).view(1, -1, dim)
    keys = torch.where(values.float().isfinite(), values.float(), 0.0).to(fp8)
    q = torch.eye(dim, dtype=dtype).unsqueeze(1).repeat(1, values.shape[1], 1)
    with Host().installed():
        options: dict[str, Any] = {"sm_scale": 1.0, "return_lse": True, "out_dtype": torch.float32}
        out, lse = prefill.single_prefill(q, keys, values, **options)
    assert torch.equal(out.nan_to_num(-1e9), values.float().nan_to_num(-1e9).expand(dim, -1, -1))
    assert out.isnan().sum() == dim * values.float().isnan().sum() > 0
    torch.testing.assert_close(lse.T, keys[0].float() / math.log(2), rtol=1e-6, atol=0)


def test_the_order_of_threads_changes_no_bit() -> None:
    case = _case("order", **F16_64, window_left=40, sinks=1.0, planner={"tile_rows": 8})
    first, *others = (attend("ragged", case, Host(sms=2, seed=seed)) for seed in range(4))
    for one in others:
        assert all(torch.equal(a, b) for a, b in zip(first, one, strict=True))


@pytest.mark.parametrize("rows", [0, 1, 70, 300])
def test_single_prefill(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 64, generator=generator).half() for n, h in ((rows, 4), (210, 2), (210, 2)))
    with Host(sms=2).installed():
        out, lse = prefill.single_prefill(q, k, v, causal=True, return_lse=True)
    oracle.Expected.of([(q, k, v)], causal=True).check(out, lse)


def test_single_prefill_with_a_mask() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 64, generator=generator).half() for n, h in ((50, 4), (211, 2), (211, 2)))
    visible = torch.rand(50, 211, generator=generator) < 0.5
    with Host(sms=2).installed():
        out, lse = prefill.single_prefill(q, k, v, causal=True, mask=pack([visible]), return_lse=True)
    oracle.Expected.of([(q, k, v, visible)]).check(out, lse)


EQUAL: dict[str, Any] = {"qo_lens": (70,) * 3, "kv_lens": (150,) * 3, "heads": (4, 2)}
EQUAL_LENGTHS = [
    _case("causal", **F16_64 | EQUAL, causal=True),
    _case("not causal, heads of 128", **EQUAL | {"qo_lens": (200,) * 2, "kv_lens": (90,) * 2}),
    _case("window on the right", **EQUAL, window_right=20, window_left=30, sinks=1.0),
    _case("mask", **F16_64 | EQUAL, masked=0.5),
    _case("RoPE", **F16_64 | EQUAL, causal=True, pos_encoding="ROPE_LLAMA"),
    _case("ALiBi", **F16_64 | EQUAL, causal=True, pos_encoding="ALIBI"),
    _case("few rows", **EQUAL | {"qo_lens": (3,) * 3}, causal=True),
]


@pytest.mark.parametrize("case", EQUAL_LENGTHS, ids=[case.name for case in EQUAL_LENGTHS])
def test_requests_of_equal_lengths(case: Case) -> None:
    setup = Setup("ragged", case)
    with Host(sms=2).installed():
        setup.check(*prefill.single_prefill(**setup.unplanned_arguments), **setup.tolerance("cuda"))


SPLIT_EQUAL: dict[str, Any] = {"qo_lens": (5,) * 2, "kv_lens": (700,) * 2, "heads": (4, 2)}
SPLIT_EQUAL_LENGTHS = [
    _case("causal, sinks", **F16_64 | SPLIT_EQUAL, causal=True, sinks=1.0),
    _case("window", **SPLIT_EQUAL, window_left=300, window_right=2),
    _case("mask", **F16_64 | SPLIT_EQUAL, masked=0.5),
    _case("RoPE, several blocks", **F16_64 | SPLIT_EQUAL | {"qo_lens": (70,) * 2}, pos_encoding="ROPE_LLAMA"),
    _case("ALiBi", **F16_64 | SPLIT_EQUAL, causal=True, pos_encoding="ALIBI"),
    _case("one row", **SPLIT_EQUAL | {"qo_lens": (1,), "kv_lens": (1000,), "head_dims": (256, 256)}),
]


@pytest.mark.parametrize("case", SPLIT_EQUAL_LENGTHS, ids=[case.name for case in SPLIT_EQUAL_LENGTHS])
def test_split_requests_of_equal_lengths(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_requests, "fastest_splits", lambda *_: 3)
    setup, launched = Setup("ragged", case), []

    def launch(*args: Any, **arguments: Any) -> None:
        launched.append((arguments["request_splits"], arguments["slots"]))
        host.launch(*args, **arguments)

    with Host(sms=2).installed() as host, pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "launch", launch)
        setup.check(*prefill.single_prefill(**setup.unplanned_arguments), **setup.tolerance("cuda"))
    assert launched == [(3, 3 * len(case.kv_lens))]


def test_the_counter_of_units_is_0_again_and_one_that_was_not_heals() -> None:
    """A launch with another number may leave units out, but ends, and the next one is right."""
    setup = Setup("ragged", _case("counter", **F16_64, causal=True, planner={"tile_rows": 16}))
    plan = setup.arguments["plan"]
    with Host(sms=2).installed():
        for number in (0, 3, 11, -1, -(2**31)):
            plan.queue[0] = number
            for _ in range(2):
                out, lse = prefill.ragged_prefill(**setup.arguments)
            setup.check(out, lse, **setup.tolerance("cuda"))
            assert plan.queue[0] == 0 or number < 0


@pytest.mark.parametrize(("masked", "pos_encoding"), [(None, "NONE"), (0.5, "NONE"), (None, "ALIBI")])
@pytest.mark.parametrize("seed", range(8))
def test_plans_of_random_extremes_stay_within_the_tensors(seed: int, masked: float | None, pos_encoding: str) -> None:
    """A result means nothing then: several work items may have the same rows."""
    kind = ("prefill", "ragged")[seed % 2]
    causal = seed % 3 == 0 and masked is None
    options: dict[str, Any] = {"causal": causal, "masked": masked, "pos_encoding": pos_encoding}
    setup = Setup(kind, _case("extremes", **SPLIT | F16_64 | options, padding=2))
    _stays_within_the_tensors(kind, random_plan(setup.arguments, seed), seed)


@pytest.mark.parametrize("sizes", [{"masked": 0.5}, FEW_512 | {"planner": {"num_ctas": 12}}], ids=["many", "few"])
@pytest.mark.parametrize("seed", range(4))
def test_plans_of_random_extremes_for_heads_of_512_stay_within_the_tensors(seed: int, sizes: dict[str, Any]) -> None:
    kind = ("prefill", "ragged")[seed % 2]
    setup = Setup(kind, _case("extremes", **SPLIT | OF_512 | sizes, padding=2))
    _stays_within_the_tensors(kind, random_plan(setup.arguments, seed), seed)


def _stays_within_the_tensors(kind: str, arguments: dict[str, Any], seed: int = 0) -> None:
    with Host(sms=2, seed=seed).installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_call, "combine_split_tiles", lambda *_, **__: None)
        try:
            OPS[kind](**arguments)
        except HostError as error:
            if not re.match(r"race(.|\n)* of (out|lse|partial)", str(error)):
                raise


LEAST, MOST = -(2**31), 2**31 - 1
HOSTILE_LENGTHS: dict[str, dict[str, list[int]]] = {
    "a negative length": {"kv_len": [1_000_000, -(2**23), 300]},
    "bits beyond 2^63": {"qo_indptr": [LEAST, MOST, 140, 340], "kv_len": [MOST, 0, MOST]},
    "rows beyond 2^31": {"qo_indptr": [LEAST, MOST, 140, 340], "kv_len": [300, 300, 300]},
}


@pytest.mark.parametrize("request_of_items", [0, 1, 2])
@pytest.mark.parametrize("name", HOSTILE_LENGTHS)
def test_masks_of_hostile_lengths_stay_within_the_tensors(name: str, request_of_items: int) -> None:
    setup = Setup("ragged", _case(name, **F16_64, kv_lens=(300,) * 3, qo_lens=(140,) * 3, heads=(2, 1), masked=0.5))
    plan = PrefillPlan(*setup.arguments["plan"])
    for field, values in HOSTILE_LENGTHS[name].items():
        getattr(plan, field).copy_(torch.tensor(values, dtype=torch.int32))
    plan.work[:, WORK_FIELDS.index("request")] = request_of_items
    _stays_within_the_tensors("ragged", setup.arguments)


def _states(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of which some have no keys, and NaN in place of an output."""
    generator = torch.Generator().manual_seed(len(shape))
    v, s = (torch.randn(one, generator=generator) for one in (shape, shape[:-1]))
    empty = torch.rand(s.shape, generator=generator) < 0.3
    v[empty], s[empty] = math.nan, -math.inf
    return v.to(dtype), s


def _check_merge(out: Tensor, lse: Tensor, v: Tensor, s: Tensor) -> None:
    expected, expected_lse = oracle.merge(v, s)
    spread = v.double().abs().nan_to_num(0).amax(1)
    eps = max(torch.finfo(out.dtype).eps, 2**-20)
    assert ((out.double() - expected).abs() <= eps * spread).all()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("states", [1, 3, 9, 23, 64])
@pytest.mark.parametrize("dtype", merges.DTYPES, ids=str)
def test_merge_states(dtype: torch.dtype, states: int) -> None:
    v, s = _states(7, states, 3, 48, dtype=dtype)
    with Host(seed=states).installed():
        _check_merge(*merges.merge_states(v, s), v, s)


@pytest.mark.parametrize("dtype", merges.DTYPES, ids=str)
def test_merge_state(dtype: torch.dtype) -> None:
    v, s = _states(9, 2, 5, 64, dtype=dtype)
    (v_a, v_b), (s_a, s_b) = v.unbind(1), s.unbind(1)
    merged = torch.arange(9) % 3 != 1
    with Host(seed=1).installed():
        _check_merge(*merges.merge_state(v_a, s_a, v_b, s_b), v, s)
        out, lse = v_a.clone(), s_a.clone()
        merges.merge_state_in_place(out, lse, v_b, s_b, merged)
    _check_merge(out[merged], lse[merged], v[merged], s[merged])
    assert torch.equal(out[~merged].nan_to_num(7), v_a[~merged].nan_to_num(7))
    assert torch.equal(lse[~merged], s_a[~merged])


def _within(t: Tensor, *more: int) -> Tensor:
    """``t`` in a tensor with so many more elements in each dimension, which are NaN."""
    outer = torch.full([n + m for n, m in zip(t.shape, more, strict=True)], math.nan, dtype=t.dtype)
    inner = outer[tuple(slice(n) for n in t.shape)]
    return inner.copy_(t)


@pytest.mark.parametrize("states", [3, 23])
def test_merges_of_any_strides(states: int) -> None:
    v, s = _states(7, states, 3, 48, dtype=torch.float16)
    v, s = _within(v, 1, 2, 1, 16), _within(s, 2, 1, 5)
    with Host(seed=states).installed():
        _check_merge(*merges.merge_states(v, s), v, s)
        v, s = v[:, :2].contiguous(), s[:, :2].contiguous()
        (v_a, v_b), (s_a, s_b) = v.unbind(1), s.unbind(1)
        v_a, s_a = _within(v_a, 2, 1, 8), _within(s_a, 1, 2)
        _check_merge(*merges.merge_state(v_a, s_a, v_b, s_b), v, s)
        _check_merge(*merges.merge_state(v_b, s_b, v_a, s_a), v, s)
        out, lse = _within(v_a, 1, 1, 16), _within(s_a, 1, 1)
        merges.merge_state_in_place(out, lse, v_b, s_b)
    _check_merge(out, lse, v, s)


def test_parts_of_states_leave_each_row_its_threads() -> None:
    for dim in (8, 48, 128, 1024):
        for states in (1, 8, 64, 500):
            v = torch.empty(3, states, 2, dim, dtype=torch.float16, device="meta")
            vectors, parts = dim // 8, merges._parts(v)
            assert 1 <= parts <= max(1, states // merges.PART_STATES)
            assert parts * vectors <= merges.THREADS
