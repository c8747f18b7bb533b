"""Why a kernel does not run a problem: a function for each entry of the backend table.

A reason completes the sentence "it does not run this problem: ...". No reason means that the kernel runs it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch

from attn_ops.eager.extension import is_available, unavailable_reason
from attn_ops.gpu import ALIGNMENT, compute_capability
from attn_ops.ops.cuda_kernels import (
    CUDA_DECODE_PACKED_ROWS,
    CUDA_DECODE_PAGE,
    CUDA_MERGE_VECTORS,
    CUDA_PAGED_PREFILLS,
    CUDA_PLANS,
    CUDA_PREFILL_ALIBI_HEAD_DIMS,
    CUDA_PREFILL_FP8_HEAD_DIMS,
    CUDA_PREFILL_GROUP,
    CUDA_PREFILL_HEAD_DIMS,
    CUDA_PREFILL_ROPE_HEAD_DIMS,
    CUDA_VECTOR,
    DecodeKey,
    PrefillKey,
    cuda_decode_kv_heads,
    cuda_mla_keys,
    has_decode_tile,
    is_padded_decode,
    kv_loads,
    mla_by_tokens,
    single_decode_key,
)
from attn_ops.ops.options import FLOATS, FP8, MLA_DIMS, MLA_HEAD_DIMS

if TYPE_CHECKING:
    from attn_ops.ops.backends import Problem

TRITON_KERNELS: dict[str, str] = {
    "plan_decode": "plan_decode",
    "plan_prefill": "plan_prefill",
    "batch_decode": "decode",
    "batch_prefill": "prefill",
    "ragged_prefill": "prefill",
    "single_prefill": "prefill",
    "block_sparse_prefill": "prefill",
    "batch_mla": "prefill",
    "append_kv": "append",
    "append_mla_kv": "append",
    "batch_indices_positions": "page_table",
    "seq_lens": "page_table",
    "page_table": "page_table",
    "shard_page_table": "shard_page_table",
    "merge_state": "merge_states",
    "merge_states": "merge_states",
    "merge_state_in_place": "merge_states",
    "merge_states_varlen": "merge_states",
    "packbits": "packbits",
    "segment_packbits": "packbits",
}
"""op -> kernel of the general Triton backend, a file of ``kernels/triton``."""

TRITON_MLA = frozenset({"batch_mla", "append_mla_kv"})
"""Ops whose key has two parts, of which the first is as wide as the value."""

TRITON_COPIES = frozenset({"append_kv", "append_mla_kv"})
"""Ops that move elements of any dtype."""

TRITON_OPTIONS = frozenset(
    {
        "sm_scale",
        "logits_soft_cap",
        "window_left",
        "window_right",
        "causal",
        "mask",
        "sinks",
        "kv_scale",
        "pos_encoding",
        "rope_scale",
        "rope_theta",
        "out_dtype",
    }
)
"""Options that the general Triton kernels implement, also over the keys of one rank."""

CPU_SDPA = "_scaled_dot_product_flash_attention_for_cpu"
"""PyTorch's flash attention for the CPU, a private function that a release may lack."""

CPU_SDPA_OPTIONS = frozenset(
    {"sm_scale", "causal", "window_left", "window_right", "sinks", "kv_scale", "out_dtype", "rope_scale", "rope_theta"}
)
"""Options that the kernel for the CPU implements; those of RoPE have no effect without ``pos_encoding``."""

POSITIONAL_OPTIONS = frozenset({"causal", "window_left", "window_right", "mask", "pos_encoding"})
"""Options that depend on the positions of keys, which are not consecutive on one of several ranks."""

POSITION_NAMES = {"ROPE_LLAMA": "RoPE", "ALIBI": "ALiBi"}
"""Positional encodings in reasons."""

CUDA_PREFILL_ENCODING_HEAD_DIMS = {
    "ROPE_LLAMA": CUDA_PREFILL_ROPE_HEAD_DIMS,
    "ALIBI": CUDA_PREFILL_ALIBI_HEAD_DIMS,
}
"""Positional encoding -> head dims of the CUDA prefill kernels with it."""

UNALIGNED = f"rows are not aligned to {ALIGNMENT} bytes"
UNMAPPABLE = "keys and values have no elements, several at one address, or strides too large for a tensor map"
UNJOINABLE = "keys and values have too many elements for pages and heads in one coordinate of a tensor map"

CUDA_MLA_OPTIONS = frozenset({"sm_scale", "causal", "out_dtype"})
CUDA_PREFILL_OPTIONS = CUDA_MLA_OPTIONS | {
    "logits_soft_cap",
    "window_left",
    "window_right",
    "mask",
    "sinks",
    "rope_scale",
    "rope_theta",
}
CUDA_DECODE_OPTIONS = CUDA_PREFILL_OPTIONS - {"window_right", "mask"} | {"kv_scale"}
"""Options that the CUDA kernels implement; those of RoPE have no effect without ``pos_encoding``."""


@functools.cache
def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _failed(checks: list[tuple[bool, str]]) -> list[str]:
    return [reason for holds, reason in checks if not holds]


def _unimplemented(p: Problem, implemented: frozenset[str]) -> list[tuple[bool, str]]:
    """A check for each option of the call that a kernel does not implement."""
    return [(False, f"it does not implement {name}") for name in p.options if name not in implemented]


def _options(p: Problem, implemented: frozenset[str]) -> list[tuple[bool, str]]:
    """The checks of :func:`_unimplemented` for a kernel without positional options over the keys of one rank."""
    unknown = _unimplemented(p, implemented)
    if p.context_ranks == 1:
        return unknown
    # A decode row sees all keys: "causal" masks none.
    needed = POSITIONAL_OPTIONS - {"causal"} if p.op == "batch_decode" else POSITIONAL_OPTIONS
    positional = [name for name in p.options if name in needed & implemented]
    return unknown + [(False, f"it does not implement {name} on the keys of one rank") for name in positional]


def _machine_of_hopper(p: Problem) -> list[str]:
    """The first requirement of Hopper-only kernels that the machine does not meet."""
    if p.device.type != "cuda":
        return [f"it runs on cuda, not {p.device.type}"]
    capability = compute_capability(p.device)
    return [] if capability == (9, 0) else [f"it needs compute capability 9.0, not {capability}"]


def reference(p: Problem) -> list[str]:
    return []


def cpu_tables(p: Problem) -> list[str]:
    """Planning and appends on the CPU by loops over the numbers of page tables."""
    return [] if p.device.type == "cpu" else [f"it runs on cpu, not {p.device.type}"]


def cpu_sdpa(p: Problem) -> list[str]:
    """PyTorch's flash attention for the CPU."""
    if p.device.type != "cpu":
        return [f"it runs on cpu, not {p.device.type}"]
    return _failed(
        [
            (
                p.op == "batch_mla" or p.head_dim_qk == p.head_dim_vo,
                f"head dimensions {p.head_dim_qk} and {p.head_dim_vo} differ",
            ),
            (p.head_dim_vo >= 1, "it needs head_dim at least 1"),
            (hasattr(torch, CPU_SDPA), f"torch {torch.__version__} has no {CPU_SDPA}"),
            *_options(p, CPU_SDPA_OPTIONS),
        ]
    )


def triton(p: Problem) -> list[str]:
    """The general Triton kernels: any GPU from compute capability 8.0."""
    capability = compute_capability(p.device)
    kernel = TRITON_KERNELS.get(p.op)
    key_dim = max(p.head_dim_vo, p.head_dim_qk - p.head_dim_vo) if p.op in TRITON_MLA else p.head_dim_qk
    return _failed(
        [
            (kernel is not None, f"it has no kernel for {p.op}"),
            (triton_installed(), "triton is not installed"),
            (p.device.type == "cuda", f"it runs on cuda, not {p.device.type}"),
            (
                capability is None or capability >= (8, 0),
                f"it needs compute capability 8.0 or newer, not {capability}",
            ),
            (p.dtype in FLOATS or p.op in TRITON_COPIES, f"it does not compute in {p.dtype}"),
            *_unimplemented(p, TRITON_OPTIONS),
            (
                capability is None or capability >= (8, 9) or torch.float8_e4m3fn not in (p.kv_dtype, p.out_dtype),
                f"it needs compute capability 8.9 or newer for torch.float8_e4m3fn, not {capability}",
            ),
            (max(key_dim, p.head_dim_vo) <= 512, "it needs head_dim at most 512"),
            (min(key_dim, p.head_dim_vo) >= 1 or p.op in TRITON_COPIES, "it needs head_dim at least 1"),
            (
                kernel == "prefill" or p.num_qo_heads // p.num_kv_heads <= 128,
                "it needs at most 128 query heads per KV head",
            ),
        ]
    )


def cuda_mla(p: Problem) -> list[str]:
    """A cache of the query's dtype, or an FP8 cache, which is converted to it."""
    fp8, by_tokens = p.kv_dtype in FP8, mla_by_tokens(p.page_size)
    return _cuda(
        p,
        "mla",
        cuda_mla_keys(p.dtype, fp8, by_tokens),
        [
            (triton_installed(), "triton, whose kernel combines its partial results, is not installed"),
            _is_16_bit(p),
            (fp8 or p.kv_dtype == p.dtype, f"the cache is {p.kv_dtype}, neither {p.dtype} nor FP8"),
            (p.layout.aligned, UNALIGNED),
            (p.layout.mappable or by_tokens, UNMAPPABLE),
            ((p.head_dim_qk, p.head_dim_vo) == MLA_HEAD_DIMS, "the head is not {} + {} wide".format(*MLA_DIMS)),
            *_options(p, CUDA_MLA_OPTIONS | ({"kv_scale"} if fp8 else set())),
        ],
    )


def kernel_unavailable(module: str, *keys: Hashable) -> str:
    """Why ``SPECIALIZATIONS[key]`` of ``kernels/cuda/{module}.py`` cannot be launched for each of ``keys``.

    Kernels that are not cached are compiled.
    """
    if not is_available():
        return f"the launcher is missing ({unavailable_reason}; install with a C++ compiler)"
    kernels, compiler = (importlib.import_module(f"attn_ops.kernels.cuda.{name}") for name in (module, "compile"))
    reason: str = compiler.unavailable_reason(*(kernels.SPECIALIZATIONS[key] for key in keys))
    return reason


def _cuda(p: Problem, module: str, keys: Sequence[Hashable], checks: list[tuple[bool, str]]) -> list[str]:
    """The reasons of a CUDA kernel. If machine and ``checks`` pass, the specializations ``keys`` must compile too."""
    reasons = _machine_of_hopper(p) or _failed(checks)
    if reasons:
        return reasons
    reason = kernel_unavailable(module, *keys)
    return [reason] if reason else []


def cuda_merge_states(p: Problem) -> list[str]:
    row_bytes = p.head_dim_vo * p.dtype.itemsize
    most = CUDA_MERGE_VECTORS * CUDA_VECTOR
    return _cuda(
        p,
        "merge_states",
        [(p.op, p.dtype)],
        [
            (p.dtype in FLOATS, f"it does not compute in {p.dtype}"),
            (0 < row_bytes <= most, f"rows of {row_bytes} bytes are not of 1 to {most}"),
            (row_bytes % CUDA_VECTOR == 0, f"rows of {row_bytes} bytes are not whole vectors of {CUDA_VECTOR}"),
            (p.layout.aligned, UNALIGNED),
        ],
    )


def cuda_plan(p: Problem) -> list[str]:
    needed = "triton, whose kernel writes larger plans, is not installed"
    return _cuda(p, "plan", CUDA_PLANS, [(triton_installed(), needed)])


def _cuda_decode_sizes(head_dims: tuple[int, int], group: int, page_size: int) -> list[tuple[bool, str]]:
    """The checks of sizes of the CUDA decode kernel; ``head_dims`` are those of keys and of values."""
    dim_qk, dim_vo = head_dims
    most = max(CUDA_DECODE_PACKED_ROWS)
    return [
        (has_decode_tile(head_dims), f"head dimensions {dim_qk} and {dim_vo} have no tile"),
        (page_size % CUDA_DECODE_PAGE == 0, f"pages of {page_size} tokens are not multiples of {CUDA_DECODE_PAGE}"),
        (group <= most, f"it needs at most {most} query heads per KV head"),
    ]


def has_cuda_decode(head_dims: tuple[int, int], group: int, page_size: int) -> bool:
    """Whether the CUDA decode kernel takes caches of these sizes."""
    return not _failed(_cuda_decode_sizes(head_dims, group, page_size))


def needs_general_decode(dtype: torch.dtype, kv_dtype: torch.dtype, pos_encoding: str, head_dim: int) -> bool:
    """Whether only the general kernel decodes with these dtypes, this encoding and heads of ``head_dim``."""
    rotates = kv_dtype not in FP8 and not is_padded_decode(head_dim)
    encodings = ("NONE", "ROPE_LLAMA") if rotates else ("NONE",)
    return dtype == torch.float32 or pos_encoding not in encodings


def is_plain_prefill(dtype: torch.dtype, kv_dtype: torch.dtype, pos_encoding: str, masked: bool) -> bool:
    """Whether a call of prefill is of 16 bits, with neither a custom mask nor a positional encoding."""
    return dtype == kv_dtype and dtype in (torch.float16, torch.bfloat16) and pos_encoding == "NONE" and not masked


def cuda_decode(p: Problem) -> list[str]:
    """A cache of the query's dtype, or an FP8 cache."""
    group, dims = p.num_qo_heads // p.num_kv_heads, (p.head_dim_qk, p.head_dim_vo)
    sizes = _cuda_decode_sizes(dims, group, p.page_size)
    rope = p.pos_encoding == "ROPE_LLAMA"
    checks = [
        (triton_installed(), "triton, whose kernel combines its partial results, is not installed"),
        _is_16_bit(p),
        (p.kv_dtype in (p.dtype, *FP8), f"the cache is {p.kv_dtype}, neither {p.dtype} nor FP8"),
        (not (rope and p.kv_dtype in FP8), "it does not implement RoPE with an FP8 cache"),
        (not (rope and is_padded_decode(dims[0])), f"it does not implement RoPE with head dimension {dims[0]}"),
        *sizes,
        (p.layout.aligned, UNALIGNED),
        (p.layout.mappable, UNMAPPABLE),
        (p.layout.joinable, UNJOINABLE),
        *_options(p, CUDA_DECODE_OPTIONS | ({"pos_encoding"} if rope else set())),
    ]
    # KV heads of a CTA, of plans for 16-bit and for FP8 caches: a plan may serve both.
    kv_heads = {cuda_decode_kv_heads(dims[0], p.num_kv_heads, fp8) for fp8 in {False, p.kv_dtype in FP8}}
    sized = [] if _failed(sizes) else kv_heads
    keys = [DecodeKey.of(dims[0], n, group, p.dtype, p.kv_dtype, p.pos_encoding) for n in sized]
    return _cuda(p, "decode", keys, checks)


def _cuda_prefill(
    p: Problem,
    of_dtypes: list[tuple[bool, str]],
    options: frozenset[str],
    head_dims: frozenset[tuple[int, int]] | None = None,
) -> list[str]:
    """The reasons of the CUDA prefill kernel, with its checks of queries, keys and values.

    ``head_dims`` are by default those of the positional encoding.
    """
    head_dims = head_dims or CUDA_PREFILL_ENCODING_HEAD_DIMS.get(p.pos_encoding, CUDA_PREFILL_HEAD_DIMS)
    dims = p.head_dim_qk, p.head_dim_vo
    custom_mask = "mask" in p.options
    option = POSITION_NAMES.get(p.pos_encoding, "mask and an FP8 cache" if custom_mask and p.kv_dtype in FP8 else "")
    key = PrefillKey.of(dims, _kv_loads(p), p.dtype, p.kv_dtype, custom_mask, p.pos_encoding)
    reasons = _cuda(
        p,
        "prefill",
        key.variants(),
        [
            (triton_installed(), "triton, whose kernel combines its partial results, is not installed"),
            (
                dims in head_dims or key.padded,
                f"head dimensions {dims[0]} and {dims[1]} have no tile" + (f" with {option}" if option else ""),
            ),
            (
                p.num_qo_heads // p.num_kv_heads <= CUDA_PREFILL_GROUP,
                f"it needs at most {CUDA_PREFILL_GROUP} query heads per KV head",
            ),
            (p.layout.aligned, UNALIGNED),
            *of_dtypes,
            *_options(p, options),
        ],
    )
    if reasons or p.op != "single_prefill":
        return reasons
    heads = p.num_qo_heads, p.num_kv_heads
    of_one_row = single_decode_key(dims, heads, p.dtype, p.kv_dtype, custom_mask, p.pos_encoding)
    return [] if of_one_row is None else _cuda(p, "single_decode", [of_one_row], [])


def _is_16_bit(p: Problem) -> tuple[bool, str]:
    return p.dtype in (torch.float16, torch.bfloat16), f"{p.dtype} is not a 16-bit dtype"


def _kv_loads(p: Problem) -> str:
    return kv_loads(p.op in CUDA_PAGED_PREFILLS, p.page_size)


def _has_prefill_maps(p: Problem) -> list[tuple[bool, str]]:
    """The checks of keys and values that CUDA prefill reads through tensor maps."""
    if _kv_loads(p) == "tokens":
        return []
    return [
        (p.layout.mappable, UNMAPPABLE),
        (p.layout.joinable or p.op not in CUDA_PAGED_PREFILLS, UNJOINABLE),
    ]


def cuda_prefill(p: Problem) -> list[str]:
    """Keys and values of the query's dtype."""
    checks = [_is_16_bit(p), (p.kv_dtype == p.dtype, f"the cache is {p.kv_dtype}"), *_has_prefill_maps(p)]
    return _cuda_prefill(p, checks, CUDA_PREFILL_OPTIONS | {"pos_encoding"})


def cuda_prefill_e4m3(p: Problem) -> list[str]:
    """Queries, keys and values of e4m3, which are multiplied in FP8."""
    e4m3 = torch.float8_e4m3fn
    checks = [
        (p.dtype == e4m3, f"the query is {p.dtype}, not {e4m3}"),
        (p.kv_dtype == e4m3, f"the cache is {p.kv_dtype}, not {e4m3}"),
        *_has_prefill_maps(p),
    ]
    options = CUDA_PREFILL_OPTIONS - {"mask"} | {"kv_scale"}
    return _cuda_prefill(p, checks, options, CUDA_PREFILL_FP8_HEAD_DIMS)


def cuda_prefill_fp8(p: Problem) -> list[str]:
    """FP8 keys and values of 16-bit queries, which are converted to 16 bits."""
    encoding = POSITION_NAMES.get(p.pos_encoding)
    checks = [
        _is_16_bit(p),
        (p.kv_dtype in FP8, f"the cache is {p.kv_dtype}, not FP8"),
        (not (encoding and "mask" in p.options), f"it does not implement mask with {encoding} and an FP8 cache"),
        *_has_prefill_maps(p),
    ]
    return _cuda_prefill(p, checks, CUDA_PREFILL_OPTIONS | {"kv_scale", "pos_encoding"})
