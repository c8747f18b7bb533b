"""Calls of bfloat16 alone on the CPU, which ``cpu.sdpa`` computes without a conversion to float32."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cases import DECODE_AXES, DECODE_BASE, PREFILL_AXES, PREFILL_BASE, RAGGED_AXES, Case, one_at_a_time
from helpers.harness import Setup

from attn_ops.kernels.cpu import sdpa

pytestmark = pytest.mark.usefixtures("poisoned_memory")

AXES = {"decode": DECODE_AXES, "prefill": PREFILL_AXES, "ragged": RAGGED_AXES}
LEFT_OUT = ("dtype", "logits_soft_cap", "sinks", "out_dtype")
DTYPES: dict[str, Any] = {"dtype": torch.bfloat16}


def _cases(kind: str) -> list[Case]:
    base = replace(DECODE_BASE if kind == "decode" else PREFILL_BASE, **DTYPES)
    axes = {name: values for name, values in AXES[kind].items() if name not in LEFT_OUT}
    return [case for case in one_at_a_time(base, axes) if case.head_dims[0] == case.head_dims[1]]


@pytest.fixture(autouse=True)
def on_every_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "BFLOAT16_ROWS", 32)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes that the kernel has computed in."""
    dtypes, flash = list[torch.dtype](), sdpa.FLASH

    def observed(q: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        dtypes.append(q.dtype)
        return flash(q, *args, **kwargs)

    monkeypatch.setattr(sdpa, "FLASH", observed)
    return dtypes


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind in AXES for case in _cases(kind)], ids=str)
def test_the_output_is_within_tolerance_of_the_oracle(kind: str, case: Case) -> None:
    setup = Setup(kind, case)
    for backend in ("cpu", "auto"):
        out, lse = setup.run(backend, return_lse=False)
        assert lse.numel() == 0
        setup.check(out)


@pytest.mark.parametrize("kind", list(AXES))
def test_what_is_computed_in_bfloat16(kind: str, computed: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, which need no mask, of calls whose result no scale, sink or other dtype makes less exact."""
    rows = () if kind == "decode" else (1, 1, 1)
    base = replace(DECODE_BASE, kv_lens=(37, 20, 130), qo_lens=rows, **DTYPES)

    def dtypes(return_lse: bool = False, **changes: Any) -> set[torch.dtype]:
        setup = Setup(kind, replace(base, **changes))
        out, lse = setup.run("cpu", return_lse=return_lse)
        setup.check(out, lse if return_lse else None, **setup.tolerance("cpu"))
        found = set(computed)
        computed.clear()
        return found

    assert dtypes() == {torch.bfloat16}
    exact: list[dict[str, Any]] = [
        {"return_lse": True},
        {"sinks": 1.0},
        {"kv_scale": (0.5, 2.0), "kv_dtype": torch.float8_e4m3fn},
        {"kv_dtype": torch.float8_e4m3fn},
        {"out_dtype": torch.float8_e4m3fn},
        {"dtype": torch.float16},
    ]
    assert [dtypes(**changes) for changes in exact] == [{torch.float32}] * len(exact)
    monkeypatch.setattr(sdpa, "BFLOAT16_ROWS", 1)
    assert dtypes() == {torch.float32}


def test_rows_of_both_dtypes(computed: list[torch.dtype]) -> None:
    """A batch whose requests have few rows and many, some of which need a mask."""
    setup = Setup(
        "prefill", replace(PREFILL_BASE, kv_lens=(9, 130, 0, 33), qo_lens=(9, 70, 0, 33), causal=True, **DTYPES)
    )
    setup.check(setup.run("cpu", return_lse=False)[0])
    assert set(computed) == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("of_values", [False, True], ids=["key", "value"])
def test_numbers_that_are_not_finite(of_values: bool, value: float, computed: list[torch.dtype]) -> None:
    """The reference computes the call, so that rows that do not see a key have the exact result."""
    setup = Setup("ragged", replace(PREFILL_BASE, kv_lens=(7, 9), qo_lens=(7, 9), causal=True, **DTYPES))
    expected = setup.expected
    (setup.v if of_values else setup.k)[7 - 1] = value
    out, _ = setup.run("cpu", return_lse=False)
    assert torch.bfloat16 in computed
    for rows in [slice(7, None)] if of_values else [slice(0, 6), slice(7, None)]:
        expected.rows(rows).check(out[rows])
    torch.testing.assert_close(out, setup.run("reference")[0], rtol=2**-7, atol=2**-7, equal_nan=True)


def test_logits_of_minus_infinity() -> None:
    """The output is 0, as that of a row that sees no key."""
    setup = Setup("decode", replace(DECODE_BASE, **DTYPES))
    setup.q.abs_().add_(1)
    setup.k.fill_(-math.inf)
    assert not setup.run("cpu", return_lse=False)[0].any()
