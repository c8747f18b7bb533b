"""Prefill and MLA problems, with targets on one H200. Reports compare each with its fastest peer."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PrefillRow:
    """A batch of prefill chunks. ``goal`` is the target rate in TFLOP/s, with FLOPs as :meth:`flops` counts them."""

    name: str
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    goal: float | None
    causal: bool = True
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    head_dim_vo: int = 128
    page_size: int = 16
    window_left: int = -1
    logits_soft_cap: float = 0.0
    fp8: bool = False  # keys and values
    fp8_query: bool = False
    paged_only: bool = False  # the row is about its page size: only implementations over paged KV are compared
    mask: str = ""  # custom: "causal", or "random": all keys before the new ones, and a random half of these
    pos_encoding: str = "NONE"  # inside attention: with RoPE, keys are not rotated before they are appended

    @property
    def batch(self) -> int:
        return len(self.kv_lens)

    @property
    def equal_lengths(self) -> tuple[int, int] | None:
        """Query rows and keys of all requests if they are equal, as a dense batch needs them."""
        lengths = set(zip(self.qo_lens, self.kv_lens, strict=True))
        return lengths.pop() if len(lengths) == 1 else None

    def flops(self) -> int:
        """2 * num_qo_heads * (head_dim + head_dim_vo) operations for each query row and key that it sees.

        With a random mask for each query row and key, as no KV tile is hidden whole.
        """
        pairs = sum(self._visible(n, m) for n, m in zip(self.qo_lens, self.kv_lens, strict=True))
        return 2 * self.num_qo_heads * (self.head_dim + self.head_dim_vo) * pairs

    def _visible(self, rows: int, keys: int) -> int:
        """Pairs of a query row and a key that it sees, of one request."""
        if not self.causal and self.mask != "causal":
            return rows * keys
        most = keys if self.window_left < 0 else self.window_left + 1
        return sum(min(keys - rows + row + 1, most) for row in range(rows))

    def kv_bytes(self) -> int:
        return sum(self.kv_lens) * self.num_kv_heads * (self.head_dim + self.head_dim_vo) * (1 if self.fp8 else 2)

    def bytes(self) -> int:
        """Bytes of keys, values and queries, each read once, and of outputs, written once."""
        of_row = self.head_dim * (1 if self.fp8_query else 2) + self.head_dim_vo * 2
        return self.kv_bytes() + sum(self.qo_lens) * self.num_qo_heads * of_row


@dataclass(frozen=True)
class MlaRow:
    """A batch of MLA decode requests: latents of 512 and 64. ``goal`` is the target time in microseconds."""

    name: str
    kv_lens: tuple[int, ...]
    goal: float | None
    num_heads: int = 128
    page_size: int = 64
    fp8: bool = False  # the cache

    @property
    def batch(self) -> int:
        return len(self.kv_lens)

    def flops(self) -> int:
        return 2 * self.num_heads * (576 + 512) * sum(self.kv_lens)

    def kv_bytes(self) -> int:
        return sum(self.kv_lens) * 576 * (1 if self.fp8 else 2)

    def bytes(self) -> int:
        """Bytes of the KV cache and 16-bit queries, each read once, and of outputs, written once."""
        return self.kv_bytes() + self.batch * self.num_heads * (576 + 512) * 2


def _prefill(
    batch: int,
    new: int,
    context: int,
    goal: float | None,
    causal: bool = True,
    heads: tuple[int, int] = (32, 8),
    dims: tuple[int, int] = (128, 128),
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    page_size: int = 16,
    mask: str = "",
    pos_encoding: str = "NONE",
) -> PrefillRow:
    size = f"{context // 1024}k" if context % 1024 == 0 else str(context)
    name = f"{batch} x {size}" if new == context else f"{batch} x ({new} new on {size})"
    name += "" if heads == (32, 8) else f", {heads[0]}/{heads[1]}"
    name += "" if dims == (128, 128) else f", head_dim {'/'.join(map(str, dict.fromkeys(dims)))}"
    name += {"": "" if causal else ", not causal", "random": ", custom mask", "causal": ", causal as custom mask"}[mask]
    name += "" if window_left < 0 else f", window {window_left}"
    name += "" if logits_soft_cap == 0 else f", soft cap {logits_soft_cap:g}"
    name += "" if page_size == 16 else f", page {page_size}"
    name += {"NONE": "", "ROPE_LLAMA": ", RoPE", "ALIBI": ", ALiBi"}[pos_encoding]
    lengths = (new,) * batch, (context,) * batch
    row = PrefillRow(name, *lengths, goal, causal and not mask, *heads, *dims, page_size, window_left, logits_soft_cap)
    return replace(row, paged_only=page_size != 16, mask=mask, pos_encoding=pos_encoding)


PREFILL_ROWS: tuple[PrefillRow, ...] = (
    _prefill(1, 4096, 4096, 515),
    _prefill(1, 8192, 8192, 635),
    _prefill(1, 16384, 16384, 650),
    _prefill(8, 512, 8192, 640),
    _prefill(32, 16, 4096, 250),
    _prefill(1, 600, 8192, None),
    _prefill(1, 64, 8192, None),
    _prefill(4, 4096, 4096, 680, causal=False),
    _prefill(64, 512, 512, None),
    _prefill(8, 2048, 2048, None),
    _prefill(128, 128, 128, None),
    _prefill(64, 256, 256, None, causal=False, dims=(64, 64), heads=(16, 16)),
    _prefill(1, 4096, 4096, None, logits_soft_cap=50.0),
    _prefill(1, 8192, 8192, None, window_left=512),
    _prefill(1, 16384, 16384, None, dims=(64, 64)),
    _prefill(1, 8192, 8192, None, dims=(256, 256), heads=(16, 4)),
    _prefill(1, 8192, 8192, None, dims=(192, 128), heads=(16, 16)),
    _prefill(64, 4, 4096, None),
    _prefill(1, 8192, 8192, None, page_size=1),
    _prefill(8, 512, 8192, None, page_size=1),
    PrefillRow("1 x (2048 new on 8k) + 64 x (1 new on 2k)", (2048, *[1] * 64), (8192, *[2048] * 64), None),
    _prefill(1, 8192, 8192, None, mask="random"),
    _prefill(32, 16, 4096, None, mask="random"),
    _prefill(8, 64, 8192, None, mask="random", page_size=1),
    _prefill(1, 8192, 8192, None, pos_encoding="ROPE_LLAMA"),
    _prefill(8, 512, 8192, None, pos_encoding="ROPE_LLAMA"),
    _prefill(32, 4, 4096, None, pos_encoding="ROPE_LLAMA"),
    _prefill(1, 8192, 8192, None, mask="causal"),
    _prefill(1, 8192, 8192, None, pos_encoding="ALIBI"),
    _prefill(32, 4, 4096, None, pos_encoding="ALIBI"),
    _prefill(1, 8192, 8192, None, dims=(512, 512), heads=(32, 4)),
    _prefill(8, 512, 8192, None, dims=(512, 512), heads=(8, 2)),
    _prefill(32, 4, 4096, None, dims=(512, 512), heads=(32, 4)),
    *(_prefill(1, 8192, 8192, None, dims=(dim, dim), heads=(32, 32)) for dim in (72, 80, 96, 112)),
    *(_prefill(1, 8192, 8192, None, dims=(dim, dim), heads=(16, 16)) for dim in (160, 192)),
    _prefill(8, 2048, 2048, None, dims=(96, 96), heads=(32, 32)),
    _prefill(8, 512, 8192, None, dims=(96, 96), heads=(32, 32)),
    _prefill(16, 1024, 1024, None, causal=False, dims=(72, 72), heads=(16, 16)),
    _prefill(4, 4096, 4096, None, causal=False, dims=(80, 80), heads=(16, 16)),
    _prefill(1, 8192, 8192, None, dims=(256, 256), heads=(16, 4), pos_encoding="ALIBI"),
    _prefill(32, 200, 200, None),
    _prefill(128, 64, 64, None),
    _prefill(1, 1000, 1000, None, heads=(40, 8)),
    _prefill(32, 256, 256, None, causal=False, dims=(64, 64), heads=(12, 12)),
    _prefill(8, 448, 448, None, dims=(64, 64), heads=(20, 20)),
    _prefill(64, 77, 77, None, dims=(64, 64), heads=(12, 12)),
    _prefill(256, 64, 64, None, dims=(64, 64), heads=(16, 16)),
)


PREFILL_DENSE_ROWS: tuple[PrefillRow, ...] = (
    *(_prefill(1, 1, keys, None, causal=False) for keys in (512, 2048, 4096, 8192, 32768)),
    _prefill(8, 1, 4096, None, causal=False),
    _prefill(4, 1, 8192, None, causal=False),
    _prefill(1, 1, 8192, None, causal=False, heads=(16, 1)),
    _prefill(1, 1, 2048, None, causal=False, heads=(20, 20), dims=(64, 64)),
    _prefill(1, 64, 4096, None),
    _prefill(1, 256, 8192, None),
    _prefill(1, 100, 1500, None, causal=False, heads=(28, 4)),
    _prefill(2, 77, 2048, None, causal=False, heads=(20, 20), dims=(64, 64)),
    _prefill(2, 4096, 77, None, causal=False, heads=(10, 10), dims=(64, 64)),
    _prefill(2, 256, 256, None, causal=False, heads=(8, 8), dims=(160, 160)),
    _prefill(32, 128, 128, None, causal=False, heads=(12, 12), dims=(64, 64)),
    _prefill(64, 197, 197, None, causal=False, heads=(12, 12), dims=(64, 64)),
    _prefill(2, 1024, 1024, None, causal=False, heads=(20, 20), dims=(64, 64)),
    _prefill(4, 300, 300, None, heads=(28, 4)),
    _prefill(8, 2048, 2048, None),
)
"""Requests of equal lengths, without a plan."""


def _fp8(row: PrefillRow, query: bool = False) -> PrefillRow:
    return replace(row, name=f"{row.name}, fp8 {'query and ' * query}cache", goal=None, fp8=True, fp8_query=query)


PREFILL_FP8_ROWS: tuple[PrefillRow, ...] = (
    _fp8(_prefill(1, 8192, 8192, None)),
    _fp8(_prefill(8, 512, 8192, None)),
    _fp8(_prefill(64, 512, 512, None)),
    _fp8(_prefill(32, 16, 4096, None)),
    _fp8(_prefill(1, 8192, 8192, None), query=True),
    _fp8(_prefill(1, 16384, 16384, None), query=True),
    _fp8(_prefill(8, 512, 8192, None), query=True),
    _fp8(_prefill(8, 2048, 2048, None), query=True),
    _fp8(_prefill(64, 512, 512, None), query=True),
    _fp8(_prefill(32, 4, 4096, None, heads=(64, 8))),
    _fp8(_prefill(8, 512, 8192, None, dims=(512, 512), heads=(8, 2))),
    _fp8(_prefill(32, 4, 4096, None, dims=(512, 512), heads=(32, 4))),
    _fp8(_prefill(8, 512, 8192, None, dims=(96, 96), heads=(32, 32))),
    _fp8(_prefill(1, 8192, 8192, None, pos_encoding="ALIBI")),
    _fp8(_prefill(32, 4, 4096, None, pos_encoding="ALIBI")),
)

MLA_ROWS: tuple[MlaRow, ...] = (
    MlaRow("1 x 8k", (8192,), 15),
    MlaRow("16 x 4k", (4096,) * 16, 38),
    MlaRow("64 x 4k", (4096,) * 64, 115),
    MlaRow("80 x 4k", (4096,) * 80, None),
    MlaRow("128 x 8k", (8192,) * 128, 440),
    MlaRow("32 x 4k, 64 heads", (4096,) * 32, None, num_heads=64),
    MlaRow("32 x 4k, 32 heads", (4096,) * 32, None, num_heads=32),
    MlaRow("32 x 4k, 16 heads", (4096,) * 32, None, num_heads=16),
    MlaRow("64 x 4k, page 1", (4096,) * 64, None, page_size=1),
    MlaRow("32 x 4k, 32 heads, page 1", (4096,) * 32, None, num_heads=32, page_size=1),
    MlaRow("32 x 4k, 16 heads, page 1", (4096,) * 32, None, num_heads=16, page_size=1),
    MlaRow("1 x 8k, fp8 cache", (8192,), None, fp8=True),
    MlaRow("64 x 4k, fp8 cache", (4096,) * 64, None, fp8=True),
    MlaRow("32 x 4k, 64 heads, fp8 cache", (4096,) * 32, None, num_heads=64, fp8=True),
    MlaRow("32 x 4k, 16 heads, fp8 cache", (4096,) * 32, None, num_heads=16, fp8=True),
    MlaRow("128 x 4k, 16 heads, fp8 cache", (4096,) * 128, None, num_heads=16, fp8=True),
)
