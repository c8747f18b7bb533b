"""Random valid calls of block-sparse attention: its ops and its wrappers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import attn_ops as flashinfer
from attn_ops.sparse_planner import fold_heads
from helpers.fuzz.attention import attention_call
from helpers.fuzz.batch import Shape, draw_options
from helpers.fuzz.draw import Call, Draw
from helpers.fuzz.oracle import Options, Request, attend
from helpers.fuzz.public import common_options, draw_workspace, public_call
from helpers.oracle import Expected

PREFILL_ONLY = ("window_left", "pos_encoding", "k_scale", "v_scale")


@dataclass
class Matrix:
    """A map ``[maps, MB, NB]`` of blocks of ``rows[h]`` by ``cols[h]``, and queries, keys and values of all heads.

    ``keys`` and ``values`` are NaN where no block reads them; ``clean`` has numbers there.
    """

    d: Draw
    shape: Shape
    rows: Tensor
    cols: Tensor
    causal: bool

    def __post_init__(self) -> None:
        d, (hq, hkv), (dim, vo) = self.d, self.shape.heads, self.shape.dims
        maps, self.num_rows, self.num_keys = len(self.rows), int(self.rows[0].sum()), int(self.cols[0].sum())
        density = d.pick(0.0, 0.2, 0.5, 0.9, 1.0)
        sizes = maps, self.rows.shape[1], self.cols.shape[1]
        self.map = torch.rand(sizes, generator=d.generator) < density
        self.dense = torch.stack([self._expand(h, self.map[h]) for h in range(maps)])
        read = self.dense.any(1)
        if self.causal:
            i, j = torch.arange(self.num_rows)[:, None], torch.arange(self.num_keys)
            self.dense &= j + self.num_rows <= self.num_keys + i
        self.q = (d.normal(self.num_rows, hq, dim) * d.pick(1.0, 0.1, 3.0)).to(self.shape.dtype)
        self.clean = [d.normal(self.num_keys, hkv, width).to(self.shape.kv_dtype) for width in (dim, vo)]
        unread = ~read.T.expand(self.num_keys, hkv)[..., None]
        self.kv = [t.float().masked_fill(unread, math.nan).to(t.dtype) for t in self.clean]

    def _expand(self, h: int, blocks: Tensor) -> Tensor:
        return blocks.repeat_interleave(self.rows[h], 0).repeat_interleave(self.cols[h], 1)

    def expected(self, o: Options) -> Expected:
        """The mask holds causality; each KV head has its own."""
        o = replace(o, causal=False)
        k, v = self.clean
        hkv = k.shape[1]
        if len(self.dense) == 1:
            return attend(Request(self.q, k, v, self.dense[0]), o)
        groups = self.q.unflatten(1, (hkv, -1))
        parts = [attend(Request(groups[:, h], k[:, h : h + 1], v[:, h : h + 1], self.dense[h]), o) for h in range(hkv)]
        columns = zip(*((e.out, e.lse, e.spread, e.reach) for e in parts), strict=True)
        return Expected(*(torch.cat(column, 1) for column in columns))

    @property
    def bsr(self) -> tuple[Tensor, Tensor]:
        """``indptr`` and ``indices`` of the only map, the columns of a block row in any order."""
        columns = [row.nonzero()[:, 0] for row in self.map[0]]
        columns = [c[torch.randperm(len(c), generator=self.d.generator)] for c in columns]
        indptr = torch.tensor([0, *map(len, columns)]).cumsum(0)
        dtype, device = self.d.pick(torch.int32, torch.int64), self.d.pick("cpu", self.d.device)
        return indptr.to(device, dtype), torch.cat(columns).to(device, dtype)

    def __str__(self) -> str:
        sizes = f"rows={self.rows.tolist()}, cols={self.cols.tolist()}, causal={self.causal}"
        return f"{self.shape}, {sizes}, map={self.map.int().tolist()}"


def _uniform(d: Draw, shape: Shape, causal: bool) -> tuple[Matrix, int, int]:
    """A matrix of equal blocks, and their rows and columns."""
    row_block, col_block = d.pick(1, 3, 8, 16, 32), shape.page_size
    rows, cols = d.integer(1, d.by_size(20, 90, 300)), d.integer(1, max(1, d.by_size(40, 200, 900) // col_block))
    blocks = [row_block] * (rows // row_block) + [rows % row_block] * (rows % row_block > 0)
    return Matrix(d, shape, torch.tensor([blocks]), torch.full((1, cols), col_block), causal), row_block, col_block


def _partition(d: Draw, maps: int, blocks: int, total: int, multiple: int) -> Tensor:
    """``maps`` ways of dividing ``total * multiple`` into ``blocks`` sizes, some of them 0."""
    cuts = [sorted(d.integer(0, total) for _ in range(blocks - 1)) for _ in range(maps)]
    return torch.tensor([[0, *c, total] for c in cuts]).diff(dim=1) * multiple


def _variable(d: Draw, shape: Shape, causal: bool) -> Matrix:
    maps = shape.heads[1]
    rows = _partition(d, maps, d.integer(1, 6), d.integer(1, d.by_size(20, 60, 200)), 1)
    multiple = d.pick(1, 1, 4, 16)
    cols = _partition(d, maps, d.integer(1, 8), d.integer(1, max(1, d.by_size(40, 90, 400) // multiple)), multiple)
    return Matrix(d, shape, rows, cols, causal)


def block_sparse_prefill(d: Draw) -> Call:
    shape = Shape.draw(d)
    o = draw_options(d, shape, "window_left", "pos_encoding")
    op, variable = "block_sparse_prefill", d.chance(0.4)
    options = {"sm_scale": o.sm_scale, "logits_soft_cap": o.soft_cap, "sinks": o.sinks, "causal": o.causal}
    if shape.is_fp8:
        options["kv_scale"] = torch.tensor([o.k_scale, o.v_scale], device=d.device)
    sizes: dict[str, Any] = dict(zip(("num_qo_heads", "num_kv_heads"), shape.heads, strict=True))
    sizes |= {"head_dim": shape.dims[0], "head_dim_vo": shape.dims[1], "causal": o.causal, "device": d.device}
    sizes |= {"tile_rows": d.pick(None, 1, 16), "num_ctas": d.pick(None, 12)}
    if not variable:
        m, row_block, col_block = _uniform(d, shape, o.causal)
        indptr, indices = m.bsr
        planner: Any = flashinfer.BlockSparsePlanner(
            m.num_rows, m.num_keys, row_block, col_block, len(indices) + d.pick(1, 7), **sizes
        )
        plan, expected = planner.plan(indptr, indices), m.expected(o)
        k, v = (d.place(t if shape.kv_layout == "NHD" else t.transpose(0, 1)) for t in m.kv)
        q, layout = d.place(m.q), shape.kv_layout
    else:
        m = _variable(d, shape, o.causal)
        page = math.gcd(16, *m.cols.flatten().tolist())
        pages = int((m.map * m.cols[:, None]).sum()) // page * (1 + (m.cols.shape[1] if o.causal else 0))
        options["sinks"] = None
        blocks = m.rows.shape[1], m.cols.shape[1]
        planner = flashinfer.VariableBlockSparsePlanner(
            m.num_rows, m.num_keys, *blocks, pages + 1, page_size=page, **sizes
        )
        plan = planner.plan(m.map.to(d.device), m.rows.to(d.device), m.cols.to(d.device))
        q, k, v = (t.to(d.device) for t in fold_heads(*(t.transpose(0, 1).contiguous() for t in (m.q, *m.kv))))
        e = m.expected(replace(o, sinks=None))
        columns = (t.unflatten(1, (shape.heads[1], -1)).transpose(0, 1).flatten(0, 1) for t in _columns(e))
        expected, layout = Expected(*columns), "NHD"
    arguments = {"q": q, "k": k, "v": v, "plan": plan, "workspace": planner.workspace, "kv_layout": layout, **options}
    return attention_call(d, op, arguments, expected, shape, o, f"{m}, {o}, variable={variable}")


def _columns(e: Expected) -> tuple[Tensor, ...]:
    return e.out, e.lse, e.spread, e.reach


def block_sparse_table(d: Draw) -> Call:
    """The page table names exactly the keys that a block row selects."""
    causal = d.chance(0.5)
    m = _variable(d, Shape.draw(d), False)
    rows, cols = (torch.nn.functional.pad(t.cumsum(1), (1, 0)).int().to(d.device) for t in (m.rows, m.cols))
    page, maps = math.gcd(8, *m.cols.flatten().tolist()), len(m.rows)
    keys = torch.arange(m.num_keys)
    lists = []
    for h in range(maps):
        for r, (begin, end) in enumerate(zip(rows[h, :-1].tolist(), rows[h, 1:].tolist(), strict=True)):
            seen = m.map[h, r].repeat_interleave(m.cols[h]) & (end > begin)
            if causal:
                seen = seen & (keys < end + m.num_keys - m.num_rows)
            lists.append((keys[seen] + h * m.num_keys).tolist())
    most = m.map.numel() * m.num_keys // page + 1
    mask = m.map.to(d.device)

    def check(got: tuple[Tensor, ...]) -> None:
        indptr, indices, last, _ = (t.tolist() for t in got)
        assert len(indices) == most
        for b, expected in enumerate(lists):
            pages = indices[indptr[b] : indptr[b + 1]]
            found = [p * page + t for p in pages for t in range(page)]
            assert found[: len(found) - (page - last[b] if pages else 0)] == expected, b

    return Call(
        "block_sparse_table",
        f"{m}, causal={causal}, page={page}",
        lambda: torch.ops.attn.block_sparse_table(mask, rows, cols, page, most, causal=causal),
        check,
        [mask, rows, cols],
    )


def _dtypes(shape: Shape) -> dict[str, torch.dtype]:
    return {"q_data_type": shape.dtype, "kv_data_type": shape.kv_dtype}


def block_sparse_wrapper(d: Draw) -> Call:
    shape = Shape.draw(d, same_dims=True)
    o = draw_options(d, shape, *PREFILL_ONLY, "sinks")
    m, row_block, col_block = _uniform(d, shape, o.causal)
    indptr, indices = m.bsr
    masks: dict[str, Tensor] = {}
    if d.chance(0.3):
        masks["mask"] = _element_masks(m, indptr, indices, row_block, col_block).to(d.device)
    workspace = draw_workspace(d)
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace, backend=d.pick("auto", "fa2"))
    named = common_options(replace(o, causal=False))
    named = {k: v for k, v in named.items() if k not in ("window_left", "window_right")} | {"causal": o.causal}
    sizes = m.num_rows, m.num_keys, row_block, col_block, *shape.heads, shape.dims[0]
    q, k, v, lse = d.place(m.q), *map(d.place, m.kv), d.chance(0.7)

    def prepare() -> None:
        wrapper.plan(indptr, indices, *sizes, **named, **_dtypes(shape), **masks)

    return public_call(
        d, "block-sparse wrapper", shape, o, lambda: m.expected(o), lambda: wrapper.run(q, k, v, return_lse=lse),
        (q, k, v), f"{m}, {o}, masked={bool(masks)}", lse=lse, prepare=prepare, workspace=workspace, rounded=2,
    )  # fmt: skip


def _element_masks(m: Matrix, indptr: Tensor, indices: Tensor, row_block: int, col_block: int) -> Tensor:
    """Masks of the blocks, which replace causality in ``m``."""
    masks = torch.rand(len(indices), row_block, col_block, generator=m.d.generator) < 0.6
    m.dense = torch.zeros_like(m.dense)
    bounds = indptr.tolist()
    for r in range(len(bounds) - 1):
        for e in range(bounds[r], bounds[r + 1]):
            i, j = r * row_block, int(indices[e]) * col_block
            part = m.dense[0, i : i + row_block, j : j + col_block]
            part |= masks[e, : part.shape[0]]
    return masks


def variable_wrapper(d: Draw) -> Call:
    shape = Shape.draw(d, same_dims=True)
    o = draw_options(d, shape, *PREFILL_ONLY, "sinks")
    m = _variable(d, shape, o.causal)
    workspace = draw_workspace(d)
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace, backend=d.pick("auto", "fa2"))
    named = common_options(replace(o, causal=False))
    named = {k: v for k, v in named.items() if k not in ("window_left", "window_right")} | {"causal": o.causal}
    q, k, v = (d.place(t.transpose(0, 1)) for t in (m.q, *m.kv))
    q = q.contiguous()
    lse = d.chance(0.7)

    def prepare() -> None:
        maps = (t.to(d.device) for t in (m.map, m.rows, m.cols))
        wrapper.plan(*maps, *shape.heads, shape.dims[0], **named, **_dtypes(shape))

    def run() -> Any:
        result = wrapper.run(q, k, v, return_lse=lse)
        parts = [t.transpose(0, 1).contiguous() for t in (result if lse else (result,))]
        return tuple(parts) if lse else parts[0]

    return public_call(
        d, "variable block-sparse wrapper", shape, o, lambda: m.expected(o), run, (q, k, v), f"{m}, {o}",
        lse=lse, prepare=prepare, workspace=workspace, rounded=2,
    )  # fmt: skip


SPARSE_OPS: dict[str, Callable[[Draw], Call]] = {
    "block_sparse_prefill": block_sparse_prefill,
    "block_sparse_table": block_sparse_table,
}
SPARSE_WRAPPERS: dict[str, Callable[[Draw], Call]] = {
    "block-sparse wrapper": block_sparse_wrapper,
    "variable block-sparse wrapper": variable_wrapper,
}
