"""Run by ``test_triton_prefill_interpreter`` with TRITON_INTERPRET=1: prints what fails, exits with how much."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from attn_ops.kernels import triton

from attn_ops.ops import backends
from helpers import truncated_masks
from helpers.cases import PREFILL, PREFILL_BASE, PREFILL_SPECIAL, RAGGED, RAGGED_SPECIAL, Case
from helpers.harness import Setup
from helpers.mla_cases import CASES
from helpers.mla_cases import check as check_mla

OPS = ("batch_prefill", "ragged_prefill", "batch_mla")
SPLIT = [
    replace(PREFILL_BASE, name=f"split{i}", kv_lens=(300, 0, 700, 130), planner={"num_ctas": 12, "tile_rows": 16}, **o)
    for i, o in enumerate(({"causal": True, "sinks": 1.0}, {"window_left": 600, "page_size": 64}, {"masked": 0.5}))
]
PIECES = [case for case in PREFILL if case.name.startswith("pieces")]


def interpreted(name: str) -> backends.Backend:
    """The triton backend, whatever the device."""
    return backends.Backend(name, triton.__name__, lambda problem: [] if problem.op in OPS else ["elsewhere"])


def attempt(name: str, check: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    try:
        check(*args, **kwargs)
    except Exception as error:  # every failure is to be seen
        print(f"{name}: {type(error).__name__} {error}")
        return 1
    return 0


def check(kind: str, case: Case) -> None:
    setup = Setup(kind, case)
    rounded = case.pos_encoding == "ROPE_LLAMA"
    setup.check(*setup.run("interpreted"), **({"float32_eps": torch.finfo(case.dtype).eps / 8} if rounded else {}))


def every(cases: list[Case], step: int) -> list[Case]:
    return [case for case in cases if case.dtype != torch.bfloat16][::step]


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    backends.BACKENDS = (interpreted("interpreted"), *backends.BACKENDS)
    failures = 0
    for kind, cases in (
        ("prefill", [*SPLIT, *PIECES, *every(PREFILL, 23), *every(PREFILL_SPECIAL, 9)]),
        ("ragged", [*every(RAGGED, 29), *every(RAGGED_SPECIAL, 13)]),
    ):
        for case in cases:
            failures += attempt(f"{kind} {case}", check, kind, case)
    for held in truncated_masks.LENGTHS[::2]:
        failures += attempt(f"mask of {held} bytes", truncated_masks.check, "prefill", held, backend="interpreted")
    for mla in CASES:
        if mla.dtype != torch.bfloat16 and mla.dims[0] * mla.heads < 1000:
            failures += attempt(f"mla {mla}", check_mla, mla, backend="interpreted")
    sys.exit(failures)
