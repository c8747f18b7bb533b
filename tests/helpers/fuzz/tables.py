"""Random valid calls of the ops for page tables and bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helpers.fuzz.batch import Batch, Shape
from helpers.fuzz.draw import Call, Draw

ops = torch.ops.attn


def _int32(values: Any, d: Draw) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=d.device)


def _equal(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.tolist() == b, f"{a.tolist()}, expected {b}"


def batch_indices_positions(d: Draw) -> Call:
    counts = [d.pick(0, 1, 2, d.integer(0, 20)) for _ in range(d.integer(1, 8))]
    lens = [n + d.pick(0, 3, 50) for n in counts]
    spare = d.pick(0, 0, 3)
    indptr, seq_lens = _int32([sum(counts[:i]) for i in range(len(counts) + 1)], d), _int32(lens, d)
    batch = [b for b, n in enumerate(counts) for _ in range(n)] + [-1] * spare
    positions = [m - n + i for n, m in zip(counts, lens, strict=True) for i in range(n)]
    return Call(
        "batch_indices_positions",
        f"{counts}, {lens}, spare={spare}",
        lambda: ops.batch_indices_positions(indptr, seq_lens, sum(counts) + spare, backend=d.backend),
        lambda got: _equal((got[0], got[1][: len(positions)]), (batch, positions)),
        [indptr, seq_lens],
    )


def seq_lens(d: Draw) -> Call:
    shape = Shape.draw(d)
    batch = Batch(d, shape)
    indptr, _, last = batch.page_table(wide=False)
    return Call(
        "seq_lens",
        str(batch),
        lambda: ops.seq_lens(indptr, last, shape.page_size, backend=d.backend),
        lambda got: _equal([got], [batch.kv_lens]),
        [indptr, last],
    )


def page_table(d: Draw) -> Call:
    shape = Shape.draw(d)
    batch = Batch(d, shape)
    tables, lens = batch.block_tables(), batch.seq_lens
    flat = [page for mine in batch.pages for page in mine]
    indptr = [sum(map(len, batch.pages[:b])) for b in range(len(batch.pages) + 1)]
    last = [(n - 1) % shape.page_size + 1 for n in batch.kv_lens]

    def check(got: tuple[Tensor, Tensor, Tensor]) -> None:
        _equal((got[0], got[1][: len(flat)]), (indptr, flat))
        assert all(a == b for a, b, n in zip(got[2].tolist(), last, batch.kv_lens, strict=True) if n)

    return Call(
        "page_table",
        str(batch),
        lambda: ops.page_table(tables, lens, shape.page_size, backend=d.backend),
        check,
        [tables, lens],
    )


def shard_page_table(d: Draw) -> Call:
    shape = Shape.draw(d)
    batch = Batch(d, shape)
    world = d.integer(1, 4)
    rank, size = d.integer(0, world - 1), shape.page_size
    interleave = size * d.pick(1, 1, 2, 5)
    table = batch.page_table(wide=False)
    indptr, flat, last = [0], [], []
    for pages, n in zip(batch.pages, batch.kv_lens, strict=True):
        owned = [p for p in range(-(-n // size)) if p * size // interleave % world == rank]
        flat += [pages[p] for p in owned]
        indptr.append(len(flat))
        last.append(min(size, n - owned[-1] * size) if owned else 0)

    def check(got: tuple[Tensor, Tensor, Tensor]) -> None:
        _equal((got[0], got[1][: len(flat)], got[2]), (indptr, flat, last))
        assert not got[1][len(flat) :].any()

    return Call(
        "shard_page_table",
        f"{batch}, rank={rank}, world={world}, interleave={interleave}",
        lambda: ops.shard_page_table(*table, size, rank, world, interleave, backend=d.backend),
        check,
        list(table),
    )


def _pack(bits: list[bool], bitorder: str) -> list[int]:
    padded = bits + [False] * (-len(bits) % 8)
    weights = [128 >> i for i in range(8)] if bitorder == "big" else [1 << i for i in range(8)]
    return [sum(w for w, bit in zip(weights, padded[i : i + 8], strict=True) if bit) for i in range(0, len(padded), 8)]


def packbits(d: Draw) -> Call:
    n, bitorder = d.pick(0, 1, 7, 8, 9, d.integer(0, 3000)), d.pick("big", "little")
    bits = torch.rand(n, generator=d.generator) < 0.5
    x = d.place(bits)
    return Call(
        "packbits",
        f"{n}, {bitorder}",
        lambda: ops.packbits(x, bitorder=bitorder, backend=d.backend),
        lambda got: _equal([got], [_pack(bits.tolist(), bitorder)]),
        [x],
    )


def segment_packbits(d: Draw) -> Call:
    lens, bitorder = [d.pick(0, 1, 8, d.integer(0, 100)) for _ in range(d.integer(1, 6))], d.pick("big", "little")
    bits = torch.rand(sum(lens), generator=d.generator) < 0.5
    expected, ends = list[int](), [0]
    for part in bits.split(lens):
        expected += _pack(part.tolist(), bitorder)
        ends.append(len(expected))
    x, indptr = d.place(bits), _int32([sum(lens[:i]) for i in range(len(lens) + 1)], d)
    return Call(
        "segment_packbits",
        f"{lens}, {bitorder}",
        lambda: ops.segment_packbits(x, indptr, len(expected), bitorder=bitorder, backend=d.backend),
        lambda got: _equal(got, (expected, ends)),
        [x, indptr],
    )
