"""Sparse MLA: each query row attends to tokens that the caller has chosen for it, by their index in the cache.

Each query row is planned as a request of one row, and each of its tokens as a page of one token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attn_ops.argument_checks import integers
from attn_ops.errors import OptionError, PageTableError, ShapeError, fail, shape_of
from attn_ops.frontend.arguments import given_tensor
from attn_ops.frontend.block_tables import lengths
from attn_ops.plan.page_table import as_int32, seen
from attn_ops.symbolic_sizes import agree


class SparseTokens(NamedTuple):
    """The arguments of a sparse call: the most tokens of a query row, and the number of tokens per row, ``[rows]``."""

    top_k: int
    top_k_lens: Tensor | None

    @classmethod
    def of(cls, where: str, top_k: int, top_k_lens: Tensor | None) -> SparseTokens | None:
        """None for a dense call."""
        integers(where, sparse_mla_top_k=top_k)
        if top_k < 0:
            fail(OptionError, where, f"sparse_mla_top_k is {top_k}", "0 or more", "pass 0 for all tokens")
        if top_k:
            return cls(top_k, top_k_lens)
        if top_k_lens is not None:
            what = "sparse_mla_top_k_lens is given and sparse_mla_top_k is 0"
            fail(OptionError, where, what, "both, or neither", "pass the width of block_tables as sparse_mla_top_k")
        return None

    def chosen(
        self,
        where: str,
        block_tables: Tensor,
        seq_lens: Tensor | None,
        qo_indptr: Tensor,
        rows_shape: torch.Size,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """``(tokens, counts)``, int32 ``[rows, top_k]`` and ``[rows]``: of a row the first ``counts`` tokens count.

        With ``top_k_lens``, tokens precede negative entries in ``block_tables``. Without it, they are moved to the
        front.
        """
        table = given_tensor(where, "block_tables", block_tables, device)
        if not agree(table.shape, (*rows_shape, self.top_k)):
            expected = f"{shape_of([*rows_shape, self.top_k])}, sparse_mla_top_k tokens of each query row"
            fail(ShapeError, where, f"block_tables is {shape_of(table)}", expected, "correct one of them")
        rows = math.prod(rows_shape)  # Size.numel() would make a traced size constant
        tokens = as_int32(where, "block_tables", table).to(device).reshape(rows, self.top_k)
        counts = self._visible(where, seq_lens, qo_indptr, rows, device, ragged=len(rows_shape) == 1)
        if self.top_k_lens is not None:
            return tokens.contiguous(), torch.minimum(counts, self._given_counts(where, self.top_k_lens, rows, device))
        named = tokens >= 0
        order = named.cumsum(1, dtype=torch.int32)
        used, order = named & (order <= counts[:, None]), order.minimum(counts[:, None])
        counts, column = order[:, -1:], torch.arange(self.top_k, dtype=torch.int32, device=device)
        place = torch.where(used, order - 1, counts + column - order)
        return torch.empty_like(tokens).scatter(1, place.long(), tokens), counts[:, 0].contiguous()

    def _visible(
        self,
        where: str,
        seq_lens: Tensor | None,
        qo_indptr: Tensor,
        rows: int,
        device: torch.device,
        *,
        ragged: bool,
    ) -> Tensor:
        """int32 ``[rows]``: the most tokens that count, by ``seq_lens`` of requests, or of rows if not ``ragged``."""
        most = torch.full((rows,), self.top_k, dtype=torch.int32, device=device)
        if seq_lens is None:
            return most
        batch = qo_indptr.shape[0] - 1
        if not ragged and seq_lens.numel() != batch:
            return torch.minimum(most, lengths(where, "seq_lens", seq_lens, rows, device, each="query row"))
        kv_lens, row = lengths(where, "seq_lens", seq_lens, batch, device), torch.arange(rows, device=device)
        if batch == 0:
            return torch.zeros_like(most)
        # The conversion copies: Inductor's searchsorted loses the offset of a view.
        ends = qo_indptr[1:].long()
        request = torch.searchsorted(ends, row, right=True).clamp(max=batch - 1)
        later = ends[request] - 1 - row  # rows of the request; negative after the last request
        visible = torch.where(later < 0, 0, kv_lens[request] - later)
        return visible.clamp(min=0).int().minimum(most)

    def _given_counts(self, where: str, top_k_lens: Tensor, rows: int, device: torch.device) -> Tensor:
        name = "sparse_mla_top_k_lens"
        counts = lengths(where, name, top_k_lens, rows, device, each="query row")
        if seen(top_k_lens) and rows and int(top_k_lens.max()) > self.top_k:
            expected = f"at most sparse_mla_top_k, {self.top_k}"
            fail(PageTableError, where, f"{name} has {int(top_k_lens.max())} tokens of a row", expected, "correct it")
        return counts
