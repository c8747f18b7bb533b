"""Prefill with ALiBi in CUDA C++ on the host (``helpers/cuda_host``): results against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")  # whose call of the prefill kernels the CUDA kernel shares

from helpers.cases import Case
from helpers.cuda_host import Fault, Host, needs_a_compiler
from helpers.cuda_host.calls import FP8_KV, SPLIT, attend
from helpers.cuda_host.calls import prefill_case as _case
from helpers.harness import Setup
from helpers.oracle import alibi_slopes

from attn_ops.kernels.cuda import prefill

pytestmark = [needs_a_compiler, pytest.mark.usefixtures("poisoned_memory")]

ALIBI: dict[str, Any] = {"pos_encoding": "ALIBI", "causal": True}
MASK: dict[str, Any] = {"pos_encoding": "ALIBI", "causal": False, "masked": 0.4}
OF_64: dict[str, Any] = {"head_dims": (64, 64)}
OF_256: dict[str, Any] = {"head_dims": (256, 256), "heads": (4, 2)}
FP8_E5M2: dict[str, Any] = {"kv_dtype": torch.float8_e5m2, "kv_scale": (-2.0, 2.0**-120)}

CASES = [
    ("prefill", _case("causal", **ALIBI)),
    ("prefill", _case("not causal", **ALIBI | {"causal": False}, sm_scale=0.3, page_size=8)),
    ("prefill", _case("more rows than keys", **ALIBI, kv_lens=(30, 5), qo_lens=(40, 7))),
    ("prefill", _case("window, cap, sinks", **ALIBI, window_left=33, logits_soft_cap=5.0, sinks=1.0, page_size=64)),
    ("prefill", _case("windows on both sides", **ALIBI | {"causal": False}, window_left=20, window_right=7)),
    ("prefill", _case("splits", **ALIBI | SPLIT, heads=(7, 1), storage="fused", kv_layout="HND")),
    ("prefill", _case("splits, units of 128", **ALIBI, kv_lens=(700, 0, 300, 2), planner={"num_ctas": 12})),
    ("prefill", _case("groups that do not divide 64", **ALIBI, heads=(10, 2), dtype=torch.float16)),
    ("prefill", _case("groups larger than a unit", **ALIBI, heads=(150, 1), qo_lens=(3, 0, 2, 1))),
    ("prefill", _case("query tiles of 192 packed rows", **ALIBI, heads=(12, 4), planner={"tile_rows": 64})),
    ("prefill", _case("pages of one token", **ALIBI, page_size=1, dtype=torch.float16)),
    ("prefill", _case("pages of five tokens, window", **ALIBI, page_size=5, window_left=33)),
    ("prefill", _case("no keys", **ALIBI, kv_lens=(300, 0, 200, 5, 0), qo_lens=(40, 9, 200, 5, 3))),
    ("prefill", _case("rows beyond the batch", **ALIBI, padding=70, spare_batch=2)),
    ("prefill", _case("64", **ALIBI | OF_64, page_size=16, dtype=torch.float16)),
    ("prefill", _case("64, splits", **ALIBI | OF_64 | SPLIT, heads=(6, 2), window_left=300)),
    ("prefill", _case("64, cap, many rows", **ALIBI | OF_64, logits_soft_cap=5.0, kv_lens=(400,), qo_lens=(200,))),
    ("prefill", _case("64, pages of three tokens", **ALIBI | OF_64, page_size=3, sinks=1.0)),
    ("prefill", _case("mask", **MASK, padding=3, spare_batch=2)),
    ("prefill", _case("mask that hides most tokens", **MASK | {"masked": 0.01}, kv_lens=(700,), qo_lens=(9,))),
    ("prefill", _case("mask, window, cap, tokens", **MASK, window_left=50, logits_soft_cap=5.0, page_size=1)),
    ("prefill", _case("64, mask, splits", **MASK | OF_64 | SPLIT | {"causal": False}, kv_layout="HND")),
    ("ragged", _case("ragged, mask", **MASK, dtype=torch.float16)),
    ("ragged", _case("ragged", **ALIBI, storage="padded", planner={"tile_rows": 32})),
    ("ragged", _case("ragged, window", **ALIBI, window_left=40, heads=(6, 2), kv_layout="HND")),
    ("ragged", _case("ragged, 64", **ALIBI | OF_64, dtype=torch.float16, out_dtype=torch.float32)),
    (
        "ragged",
        _case("the bias exceeds the logits", **ALIBI, kv_lens=(300,), qo_lens=(300,), heads=(12, 4), sm_scale=0.01),
    ),
    ("prefill", _case("256, window", **ALIBI | OF_256, window_left=33, page_size=8)),
    ("prefill", _case("256, splits, mask", **MASK | OF_256 | SPLIT | {"causal": False}, sinks=1.0)),
    ("ragged", _case("ragged, 256", **ALIBI | OF_256, dtype=torch.float16, logits_soft_cap=5.0)),
]
CASES += [
    (kind, replace(case, name=f"{case}, FP8", **(FP8_KV if i % 2 else FP8_E5M2)))
    for i, (kind, case) in enumerate(case for case in CASES if case[1].masked is None)
]


@pytest.mark.parametrize(("kind", "case"), CASES, ids=[case.name for _, case in CASES])
def test_prefill_adds_the_bias(kind: str, case: Case) -> None:
    attend(kind, case, Host())


@pytest.mark.parametrize("dim", [64, 128])
def test_prefill_without_a_plan_adds_the_bias(dim: int) -> None:
    sizes: dict[str, Any] = {"kv_lens": (230,), "qo_lens": (150,), "heads": (6, 2), "head_dims": (dim, dim)}
    setup = Setup("ragged", _case("single", **ALIBI, **sizes, dtype=torch.float16))
    arguments = {name: x for name, x in setup.arguments.items() if name not in ("plan", "workspace")}
    with Host().installed():
        setup.check(*prefill.single_prefill(**arguments), **setup.tolerance("cuda"))


ABSOLUTE = Fault(
    "to.bias_row = int(p.has_cap ? in_request : position), to.bias_rest = int(uint32(to.bias_row) - in_request);",
    "to.bias_row = int(in_request), to.bias_rest = 0;",
)


@pytest.mark.parametrize("planted", [0, 1])
def test_long_contexts_take_no_precision(planted: int) -> None:
    """Distances from the first rows of a request would need more than float32 has, as a planted fault shows."""
    rows, tokens, heads, window = 3, 200_000, 12, 300
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 64, generator=generator).half() for n, h in ((rows, heads), (tokens, 1), (tokens, 1)))
    with Host(faults=[ABSOLUTE], planted=planted).installed():
        options: dict[str, Any] = {"causal": True, "window_left": window, "pos_encoding": "ALIBI"}
        out, _ = prefill.single_prefill(q, k, v, out_dtype=torch.float32, **options)
    near = window + rows
    distance = torch.arange(-near + 1, 1)[None] + torch.arange(rows - 1, -1, -1)[:, None]
    logits = torch.einsum("nhd,md->nhm", q.double(), k[-near:, 0].double()) / 8
    logits += torch.tensor(alibi_slopes(heads)).double()[None, :, None] * distance[:, None]
    logits.masked_fill_(((distance > 0) | (distance < -window))[:, None], -torch.inf)
    error = (out - logits.softmax(-1) @ v[-near:, 0].double()).abs().max()
    assert (error < 2**-10) != planted


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 40, 96])
def test_the_bias_alone_is_exact(heads: int) -> None:
    """Of queries that are 0, a row has softmax weights of its distances, and the LSE of their sum."""
    tokens, rows = 9, 3
    q, k = torch.zeros(rows, heads, 64, dtype=torch.float16), torch.ones(tokens, 1, 64, dtype=torch.float16)
    with Host().installed():
        _, lse = prefill.single_prefill(q, k, k, pos_encoding="ALIBI", return_lse=True)
    slopes = torch.tensor(alibi_slopes(heads), dtype=torch.float64)
    distance = torch.arange(tokens)[None] - torch.arange(rows)[:, None]
    expected = torch.logsumexp(slopes[None, :, None] * distance[:, None, :], -1) / torch.log(torch.tensor(2.0))
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-6)
