"""Triton kernels compiled for GPUs that are not there: they assemble, fit, and write only what they should."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap

import attn_ops

triton = pytest.importorskip("triton")

from attn_ops.kernels import triton as backend  # noqa: E402
from attn_ops.kernels.triton import launch as launching  # noqa: E402
from attn_ops.kernels.triton.tiles import decode_tile, shared_bytes  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or triton.knobs.runtime.interpret, reason="compiles for a GPU that is not there"
)


class Driver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.target = triton.backends.compiler.GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


Compiled = list[tuple[Any, dict[str, Any]]]


@pytest.fixture
def compile_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Compiled]]:
    """``compile_for(capability)``: launches compile only, into the list that it returns."""

    def install(capability: int) -> Compiled:
        compiled: Compiled = []
        triton.runtime.driver.set_active(Driver(capability))

        def compile_only(
            kernel: Any, grid: Any, tensors: Any, scalars: Any, strides: Any, constants: Any, options: Any
        ) -> None:
            args = (*tensors, *scalars, *strides, *constants)
            result = kernel.warmup(*args, grid=tuple(grid), **options.keywords())
            result = result.result() if hasattr(result, "result") else result
            compiled.append((result, dict(zip(kernel.arg_names, args, strict=True))))

        monkeypatch.setattr(launching, "_launch_direct", compile_only)
        return compiled

    previous = triton.runtime.driver._active
    yield install
    triton.runtime.driver._active = previous


def _decode(dtype: torch.dtype, dim: int, heads: tuple[int, int], **options: Any) -> None:
    planner = attn_ops.DecodePlanner(
        8, 100, page_size=16, num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim=dim, num_ctas=33
    )
    q, cache = torch.zeros(5, heads[0], dim, dtype=dtype), torch.zeros(10, 16, heads[1], dim, dtype=dtype)
    backend.batch_decode(q, cache, cache, list(planner.state), planner.workspace, **options)


def _others() -> None:
    v, s = torch.zeros(5, 3, 32, 128, dtype=torch.bfloat16), torch.zeros(5, 3, 32)
    backend.merge_states(v, s)
    backend.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    cache, i = torch.zeros(10, 16, 8, 128, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.int32)
    backend.append_kv(cache[0, :6], cache[0, :6], cache, cache, i, i, i, i)
    for split in (None, 8):
        planner = attn_ops.DecodePlanner(
            5, 100, page_size=16, num_qo_heads=32, num_kv_heads=8, head_dim=128, num_ctas=33, fixed_split_size=split
        )
        backend.plan_decode(i, i, i[1:], list(planner.state))
    sizes = {"page_size": 16, "num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    prefill = attn_ops.PrefillPlanner(5, 100, 100, **sizes, fixed_split_size=8)
    backend.plan_prefill(i, i, i, i[1:], list(prefill.state))


DECODES: list[tuple[torch.dtype, int, tuple[int, int], dict[str, Any]]] = [
    (torch.bfloat16, 128, (32, 8), {}),
    (torch.float16, 64, (8, 8), {"sinks": torch.zeros(8), "return_lse": True}),
    (torch.bfloat16, 256, (10, 2), {"window_left": 100}),
    (torch.float16, 80, (64, 1), {"logits_soft_cap": 30.0}),
    (torch.float32, 512, (4, 2), {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_decode_assembles_and_fits(capability: int, compile_for: Callable[[int], Compiled]) -> None:
    compiled = compile_for(capability)
    for dtype, dim, heads, options in DECODES:
        _decode(dtype, dim, heads, **options)
        (kernel, _), _ = compiled[-2:]
        tile = decode_tile(torch.device("cpu"), dtype, dim, dim, heads[0] // heads[1])
        bound = shared_bytes(tile.kv, tile.options.num_stages, tile.heads, tile.dim_qk, tile.dim_vo, dtype.itemsize)
        assert kernel.metadata.shared <= bound
        assert kernel.asm["cubin"]


@pytest.mark.parametrize("capability", [80, 90])
def test_the_others_assemble(capability: int, compile_for: Callable[[int], Compiled]) -> None:
    compiled = compile_for(capability)
    _others()
    assert [kernel.metadata.name for kernel, _ in compiled] == list(WRITTEN)[2:]


DECODE_PLAN = {"plan_kv_indptr", "plan_kv_indices", "plan_kv_len", "work", "cta_indptr", "merge_indptr"}
WRITTEN = {
    "decode_kernel": {"out", "lse", "partial"},
    "merge_pieces_kernel": {"out", "lse"},
    "merge_states_kernel": {"out", "lse"},
    "merge_state_kernel": {"out", "lse"},
    "append_kernel": {"k_cache", "v_cache"},
    "plan_decode_kernel": DECODE_PLAN,
    "plan_pieces_kernel": DECODE_PLAN,
    "plan_prefill_kernel": {"plan_qo_indptr", "plan_kv_indptr", "plan_kv_indices", "plan_kv_len", "work", "merges"},
}


def test_the_compiler_sees_what_is_written(compile_for: Callable[[int], Compiled]) -> None:
    """Where its analysis gives up, Inductor takes every tensor to be written and copies the caches."""
    compiled = compile_for(90)
    _decode(torch.bfloat16, 128, (32, 8), return_lse=True)
    _others()
    for kernel, arguments in compiled:
        if hasattr(triton_kernel_wrap, "identify_accessed_tensors"):
            accesses = triton_kernel_wrap.identify_accessed_tensors(kernel.src.fn, arguments, {})
            written = {access.name for access in accesses.read_writes.writes}
        else:
            written = set(triton_kernel_wrap.identify_mutated_tensors(kernel.src.fn, arguments, {}))
        assert written == WRITTEN[kernel.metadata.name]
