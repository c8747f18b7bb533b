"""Triton kernels compiled offline, for GPUs that are absent: they assemble, fit, and write only their outputs."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from helpers.offline_compile import (  # noqa: E402
    compiling_for,
    context_ops,
    decode,
    eager,
    mla,
    prefill,
    small_ops,
)

import attn_ops  # noqa: E402
from attn_ops.kernels import triton as backend  # noqa: E402
from attn_ops.kernels.triton.config_decode import decode_tile, shared_bytes, short_stages  # noqa: E402

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or triton.knobs.runtime.interpret, reason="compiles for a GPU that is not there"
)

DECODES: list[tuple[torch.dtype, int, tuple[int, int], dict[str, Any]]] = [
    (torch.bfloat16, 128, (32, 8), {}),
    (torch.float16, 64, (8, 8), {"sinks": torch.zeros(8), "return_lse": True}),
    (torch.bfloat16, 256, (10, 2), {"window_left": 100}),
    (torch.float16, 80, (64, 1), {"logits_soft_cap": 30.0}),
    (torch.float32, 512, (4, 2), {}),
    (torch.bfloat16, 128, (32, 8), {"pos_encoding": "ALIBI"}),
    (torch.bfloat16, 128, (32, 8), {"pages": 100}),
    (torch.float16, 64, (16, 8), {"pages": 1000}),
    (torch.bfloat16, 128, (64, 8), {"pos_encoding": "ROPE_LLAMA"}),
    (torch.bfloat16, 128, (32, 8), {"kv_dtype": torch.float8_e5m2, "kv_scale": torch.ones(2)}),
    (torch.float16, 256, (64, 1), {"kv_dtype": torch.float8_e5m2}),
    (torch.bfloat16, 512, (4, 2), {"kv_dtype": torch.float8_e5m2, "pos_encoding": "ROPE_LLAMA"}),
    (torch.float32, 128, (4, 2), {"kv_dtype": torch.float8_e5m2}),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_one_decode_kernel_serves_caches_of_all_lengths(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of transformers, ``[batch, num_kv_heads, tokens, head_dim]``, whose heads are further apart in each step.

    Triton compiles a kernel for each key of its cache. Here it returns the key.
    """
    monkeypatch.setattr(triton.runtime.JITFunction, "_do_compile", lambda self, key, *_: (self.__name__, key))
    planner = attn_ops.DecodePlanner(1, 2048, page_size=1, num_qo_heads=32, num_kv_heads=8, head_dim=128, num_ctas=33)
    q, kernels = torch.zeros(1, 32, 128, dtype=torch.bfloat16), []
    for tokens in (1000, 1001, 2000):
        memory = torch.zeros(2, 8, tokens, 128, dtype=dtype)
        k, v = (t.as_strided((tokens, 1, 8, 128), (128, 128, tokens * 128, 1)) for t in memory)
        with compiling_for(90) as compiled:
            for call in (functools.partial(eager, backend.batch_decode), backend.batch_decode):
                call(q, k, v, list(planner.state), planner.workspace)
        kernels.append([key for key, _ in compiled])
    assert [name for name, _ in kernels[0]] == DECODE_KERNELS
    assert len(set(kernels[0])) == len(DECODE_KERNELS)
    assert kernels[1:] == kernels[:1] * 2


DECODE_KERNELS = ["decode_kernel", "decode_kernel", "combine_decode_kernel"]
"""Of an eager call, and of one in a CUDA graph capture or a package."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_decode_fits_the_predicted_shared_memory(capability: int) -> None:
    """Every second problem for each GPU: the kernel with a combine step, which has all code of the one without.

    The latter is compiled for the first problem.
    """
    with compiling_for(capability) as compiled:
        for i, (dtype, dim, heads, options) in enumerate(DECODES[capability == 90 :: 2]):
            compiled.clear()
            for call in (functools.partial(eager, decode), decode)[: 1 if i else 2]:
                call(dtype, (dim, dim), heads, **options)
            assert [kernel.metadata.name for kernel, _ in compiled] == DECODE_KERNELS[: 1 if i else 3]
            kv_dtype, halves = options.get("kv_dtype", dtype), options.get("pos_encoding") == "ROPE_LLAMA"
            short = short_stages(kv_dtype, 16 * options.get("pages", 10_000), 33)
            tile = decode_tile(torch.device("cpu"), dtype, dim, dim, heads[0] // heads[1], kv_dtype, halves, short)
            exchanged = halves or (dtype == torch.float32 and kv_dtype != dtype)
            sizes = (tile.heads, tile.dim_qk * (1 + halves), tile.dim_vo, dtype.itemsize, kv_dtype.itemsize, exchanged)
            bound = shared_bytes(tile.kv, tile.options.num_stages, *sizes)
            for kernel, _ in compiled[:2]:
                assert kernel.metadata.shared <= bound
                assert kernel.asm["cubin"]


DECODE_PLAN = {
    "plan_kv_indptr",
    "plan_kv_indices",
    "plan_kv_len",
    "work",
    "cta_indptr",
    "merge_indptr",
    "split_counters",
}
WRITTEN = {
    "decode_kernel": {"out", "lse", "partial"},
    "combine_decode_kernel": {"out", "lse"},
    "prefill_kernel": {"out", "lse", "partial"},
    "combine_prefill_kernel": {"out", "lse"},
    "merge_states_kernel": {"out", "lse"},
    "merge_state_kernel": {"out", "lse"},
    "merge_state_in_place_kernel": {"v", "s"},
    "merge_states_varlen_kernel": {"out", "lse"},
    "append_kernel": {"k_cache", "v_cache"},
    "batch_indices_positions_kernel": {"batch_indices", "positions"},
    "seq_lens_kernel": {"out"},
    "shard_page_table_kernel": {"own_indptr", "own_indices", "own_last_page_len"},
    "page_table_kernel": {"kv_indptr", "kv_indices", "kv_last_page_len"},
    "packbits_kernel": {"out"},
    "segment_packbits_kernel": {"out", "byte_indptr"},
    "plan_decode_kernel": DECODE_PLAN,
    "plan_decode_fixed_split_kernel": DECODE_PLAN,
    "publish_kernel": {"stored"},
    "plan_prefill_kernel": {
        "plan_qo_indptr",
        "plan_kv_indptr",
        "plan_kv_indices",
        "plan_kv_len",
        "work",
        "split_tiles",
        "queue",
    },
}


def _written(kernel: Any, arguments: dict[str, Any]) -> set[str]:
    """The tensors that Triton's analysis finds to be written, of a launch without PDL, as Inductor's are."""
    if "PDL" in arguments:
        arguments = {**arguments, "PDL": False}
    if hasattr(triton_kernel_wrap, "identify_accessed_tensors"):
        accesses = triton_kernel_wrap.identify_accessed_tensors(kernel, arguments, {})
        return {access.name for access in accesses.read_writes.writes}
    return set(triton_kernel_wrap.identify_mutated_tensors(kernel, arguments, {}))


def test_the_analysis_of_writes_is_exact() -> None:
    """Where the analysis gives up, Inductor treats every tensor as written and copies the caches."""
    with compiling_for(90, compiles=False) as launched:
        decode(torch.bfloat16, (128, 128), (32, 8), return_lse=True)
        fp8 = {"kv_dtype": torch.float8_e5m2, "kv_scale": torch.ones(2)}
        decode(torch.bfloat16, (64, 64), (2, 2), return_lse=True, pos_encoding="ROPE_LLAMA", **fp8)
        prefill(torch.bfloat16, (192, 128), (32, 8), causal=True, return_lse=True)
        mla(torch.bfloat16, (512, 64), 16, return_lse=True)
        small_ops()
        assert {kernel.__name__ for kernel, _ in launched} == WRITTEN.keys()
        for kernel, arguments in launched:
            assert _written(kernel, arguments) == WRITTEN[kernel.__name__]


def test_inductor_can_embed_the_sources() -> None:
    """It embeds sources and the repr of constants in triple quotes, which torch 2.11 does not escape."""
    modules = [importlib.import_module(f"{backend.__name__}.{m.name}") for m in pkgutil.iter_modules(backend.__path__)]
    values = [value for module in modules for value in vars(module).values()]
    sources = [value.src for value in values if isinstance(value, triton.runtime.JITFunction)]
    texts = [value.value for value in values if isinstance(value, tl.constexpr) and isinstance(value.value, str)]
    assert len(sources) > 50
    assert texts
    for text in (*sources, *map(repr, texts)):
        assert "\\" not in text, text
        assert "'''" not in text, text


@pytest.mark.slow
def test_kernels_on_the_keys_of_one_rank() -> None:
    with compiling_for(90) as compiled:
        context_ops()
    names = {kernel.metadata.name for kernel, _ in compiled}
    plans = {"plan_decode_kernel", "plan_decode_fixed_split_kernel", "plan_prefill_kernel"}
    assert names >= {"decode_kernel", "prefill_kernel", *plans}
