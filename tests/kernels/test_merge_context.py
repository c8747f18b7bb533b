"""The one-shot merge compiles for GPUs that are absent, with the memory order that it needs."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from helpers.offline_compile import compiling_for  # noqa: E402

from attn_ops.kernels.triton.merge_context import merge_context  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or triton.knobs.runtime.interpret, reason="compiles for a GPU that is not there"
)


@pytest.mark.parametrize(("capability", "world", "scatter"), [(80, 2, False), (90, 4, True)])
def test_the_flags_are_released_and_acquired(capability: int, world: int, scatter: bool) -> None:
    v, s, heads = torch.zeros(8, 32, 128, dtype=torch.bfloat16), torch.zeros(8, 32), 32 // world if scatter else 32
    with compiling_for(capability) as compiled:
        merge_context(
            v,
            s,
            torch.zeros(world + 1, dtype=torch.int64),
            torch.zeros(64, dtype=torch.int32),
            1,
            1 << 16,
            60_000,
            torch.zeros(8, heads, 128, dtype=torch.bfloat16),
            torch.zeros(8, heads),
            torch.zeros(32) if scatter else None,
        )
    ((kernel, _),) = compiled
    ptx = kernel.asm["ptx"]
    release, acquire = ptx.index("atom.global.sys.release.exch"), ptx.index("ld.acquire.sys.global")
    assert "bar.sync" in ptx[:release]
    assert release < acquire < ptx.rindex("bar.sync")
    assert "ld.global.v2" in ptx[ptx.rindex("bar.sync") :]
