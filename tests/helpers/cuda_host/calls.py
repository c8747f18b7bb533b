"""Calls of CUDA kernels on the host, and their cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_ops.kernels.cuda import mla, prefill
from helpers import mla_cases
from helpers.cases import Case
from helpers.cuda_host import Host
from helpers.harness import Setup

OPS = {"prefill": prefill.batch_prefill, "ragged": prefill.ragged_prefill}

SPLIT: dict[str, Any] = {"kv_lens": (700, 0, 300, 2), "planner": {"num_ctas": 12, "tile_rows": 8}}
FP8_KV: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn, "kv_scale": (0.5, 3.0)}


def prefill_case(name: str, **fields: Any) -> Case:
    sizes: dict[str, Any] = {"kv_lens": (70, 0, 150, 2), "qo_lens": (40, 0, 33, 2), "heads": (8, 2)}
    return Case(name, **(sizes | {"dtype": torch.bfloat16, "head_dims": (128, 128)} | fields))


def attend(kind: str, case: Case, host: Host) -> tuple[Tensor, Tensor]:
    """Run the case on the host and compare it with the oracle."""
    setup = Setup(kind, case)
    with host.installed():
        out, lse = OPS[kind](**setup.arguments)
    setup.check(out, lse, **setup.tolerance("cuda"))
    return out, lse


def mla_op(*tensors: Any, backend: str, **options: Any) -> tuple[Tensor, Tensor]:
    return mla.batch_mla(*tensors, **options)


def swapped(name: str, heads: int, **options: Any) -> mla_cases.Mla:
    """A case of few packed rows, by default of decode with splits."""
    sizes: dict[str, Any] = {"qo_lens": (1, 1, 0, 1), "kv_lens": (70, 300, 0, 1000), "dims": (512, 64)}
    fixed: dict[str, Any] = {"dtype": torch.bfloat16, "page_size": 64, "sm_scale": None, "planner": {"num_ctas": 12}}
    return mla_cases.Mla(name, heads=heads, **(sizes | fixed | options))
