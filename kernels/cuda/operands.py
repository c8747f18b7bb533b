"""Arguments of the attention kernels: numbers of dtypes, tensor maps of paged KV, and arguments of RoPE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.kernels.cuda.kernel import TensorMap
from attn_ops.native.images import NoImageError
from attn_ops.ops.cuda_kernels import CUDA_PAGE
from attn_ops.ops.options import AttentionOptions
from attn_ops.plan.state import KV_BLOCK

ROW_BYTES = 128
"""Most bytes of a row in shared memory. The swizzle is as wide as the row."""

COLUMNS = ROW_BYTES // 2
"""16-bit elements of a row of ``ROW_BYTES`` in shared memory."""


class Columns(NamedTuple):
    """How tensor maps divide the columns of a head. A box has the columns of a row in shared memory.

    blocks  size of the dimension of blocks of columns: the rows of a token
    size    size of the dimension of columns
    box     columns of a box
    step    elements from a block to the next
    """

    blocks: int
    size: int
    box: int
    step: int

    @classmethod
    def of(cls, t: Tensor, row_bytes: int = ROW_BYTES, padded: bool = False) -> Columns:
        """``padded``: one block, and boxes from any column on. TMA writes zeros for columns after the last."""
        dim, box = int(t.shape[-1]), row_bytes // t.element_size()
        if padded:
            return cls(1, dim, box, box)
        box = min(dim, box)
        return cls(dim // box, box, box, box)

    @classmethod
    def overlapping(cls, t: Tensor) -> Columns:
        """Two blocks, the second of which has the last columns of the head."""
        box = ROW_BYTES // t.element_size()
        return cls(2, box, box, int(t.shape[-1]) - box)


GROUP_TOKENS = CUDA_PAGE
"""Tokens of a swizzled group of rows. Groups are a dimension of maps, so that one box has all columns of its tokens."""

DTYPES = {torch.float16: 1, torch.bfloat16: 2}
"""dtype -> the macro DTYPE."""

OUT_TYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3, torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}
"""dtype -> ``OutType`` (``out_type.cuh``)."""

FP8_TYPES = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}
"""dtype -> ``Fp8Type`` (``fp8.cuh``)."""

ROPE_PARAMETERS = {"rope_theta": "fp32", "rope_scale": "fp32"}
"""Parameters of kernels that rotate queries and keys."""


def rope_arguments(o: AttentionOptions) -> dict[str, float]:
    return {} if o.pos_encoding != "ROPE_LLAMA" else {"rope_theta": o.rope_theta, "rope_scale": o.rope_scale}


def box_of_pages(page_size: int, most: int) -> int:
    """Tokens of a box of paged KV: a page or a part of a page, at most ``most`` tokens, and inside of one KV block.

    Splits begin at KV blocks. A split that began inside of a box would see keys of the split before.
    """
    return math.gcd(page_size, min(most, KV_BLOCK))


def paged_map(
    t: Tensor,
    strides: Sequence[Any],
    heads: int,
    page_size: int,
    box: int,
    columns: Columns,
    heads_of_box: int = 1,
    column_parts: int = 1,
) -> tuple[TensorMap, int, int]:
    """The map of paged keys or values, and what a page and a head add to the outermost index of the map.

    A map has at most five dimensions, so pages and heads are one dimension, whose stride divides the strides of both.

    strides       of pages, tokens and heads, in elements
    box           tokens of a box
    heads_of_box  heads of a box. With several, a token of a head must be one row
    column_parts  number of equal parts of the blocks of columns, of which a box has one
    """
    page, token, head = strides
    if not (isinstance(page, int) and isinstance(head, int)):
        raise NoImageError("the strides of pages and heads depend on sizes that only the run knows")
    unit = math.gcd(page, head)
    pages_and_heads = (t.shape[0] - 1) * (page // unit) + (heads - heads_of_box) * (head // unit) + 1
    rows, row = (heads_of_box, head) if heads_of_box > 1 else (columns.blocks, columns.step)  # of a token
    shape = pages_and_heads, page_size // GROUP_TOKENS, rows, GROUP_TOKENS, columns.size
    strides = unit, GROUP_TOKENS * token, row, token, 1
    boxes = 1, box // GROUP_TOKENS, rows // column_parts, GROUP_TOKENS, columns.box
    return TensorMap(t, shape, strides, boxes, columns.box * t.element_size()), page // unit, head // unit
