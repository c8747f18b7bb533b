"""Keys and values that no row of their request sees have no effect, whatever they hold, NaN included."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.backends import each_case
from helpers.cases import PREFILL_BASE, Case
from helpers.harness import CPU_BACKENDS, Setup
from torch import Tensor

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DECODE = Case("decode", kv_lens=(37, 0, 130, 1, 700))
PREFILL = replace(PREFILL_BASE, name="prefill", kv_lens=(37, 0, 330, 19), qo_lens=(3, 0, 40, 19), causal=True)
HOPPER = replace(
    PREFILL, name="hopper", kv_lens=(370, 0, 930, 190), dtype=torch.bfloat16, heads=(8, 2), head_dims=(128, 128)
)


def _windows(base: Case, **changes: object) -> list[Case]:
    return [
        replace(base, name=f"{base.name}, window {w}{''.join(f', {k} {v}' for k, v in changes.items())}", window_left=w)
        for w in (0, 5, 33, 100)
    ]


WINDOWS = [
    *(("decode", case) for case in _windows(DECODE)),
    *(("prefill", replace(case, page_size=p)) for p in (1, 16, 64) for case in _windows(PREFILL, page_size=p)),
    *(("prefill", replace(case, causal=False)) for case in _windows(PREFILL, causal=False)),
    *(("prefill", case) for case in _windows(HOPPER)),
    *(("prefill", replace(case, planner={"tile_rows": 8})) for case in _windows(HOPPER, tile_rows=8)),
    *(("prefill", replace(case, planner={"tile_rows": 48})) for case in _windows(HOPPER, tile_rows=48)),
    *(("ragged", case) for case in (*_windows(PREFILL), *_windows(HOPPER))),
]


class Named(tuple[str, Case]):
    __slots__ = ()

    def __str__(self) -> str:
        return f"{self[0]}: {self[1]}"


def _hidden(setup: Setup) -> list[Tensor]:
    """For each request, bool ``[kv_len]``: no row sees the token."""
    hidden = []
    for n, m, mask in zip(setup.qo_lens, setup.case.kv_lens, setup.masks, strict=True):
        position = torch.arange(m - n, m)[:, None]
        seen = torch.ones(n, m, dtype=torch.bool) if mask is None else mask
        if setup.case.window_left >= 0:
            seen = seen & (torch.arange(m) >= position - setup.case.window_left)
        hidden.append(~seen.any(0))
    return hidden


def _poison(setup: Setup, hidden: list[Tensor]) -> int:
    """Set these tokens of the cache to NaN; returns their number."""
    count = first = 0
    for b, tokens in enumerate(hidden):
        at = tokens.nonzero().flatten().to(setup.device)
        for cache in (setup.k, setup.v):
            heads_last = cache if setup.case.kv_layout == "NHD" else cache.transpose(-2, -3)
            if setup.kind == "ragged":
                heads_last[first + at] = math.nan
            else:
                indptr, indices, _ = setup.page_table
                page = indices[int(indptr[b]) : int(indptr[b + 1])].long()[at // setup.case.page_size]
                heads_last[page, at % setup.case.page_size] = math.nan
        count, first = count + at.shape[0], first + tokens.shape[0]
    return count


@each_case([Named(x) for x in WINDOWS], interpreted=[Named(x) for x in (*WINDOWS[:4:2], *WINDOWS[5:12:3], WINDOWS[-6])])
def test_before_the_window(case: Named, device: str, backend: str) -> None:
    setup = Setup(*case, device)
    expected = setup.expected
    assert _poison(setup, _hidden(setup))
    for name in CPU_BACKENDS if backend == "reference" else (backend,):
        expected.check(*setup.run(name))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Named(x) for x in WINDOWS if x[1].name.startswith(HOPPER.name)], ids=str)
def test_before_the_window_in_the_cuda_kernel(case: Named) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    setup = Setup(*case, "cuda")
    expected = setup.expected
    assert _poison(setup, _hidden(setup))
    expected.check(*setup.run("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "page_size"), [("prefill", 16), ("prefill", 5), ("ragged", 1)])
@pytest.mark.parametrize("tile_rows", [8, 48])
def test_hidden_by_a_mask_in_the_cuda_kernel(kind: str, page_size: int, tile_rows: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    case = replace(HOPPER, name="mask", masked=0.02, page_size=page_size, planner={"tile_rows": tile_rows})
    setup = Setup(kind, case, "cuda")
    expected = setup.expected
    assert _poison(setup, _hidden(setup))
    expected.check(*setup.run("cuda"))


MASKED = [(kind, replace(PREFILL, name="mask", masked=0.02, causal=False)) for kind in ("prefill", "ragged")]


@each_case([Named(x) for x in MASKED], interpreted=[Named(x) for x in MASKED])
def test_hidden_by_a_mask(case: Named, device: str, backend: str) -> None:
    setup = Setup(*case, device)
    expected = setup.expected
    assert _poison(setup, _hidden(setup))
    for name in CPU_BACKENDS if backend == "reference" else (backend,):
        expected.check(*setup.run(name))
