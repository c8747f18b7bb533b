"""Compiles random problems that the ``triton`` backend takes, for GPUs that are absent, until shared memory is known.

``python -m helpers.compile_sweep --count 20`` in ``tests/`` prints the kernels that do not compile, and those that take
more shared memory than a CTA has. The exit status is their number.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.nvidia.compiler import CUDABackend

from helpers.offline_compile import SHARED_MEMORY, compiling_for, decode, mla, prefill

RESERVED = 1024
"""Bytes of shared memory per CTA that the system reserves, from compute capability 9.0 on."""

DIMS = (1, 8, 17, 40, 64, 80, 96, 128, 129, 160, 192, 200, 256, 257, 300, 320, 384, 448, 500, 512)
GROUPS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 100, 128, 160)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
E4M3_SINCE = 89

Call = tuple[str, Callable[..., None], tuple[Any, ...], dict[str, Any]]


def options(draw: random.Random, heads: int) -> dict[str, Any]:
    return {
        "window_left": draw.choice([-1, 10]),
        "logits_soft_cap": draw.choice([0.0, 5.0]),
        "return_lse": draw.random() < 0.5,
        "sinks": draw.choice([None, torch.zeros(heads)]),
    }


def positions_and_dtype(draw: random.Random, dims: tuple[int, int]) -> dict[str, Any]:
    kv_dtype = draw.choice([None, torch.float8_e4m3fn, torch.float8_e5m2])
    encodings = ["NONE", "ALIBI"] if dims[0] % 2 else ["NONE", "ALIBI", "ROPE_LLAMA"]
    scale = None if kv_dtype is None else torch.ones(2)
    return {"kv_dtype": kv_dtype, "kv_scale": scale, "pos_encoding": draw.choice(encodings)}


def draw_dims(draw: random.Random) -> tuple[int, int]:
    first = draw.choice(DIMS)
    return first, first if draw.random() < 0.6 else draw.choice(DIMS)


def draw_decode(draw: random.Random) -> Call:
    dims, group, kv_heads = draw_dims(draw), draw.choice(GROUPS[:-1]), draw.choice([1, 2])
    heads = group * kv_heads, kv_heads
    given = options(draw, heads[0]) | positions_and_dtype(draw, dims)
    return "decode", decode, (draw.choice(DTYPES), dims, heads, draw.choice([1, 3, 16, 64])), given


def draw_prefill(draw: random.Random) -> Call:
    dims, group, kv_heads = draw_dims(draw), draw.choice(GROUPS), draw.choice([1, 2])
    heads = group * kv_heads, kv_heads
    mask = draw.choice([None, None, torch.zeros(100, dtype=torch.uint8)])
    given = options(draw, heads[0]) | positions_and_dtype(draw, dims) | {"mask": mask, "causal": draw.random() < 0.5}
    given["window_right"] = draw.choice([-1, -1, 5])
    return "prefill", prefill, (draw.choice(DTYPES), dims, heads, draw.choice([None, 1, 3, 16, 64])), given


def draw_mla(draw: random.Random) -> Call:
    dims = draw.choice([(512, 64), (256, 64), (32, 8), (500, 40), (64, 64), (512, 512), (300, 100), (512, 8)])
    heads = draw.choice(GROUPS)
    return "mla", mla, (draw.choice(DTYPES), dims, heads), options(draw, heads) | {"causal": draw.random() < 0.5}


def failures(call: Call, capability: int) -> list[str]:
    _, function, args, given = call
    try:
        with compiling_for(capability) as compiled:
            function(*args, **given)
    except Exception as error:  # whatever the compiler raises is printed
        return [f"{type(error).__name__} {error}"]
    most = (SHARED_MEMORY[capability][0] << 10) - (RESERVED if capability >= 90 else 0)
    return [
        f"{kernel.src.fn.__name__} takes {kernel.metadata.shared} bytes of {most}"
        for kernel, _ in compiled
        if kernel.metadata.shared > most
    ]


def no_assembly(self: Any, source: Any, metadata: dict[str, Any], *_: Any) -> str:
    metadata["name"] = "not assembled"
    return ".target none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="problems of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=("decode", "prefill", "mla"), action="append", help="only of these kinds")
    parser.add_argument("--capability", type=int, choices=SHARED_MEMORY, action="append", help="only for these GPUs")
    chosen = parser.parse_args()
    draw, found = random.Random(chosen.seed), 0
    drawn = [make(draw) for _ in range(chosen.count) for make in (draw_decode, draw_prefill, draw_mla)]
    for call in drawn:
        if chosen.kind and call[0] not in chosen.kind:
            continue
        for capability in chosen.capability or SHARED_MEMORY:
            if call[3].get("kv_dtype") == torch.float8_e4m3fn and capability < E4M3_SINCE:
                continue
            for failure in failures(call, capability):
                shown = {name: "tensor" if isinstance(x, torch.Tensor) else x for name, x in call[3].items()}
                print(f"sm_{capability} {call[0]} {call[2]} {shown}: {failure}", flush=True)
                found += 1
    return min(found, 100)


if __name__ == "__main__":
    # Kernels that are not assembled must not stay in the cache.
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(triton.knobs.cache, "dir", folder),
        patch.object(CUDABackend, "make_ptx", no_assembly),
        patch.object(CUDABackend, "make_cubin", lambda *_: b"\x7fELF"),
    ):
        sys.exit(main())
