"""Which calls the CUDA kernels run: the problem that a call's check makes of it, and their reasons."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import attn_ops
from attn_ops.errors import BackendError
from attn_ops.ops import backends, unsupported
from attn_ops.ops.checks import CHECKS

pytestmark = pytest.mark.usefixtures("on_hopper")

BF16 = torch.bfloat16
CUDA = "cuda.merge_states"


def _states(*shape: int, dtype: torch.dtype = BF16, spare: int = 0) -> tuple[Tensor, Tensor]:
    """Fake states on a GPU. ``spare`` elements lie behind each row of ``v``."""
    *rows, dim = shape
    strides = [math.prod(rows[i + 1 :]) * (dim + spare) for i in range(len(rows))]
    with FakeTensorMode():
        v = torch.empty_strided(shape, (*strides, 1), dtype=dtype, device="cuda")
        return v, torch.empty(rows, device="cuda")


def _calls(dim: int = 128, **options: Any) -> list[tuple[str, tuple[Tensor, ...]]]:
    """A call of each op, with states like these."""
    pair = _states(5, 4, dim, **options) * 2
    return [
        ("merge_states", _states(5, 3, 4, dim, **options)),
        ("merge_state", pair),
        ("merge_state_in_place", pair),
    ]


TAKEN: list[dict[str, Any]] = [
    {},
    {"dim": 8},
    {"dim": 1024},
    {"dim": 4, "dtype": torch.float32},
    {"dim": 80, "dtype": torch.float16, "spare": 8},
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dim": 12}, "rows of 24 bytes are not whole vectors of 16"),
    ({"dim": 1032}, "rows of 2064 bytes are not of 1 to 2048"),
    ({"dim": 0}, "rows of 0 bytes are not of 1 to 2048"),
    ({"spare": 4}, "rows are not aligned to 16 bytes"),
]


@pytest.mark.parametrize("options", TAKEN, ids=str)
def test_a_merge_runs_on_the_cuda_kernel(options: dict[str, Any], on_hopper: list[Any]) -> None:
    for op, arguments in _calls(**options):
        problem = CHECKS[op](*arguments)
        assert backends.choose(problem).label(op) == CUDA
        assert backends.choose(problem, "cuda").label(op) == CUDA
        general = "triton" if options.get("dim", 0) <= 512 else "reference"
        assert backends.choose(problem, lowerable=True).label(op) == general
        assert backends.choose(problem, lowerable=True, images=True).label(op) == CUDA
        line = attn_ops.explain(op, *arguments).splitlines()[0]
        assert line == f"{CUDA}: runs it, kernel merge_states; packages launch its image"
        assert on_hopper[-1].kernel.function == f"{op}_kernel"


@pytest.mark.parametrize(("options", "reason"), REFUSED, ids=[str(options) for options, _ in REFUSED])
def test_other_merges_run_elsewhere_and_the_reason_is_given(
    options: dict[str, Any], reason: str, on_hopper: list[Any]
) -> None:
    for op, arguments in _calls(**options):
        problem = CHECKS[op](*arguments)
        assert backends.choose(problem).label(op) == ("reference" if options.get("dim") in (0, 1032) else "triton")
        with pytest.raises(BackendError, match=rf"{CUDA}: .*{reason}"):
            backends.choose(problem, "cuda")
    assert not on_hopper  # nothing is compiled for a call that another kernel runs


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), None])
def test_other_gpus_are_refused(capability: Any, monkeypatch: pytest.MonkeyPatch, on_hopper: list[Any]) -> None:
    monkeypatch.setattr(unsupported, "compute_capability", lambda device: capability)
    op, arguments = _calls()[0]
    assert f"{CUDA}: it needs compute capability 9.0, not {capability}" in attn_ops.explain(op, *arguments)
    assert not on_hopper


def test_without_the_launcher_the_reason_says_so(monkeypatch: pytest.MonkeyPatch, on_hopper: list[Any]) -> None:
    monkeypatch.setattr(unsupported, "is_available", lambda: False)
    op, arguments = _calls()[0]
    assert f"{CUDA}: the launcher is missing" in attn_ops.explain(op, *arguments)
    assert not on_hopper


def test_an_op_without_a_cuda_kernel_is_refused() -> None:
    x = torch.zeros(16, dtype=torch.bool)
    with pytest.raises(
        BackendError, match=r"packbits: no backend runs this problem \(cuda: it has no kernel for packbits\)"
    ):
        torch.ops.attn.packbits(x, backend="cuda")
