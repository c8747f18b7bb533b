"""The Hopper MLA kernel compiled offline. It is written in Gluon, which has no interpreter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import attn_ops

triton = pytest.importorskip("triton")
hopper = pytest.importorskip("attn_ops.kernels.triton.hopper_mla", exc_type=ImportError)

from helpers.offline_compile import compiling_for, tool  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or triton.knobs.runtime.interpret, reason="compiles for a GPU that is not there"
)

SHARED_BYTES = 227 << 10

PRODUCER_STACK_BYTES = 64
"""The producer spills a few values before its loop. A consumer that spills would take hundreds of bytes."""

MMA_WAITS = 10
"""Waits for matrix products in the source: six of the first consumer warpgroup, four of the second."""


def _call(
    dtype: torch.dtype = torch.bfloat16,
    dims: tuple[int, int] = (512, 64),
    heads: int = 128,
    page_size: int = 64,
    packed: bool = False,
    kv_dtype: torch.dtype | None = None,
    window_left: int = -1,
    tile_rows: int | None = None,
    shift: int = 0,
) -> tuple[list[torch.Tensor], attn_ops.PrefillPlanner]:
    """``q_nope, q_pe, ckv, kpe`` and a planner."""
    sizes = {"page_size": page_size, "num_qo_heads": heads, "num_kv_heads": 1, "window_left": window_left}
    planner = attn_ops.PrefillPlanner(
        5, 9, 40, head_dim=sum(dims), head_dim_vo=dims[0], num_ctas=6, tile_rows=tile_rows, **sizes
    )
    q = torch.zeros(9, heads, sum(dims) + shift, dtype=dtype)[..., shift:]
    cache = torch.zeros(10, page_size, sum(dims), dtype=kv_dtype or dtype)
    parts = [*q.split(dims, -1), *cache.split(dims, -1)]
    return parts if packed else [*parts[:2], *(t.contiguous() for t in parts[2:])], planner


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "causal", "return_lse"),
    [({}, False, False), ({"dtype": torch.float16, "heads": 16, "packed": True, "tile_rows": 4}, True, True)],
    ids=["decode", "rows"],
)
def test_registers_and_shared_memory_suffice(
    sizes: dict[str, Any], causal: bool, return_lse: bool, tmp_path: Path
) -> None:
    """And matrix products overlap: where the compiler does not see that they can, it adds a wait for each."""
    (q_nope, q_pe, ckv, kpe), planner = _call(**sizes)
    arguments = q_nope, q_pe, ckv, kpe, list(planner.state), planner.workspace
    with compiling_for(90) as compiled:
        hopper.batch_mla(*arguments, sm_scale=0.1, causal=causal, return_lse=return_lse)
    (kernel, _), _ = compiled
    assert kernel.metadata.shared <= SHARED_BYTES
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage = re.search(r"STACK:(\d+).*?LOCAL:(\d+)", tool("cuobjdump", "-res-usage", cubin=cubin))
    assert usage
    assert int(usage[1]) <= PRODUCER_STACK_BYTES
    assert usage[2] == "0"
    code = tool("nvdisasm", "-c", cubin=cubin)
    assert code.count("HGMMA") >= 80
    assert code.count("WARPGROUP.DEPBAR") <= MMA_WAITS
