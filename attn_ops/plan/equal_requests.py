"""Requests of equal lengths, which need no plan: their query tiles, and the splits of their keys."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_ops.plan.sizing import (
    MIN_PACKED_ROWS,
    ctas_of_tile,
    default_tile_rows,
    is_large_batch,
    is_short_kv,
    resident_ctas,
)
from attn_ops.plan.state import PlanProblem, full_tiles, keys_ahead
from attn_ops.symbolic_sizes import at_least, at_most, has_static_value, quotient

SPLIT_BLOCK = 128
"""Keys of all splits of a request but the last are a multiple of this, the largest KV tile of 16-bit keys.

``kSplitKeys`` of ``kernels/cuda/decode_problem.cuh``.
"""

MAX_SPLITS = 128
"""Most splits of a request. The combine reads all of them for each output row."""

WAVES = (0.5, 1, 2, 3, 4)
"""Waves of CTAs for which numbers of splits are compared. More than one wave leaves fewer CTAs idle at the end."""

UNIT_KEYS, CTA_KEYS, COMBINE_KEYS, PARTIAL_ROW_KEYS = 192, 1.5, 192, 3
"""Times by which numbers of splits are compared, in keys that a CTA reads. They are of the first load and the epilogue
of a unit, of the start of a CTA, of a launch of the combine kernel, and of a packed row of a partial result."""

SATURATING_CTAS = 5 / 9
"""The part of the CTAs that, with few query rows, read keys as fast as all."""

SYMBOLIC_SPLIT_KEYS = 512
"""Fewest keys of a split if sizes are symbolic."""


class EqualRequests(NamedTuple):
    """How a kernel divides requests of equal lengths.

    batch_size  requests
    rows, keys  query rows and keys of each request
    tile_rows   query rows of a query tile
    short_kv    whether they are for the CUDA kernel of short KV
    splits      splits of the keys that the rows of a request see, at least 1
    split_keys  keys of each split but the last
    """

    batch_size: int
    rows: int
    keys: int
    tile_rows: int
    short_kv: bool = False
    splits: int = 1
    split_keys: int = 0

    @property
    def num_tiles(self) -> int:
        """Work items: query tiles of all splits."""
        return self.batch_size * self.splits * -(-self.rows // self.tile_rows)

    @property
    def num_slots(self) -> int:
        """Partial results, each of ``rows`` query rows; none if the keys are not split."""
        return at_most(self.splits - 1, 1) * self.batch_size * self.splits


def divide(
    device: torch.device,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    batch_size: int,
    rows: int,
    keys: int,
    *,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
) -> EqualRequests:
    """Divide ``batch_size`` requests of ``rows`` query rows and ``keys`` keys each.

    ``heads`` are those of queries and of keys and values, and ``head_dims`` those of keys and of values. Symbolic sizes
    choose no tile of few rows.
    """
    large = is_large_batch(*heads, head_dims, batch_size, batch_size * rows, device)
    few = rows if has_static_value(rows) else None
    requests = EqualRequests(
        batch_size,
        rows,
        keys,
        default_tile_rows(device, *heads, head_dims, few, large_batch=large),
        is_short_kv(*heads, head_dims, batch_size, batch_size * rows, device, max_kv_len=keys, causal=causal),
    )
    if requests.short_kv:
        return requests
    problem = PlanProblem(
        page_size=1,
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim_qk=head_dims[0],
        head_dim_vo=head_dims[1],
        max_kv_len=1,
        tile_rows=requests.tile_rows,
    )
    visible = keys if window_left < 0 else at_most(keys, rows + window_left)
    seen_by_all = visible - rows + 1 if keys_ahead(causal, window_right) else visible
    units = at_least(batch_size * heads[1] * ctas_of_tile(problem) * full_tiles(problem, rows), 1)
    packed_rows = at_most(rows, requests.tile_rows) * heads[0] // heads[1] // ctas_of_tile(problem)
    splits = fastest_splits(units, packed_rows, visible, seen_by_all, resident_ctas(device, problem))
    return requests._replace(splits=splits, split_keys=_split_keys(visible, splits))


def divide_rows(batch_size: int, keys: int, window_left: int, ctas: int, packed_rows: int) -> EqualRequests:
    """Divide ``batch_size`` requests of one query row each between ``ctas`` CTAs of a KV head."""
    visible = keys if window_left < 0 else at_most(keys, 1 + window_left)
    splits = fastest_splits(at_least(batch_size, 1), packed_rows, visible, visible, ctas)
    requests = EqualRequests(batch_size, 1, keys, 1)
    return requests._replace(splits=splits, split_keys=_split_keys(visible, splits))


def _split_keys(keys: int, splits: int) -> int:
    return at_least((keys + splits * SPLIT_BLOCK - 1) // (splits * SPLIT_BLOCK), 1) * SPLIT_BLOCK


def fastest_splits(units: int, packed_rows: int, visible: int, seen_by_all: int, ctas: int) -> int:
    """The splits of each request with which ``ctas`` CTAs complete a call first.

    units        units without splits
    packed_rows  query rows times query heads of a unit
    visible      keys that a row of a request sees; ``seen_by_all``: that all rows see
    ctas         CTAs that run at a time
    """
    most = at_least(at_most(seen_by_all // SPLIT_BLOCK, MAX_SPLITS), 1)
    if ctas == 1:
        return 1
    if not all(type(size) is int for size in (units, visible, most)):
        return at_least(at_most(quotient(ctas, units), at_most(seen_by_all // SYMBOLIC_SPLIT_KEYS, MAX_SPLITS)), 1)

    def wave_time(running: int, keys: int) -> float:
        if running == 0:
            return 0
        saturation = running / (SATURATING_CTAS * ctas) if packed_rows <= MIN_PACKED_ROWS else 1
        return keys * max(1, saturation) + UNIT_KEYS

    def time(splits: int) -> float:
        keys, (waves, rest) = _split_keys(visible, splits), divmod(units * splits, ctas)
        total = waves * wave_time(ctas, keys) + wave_time(rest, keys) + CTA_KEYS * min(units * splits, ctas)
        if splits == 1:
            return total
        return total + PARTIAL_ROW_KEYS * packed_rows * -(-units * splits // ctas) + COMBINE_KEYS

    candidates = {1, *(max(1, min(int(waves * ctas) // units, most)) for waves in WAVES)}
    none_empty = {at_least(-(-visible // _split_keys(visible, splits)), 1) for splits in candidates}
    return min(none_empty, key=lambda splits: (time(splits), splits))
