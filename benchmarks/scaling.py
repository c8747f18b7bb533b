"""A model of attention over N GPUs and hosts: decode and prefill of one layer, by heads and by context."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from benchmarks import report

BYTES = 2
"""Bytes of an element of the cache, the query and the output."""


class Machine(NamedTuple):
    """Rates of one GPU and of its links. Microseconds, and bytes or operations per microsecond.

    read, launch      fitted to decode on an H200: a launch takes ``launch + bytes / read``
    flops             prefill, measured
    exchange          a collective of a few bytes on one host, and the merge behind it, measured; with the two
                      collectives that :func:`~attn_ops.distributed.merge_context` has since made one
    one_shot          assumed: the same in one kernel through peer memory, which took 6 to 16 on two GPUs
    link              assumed: NVLink, one direction
    host_exchange     assumed: what a collective over several hosts adds for each doubling of the hosts
    host_link         assumed: the network of one GPU
    """

    read: float = 4.495e6
    launch: float = 8.5
    flops: float = 600e6
    exchange: float = 32.0
    one_shot: float = 9.0
    link: float = 0.35e6
    host_exchange: float = 12.0
    host_link: float = 0.045e6
    gpus: int = 8


class Attention(NamedTuple):
    """Heads of one layer."""

    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    def kv_bytes(self, tokens: int) -> int:
        return 2 * BYTES * tokens * self.num_kv_heads * self.head_dim

    def state_bytes(self, rows: int) -> int:
        """Outputs and their float32 LSE."""
        return rows * self.num_qo_heads * (BYTES * self.head_dim + 4)


class Split(NamedTuple):
    """Ranks that the work is divided over. A KV head that several ranks of ``heads`` need lies on each of them."""

    heads: int = 1
    context: int = 1

    @property
    def gpus(self) -> int:
        return self.heads * self.context

    def layer(self, layer: Attention) -> Attention:
        """The heads of one rank."""
        kv_heads = -(-layer.num_kv_heads // self.heads)
        return layer._replace(num_qo_heads=layer.num_qo_heads // self.heads, num_kv_heads=kv_heads)


def exchange_us(m: Machine, split: Split, received: float, one_shot: bool = False) -> float:
    """The exchange of states and the merge: ``received`` bytes a rank. Ranks of ``heads`` share a host first."""
    if split.context == 1:
        return 0.0
    hosts = -(-split.gpus // m.gpus)
    if hosts == 1:
        return (m.one_shot if one_shot else m.exchange) + received / m.link
    doublings = (hosts - 1).bit_length()
    return m.exchange + m.host_exchange * doublings + received / m.host_link


def decode_us(
    m: Machine, layer: Attention, split: Split, batch: int, tokens: int, *, one_shot: bool = False
) -> tuple[float, float]:
    """``(local part, with the merge)`` of one row for each of ``batch`` requests of ``tokens`` keys."""
    own = split.layer(layer)
    local = m.launch + own.kv_bytes(batch * tokens) / split.context / m.read
    received = own.state_bytes(batch) * (split.context - 1)
    return local, local + exchange_us(m, split, received, one_shot)


def prefill_us(m: Machine, layer: Attention, split: Split, chunk: int, before: int) -> tuple[float, float]:
    """``(local part, with the merge)`` of ``chunk`` rows on ``before`` keys, merged by an all-to-all over heads.

    The rows among themselves are computed for a rank's share of the heads.
    """
    own = split.layer(layer)
    per_pair = 4 * own.num_qo_heads * own.head_dim
    pairs = chunk * before / split.context + chunk * chunk / 2 / split.context
    local = m.launch + per_pair * pairs / m.flops
    received = own.state_bytes(chunk) * (split.context - 1) / split.context
    return local, local + exchange_us(m, split, received)


def best_split(m: Machine, layer: Attention, gpus: int, batch: int, tokens: int) -> Split:
    """The split of ``gpus`` with the fastest decode. Heads are divided inside a host: the next layer sums over them."""
    heads = [h for h in (1, 2, 4, 8, 16, 32) if h <= min(gpus, m.gpus, layer.num_qo_heads) and gpus % h == 0]
    splits = [Split(h, gpus // h) for h in heads]
    return min(splits, key=lambda split: decode_us(m, layer, split, batch, tokens)[1])


CASES = ((1, 128 << 10), (8, 128 << 10), (1, 1 << 20), (1, 10 << 20))
GPUS = (1, 4, 8, 16, 64)


def _name(batch: int, tokens: int) -> str:
    return f"{batch} x {tokens >> 10}k" if tokens < 1 << 20 else f"{batch} x {tokens >> 20}M"


def _column(gpus: int) -> str:
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def decode_rows(m: Machine, layer: Attention) -> list[report.Row]:
    """Microseconds of the fastest split on each number of GPUs, and the split: heads x context."""
    rows: list[report.Row] = []
    for batch, tokens in CASES:
        row: report.Row = {"decode": _name(batch, tokens)}
        for gpus in GPUS:
            split = best_split(m, layer, gpus, batch, tokens)
            time = decode_us(m, layer, split, batch, tokens)[1]
            row[_column(gpus)] = f"{time:.0f} ({split.heads} x {split.context})"
        rows.append(row)
    return rows


def prefill_rows(m: Machine, layer: Attention) -> list[report.Row]:
    """Milliseconds of a chunk of 8k rows, with 8 ranks of heads on each host and the hosts by context."""
    rows: list[report.Row] = []
    for before in (128 << 10, 1 << 20, 10 << 20):
        row: report.Row = {"8k rows after": _name(1, before).removeprefix("1 x ")}
        for gpus in GPUS:
            split = Split(min(gpus, 8), max(1, gpus // 8))
            row[_column(gpus)] = f"{prefill_us(m, layer, split, 8192, before)[1] / 1000:.2f}"
        rows.append(row)
    return rows


def tables() -> list[str]:
    """The lines of both tables of the guide."""
    machine, layer = Machine(), Attention()
    return [*report.table(decode_rows(machine, layer)), "", *report.table(prefill_rows(machine, layer))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options."""


def run(args: argparse.Namespace) -> None:
    """Print the tables."""
    print("\n".join(tables()))
