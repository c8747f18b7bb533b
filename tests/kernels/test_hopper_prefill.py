"""The Hopper prefill kernel compiled offline. It is written in Gluon, which has no interpreter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cases import Case
from helpers.harness import Setup

triton = pytest.importorskip("triton")
hopper = pytest.importorskip("attn_ops.kernels.triton.hopper_prefill", exc_type=ImportError)

from helpers.offline_compile import SHARED_MEMORY, compiling_for, tool  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or triton.knobs.runtime.interpret, reason="compiles for a GPU that is not there"
)

BASE: dict[str, Any] = {"dtype": torch.bfloat16, "heads": (8, 2), "head_dims": (128, 128), "causal": True}


SPILL_BYTES = 32
"""Bytes of a thread's registers that may be spilled: values that are needed after a loop."""

OPS = {"paged": hopper.batch_prefill, "ragged": hopper.ragged_prefill, "single": hopper.single_prefill}


def _arguments(kind: str = "paged", **options: Any) -> dict[str, Any]:
    case = Case("case", **{"kv_lens": (300, 100), "qo_lens": (100, 100), **BASE, **options})
    arguments = Setup("prefill" if kind == "paged" else "ragged", case).arguments
    if kind == "single":
        del arguments["plan"], arguments["workspace"]
    return arguments


def _call(kind: str = "paged", **options: Any) -> None:
    OPS[kind](**_arguments(kind, **options))


CALLS: dict[str, dict[str, Any]] = {
    "paged": {},
    "ragged, not causal": {"kind": "ragged", "causal": False},
    "window": {"window_left": 50, "dtype": torch.float16},
    "single": {"kind": "single"},
    "rows aligned to 16 bytes": {"storage": "padded"},
    "64": {"head_dims": (64, 64), "window_left": 127, "sinks": 1.0},
    "192/128": {"kind": "ragged", "head_dims": (192, 128)},
    "alternating warpgroups": {"planner": {"tile_rows": 16}},
    "192/128, pages": {"head_dims": (192, 128), "page_size": 64, "kv_layout": "HND"},
    "256": {"head_dims": (256, 256), "window_left": 50},
    "256, cap": {"head_dims": (256, 256), "logits_soft_cap": 30.0, "page_size": 48},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_registers_suffice_and_products_overlap(name: str, tmp_path: Path) -> None:
    """Where the assembler does not see that products can overlap, it waits for each, and may move exponentials."""
    with compiling_for(90) as compiled:
        _call(**CALLS[name])
    kernel = compiled[0][0]
    assert kernel.metadata.name == "hopper_prefill_kernel"
    assert kernel.metadata.shared <= SHARED_MEMORY[90][0] << 10
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage = re.search(r"STACK:(\d+).*?LOCAL:(\d+)", tool("cuobjdump", "-res-usage", cubin=cubin))
    assert usage
    stack, local = map(int, usage.groups())
    assert local == 0
    assert stack <= SPILL_BYTES
    code = tool("nvdisasm", "-c", cubin=cubin)
    waits = re.findall(r"WARPGROUP.DEPBAR.LE gsb0, 0x(\d)", code)
    assert sorted(waits) == ["0"] * 6 + ["1"] * 2
    steps = re.findall(r"DEPBAR.LE gsb0, 0x1(.*?)DEPBAR.LE gsb0, 0x0", code, re.DOTALL)
    exponentials = 32 if "256" in name else 64  # per thread: a warpgroup has 64 packed rows and a KV tile
    assert [step.count("MUFU.EX2") >= exponentials for step in steps] == [True, True]


@pytest.mark.parametrize("out_dtype", [None, torch.float8_e4m3fn, torch.float32])
def test_both_consumers_store_output_and_lse(out_dtype: torch.dtype | None) -> None:
    """Of a whole tile and of a split, for every dtype of the output."""
    with compiling_for(90) as compiled:
        _call(out_dtype=out_dtype)
    assert compiled[0][0].asm["ttgir"].count("tt.store ") == 2 * len(("output", "LSE", "partial output", "partial LSE"))
