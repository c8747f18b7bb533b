"""What a plan is made for, apart from its capacity."""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_ops.plan.page_table import BatchSize
from attn_ops.plan.sizing import default_tile_rows, is_large_batch, is_short_kv


class PlanSpec(NamedTuple):
    """What a plan is made for, apart from capacity. Another spec needs another plan.

    decode            whether requests have one query row (:class:`DecodePlanner`), else :class:`PrefillPlanner`
    paged             whether the KV is paged, else ragged
    unsplit           whether no request is split
    fixed_split_size  pages of a split, the same in every batch; None if splits are made for load balance
    rows              query rows of every request, if all have the same number
    plain             whether calls are of 16 bits, without a custom mask or positional encoding: others have no kernel
                      for short KV
    large_batch       whether query tiles are for a batch of :func:`is_large_batch`
    short_kv          whether plans are for a batch of :func:`is_short_kv`
    general_decode    whether no CUDA decode kernel takes the calls, as with ALiBi
    fp8_decode        whether the cache of decode is FP8
    """

    decode: bool
    paged: bool
    page_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    window_left: int = -1
    causal: bool = False
    window_right: int = -1
    unsplit: bool = False
    fixed_split_size: int | None = None
    rows: int | None = None
    plain: bool = True
    large_batch: bool = False
    short_kv: bool = False
    general_decode: bool = False
    fp8_decode: bool = False

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.head_dim_qk, self.head_dim_vo

    @property
    def depends_on_batch(self) -> bool:
        """Whether the sizes of query tiles and splits follow from the batch."""
        return not self.unsplit and self.fixed_split_size is None

    def tile_rows(self, device: torch.device, rows: int) -> int:
        """Query rows of a query tile for requests of about ``rows``, used only with ``depends_on_batch``."""
        of = device, self.num_qo_heads, self.num_kv_heads, self.head_dims
        if self.depends_on_batch:
            return default_tile_rows(*of, rows, large_batch=self.large_batch)
        return default_tile_rows(*of, self.rows, unsplit=True)

    def of_batch(self, device: torch.device, size: BatchSize) -> PlanSpec:
        """The spec for a batch of this size, with ``large_batch`` and ``short_kv``.

        The capacity of its plan has no effect.
        """
        if self.decode or not self.depends_on_batch:
            return self
        sizes = self.num_qo_heads, self.num_kv_heads, self.head_dims, size.batch, size.rows, device
        kv_len = size.kv_len if self.plain else None
        short = kv_len is not None and is_short_kv(*sizes, max_kv_len=kv_len, causal=self.causal)
        return self._replace(large_batch=is_large_batch(*sizes), short_kv=short)
