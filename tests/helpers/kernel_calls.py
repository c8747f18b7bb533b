"""Small calls on the GPU that together launch every Triton and CUDA kernel, with its options."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_ops.ops.cuda_kernels import CUDA_MERGES
from attn_ops.ops.schemas import SCHEMAS
from helpers.calls import arguments, observed
from helpers.device_copies import DeviceCopies

SPLIT: dict[str, Any] = {"kv_lens": (700, 0, 1500, 2)}
BF16: dict[str, Any] = {"dtype": torch.bfloat16}
FP8: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn, "kv_scale": (0.5, 2.0)}
LATENT: dict[str, Any] = {"head_dims": (576, 512), "heads": (16, 1), "page_size": 64}
SIZES: dict[str, Any] = {"head_dims": (128, 128), "heads": (8, 2), "page_size": 16, "planner": {"num_ctas": 33}}
ROWS: dict[str, Any] = {"qo_lens": (40, 0, 33, 2), "head_dims": (128, 128), "heads": (8, 2), "causal": True}
OPTIONS: dict[str, Any] = {"window_left": 50, "logits_soft_cap": 5.0, "sinks": 1.0}

CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    **{op: (op, {}) for op in SCHEMAS if op != "block_sparse_table"},  # which has no kernel of its own
    "split decode": ("batch_decode", SPLIT | BF16 | {"planner": {"num_ctas": 33}}),
    "decode, fixed split": ("batch_decode", SPLIT | BF16 | {"planner": {"num_ctas": 9, "fixed_split_size": 4}}),
    "plan_decode, fixed split": ("plan_decode", SPLIT | {"planner": {"num_ctas": 9, "fixed_split_size": 4}}),
    "plan_prefill, fixed split": ("plan_prefill", SPLIT | {"planner": {"fixed_split_size": 8}}),
    "split decode, groups of 16": (
        "batch_decode",
        SPLIT | BF16 | {"heads": (32, 2), "kv_layout": "HND", "page_size": 3},
    ),
    "decode, options": ("batch_decode", OPTIONS | {"dtype": torch.float16, "head_dims": (80, 80), "padding": 2}),
    "decode, FP8 and RoPE": (
        "batch_decode",
        SPLIT | BF16 | FP8 | {"planner": {"num_ctas": 33}, "pos_encoding": "ROPE_LLAMA", "sinks": 1.0},
    ),
    "decode of 128": ("batch_decode", SPLIT | BF16 | SIZES | {"padding": 2}),
    "decode of 64, options, groups of 16": (
        "batch_decode",
        SPLIT | OPTIONS | SIZES | {"dtype": torch.float16, "head_dims": (64, 64), "heads": (16, 1), "page_size": 8},
    ),
    "decode of 128, FP8 cache": ("batch_decode", SPLIT | BF16 | FP8 | SIZES | {"sinks": 1.0, "kv_layout": "HND"}),
    "decode, ALiBi": ("batch_decode", {"dtype": torch.float16, "kv_dtype": torch.float8_e5m2, "pos_encoding": "ALIBI"}),
    "split prefill": (
        "batch_prefill",
        SPLIT | BF16 | {"causal": True, "planner": {"num_ctas": 12, "tile_rows": 16}},
    ),
    "prefill, options": ("batch_prefill", OPTIONS | BF16 | {"head_dims": (192, 128), "padding": 2, "page_size": 1}),
    "prefill, mask": ("batch_prefill", {"masked": 0.5, "dtype": torch.float16, "storage": "padded"}),
    "prefill, FP8 and RoPE": ("batch_prefill", BF16 | FP8 | {"pos_encoding": "ROPE_LLAMA"}),
    "prefill of 128": ("batch_prefill", SPLIT | BF16 | ROWS | {"planner": {"num_ctas": 33, "tile_rows": 32}}),
    "prefill of 128, large batch": (
        "batch_prefill",
        SPLIT | BF16 | ROWS | {"planner": {"num_ctas": 33, "tile_rows": 48}},
    ),
    "prefill of 128, alternating warpgroups": (
        "batch_prefill",
        SPLIT | BF16 | ROWS | {"planner": {"num_ctas": 33, "tile_rows": 8}},
    ),
    "prefill of 128, FP8 cache": (
        "batch_prefill",
        SPLIT | BF16 | FP8 | ROWS | {"planner": {"num_ctas": 33, "tile_rows": 32}},
    ),
    "ragged of 128": (
        "ragged_prefill",
        SPLIT | ROWS | {"dtype": torch.float16, "window_left": 300, "padding": 3, "planner": {"tile_rows": 32}},
    ),
    "ragged of 192/128": ("ragged_prefill", SPLIT | BF16 | ROWS | {"head_dims": (192, 128), "heads": (4, 1)}),
    "prefill of 256, options": (
        "batch_prefill",
        SPLIT | BF16 | ROWS | OPTIONS | {"head_dims": (256, 256), "planner": {"num_ctas": 33, "tile_rows": 32}},
    ),
    "ragged, ALiBi": ("ragged_prefill", BF16 | {"causal": True, "pos_encoding": "ALIBI", "kv_layout": "HND"}),
    "single": ("single_prefill", BF16 | {"causal": True, "head_dims": (128, 128), "heads": (8, 1)}),
    "split MLA": ("batch_mla", SPLIT | BF16 | {"causal": True, "planner": {"num_ctas": 33, "tile_rows": 4}}),
    "MLA of 512 and 64": (
        "batch_mla",
        SPLIT | BF16 | LATENT | {"causal": True, "planner": {"num_ctas": 33, "tile_rows": 4}},
    ),
    "MLA of 512 and 64, float16": ("batch_mla", LATENT | {"dtype": torch.float16, "heads": (128, 1)}),
    "MLA of 512 and 64, few packed rows": (
        "batch_mla",
        SPLIT | BF16 | LATENT | {"causal": True, "planner": {"num_ctas": 33, "tile_rows": 1}},
    ),
    "MLA of 512 and 64, FP8 cache": (
        "batch_mla",
        SPLIT | BF16 | FP8 | LATENT | {"causal": True, "planner": {"num_ctas": 33, "tile_rows": 1}},
    ),
    "MLA of 512 and 64, FP8 cache, clusters": ("batch_mla", BF16 | FP8 | LATENT | {"heads": (128, 1)}),
    "append FP8": ("append_kv", {"dtype": torch.float8_e5m2, "kv_layout": "HND", "page_size": 3}),
}

ATTENTION_ON_CUDA = (
    "prefill of 128",
    "prefill of 128, alternating warpgroups",
    "prefill of 128, FP8 cache",
    "prefill of 128, large batch",
    "prefill of 256, options",
    "ragged of 128",
    "ragged of 192/128",
    "single",
    "MLA of 512 and 64",
    "MLA of 512 and 64, float16",
    "MLA of 512 and 64, few packed rows",
    "MLA of 512 and 64, FP8 cache",
    "MLA of 512 and 64, FP8 cache, clusters",
)

ON_CUDA: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{op}, CUDA": (op, {}) for op in CUDA_MERGES},
    **{f"{name}, CUDA": CALLS[name] for name in ATTENTION_ON_CUDA},
}
"""Calls that the ``cuda`` backend runs, by name; all others are run by ``triton``."""

if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    CALLS |= ON_CUDA

ATTENTION = [name for name, (op, _) in CALLS.items() if op.endswith(("_decode", "_prefill", "_mla"))]


def call(name: str) -> tuple[str, dict[str, Any]]:
    """The op and its keyword arguments on the GPU, with the same values every time."""
    torch.manual_seed(0)
    op, changes = CALLS[name]
    kwargs = DeviceCopies().copy(arguments(op, **changes))
    return op, kwargs | {"backend": "cuda"} if name in ON_CUDA else kwargs


def run(op: str, kwargs: dict[str, Any]) -> list[Tensor]:
    return observed(op, kwargs, getattr(torch.ops.attn, op)(**{"backend": "triton"} | kwargs))


def astray(kwargs: dict[str, Any], garbage: int) -> dict[str, Any]:
    """The arguments with every other page number out of range."""
    plan = kwargs.get("plan")
    for pages in (kwargs.get("kv_indices"), getattr(plan, "kv_indices", None)):
        if pages is not None:
            pages[::2] = garbage
    return kwargs


def misplanned(kwargs: dict[str, Any], garbage: int) -> dict[str, Any]:
    """The arguments with a plan whose numbers are all ``garbage``, or random ones around 0 if ``garbage`` is 1."""
    generator = torch.Generator("cuda").manual_seed(0)
    for field in kwargs.get("plan", ()):
        field.random_(-50, 200, generator=generator) if garbage == 1 else field.fill_(garbage)
    return kwargs
