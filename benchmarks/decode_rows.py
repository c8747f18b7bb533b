"""Decode problems, with target times on one H200. Reports compare each with its fastest peer, whatever its target."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DecodeRow:
    """A batch of decode requests with ``lengths`` KV tokens. ``goal`` is the target time in microseconds."""

    name: str
    lengths: tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    goal: float | None
    head_dim: int = 128
    page_size: int = 16
    fp8: bool = False
    layout: str = "NHD"
    rope: bool = False  # inside attention: keys are not rotated before they are appended

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def equal_length(self) -> int | None:
        """The length of all requests if they are equal, as a contiguous cache needs them."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else None

    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * sum(self.lengths) * self.num_kv_heads * self.head_dim * (1 if self.fp8 else 2)

    def bytes(self) -> int:
        """Bytes of KV and 16-bit queries, each read once, and of outputs, written once."""
        return self.kv_bytes() + 2 * self.batch * self.num_qo_heads * self.head_dim * 2

    def flops(self) -> int:
        """Operations of QK and PV products."""
        return 4 * sum(self.lengths) * self.num_qo_heads * self.head_dim


FP8_GOAL_BYTES_PER_US = 3.9e6
"""Target rate with an FP8 cache above 0.5 GB."""


def _even(batch: int, length: int, heads: tuple[int, int], goal: float | None, page_size: int = 16) -> DecodeRow:
    size = f"{length // 1024}k" if length >= 1024 else str(length)
    name = f"{batch} x {size}, {heads[0]}/{heads[1]}"
    name += f", page {page_size}" if page_size != 16 else ""
    return DecodeRow(name, (length,) * batch, *heads, goal, page_size=page_size)


def _fp8(row: DecodeRow) -> DecodeRow:
    row = replace(row, name=f"{row.name}, fp8", fp8=True, goal=None)
    return replace(row, goal=round(row.bytes() / FP8_GOAL_BYTES_PER_US, 1)) if row.kv_bytes() > 5e8 else row


def _heads_of(head_dim: int, row: DecodeRow) -> DecodeRow:
    return replace(row, name=f"{row.name}, head_dim {head_dim}", head_dim=head_dim)


def _hnd(row: DecodeRow) -> DecodeRow:
    return replace(row, name=f"{row.name}, HND", layout="HND", goal=None)


def _rope(row: DecodeRow) -> DecodeRow:
    return replace(row, name=f"{row.name}, RoPE", rope=True, goal=None)


ROWS: tuple[DecodeRow, ...] = (
    _even(1, 4096, (32, 8), 8),
    _even(1, 32768, (32, 8), 36),
    _even(1, 131072, (32, 8), 127),
    _even(8, 8192, (32, 8), 66),
    _even(32, 4096, (32, 8), 125),
    _even(64, 2048, (32, 8), 126),
    _even(64, 4096, (32, 8), None),
    _even(128, 1024, (32, 8), 127),
    _even(128, 8192, (32, 8), 965),
    _even(256, 2048, (32, 8), 482),
    _even(256, 128, (32, 8), 40),
    _even(64, 2048, (64, 8), 126),
    _even(32, 2048, (32, 32), 243),
    DecodeRow("1 x 64k + 63 x 512, 32/8", (65536, *[512] * 63), 32, 8, 96),
    _even(32, 4096, (32, 8), 131, page_size=1),
    _even(32, 4096, (32, 8), 131, page_size=8),
    _even(32, 4096, (32, 8), 131, page_size=64),
    _even(32, 4096, (32, 2), None),
    _even(32, 4096, (48, 4), None),
    _heads_of(64, _even(128, 2048, (32, 8), None)),
    _heads_of(64, _even(64, 4096, (64, 8), None)),
    _fp8(_heads_of(64, _even(64, 4096, (64, 8), None))),
    _fp8(_even(1, 32768, (32, 8), None)),
    _fp8(_even(32, 4096, (32, 8), None)),
    _fp8(_even(128, 8192, (32, 8), None)),
    _fp8(_even(256, 128, (32, 8), None)),
    _fp8(DecodeRow("1 x 64k + 63 x 512, 32/8", (65536, *[512] * 63), 32, 8, None)),
    _heads_of(256, _even(32, 4096, (16, 8), None)),
    _heads_of(256, _even(32, 4096, (16, 2), None)),
    _heads_of(512, _even(32, 4096, (32, 4), None)),
    _fp8(_heads_of(512, _even(32, 4096, (32, 4), None))),
    *(_heads_of(dim, _even(32, 4096, (32, 32), None)) for dim in (80, 96, 112)),
    *(_fp8(_heads_of(dim, _even(32, 4096, (32, 32), None))) for dim in (80, 96, 112)),
    _hnd(_even(32, 4096, (32, 8), None)),
    _hnd(_heads_of(64, _even(128, 2048, (32, 8), None))),
    _hnd(_fp8(_even(32, 4096, (32, 8), None))),
    _hnd(_fp8(_even(128, 8192, (32, 8), None))),
    _rope(_even(1, 4096, (32, 8), None)),
    _rope(_even(32, 4096, (32, 8), None)),
    _rope(_even(32, 4096, (8, 8), None)),
    _rope(_even(128, 1024, (32, 32), None)),
)
