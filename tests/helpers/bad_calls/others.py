"""Wrong calls of the ops that append, merge, make page tables or pack bits."""

from __future__ import annotations

import torch

from attn_ops.errors import (
    ArgumentError,
    DTypeError,
    GradientError,
    OptionError,
    ShapeError,
)
from helpers.bad_calls.base import (
    Bad,
    dims,
    leaf,
    overlapping,
    shared,
    to,
    valid,
)


def _append() -> list[Bad]:
    """Bad calls of the ops that append."""
    one = dims(slice(1))
    return [
        Bad("append_kv", {"kv_layout": "nhd"}, OptionError, "kv_layout is nhd", "NHD or HND"),
        Bad("append_kv", {"k": to(torch.float16)}, DTypeError, "k is float16 and k_cache float32", "one dtype"),
        Bad("append_kv", {"v": to(torch.bfloat16)}, DTypeError, "v is bfloat16 and v_cache float32", "one dtype"),
        Bad("append_kv", {"v": one}, ShapeError, "v has tokens 1", "3 as in k"),
        Bad("append_kv", {"k": dims(slice(None), slice(1))}, ShapeError, "k has KV heads 1", "2 as in the cache"),
        Bad("append_kv", {"v": dims(..., slice(8))}, ShapeError, "v has head_dim 8", "64 as in v_cache"),
        Bad("append_kv", {"v_cache": one}, ShapeError, "v_cache has pages 1", ""),
        Bad("append_kv", {"positions": one}, ShapeError, "positions has tokens 1", "3 as in the appended rows"),
        Bad(
            "append_kv",
            {"k_cache": shared},
            ShapeError,
            "k_cache is written and its elements overlap, with stride 0",
            "memory of its own",
        ),
        Bad(
            "append_kv",
            {"v_cache": shared},
            ShapeError,
            "v_cache is written and its elements overlap, with stride 0",
            "memory of its own",
        ),
        Bad(
            "append_kv",
            {"v_cache": valid("append_kv")["k_cache"]},
            ArgumentError,
            "k_cache and v_cache are one tensor, and k and v are not",
            "a cache for each",
        ),
        Bad("append_kv", {"v_cache": overlapping}, ShapeError, "v_cache is written and its elements overlap, wi", "m"),
        Bad(
            "append_mla_kv",
            {"ckv_cache": shared},
            ShapeError,
            "ckv_cache is written and its elements overlap",
            "memory of its own",
        ),
        Bad("append_kv", {"k": leaf}, GradientError, "k requires grad", "inference"),
        Bad("append_kv", {"v_cache": leaf}, GradientError, "v_cache requires grad", "inference"),
        Bad("append_mla_kv", {"kpe": one}, ShapeError, "kpe has tokens 1", "3 as in ckv"),
        Bad("append_mla_kv", {"ckv": to(torch.float16)}, DTypeError, "ckv is float16 and ckv_cache", "one dtype"),
        Bad("append_mla_kv", {"kpe": dims(..., slice(4))}, ShapeError, "kpe has head_dim 4", "8 as in kpe_cache"),
    ]


def _merge() -> list[Bad]:
    """Bad calls of the ops that merge."""
    one = dims(slice(1))
    return [
        Bad(
            "merge_state_in_place",
            {"v": shared},
            ShapeError,
            "v is written and its elements overlap",
            "memory of its own",
        ),
        Bad(
            "merge_state_in_place",
            {"s": shared},
            ShapeError,
            "s is written and its elements overlap",
            "memory of its own",
        ),
        Bad("merge_state", {"v_b": dims(..., slice(8))}, ShapeError, "v_b is [5, 4, 8] float32", "[5, 4, 64] float32"),
        Bad("merge_state", {"v_b": to(torch.float16)}, DTypeError, "v_b is [5, 4, 64] float16", "[5, 4, 64] float32"),
        Bad("merge_state", {"s_a": one}, ShapeError, "s_a is [1, 4]", "[5, 4], the shape of v_a less head_dim"),
        Bad("merge_state", {"v_a": leaf}, GradientError, "v_a requires grad", "inference"),
        Bad("merge_state", {"s_b": leaf}, GradientError, "s_b requires grad", "inference"),
        Bad("merge_states", {"s": dims(slice(None), slice(2))}, ShapeError, "s is [5, 2, 4]", "[5, 3, 4]"),
        Bad("merge_states", {"v": leaf}, GradientError, "v requires grad", "inference"),
        Bad("merge_states", {"s": leaf}, GradientError, "s requires grad", "inference"),
        Bad("merge_state_in_place", {"s": to(torch.float16)}, DTypeError, "s is float16", "float32"),
        Bad(
            "merge_state_in_place",
            {"mask": torch.ones(3, dtype=torch.bool)},
            ShapeError,
            "mask has rows 3",
            "5 as in v",
        ),
        Bad("merge_state_in_place", {"mask": torch.ones(5)}, DTypeError, "mask is float32", "bool or uint8"),
        Bad("merge_state_in_place", {"v": leaf}, GradientError, "v requires grad", "inference"),
        Bad("merge_state_in_place", {"s_other": leaf}, GradientError, "s_other requires grad", "inference"),
        Bad("merge_states_varlen", {"v": leaf}, GradientError, "v requires grad", "inference"),
        Bad("merge_states_varlen", {"s": leaf}, GradientError, "s requires grad", "inference"),
    ]


def _tables() -> list[Bad]:
    """Bad calls of the ops of page tables and packed bits."""
    one = dims(slice(1))
    return [
        Bad("batch_indices_positions", {"nnz": -1}, OptionError, "nnz is -1", "at least 0"),
        Bad("batch_indices_positions", {"seq_lens": one}, ShapeError, "seq_lens has length 1", "3 as in append_indptr"),
        Bad("seq_lens", {"page_size": 0}, OptionError, "page_size is 0", "at least 1"),
        Bad("seq_lens", {"kv_last_page_len": one}, ShapeError, "kv_last_page_len has length 1", "2 as in kv_indptr"),
        Bad("page_table", {"page_size": 0}, OptionError, "page_size is 0", "at least 1"),
        Bad("page_table", {"page_size": 2**30}, OptionError, "a request of 2 pages of page_size 1073741824", "at most"),
        Bad("page_table", {"page_size": 2**62}, OptionError, f"page_size is {2**62}", "at most 2147483647"),
        Bad("seq_lens", {"page_size": 2**32 + 16}, OptionError, f"page_size is {2**32 + 16}", "at most 2147483647"),
        Bad("batch_indices_positions", {"nnz": 2**40}, OptionError, f"nnz is {2**40}", "at most 2147483647"),
        Bad("page_table", {"seq_lens": one}, ShapeError, "seq_lens has length 1", "2 as in block_tables"),
        Bad("packbits", {"bitorder": "huge"}, OptionError, "bitorder is huge", "big or little"),
        Bad("segment_packbits", {"num_bytes": -1}, OptionError, "num_bytes is -1", "at least 0"),
    ]


OTHERS = [*_append(), *_merge(), *_tables()]
