"""Operands of attention kernels: dtypes as numbers of the sources, tensor maps of pages, and arguments of RoPE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from attn_ops.kernels.cuda.kernel import TensorMap
from torch import Tensor

from attn_ops.native.images import NoImageError
from attn_ops.ops.cuda_kernels import CUDA_PAGE
from attn_ops.ops.options import AttentionOptions
from attn_ops.plan.state import KV_BLOCK

ROW_BYTES = 128
"""Of a row in shared memory, the width of the swizzle. Narrower rows have a narrower swizzle."""

COLUMNS = ROW_BYTES // 2
"""16-bit elements of a row in shared memory."""


def row_columns(t: Tensor, row_bytes: int = ROW_BYTES) -> int:
    """Columns of a row in shared memory. Wider heads have several rows."""
    return min(int(t.shape[-1]), row_bytes // t.element_size())


GROUP_TOKENS = CUDA_PAGE
"""Tokens of a page are loaded in groups, so that a page is one box with all columns of a head."""

DTYPES = {torch.float16: 1, torch.bfloat16: 2}
"""dtype -> the macro DTYPE."""

OUT_TYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}
"""``OutType`` of the sources."""

FP8_TYPES = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}
"""``Fp8Type`` of the sources."""

ROPE_PARAMETERS = {"rope_theta": "fp32", "rope_scale": "fp32"}
"""Parameters of kernels that rotate queries and keys."""


def rope_arguments(o: AttentionOptions) -> dict[str, float]:
    return {} if o.pos_encoding != "ROPE_LLAMA" else {"rope_theta": o.rope_theta, "rope_scale": o.rope_scale}


def box_of_pages(page_size: int, most: int) -> int:
    """Tokens of a box of paged KV: a page, or a part of it of at most ``most`` tokens that lies in one KV block.

    Splits begin at KV blocks. One that began inside of a box would see the keys of the split before it.
    """
    return math.gcd(page_size, min(most, KV_BLOCK))


def paged_map(
    t: Tensor,
    strides: Sequence[Any],
    heads: int,
    page_size: int,
    box: int,
    row_bytes: int = ROW_BYTES,
    heads_of_box: int = 1,
    column_parts: int = 1,
) -> tuple[TensorMap, int, int]:
    """The map of paged keys or values, and what a page and a head add to its outermost index.

    Pages and heads are one dimension, whose stride divides theirs: a map has five dimensions at most. A box has several
    heads where each is one row of a token. Or it has one of ``column_parts`` equal parts of the columns of a head.
    """
    page, token, head = strides
    if not (isinstance(page, int) and isinstance(head, int)):
        raise NoImageError("the strides of pages and heads depend on sizes that only the run knows")
    unit = math.gcd(page, head)
    pages_and_heads = (t.shape[0] - 1) * (page // unit) + (heads - heads_of_box) * (head // unit) + 1
    columns = row_columns(t, row_bytes)
    rows, row = (heads_of_box, head) if heads_of_box > 1 else (t.shape[-1] // columns, columns)  # of a token
    shape = pages_and_heads, page_size // GROUP_TOKENS, rows, GROUP_TOKENS, columns
    strides = unit, GROUP_TOKENS * token, row, token, 1
    boxes = 1, box // GROUP_TOKENS, rows // column_parts, GROUP_TOKENS, columns
    return TensorMap(t, shape, strides, boxes, columns * t.element_size()), page // unit, head // unit
