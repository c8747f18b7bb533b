"""Block-sparse problems: random block maps over dense keys, their planners, and a float32 reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.comparison import largest_error
from benchmarks.timing import copies_for


@dataclass(frozen=True)
class SparseRow:
    """A square matrix of ``size`` query rows and keys, of whose blocks a share of ``density`` is selected.

    blocks     block rows and columns
    variable   a map for each KV head, with blocks of random sizes; else all blocks are of ``size // blocks``
    multiple   divides the random sizes
    """

    name: str
    size: int
    blocks: int
    density: float
    variable: bool = False
    multiple: int = 1
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def block(self) -> int:
        return self.size // self.blocks

    def kv_bytes(self, element: int = 2) -> int:
        return 2 * self.size * self.num_kv_heads * self.head_dim * element


SPARSE_ROWS = [
    *(
        SparseRow(f"8k x 8k, blocks of {8192 // blocks}, {density:.0%}", 8192, blocks, density)
        for blocks in (128, 64)
        for density in (0.1, 0.3)
    ),
    *(
        SparseRow(f"8k x 8k, 64 x 64 blocks of random sizes{of}, {density:.0%}", 8192, 64, density, True, multiple)
        for multiple, of in ((1, ""), (16, ", multiples of 16"))
        for density in (0.1, 0.3)
    ),
]


class SparseProblem:
    """Copies of keys and values, and a random block map.

    ``keys[i]`` and ``values[i]`` are ``[size, num_kv_heads, head_dim]``, or heads first if the blocks are variable, as
    FlashInfer's wrappers take them. ``row_sz`` and ``col_sz [maps, blocks]`` are the sizes of blocks.
    """

    def __init__(self, row: SparseRow, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> None:
        self.row, self.dtype, self.device = row, dtype, device
        self._generator = torch.Generator(device).manual_seed(0)
        self.copies = copies_for(row.kv_bytes())
        maps = row.num_kv_heads if row.variable else 1
        self.map = self._random(maps, row.blocks, row.blocks) < row.density
        self.row_sz, self.col_sz = (self._sizes(maps) for _ in range(2))
        self.q = self._tensor(row.num_qo_heads)
        self.keys, self.values = ([self._tensor(row.num_kv_heads) for _ in range(self.copies)] for _ in range(2))

    def _random(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device)

    def _tensor(self, heads: int) -> Tensor:
        shape = (heads, self.row.size) if self.row.variable else (self.row.size, heads)
        full = (*shape, self.row.head_dim)
        return torch.randn(full, generator=self._generator, device=self.device, dtype=self.dtype)

    def _sizes(self, maps: int) -> Tensor:
        row = self.row
        if not row.variable:
            return torch.full((maps, row.blocks), row.block, dtype=torch.int32, device=self.device)
        units = row.size // row.multiple
        cuts = self._random(maps, units - 1).argsort(1)[:, : row.blocks - 1].add(1).sort(1).values
        ends = torch.cat((cuts.new_zeros(maps, 1), cuts, cuts.new_full((maps, 1), units)), 1)
        return ends.diff(dim=1).mul(row.multiple).int()

    @property
    def bsr(self) -> tuple[Tensor, Tensor]:
        """``indptr`` and ``indices`` of the only map."""
        steps = self.map[0].sum(1)
        return torch.cat((steps.new_zeros(1), steps.cumsum(0))).int(), self.map[0].nonzero()[:, 1].int()

    def flops(self) -> int:
        """4 * head_dim operations for each query head, and query row and key of a selected block."""
        selected = self.map * self.row_sz[:, :, None].long() * self.col_sz[:, None]
        heads = self.row.num_qo_heads // len(self.map)
        return 4 * self.row.head_dim * heads * int(selected.sum())

    def error(self, out: Tensor, copy: int = 0, rows: int = 64) -> float:
        """Largest relative error in norm of first, middle and last query rows of two KV heads, against float32."""
        size, group = self.row.size, self.row.num_qo_heads // self.row.num_kv_heads
        pairs = []
        for h in {0, self.row.num_kv_heads - 1}:
            for begin in {0, max(0, size // 2 - rows // 2), max(0, size - rows)}:
                i = torch.arange(begin, min(size, begin + rows), device=self.device)
                heads = slice(h * group, (h + 1) * group)
                actual = out[heads, i].transpose(0, 1) if self.row.variable else out[i, heads]
                pairs.append((actual, self._expected(h, heads, i, copy)))
        return largest_error(pairs)

    def _expected(self, h: int, heads: slice, i: Tensor, copy: int) -> Tensor:
        """The float32 result ``[rows, group, head_dim]`` of rows ``i`` for KV head ``h``."""
        m = h if self.row.variable else 0
        block_row = torch.searchsorted(self.row_sz[m].cumsum(0), i, right=True)
        seen = self.map[m][block_row].repeat_interleave(self.col_sz[m], 1)
        q, k, v = (t if self.row.variable else t.transpose(0, 1) for t in (self.q, self.keys[copy], self.values[copy]))
        logits = torch.einsum("gnd,md->ngm", q[heads][:, i].float(), k[h].float()) * self.row.head_dim**-0.5
        logits = logits.masked_fill(~seen[:, None], -torch.inf)
        p = torch.where(seen.any(1)[:, None, None], logits.softmax(-1), 0.0)
        return torch.einsum("ngm,md->ngd", p, v[h].float())
