"""Wrong calls of the attention ops."""

from __future__ import annotations

import math

import torch

from attn_ops.errors import (
    CapacityError,
    DeviceError,
    DTypeError,
    GradientError,
    OptionError,
    PlanError,
    ShapeError,
)
from helpers.bad_calls.base import (
    ROWS,
    TOKENS,
    Bad,
    but_last,
    dims,
    leaf,
    longer,
    meta,
    replan,
    to,
    twice,
)
from helpers.calls import arguments


def _options() -> list[Bad]:
    """Arguments that all attention ops have."""
    bad = []
    for op in ("batch_decode", "batch_prefill", "ragged_prefill", "single_prefill"):
        key = "k_cache" if op.startswith("batch") else "k"
        value = key.replace("k", "v", 1)
        bad += [
            Bad(op, {"sm_scale": -1.0}, OptionError, "sm_scale is -1.0", "a positive number"),
            Bad(op, {"sm_scale": 0.0}, OptionError, "sm_scale is 0.0", "a positive number"),
            Bad(op, {"sm_scale": 2.0**-127}, OptionError, "sm_scale is 5.877", "a positive number"),
            Bad(op, {"sm_scale": math.nan}, OptionError, "sm_scale is nan", "a positive number"),
            Bad(op, {"logits_soft_cap": -2.0}, OptionError, "logits_soft_cap is -2.0", "a positive number, or 0"),
            Bad(op, {"sm_scale": math.inf}, OptionError, "sm_scale is inf", "a positive number"),
            Bad(op, {"logits_soft_cap": math.inf}, OptionError, "logits_soft_cap is inf", "a positive number, or 0"),
            Bad(op, {"out_dtype": torch.int32}, OptionError, "out_dtype is int32", "float16, bfloat16, float32"),
            Bad(op, {"window_left": -2}, OptionError, "window_left is -2", "0 or more tokens"),
            Bad(
                op,
                {"window_left": 1 << 30},
                OptionError,
                "window_left is 1073741824",
                "0 or more tokens, at most 1073741823",
            ),
            *(
                Bad(
                    op, {"window_right": w}, OptionError, f"window_right is {w}", "0 or more tokens, at most 1073741823"
                )
                for w in (-2, 1 << 30)
                if op != "batch_decode"
            ),
            Bad(op, {"rope_scale": 0.0}, OptionError, "rope_scale is 0.0", "a positive number"),
            Bad(op, {"rope_theta": -1.0}, OptionError, "rope_theta is -1.0", "a positive number"),
            Bad(op, {"pos_encoding": "ROPE"}, OptionError, "pos_encoding is 'ROPE'", "NONE, ROPE_LLAMA, ALIBI"),
            Bad(op, {"kv_layout": "NDH"}, OptionError, "kv_layout is NDH", "NHD or HND"),
            Bad(op, {"backend": "fa3"}, OptionError, "backend is fa3", "auto or one of cuda, triton, cpu, reference"),
            Bad(op, {"sinks": torch.zeros(3)}, ShapeError, "sinks has length 3", "4 as in the query heads"),
            Bad(op, {"sinks": torch.zeros(4).half()}, DTypeError, "sinks is float16", "float32"),
            Bad(op, {"sinks": torch.zeros(4, 1)}, ShapeError, "sinks has rank 2", "1, [num_qo_heads]"),
            Bad(op, {"sinks": meta(torch.zeros(4))}, DeviceError, "sinks is on meta", "cpu"),
            Bad(op, {"kv_scale": torch.ones(2).requires_grad_()}, GradientError, "kv_scale requires grad", "inference"),
            Bad(op, {"kv_scale": torch.zeros(1)}, ShapeError, "kv_scale has length 1", "2 as in the scales"),
            Bad(op, {"q": dims(slice(None), slice(3))}, ShapeError, "3 query heads do not share 2 KV heads", "a query"),
            Bad(op, {"q": dims(slice(None), slice(0))}, ShapeError, "0 query heads do not share 2 KV heads", "a query"),
            Bad(op, {"q": dims(..., slice(32))}, ShapeError, f"{key} has head_dim 64", "32 as in q"),
            Bad(op, dict.fromkeys(("q", key, value), dims(..., slice(0))), ShapeError, "q has head_dim 0", "at least"),
            Bad(op, {"q": to(torch.float16)}, DTypeError, f"{key} is float32 and q float16", "the dtype of q"),
            Bad(op, {value: to(torch.bfloat16)}, DTypeError, f"{key} is float32 and {value} bfl", "one dtype"),
            Bad(op, {value: dims(slice(1, None))}, ShapeError, f"{value} has ", ""),
            Bad(op, {value: dims(slice(None), slice(1))}, ShapeError, f"{value} has dimension 1 1", ""),
            Bad(op, {key: to(torch.float16), value: to(torch.float16)}, DTypeError, f"{key} is float16 and q", "the"),
            Bad(op, {"sinks": leaf(torch.zeros(4))}, GradientError, "sinks requires grad", "inference"),
            Bad(
                op,
                {"q": dims(..., slice(63)), key: dims(..., slice(63)), "pos_encoding": "ROPE_LLAMA"},
                ShapeError,
                "q has head_dim 63",
                "an even one for ROPE_LLAMA",
            ),
            *(Bad(op, {name: leaf}, GradientError, f"{name} requires grad", "inf") for name in ("q", key, value)),
        ]
        if op.startswith("batch"):
            one_head = {value: dims(slice(None), slice(None), slice(1))}
            bad.append(Bad(op, one_head, ShapeError, "v_cache has dimension 2 1", "2 as in k_cache"))
        if op != "batch_decode":
            bad.append(Bad(op, {"q": longer(0, ROWS)}, CapacityError, f"q has {ROWS} query rows", "at most 268435456"))
            mask = torch.zeros(1, dtype=torch.uint8)
            if not op.startswith("batch"):
                long = {key: longer(0, TOKENS), value: longer(0, TOKENS)}
                bad.append(Bad(op, long, CapacityError, f"k has {TOKENS} tokens", "at most 2146435072"))
            bad += [
                Bad(op, {"mask": mask.bool()}, DTypeError, "mask is bool", "uint8"),
                Bad(op, {"mask": mask[None]}, ShapeError, "mask has rank 2", "1, [bytes]"),
            ]
    return bad


def _latent() -> list[Bad]:
    """Bad calls of latent attention."""
    one = dims(slice(1))
    return [
        Bad("batch_mla", {"q_pe": to(torch.float16)}, DTypeError, "q_pe is float16", "float32"),
        Bad("batch_mla", {"q_pe": dims(..., slice(4))}, ShapeError, "kpe_cache has head_dim 8", "4 as in q_pe"),
        Bad("batch_mla", {"kpe_cache": one}, ShapeError, "kpe_cache has dimension 0 1", ""),
        Bad("batch_mla", {"kpe_cache": dims(slice(None), slice(1))}, ShapeError, "kpe_cache has dimension 1 1", "16"),
        Bad("batch_mla", {"ckv_cache": dims(..., slice(16))}, ShapeError, "ckv_cache has head_dim 16", "32 as in q_n"),
        Bad("batch_mla", {"sm_scale": None}, OptionError, "sm_scale is None with head_dim 32 + 8", "a number"),
        Bad("batch_mla", {"plan": arguments("batch_prefill")["plan"]}, PlanError, "the plan was made for num_qo", "a"),
        Bad("batch_mla", {"plan": arguments("batch_decode")["plan"]}, PlanError, "plan", ""),
        Bad(
            "batch_mla",
            {"q_nope": longer(0, ROWS), "q_pe": longer(0, ROWS)},
            CapacityError,
            f"q_nope has {ROWS} query rows",
            "at most 268435456",
        ),
        Bad("batch_mla", {"q_nope": leaf}, GradientError, "q_nope requires grad", "inference"),
    ]


def _blocks() -> list[Bad]:
    """Bad calls of block-sparse attention and its tables."""
    one_column = dims(slice(None), slice(1))
    return [
        *(
            Bad("block_sparse_prefill", {name: value}, OptionError, f"{name} is {value}", expected)
            for name, value, expected in (
                ("sm_scale", -1.0, "a positive number"),
                ("logits_soft_cap", -2.0, "a positive number, or 0"),
                ("kv_layout", "NDH", "NHD or HND"),
                ("backend", "fa3", "auto or one of cuda, triton, cpu, reference"),
            )
        ),
        Bad("block_sparse_prefill", {"sinks": torch.zeros(3)}, ShapeError, "sinks has length 3", "4 as in the query"),
        Bad("block_sparse_prefill", {"mask": torch.ones(1)}, DTypeError, "mask is float32", "uint8"),
        Bad("block_sparse_prefill", {"q": dims(..., slice(32))}, ShapeError, "k has head_dim 64", "32 as in q"),
        Bad(
            "block_sparse_prefill", {"k": dims(slice(90)), "v": dims(slice(90))}, ShapeError, "k has 90 tokens", "whole"
        ),
        Bad("block_sparse_prefill", {"v": dims(slice(80))}, ShapeError, "v has dimension 0 80", "96 as in k"),
        Bad("block_sparse_prefill", {"k": to(torch.bfloat16)}, DTypeError, "k is bfloat16 and v float32", "one"),
        Bad("block_sparse_prefill", {"q": leaf}, GradientError, "q requires grad", "inference"),
        Bad("block_sparse_prefill", {"plan": but_last}, PlanError, "plan has 7 tensors", "the 8 of PrefillPlan"),
        Bad(
            "block_sparse_prefill", {"plan": replan(num_kv_heads=1)}, PlanError, "the plan was made for num_kv_he", "a"
        ),
        Bad(
            "block_sparse_prefill",
            {"plan": replan(max_pages=0, page_size=1)},
            PlanError,
            "the plan is for ragged KV",
            "one with a page for each block column",
        ),
        Bad(
            "block_sparse_prefill",
            {"plan": replan(causal=True)},
            PlanError,
            "the plan was made for causal attention and causal is False",
            "causal=True",
        ),
        Bad("block_sparse_prefill", {"q": longer(0, ROWS)}, CapacityError, f"q has {ROWS} query rows", "at most 26843"),
        Bad(
            "block_sparse_prefill",
            {"k": longer(0, TOKENS), "v": longer(0, TOKENS)},
            CapacityError,
            f"k has {TOKENS} tokens",
            "at most 2146435072",
        ),
        Bad(
            "block_sparse_table", {"row_indptr": one_column}, ShapeError, "row_indptr has entries 1", "3 as in block_m"
        ),
        Bad(
            "block_sparse_table", {"col_indptr": one_column}, ShapeError, "col_indptr has entries 1", "4 as in block_m"
        ),
        Bad("block_sparse_table", {"col_indptr": twice}, ShapeError, "col_indptr has maps 2", "1 as in block_mask"),
        Bad("block_sparse_table", {"page_size": 0}, OptionError, "page_size is 0", "at least 1"),
        Bad("block_sparse_table", {"max_pages": -1}, OptionError, "max_pages is -1", "at least 0"),
    ]


ATTENTION = [*_options(), *_latent(), *_blocks()]
