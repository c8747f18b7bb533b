"""Prefill on Hopper: the host side of ``prefill.cu``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.kernels.cuda import single_decode
from attn_ops.kernels.cuda.kernel import Kernel, Specialization, TensorMap, persistent_grid
from attn_ops.kernels.cuda.launch import launch
from attn_ops.kernels.cuda.operands import (
    COLUMNS,
    DTYPES,
    FP8_TYPES,
    OUT_TYPES,
    ROPE_PARAMETERS,
    ROW_BYTES,
    Columns,
    box_of_pages,
    paged_map,
    rope_arguments,
)
from attn_ops.kernels.triton.prefill_call import (
    Batch,
    Operands,
    attend_requests,
    dense_operands,
    plan_arguments,
    prefill_ops,
    tiles_of_requests,
    work_items,
)
from attn_ops.ops.cuda_kernels import (
    CUDA_PREFILL_ALIBI_HEAD_DIMS,
    CUDA_PREFILL_FEW_ROWS_HEAD_DIMS,
    CUDA_PREFILL_FP8_HEAD_DIMS,
    CUDA_PREFILL_HEAD_DIMS,
    CUDA_PREFILL_LARGE_BATCH_HEAD_DIMS,
    CUDA_PREFILL_PADDED_HEAD_DIMS,
    CUDA_PREFILL_PADDED_PLAIN_HEAD_DIMS,
    CUDA_PREFILL_ROPE_HEAD_DIMS,
    CUDA_PREFILL_SHARED_ROWS_HEAD_DIMS,
    CUDA_PREFILL_SHORT_KV,
    PrefillKey,
    kv_loads,
    single_decode_key,
)
from attn_ops.ops.options import FP8, AttentionOptions, softmax_scale
from attn_ops.plan.equal_requests import EqualRequests
from attn_ops.plan.sizing import (
    THREE_CONSUMERS_CTA_PACKED_ROWS,
    fills_three_consumers,
    takes_three_consumers,
)
from attn_ops.plan.state import PlanProblem, PrefillPlan
from attn_ops.symbolic_sizes import has_static_value, statically_known_true

PACKED_ROWS = 64
"""Packed rows of a consumer warpgroup."""

NO_WINDOW = 1 << 30
"""A window without a bound: ``kNone`` of the source."""

BFLOAT16_QUERIES = 2
"""A flag of the parameter ``kv_type``: ``kBFloat16Queries`` of the source."""

KV_STEPS = ("k_page_step", "k_head_step", "v_page_step", "v_head_step")
"""Parameters of pages that TMA loads: what a page and a head add to the outermost index of the maps."""

KV_STRIDES = tuple(f"stride_{tensor}_{of}" for tensor in ("k", "v") for of in ("page", "token", "head"))
"""Parameters of keys and values that cp.async copies by tokens: strides in elements."""


REQUEST_SIZES = ("request_rows", "request_keys", "request_splits", "split_keys")
"""Parameters of ragged keys without a plan: query rows, keys and splits of each request, and keys of a split."""

PARAMETERS = {
    "KV_FP8": {"kv_type": "i32", "kv_scale": "pointer"},
    "Q_FP8": {"kv_scale": "pointer"},
    "ROPE": ROPE_PARAMETERS,
    "PADDED": {"head_dim_qk": "i32", "head_dim_vo": "i32"},
}
"""Macro -> further parameters of the kernel."""

POSITION_MACROS = {"ROPE_LLAMA": "ROPE", "ALIBI": "ALIBI"}
"""Positional encoding -> macro."""


def _kernel(loads: str, custom_mask: bool, further: Mapping[str, str]) -> Kernel:
    """The kernel that loads keys and values by ``loads``, one of :data:`LOADS`, with ``further`` parameters."""
    by_tokens = loads == "tokens"
    parameters = {
        "q": "pointer",
        "q_map": "map",
        **dict.fromkeys(("k", "v"), "pointer" if by_tokens else "map"),
        "sinks": "pointer",
        **({"mask": "pointer", "mask_bytes": "i64", "kv_len": "pointer"} if custom_mask else {}),
        **dict.fromkeys(("out", "lse", "partial", "qo_indptr", "kv_indices", "work", "queue"), "pointer"),
        **dict.fromkeys(("scale", "cap"), "fp32"),
        **dict.fromkeys(("window_left", "window_right", "rows"), "i32"),
        **dict.fromkeys(("kv_rows", *REQUEST_SIZES) if loads == "ragged" else ("num_pages",), "i32"),
        **dict.fromkeys(("max_pages", "max_items", "max_batch", "slots"), "i32"),
        **dict.fromkeys(("stride_q_row", "stride_q_head"), "i64"),
        **dict.fromkeys(("num_kv_heads", "group", *(() if loads == "ragged" else ("page_size",))), "i32"),
        **(dict.fromkeys(KV_STRIDES, "i64") if by_tokens else {"box": "i32"}),
        **dict.fromkeys(KV_STEPS if loads == "pages" else (), "i32"),
        **further,
        **dict.fromkeys(("tile_rows", "out_type"), "i32"),
    }
    aligned = ("q", "k", "v", "out") if by_tokens else ("q", "out")
    return Kernel("prefill.cu", "prefill", parameters, writes=("out", "lse", "partial"), aligned=aligned)


LOADS = ("ragged", "pages", "tokens")
"""The results of :func:`~attn_ops.ops.cuda_kernels.kv_loads`."""


class Fp8Tiles(NamedTuple):
    """The FP8 rings of kernels that convert FP8 keys and values. The source has the macros of the names given here.

    tokens        ``LOADED_TILE``: tokens of an FP8 tile. A KV tile is one or two of them
    key_stages    ``FP8_KEY_STAGES``: FP8 tiles of the ring of keys
    value_stages  ``FP8_VALUE_STAGES``: FP8 tiles of the ring of values
    """

    tokens: int
    key_stages: int
    value_stages: int


class Tile(NamedTuple):
    """Sizes of a kernel for one pair of head dims. The source has the macros of the names given here.

    tokens             ``TILE``: tokens of a KV tile
    key_stages         ``KEY_STAGES``: stages of the ring of keys
    value_stages       ``VALUE_STAGES``: stages of the ring of values
    queries            ``QUERIES``: query buffers
    box                ``RAGGED_BOX``: tokens of a TMA box of ragged keys and values, and the most tokens of a box of
                       paged ones. Smaller boxes read and clear fewer tokens after the end of the KV, but each box (with
                       ragged KV one block of columns) takes an instruction
    transposed_stages  ``TRANSPOSED_STAGES``: stages of the ring of transposed values, with FP8 products
    converters         ``CONVERTERS``: warpgroups that convert FP8 keys and values, or rotate queries and keys
    fp8                the rings of FP8 keys and values that are converted
    consumers          ``CONSUMERS``: consumer warpgroups
    query_tiles        ``QUERY_TILES``: blocks of 64 packed rows of a query buffer. None: one for each consumer
    key_parts          ``KEY_PARTS``: parts of the columns of keys, each in a stage of its own
    unit_parts         ``UNIT_PARTS``: parts of the columns of values, each in a unit of its own
    ctas_per_sm        ``CTAS_PER_SM``: CTAs that run on an SM
    """

    tokens: int
    key_stages: int
    value_stages: int
    queries: int
    box: int
    transposed_stages: int = 0
    converters: int = 0
    fp8: Fp8Tiles | None = None
    consumers: int = 2
    query_tiles: int | None = None
    key_parts: int = 1
    unit_parts: int = 1
    ctas_per_sm: int = 1

    @property
    def macros(self) -> dict[str, int]:
        """All but ``CONSUMERS``, which is in the name of a kernel."""
        loaded, fp8_key_stages, fp8_value_stages = self.fp8 or Fp8Tiles(self.tokens, 0, 0)
        return {
            "TILE": self.tokens,
            "KEY_STAGES": self.key_stages,
            "VALUE_STAGES": self.value_stages,
            "QUERIES": self.queries,
            "RAGGED_BOX": self.box,
            "TRANSPOSED_STAGES": self.transposed_stages,
            "CONVERTERS": self.converters,
            "LOADED_TILE": loaded,
            "FP8_KEY_STAGES": fp8_key_stages,
            "FP8_VALUE_STAGES": fp8_value_stages,
            "QUERY_TILES": self.query_tiles or self.consumers,
            "KEY_PARTS": self.key_parts,
            "UNIT_PARTS": self.unit_parts,
            "CTAS_PER_SM": self.ctas_per_sm,
        }

    def shared_bytes(self, dim_qk: int, dim_vo: int, itemsize: int, custom_mask: bool) -> int:
        """Bytes of shared memory of a CTA: query buffers, rings, and 1024 or more for other fields of ``Shared``."""
        rows = self.queries * (self.query_tiles or self.consumers) * PACKED_ROWS
        dim_qk, dim_vo = (-(-dim // COLUMNS) * COLUMNS for dim in (dim_qk, dim_vo))  # whole blocks of columns
        key_columns, value_columns = dim_qk // self.key_parts, dim_vo // self.unit_parts
        of_token = self.key_stages * key_columns + (self.value_stages + self.transposed_stages) * value_columns
        loaded, fp8_key_stages, fp8_value_stages = self.fp8 or Fp8Tiles(0, 0, 0)
        fp8 = loaded * (fp8_key_stages * key_columns + fp8_value_stages * value_columns)
        scales = 4 * rows if self.fp8 and self.query_tiles and self.key_parts == 1 else 0
        small = 1024 + scales + 32 * (self.threads // 32) * custom_mask
        return itemsize * (rows * dim_qk + self.tokens * of_token) + fp8 + -(-small // 1024) * 1024

    @property
    def threads(self) -> int:
        """Threads of a CTA: one producer warpgroup, and the consumer and converter warpgroups."""
        return 128 * (1 + self.converters + self.consumers)

    def unit_rows(self, packed_rows: int) -> int:
        """Packed rows of a unit: a work item of ``packed_rows`` is divided into as few equal units as possible."""
        parts = -(-packed_rows // PACKED_ROWS)
        return -(-parts // -(-parts // self.consumers)) * PACKED_ROWS

    @property
    def row_bytes(self) -> int:
        """``kLoadedRowBytes`` with wide heads: a row as it is loaded. Conversion from FP8 doubles its width."""
        return ROW_BYTES // 2 if self.fp8 else ROW_BYTES


TILES = {
    (64, 64): Tile(128, 4, 4, 2, 64, consumers=3),
    (128, 128): Tile(128, 2, 2, 2, 32),
    (192, 128): Tile(128, 2, 2, 1, 128),
    (256, 256): Tile(64, 3, 2, 1, 32),
    (512, 512): Tile(64, 4, 1, 1, 32, key_parts=4, unit_parts=2),
}
"""Tiles of 16-bit kernels. The key of this and the next tables is (head dim of keys, head dim of values)."""

MASK_TILES = {(64, 64): Tile(128, 4, 4, 2, 64)}
"""Tiles of 16-bit kernels with a custom mask, where they are not those of :data:`TILES`.

With two consumers, the warps that read the mask have registers for several words of it at once.
"""

LARGE_BATCH_TILES = {(128, 128): Tile(64, 4, 4, 2, 32, consumers=3)}
"""Tiles of 16-bit kernels for query tiles that fill three consumers, which plans for large batches have."""

SHORT_KV_TILES = {
    (64, 64): Tile(64, 4, 4, 1, 64, consumers=1, ctas_per_sm=3),
    (128, 128): Tile(64, 3, 3, 1, 32, consumers=1, ctas_per_sm=2),
}
"""Tiles of 16-bit kernels for requests with few keys.

A unit of few KV tiles is a chain of latencies: loads, products, softmax, stores. Units of several CTAs overlap.
"""

SHARED_ROWS_TILES = {(512, 512): Tile(64, 6, 1, 1, 32, query_tiles=1, key_parts=4)}
"""Tiles of 16-bit kernels for query tiles of at most :data:`PACKED_ROWS` rows, all of which both consumers have."""

KV_FP8_TILES = {
    (64, 64): Tile(128, 3, 3, 2, 64, converters=1, fp8=Fp8Tiles(64, 2, 2)),
    (128, 128): Tile(128, 2, 2, 2, 32, converters=1, fp8=Fp8Tiles(64, 2, 2)),
    (192, 128): Tile(64, 2, 2, 1, 32, converters=1, fp8=Fp8Tiles(32, 2, 2)),
    (256, 256): Tile(64, 2, 2, 1, 32, converters=1, fp8=Fp8Tiles(32, 2, 2)),
    (512, 512): Tile(64, 2, 1, 1, 32, converters=1, fp8=Fp8Tiles(64, 2, 1), key_parts=4, unit_parts=2),
}
"""Tiles of kernels that convert FP8 keys and values."""

SHARED_ROWS_KV_FP8_TILES = {
    (512, 512): Tile(64, 2, 1, 1, 32, converters=1, fp8=Fp8Tiles(64, 4, 1), query_tiles=1, key_parts=4),
}
"""Tiles as :data:`SHARED_ROWS_TILES`, of kernels that convert FP8 keys and values."""

KV_FP8_ROPE_TILES = {
    (64, 64): Tile(128, 3, 2, 2, 64, converters=1, fp8=Fp8Tiles(64, 2, 2)),
    (128, 128): KV_FP8_TILES[128, 128],
    (256, 256): KV_FP8_TILES[256, 256],
}
"""Tiles of kernels that convert FP8 keys and values, and rotate queries and keys."""

FEW_ROWS_TILES = {
    (64, 64): Tile(128, 3, 3, 2, 64, converters=2, fp8=Fp8Tiles(128, 6, 6), query_tiles=1),
    (128, 128): Tile(64, 3, 3, 2, 32, converters=2, fp8=Fp8Tiles(64, 6, 6), query_tiles=1),
    (256, 256): Tile(64, 2, 2, 1, 32, converters=1, fp8=Fp8Tiles(64, 2, 2), query_tiles=1),
}
"""Tiles of kernels that convert FP8 keys and values, for query tiles of at most :data:`PACKED_ROWS` rows.

The FP8 rings are larger than those of :data:`KV_FP8_TILES`, so that more loads are in flight.
"""

ROPE_TILES = {
    (64, 64): Tile(128, 3, 3, 2, 64, converters=1),
    (128, 128): Tile(128, 2, 2, 2, 32, converters=1),
    (256, 256): Tile(64, 3, 2, 1, 32, converters=1),
}
"""Tiles of kernels that rotate queries and keys."""

ALIBI_TILES = {dims: TILES[dims] for dims in sorted(CUDA_PREFILL_ALIBI_HEAD_DIMS)}
"""Tiles of kernels that add the bias of ALiBi."""

KV_FP8_ALIBI_TILES = {dims: KV_FP8_TILES[dims] for dims in ALIBI_TILES}
"""Tiles of kernels that convert FP8 keys and values, and add the bias of ALiBi."""

PADDED_TILES = {
    (128, 128): TILES[128, 128],
    (192, 192): Tile(64, 4, 3, 1, 32),
    (256, 256): TILES[256, 256],
}
"""Tiles of 16-bit kernels for heads with fewer columns."""

PADDED_PLAIN_TILES = {(96, 96): Tile(64, 4, 4, 2, 32, consumers=3)}
"""Tiles as :data:`PADDED_TILES`, of kernels without custom masks."""

PADDED_KV_FP8_TILES = {
    (128, 128): KV_FP8_TILES[128, 128],
    (192, 192): Tile(64, 2, 2, 1, 32, converters=1, fp8=Fp8Tiles(32, 2, 2)),
    (256, 256): KV_FP8_TILES[256, 256],
}
"""Tiles as :data:`PADDED_TILES`, of kernels that convert FP8 keys and values."""

FP8_TILES = {
    (64, 64): Tile(128, 4, 2, 2, 64, 4),
    (128, 128): Tile(128, 4, 2, 2, 32, 4),
    (256, 256): Tile(64, 4, 2, 1, 32, 4),
}
"""Tiles of kernels with FP8 products."""

assert TILES.keys() == CUDA_PREFILL_HEAD_DIMS
assert tuple(PADDED_TILES) == tuple(PADDED_KV_FP8_TILES) == CUDA_PREFILL_PADDED_HEAD_DIMS
assert tuple(PADDED_PLAIN_TILES) == (CUDA_PREFILL_PADDED_PLAIN_HEAD_DIMS,)
assert KV_FP8_TILES.keys() == CUDA_PREFILL_HEAD_DIMS
assert FP8_TILES.keys() == CUDA_PREFILL_FP8_HEAD_DIMS
assert LARGE_BATCH_TILES.keys() == CUDA_PREFILL_LARGE_BATCH_HEAD_DIMS
assert SHORT_KV_TILES.keys() == CUDA_PREFILL_SHORT_KV.keys()
assert SHARED_ROWS_TILES.keys() == SHARED_ROWS_KV_FP8_TILES.keys() == CUDA_PREFILL_SHARED_ROWS_HEAD_DIMS
assert FEW_ROWS_TILES.keys() == CUDA_PREFILL_FEW_ROWS_HEAD_DIMS
assert ROPE_TILES.keys() == KV_FP8_ROPE_TILES.keys() == CUDA_PREFILL_ROPE_HEAD_DIMS
assert all(tile.consumers == 2 for tile in MASK_TILES.values())
assert all((tile.consumers == 3) == takes_three_consumers(dims) for dims, tile in (TILES | PADDED_PLAIN_TILES).items())
assert THREE_CONSUMERS_CTA_PACKED_ROWS == 3 * PACKED_ROWS

E4M3 = torch.float8_e4m3fn


def key_of_plan(key: PrefillKey, packed_rows: int, short_kv: bool) -> PrefillKey:
    """The key of the special kernel for query tiles of ``packed_rows`` or for short KV, if ``key`` has one.

    Otherwise ``key``.
    """
    plans = {
        "short KV": short_kv,
        "few rows": packed_rows <= PACKED_ROWS,
        "large batch": fills_three_consumers(packed_rows),
    }
    keys = {one.special: one for one in key.variants()}
    return next((keys[special] for special, applies in plans.items() if applies and special in keys), key)


class Family(NamedTuple):
    """Specializations that have a table of tiles in common.

    dtypes  values of :attr:`PrefillKey.dtype`
    macros  macros in addition to those that :func:`_specialization` derives from the key
    special value of :attr:`PrefillKey.special`
    loads   values of :attr:`PrefillKey.loads`
    masks   values of :attr:`PrefillKey.custom_mask`
    masked  tiles that replace others with a custom mask
    """

    tiles: dict[tuple[int, int], Tile]
    dtypes: Sequence[torch.dtype] = tuple(DTYPES)
    macros: Sequence[str] = ()
    special: str = ""
    loads: Sequence[str] = LOADS
    masks: Sequence[bool] = (False, True)
    masked: Mapping[tuple[int, int], Tile] = {}

    @property
    def parameters(self) -> dict[str, str]:
        """The further parameters of the kernels, by their macros."""
        of_macros = [of for macro, of in PARAMETERS.items() if macro in self.macros]
        return {name: kind for of in of_macros for name, kind in of.items()}

    @property
    def pos_encoding(self) -> str:
        return next((name for name, macro in POSITION_MACROS.items() if macro in self.macros), "NONE")


FAMILIES = (
    Family(TILES, masked=MASK_TILES),
    Family(LARGE_BATCH_TILES, special="large batch", masks=(False,)),
    Family(SHORT_KV_TILES, special="short KV", masks=(False,)),
    Family(SHARED_ROWS_TILES, macros=("SHARED_ROWS",), special="few rows"),
    Family(KV_FP8_TILES, macros=("KV_FP8",)),
    Family(SHARED_ROWS_KV_FP8_TILES, macros=("KV_FP8", "SHARED_ROWS"), special="few rows"),
    Family(FEW_ROWS_TILES, (torch.float16,), ("KV_FP8", "FEW_ROWS"), special="few rows", loads=("pages", "tokens")),
    Family(FP8_TILES, (E4M3,), ("Q_FP8",), masks=(False,)),
    Family(ROPE_TILES, macros=("ROPE",)),
    Family(KV_FP8_ROPE_TILES, macros=("KV_FP8", "ROPE"), masks=(False,)),
    Family(ALIBI_TILES, macros=("ALIBI",), masked=MASK_TILES),
    Family(KV_FP8_ALIBI_TILES, macros=("KV_FP8", "ALIBI"), masks=(False,)),
    Family(PADDED_TILES, macros=("PADDED",)),
    Family(PADDED_PLAIN_TILES, macros=("PADDED",), masks=(False,)),
    Family(PADDED_KV_FP8_TILES, macros=("KV_FP8", "PADDED"), masks=(False,)),
)


def _specialization(family: Family, key: PrefillKey, tile: Tile) -> Specialization:
    return Specialization(
        _kernel(key.loads, key.custom_mask, family.parameters),
        {
            "HEAD_DIM_QK": key.head_dim_qk,
            "HEAD_DIM_VO": key.head_dim_vo,
            "PAGED": key.loads != "ragged",
            "DTYPE": DTYPES.get(key.dtype, 2),
            "CONSUMERS": tile.consumers,
            **({"KV_CP_ASYNC": 1} if key.loads == "tokens" else {}),
            **({"CUSTOM_MASK": 1} if key.custom_mask else {}),
            **dict.fromkeys(family.macros, 1),
        },
        sizes=tile.macros,
        threads=tile.threads,
        shared_bytes=tile.shared_bytes(key.head_dim_qk, key.head_dim_vo, key.dtype.itemsize, key.custom_mask),
    )


_ALL = [
    (
        family,
        PrefillKey(*dims, loads, dtype, fp8, family.special, custom_mask, family.pos_encoding, padded),
        family.masked.get(dims, tile) if custom_mask else tile,
    )
    for family in FAMILIES
    for dims, tile in family.tiles.items()
    for loads in family.loads
    for dtype in family.dtypes
    for fp8, padded in (("KV_FP8" in family.macros or dtype == E4M3, "PADDED" in family.macros),)
    for custom_mask in family.masks
]
TILE_OF = {key: tile for _, key, tile in _ALL}
SPECIALIZATIONS = {key: _specialization(family, key, tile) for family, key, tile in _ALL}
"""Key -> specialization. ``TILE_OF``: key -> tile."""

LIKE_OPERANDS = {dtype: torch.bfloat16 if dtype == E4M3 else dtype for dtype in (*DTYPES, E4M3)}
"""Dtype of a :class:`PrefillKey` -> dtype of outputs of type ``kLikeOperands``."""


def ragged_map(t: Tensor, strides: Sequence[Any], heads: int, tokens: Any, box: int, columns: Columns) -> TensorMap:
    """The map of ragged keys or values. Heads are the outermost dimension. A box has one block of columns."""
    _, token, head = strides
    shape, boxes = (heads, columns.blocks, tokens, columns.size), (1, 1, box, columns.box)
    return TensorMap(t, shape, (head, columns.step, token, 1), boxes, columns.box * t.element_size())


def kv_arguments(x: Operands, loads: str, page_size: int, tile: Tile, padded: bool) -> dict[str, Any]:
    """The kernel arguments of keys and values, by the parameters' names."""
    pages, heads = {"num_pages": x.k.shape[0], "page_size": page_size}, x.heads[1]
    if loads == "tokens":
        return {"k": x.k, "v": x.v, **pages, **dict(zip(KV_STRIDES, (*x.k_strides, *x.v_strides), strict=True))}
    k, v = ((t, s, Columns.of(t, tile.row_bytes, padded)) for t, s in ((x.k, x.k_strides), (x.v, x.v_strides)))
    if loads == "ragged":
        maps = (ragged_map(t, strides, heads, x.kv_rows, tile.box, columns) for t, strides, columns in (k, v))
        return {**dict(zip(("k", "v"), maps, strict=True)), "box": tile.box, "kv_rows": x.kv_rows}
    box = box_of_pages(page_size, tile.box)
    (k_map, *k_steps), (v_map, *v_steps) = (
        paged_map(t, strides, heads, page_size, box, columns, column_parts=parts)
        for (t, strides, columns), parts in ((k, tile.key_parts), (v, tile.unit_parts))
    )
    steps = dict(zip(KV_STEPS, (*k_steps, *v_steps), strict=True))
    return {"k": k_map, "v": v_map, "box": box, **pages, **steps}


def fp8_arguments(x: Operands, kv_scale: Tensor | None, dtype: torch.dtype) -> dict[str, Any]:
    """The kernel arguments of FP8 keys and values. ``dtype`` is the dtype of the products.

    An FP8 query has the dtype of the keys.
    """
    if x.k.dtype not in FP8:
        return {}
    if x.q.dtype in FP8:
        return {"kv_scale": kv_scale}
    return {"kv_scale": kv_scale, "kv_type": FP8_TYPES[x.k.dtype] + BFLOAT16_QUERIES * (x.q.dtype != dtype)}


def mask_arguments(mask: Tensor | None, plan: PrefillPlan | None) -> dict[str, Any]:
    """The kernel arguments of a packed custom mask."""
    if mask is None:
        return {}
    return {"mask": mask, "mask_bytes": mask.shape[0], "kv_len": None if plan is None else plan.kv_len}


def query_map(q: Tensor, group: int, padded: bool = False) -> TensorMap:
    """The map of queries. A box has 64 packed rows. The kernel uses the map only if the group divides 64."""
    box_rows = PACKED_ROWS // group if PACKED_ROWS % group == 0 else 0
    columns = Columns.of(q, padded=padded)
    shape, strides = (columns.blocks, q.shape[0], q.shape[1], columns.size), (columns.step, q.stride(0), q.stride(1), 1)
    box = columns.blocks, max(box_rows, 1), group if box_rows else 1, columns.box
    return TensorMap(q, shape, strides, box, columns.box * q.element_size())


def request_arguments(batch: Batch) -> dict[str, Any]:
    """The kernel arguments of requests of ragged keys, 0 with a plan."""
    if isinstance(batch, PrefillPlan):
        return dict.fromkeys(REQUEST_SIZES, 0)
    return dict(zip(REQUEST_SIZES, (batch.rows, batch.keys, batch.splits, batch.split_keys), strict=True))


def launch_tiles(
    x: Operands,
    out: Tensor,
    lse: Tensor,
    batch: Batch,
    workspace: Tensor | None,
    o: AttentionOptions,
) -> None:
    """Launch the kernel (:data:`attn_ops.kernels.triton.prefill_call.LaunchTiles`)."""
    num_heads, num_kv_heads = x.heads
    tile_rows, num_items = work_items(batch, x.q.shape[0])
    group, dims = num_heads // num_kv_heads, x.head_dims
    plan = batch if isinstance(batch, PrefillPlan) else None
    paged = plan is not None and x.k.dim() == 4  # also with a plan for no pages
    page_size = 1 if plan is None else PlanProblem.of(plan.problem).page_size
    loads, packed_rows = kv_loads(paged, page_size), tile_rows * group
    custom_mask = o.mask is not None
    key = PrefillKey.of(dims, loads, x.q.dtype, x.k.dtype, custom_mask, o.pos_encoding)
    short_kv = bool(PlanProblem.of(batch.problem).short_kv) if isinstance(batch, PrefillPlan) else batch.short_kv
    key = key_of_plan(key, packed_rows, short_kv)
    tile = TILE_OF[key]
    num_units = num_items * num_kv_heads * -(-packed_rows // tile.unit_rows(packed_rows)) * tile.unit_parts
    # Requests shorter than a query tile are divided into equal units.
    if isinstance(batch, EqualRequests) and has_static_value(batch.rows):
        tile_rows = max(1, min(tile_rows, batch.rows))
    launch(
        SPECIALIZATIONS[key],
        (persistent_grid(num_units, x.q.device, tile.ctas_per_sm),),
        q=x.q,
        q_map=query_map(x.q, group, key.padded),
        **kv_arguments(x, loads, page_size, tile, key.padded),
        **fp8_arguments(x, o.kv_scale, key.dtype),
        **rope_arguments(o),
        **(dict(zip(PARAMETERS["PADDED"], dims, strict=True)) if key.padded else {}),
        **mask_arguments(o.mask, plan),
        sinks=o.sinks,
        out=out,
        lse=lse if lse.dim() > 1 else None,
        partial=workspace,
        **plan_arguments(batch),
        **(request_arguments(batch) if loads == "ragged" else {}),
        queue=None if plan is None else plan.queue,
        scale=softmax_scale(o.sm_scale, dims[0]),
        cap=o.logits_soft_cap,
        window_left=NO_WINDOW if o.window_left < 0 else o.window_left,
        window_right=0 if o.causal and not custom_mask else NO_WINDOW if o.window_right < 0 else o.window_right,
        rows=x.q.shape[0],
        stride_q_row=x.q.stride(0),
        stride_q_head=x.q.stride(1),
        num_kv_heads=num_kv_heads,
        group=group,
        tile_rows=tile_rows,
        out_type=0 if out.dtype == LIKE_OPERANDS[key.dtype] else OUT_TYPES[out.dtype],
    )


batch_prefill, ragged_prefill, _, block_sparse_prefill = prefill_ops(launch_tiles)


def single_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch_size: int = 1,
    *,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Requests of one row are for the decode kernel, if it takes them."""
    x, o = dense_operands(q, k, v, kv_layout), AttentionOptions(**options)
    key = single_decode_key(x.head_dims, x.heads, q.dtype, k.dtype, o.mask is not None, o.pos_encoding)
    if key is not None and statically_known_true(q.shape[0] == batch_size):
        return single_decode.single_decode(x, batch_size, return_lse, key, o)
    return attend_requests(launch_tiles, x, tiles_of_requests(x, batch_size, o), return_lse, o)
