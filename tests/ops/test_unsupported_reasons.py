"""The ``triton`` backend refuses a problem with its reasons, and what it accepts compiles and fits the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_ops.errors import BackendError
from attn_ops.ops import backends, unsupported
from attn_ops.ops.backends import Problem
from attn_ops.ops.options import AttentionOptions

triton = pytest.importorskip("triton")

from helpers.offline_compile import SHARED_MEMORY, compiling_for, decode, mla, prefill  # noqa: E402
from helpers.resources import resources_of  # noqa: E402

BF16 = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
GROUP_160 = {"num_qo_heads": 320, "num_kv_heads": 2}
CONDITIONS: list[tuple[dict[str, Any], tuple[int, int], str]] = [
    ({"op": "batch_decode", "head_dim_qk": 513} | BF16, (9, 0), "head_dim at most 512"),
    ({"op": "batch_decode", "head_dim_vo": 600} | BF16, (9, 0), "head_dim at most 512"),
    ({"op": "batch_prefill", "head_dim_qk": 1024} | BF16, (9, 0), "head_dim at most 512"),
    ({"op": "batch_mla", "head_dim_qk": 1200, "head_dim_vo": 512} | BF16, (9, 0), "head_dim at most 512"),
    ({"op": "append_mla_kv", "head_dim_qk": 1200, "head_dim_vo": 600} | BF16, (9, 0), "head_dim at most 512"),
    ({"op": "merge_states", "head_dim_vo": 513}, (9, 0), "head_dim at most 512"),
    ({"op": "merge_states", "head_dim_vo": 0}, (9, 0), "head_dim at least 1"),
    ({"op": "single_prefill", "head_dim_vo": 0} | BF16, (9, 0), "head_dim at least 1"),
    ({"op": "batch_decode"} | BF16 | GROUP_160, (9, 0), "at most 128 query heads per KV head"),
    ({"op": "batch_decode", "dtype": torch.float64, "kv_dtype": torch.float64}, (9, 0), "not compute in torch.float64"),
    ({"op": "batch_prefill", "dtype": torch.float8_e5m2}, (9, 0), "not compute in torch.float8_e5m2"),
    ({"op": "merge_state", "dtype": torch.float64, "kv_dtype": torch.float64}, (9, 0), "not compute in torch.float64"),
    ({"op": "batch_decode", "options": ("sinks", "new")} | BF16, (9, 0), "not implement new"),
    ({"op": "batch_prefill", "options": ("new",), "context_ranks": 2} | BF16, (9, 0), "not implement new"),
    ({"op": "batch_prefill"} | BF16, (7, 5), r"compute capability 8.0 or newer, not \(7, 5\)"),
    ({"op": "packbits"}, (7, 0), r"compute capability 8.0 or newer, not \(7, 0\)"),
    (
        {"op": "batch_prefill", "dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn},
        (8, 6),
        r"compute capability 8.9 or newer for torch.float8_e4m3fn, not \(8, 6\)",
    ),
    (
        {"op": "batch_prefill", "out_dtype": torch.float8_e4m3fn} | BF16,
        (8, 6),
        r"compute capability 8.9 or newer for torch.float8_e4m3fn, not \(8, 6\)",
    ),
]


GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(("problem", "capability", "reason"), CONDITIONS)
def test_a_refusal_gives_the_reason(
    problem: dict[str, Any], capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsupported, "compute_capability", lambda device: capability)
    with pytest.raises(BackendError, match=rf"triton: it (needs|does) {reason.removeprefix('does ')}"):
        backends.choose.__wrapped__(Problem(device=GPU, **problem), "triton")
    assert backends.choose.__wrapped__(Problem(device=GPU, **problem)).name == "reference"


AT_THE_BOUNDS: list[tuple[dict[str, Any], tuple[int, int]]] = [
    (
        {"op": "batch_prefill", "options": AttentionOptions._fields, "pos_encoding": "ALIBI", "context_ranks": 2}
        | BF16,
        (8, 0),
    ),
    ({"op": "batch_decode", "head_dim_qk": 512, "head_dim_vo": 512} | BF16, (8, 0)),
    ({"op": "batch_decode", "num_qo_heads": 256, "num_kv_heads": 2} | BF16, (8, 0)),
    ({"op": "batch_prefill"} | BF16 | GROUP_160, (8, 0)),
    ({"op": "batch_mla", "head_dim_qk": 1024, "head_dim_vo": 512} | BF16, (8, 0)),
    ({"op": "append_kv", "head_dim_qk": 0, "head_dim_vo": 0}, (8, 0)),
    ({"op": "batch_prefill", "dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn}, (8, 9)),
    ({"op": "batch_prefill", "dtype": torch.bfloat16, "kv_dtype": torch.float8_e5m2}, (8, 0)),
]


@pytest.mark.parametrize(("problem", "capability"), AT_THE_BOUNDS)
def test_problems_at_the_bounds_are_taken(
    problem: dict[str, Any], capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsupported, "compute_capability", lambda device: capability)
    assert unsupported.triton(Problem(device=GPU, **problem)) == []


def test_the_device_of_the_tensors_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the current device."""
    capabilities = {GPU: (9, 0), torch.device("cuda", 1): (7, 5)}
    monkeypatch.setattr(unsupported, "compute_capability", capabilities.get)
    for device, backend in zip(capabilities, ("triton", "reference"), strict=True):
        assert backends.choose.__wrapped__(Problem(device=device, op="packbits")).name == backend


FP8 = {"kv_dtype": torch.float8_e5m2, "kv_scale": torch.ones(2)}
MASK = torch.zeros(100, dtype=torch.uint8)
WIDEST: dict[str, tuple[int, Callable[[], None]]] = {
    "decode": (86, lambda: decode(torch.float32, (512, 512), (128, 1), window_left=3, logits_soft_cap=5.0)),
    "decode, head dim 1": (86, lambda: decode(torch.bfloat16, (1, 1), (3, 1), return_lse=True)),
    "decode, FP8 and an odd head": (86, lambda: decode(torch.bfloat16, (17, 17), (2, 2), **FP8)),
    "decode, FP8 and RoPE": (86, lambda: decode(torch.float32, (512, 512), (128, 1), pos_encoding="ROPE_LLAMA", **FP8)),
    "prefill": (86, lambda: prefill(torch.float32, (512, 512), (2, 2), 1, logits_soft_cap=5.0, mask=MASK)),
    "prefill, odd heads": (86, lambda: prefill(torch.bfloat16, (257, 17), (160, 1), 3, causal=True)),
    "prefill, FP8 and RoPE": (
        86,
        lambda: prefill(torch.bfloat16, (448, 448), (2, 2), pos_encoding="ROPE_LLAMA", **FP8),
    ),
    "mla": (86, lambda: mla(torch.float32, (512, 512), 160, causal=True)),
    "mla on Blackwell": (100, lambda: mla(torch.bfloat16, (300, 100), 64, logits_soft_cap=5.0)),
}
"""Compute capability and call: the largest on GPUs with the smallest SMs, and head dims far from powers of 2."""


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available() or triton.knobs.runtime.interpret, reason="compiles for a GPU that is not there"
)
@pytest.mark.parametrize("name", WIDEST)
def test_accepted_problems_compile_and_fit(name: str) -> None:
    capability, call = WIDEST[name]
    with compiling_for(capability) as compiled:
        call()
    assert compiled
    for kernel, _ in compiled:
        assert resources_of(kernel).shared <= SHARED_MEMORY[capability][0] << 10
