"""The CUDA kernels: which sizes they take, and which specialization runs a problem.

A key names a specialization in ``SPECIALIZATIONS`` of the kernel's module in ``kernels/cuda``, without importing it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from attn_ops.gpu import num_sms
from attn_ops.ops.options import FP8
from attn_ops.symbolic_sizes import guard_or_true

CUDA_MERGES = ("merge_state", "merge_states", "merge_state_in_place")
"""Ops of ``kernels/cuda/merge_states.py``."""

CUDA_PLANS = ((128, True), (512, True), (512, False))
"""Keys of ``kernels/cuda/plan_prefill.cu``, ascending: threads of the CTA that makes the work list, and whether the
plan has no more requests and work items than these."""

CUDA_VECTOR = 16
"""Bytes that CUDA kernels load at once."""

CUDA_PAGE = 8
"""TMA loads pages for the CUDA decode and prefill kernels if the page size is a multiple of it, the tokens of a
swizzled group of rows."""

CUDA_DECODE_HEAD_DIMS = frozenset({64, 128})
"""Head dims of the CUDA decode kernel."""

CUDA_DECODE_PADDED_HEAD_DIMS = (80, 96, 112)
"""Head dims that the CUDA decode kernel pads to :data:`CUDA_DECODE_PADDED_TO`. Rows are whole vectors also in FP8."""

CUDA_DECODE_PADDED_TO = 128

CUDA_DECODE_PAIR_BYTES = 128
"""A CTA of the CUDA decode kernel has two KV heads if a token of one head has at most this many bytes, and the number
of heads is even."""

CUDA_DECODE_PACKED_ROWS = (8, 16)
"""Largest group sizes of the specializations of the CUDA decode kernel."""

CUDA_DECODE_PAGE = 16
"""Page sizes of the CUDA decode kernel are multiples of it. Other page sizes would give boxes of 8 tokens, with which
the kernel is slower than the general one for FP8 caches, and for an odd number of 16-bit heads of 64."""

CUDA_PREFILL_HEAD_DIMS = frozenset({(64, 64), (128, 128), (192, 128), (256, 256), (512, 512)})
"""``(head_dim_qk, head_dim_vo)`` of the CUDA prefill kernel."""

CUDA_PREFILL_FP8_HEAD_DIMS = frozenset({(64, 64), (128, 128), (256, 256)})
"""``(head_dim_qk, head_dim_vo)`` of the kernel whose two products are of FP8."""

CUDA_PREFILL_LARGE_BATCH_HEAD_DIMS = frozenset({(128, 128)})
"""Head dims that have another 16-bit kernel, with three consumers, for the query tiles of large batches."""

CUDA_PREFILL_SHORT_KV = {(64, 64): 512, (128, 128): 256}
"""Head dims that have another 16-bit kernel for short KV, and the most keys of a request for which it always is."""

CUDA_PREFILL_SHARED_ROWS_HEAD_DIMS = frozenset({(512, 512)})
"""Head dims that have another kernel for query tiles of one consumer's rows, which its consumers share."""

CUDA_PREFILL_FEW_ROWS_HEAD_DIMS = frozenset({(64, 64), (128, 128), (256, 256)})
"""Head dims that have another kernel for FP8 pages that are converted, for query tiles of one consumer's rows."""

CUDA_PREFILL_ROPE_HEAD_DIMS = frozenset({(64, 64), (128, 128), (256, 256)})
"""Head dims of the kernel that rotates queries and keys."""

CUDA_PREFILL_ALIBI_HEAD_DIMS = frozenset({(64, 64), (128, 128), (256, 256)})
"""Head dims of the kernel that adds the bias of ALiBi."""

CUDA_PREFILL_PADDED_HEAD_DIMS = ((128, 128), (192, 192), (256, 256))
"""Head dims of the kernels for heads with fewer columns, ascending. Tensor maps pad keys and values with zeros, only in
shared memory."""

CUDA_PREFILL_PADDED_PLAIN_HEAD_DIMS = (96, 96)
"""Head dims of a smaller padded kernel, for 16-bit keys and values without a custom mask."""

CUDA_PREFILL_PADDED_FROM = 64
"""Heads of at most this size have no padded kernel: most columns would be padding."""

CUDA_PAGED_PREFILLS = ("batch_prefill", "block_sparse_prefill")
"""Ops of ``kernels/cuda/prefill.py`` over paged KV."""

CUDA_PREFILLS = (*CUDA_PAGED_PREFILLS, "ragged_prefill", "single_prefill")

CUDA_PREFILL_GROUP = 1 << 15
"""Largest group size for which the kernel's division by it, done as a multiplication, is exact."""

CUDA_MERGE_VECTORS = 128
"""Vectors of the longest row that the CUDA kernels merge, in one CTA."""

CUDA_MLA_PAGE = 64
"""TMA loads pages for CUDA MLA if the page size is a multiple of it, the tokens of a KV tile."""

CUDA_MLA_SWAPPED_ROWS = (16, 32)
"""Packed rows of units with swapped operands. The second size is for 16-bit caches that are copied by tokens."""


class DecodeKey(NamedTuple):
    """A specialization of ``decode.cu``.

    kv_heads     KV heads of a CTA, 1 or 2
    packed_rows  most packed rows of a KV head
    dtype        dtype of the products, float16 with an FP8 cache
    fp8          dtype of an FP8 cache, else None
    rope         whether it rotates queries and keys, of 16 bits
    padded       whether the heads of a call have fewer columns than ``head_dim``
    """

    head_dim: int
    kv_heads: int
    packed_rows: int
    dtype: torch.dtype
    fp8: torch.dtype | None
    rope: bool = False
    padded: bool = False

    @classmethod
    def of(
        cls, head_dim: int, kv_heads: int, group: int, dtype: torch.dtype, kv_dtype: torch.dtype, pos_encoding: str
    ) -> DecodeKey:
        fp8 = kv_dtype if kv_dtype in FP8 else None
        packed_rows = next(rows for rows in CUDA_DECODE_PACKED_ROWS if group <= rows)
        padded = is_padded_decode(head_dim)
        return cls(
            CUDA_DECODE_PADDED_TO if padded else head_dim,
            kv_heads,
            packed_rows,
            torch.float16 if fp8 else dtype,
            fp8,
            pos_encoding == "ROPE_LLAMA",
            padded,
        )


def single_decode_key(
    head_dims: tuple[int, int],
    heads: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    custom_mask: bool,
    pos_encoding: str,
) -> DecodeKey | None:
    """The key of calls of ``single_prefill`` with one query row in each request; None if CUDA decode has no kernel.

    ``head_dims`` are those of keys and of values, and ``heads`` those of queries and of keys and values.
    """
    group, fp8 = heads[0] // heads[1], kv_dtype in FP8
    if dtype in FP8 or custom_mask or not has_decode_tile(head_dims) or group > max(CUDA_DECODE_PACKED_ROWS):
        return None
    rotates = pos_encoding == "ROPE_LLAMA" and not (fp8 or is_padded_decode(head_dims[0]))
    if pos_encoding != "NONE" and not rotates:
        return None
    kv_heads = cuda_decode_kv_heads(head_dims[0], heads[1], fp8)
    return DecodeKey.of(head_dims[0], kv_heads, group, dtype, kv_dtype, pos_encoding)


def has_decode_tile(head_dims: tuple[int, int]) -> bool:
    """Whether the CUDA decode kernel takes heads of these dims, of keys and of values."""
    dim_qk, dim_vo = head_dims
    # By ==: the dims of a program may be symbols, which have no hash.
    return dim_qk == dim_vo and (is_padded_decode(dim_qk) or any(dim_qk == dim for dim in CUDA_DECODE_HEAD_DIMS))


def is_padded_decode(head_dim: int) -> bool:
    """Whether the CUDA decode kernel pads heads of ``head_dim`` columns."""
    return any(head_dim == dim for dim in CUDA_DECODE_PADDED_HEAD_DIMS)  # by ==: it may be a symbol, which has no hash


def cuda_decode_kv_heads(head_dim: int, num_kv_heads: int, fp8: bool) -> int:
    """KV heads of a CTA of the CUDA decode kernel over a plan for 16-bit caches, or with ``fp8`` for FP8 caches."""
    return 2 if head_dim * (1 if fp8 else 2) <= CUDA_DECODE_PAIR_BYTES and num_kv_heads % 2 == 0 else 1


def planned_decode_kv_heads(head_dim: int, num_kv_heads: int, fp8: bool, num_ctas: int, device: torch.device) -> int:
    """KV heads of a CTA of the CUDA decode kernel over a plan of ``num_ctas`` CTAs for each KV head.

    A plan for 16-bit caches may serve an FP8 cache. Its CTAs, of one KV head each, are all on the GPU at once: half as
    many CTAs of two KV heads would leave SMs idle. Both specializations run every plan, so a symbolic ``num_ctas``
    decides by its hint.
    """
    most, least = (cuda_decode_kv_heads(head_dim, num_kv_heads, of_fp8) for of_fp8 in (fp8, False))
    return most if most == least or guard_or_true(num_ctas * num_kv_heads > num_sms(device)) else least


class PrefillKey(NamedTuple):
    """A specialization of ``prefill.cu``.

    loads         how the kernel loads keys and values: a result of :func:`kv_loads`
    dtype         the query's dtype; float16 of few rows over FP8 pages (CUDA_PREFILL_FEW_ROWS_HEAD_DIMS)
    fp8           whether keys and values are FP8
    special       the plans of a special kernel: ``"few rows"``, query tiles of at most the packed rows of one consumer;
                  ``"large batch"``, query tiles that fill three consumers; ``"short KV"``, few keys in each request
    custom_mask   whether a packed custom mask says which keys a row sees
    pos_encoding  the positional encoding inside attention, of 16-bit queries
    padded        whether the heads of a call have fewer columns than ``head_dim_qk`` and ``head_dim_vo``
    """

    head_dim_qk: int
    head_dim_vo: int
    loads: str
    dtype: torch.dtype
    fp8: bool
    special: str = ""
    custom_mask: bool = False
    pos_encoding: str = "NONE"
    padded: bool = False

    @classmethod
    def of(
        cls,
        head_dims: tuple[int, int],
        loads: str,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        custom_mask: bool,
        pos_encoding: str,
    ) -> PrefillKey:
        """The key of a call with any plan; of a padded kernel, if no other has the head dims and one may take them."""
        key = cls(*head_dims, loads, dtype, kv_dtype in FP8, custom_mask=custom_mask, pos_encoding=pos_encoding)
        if head_dims in CUDA_PREFILL_HEAD_DIMS or pos_encoding != "NONE" or dtype in FP8:
            return key
        padded = padded_prefill_head_dims(head_dims, key.fp8, custom_mask)
        return key if padded is None else key._replace(head_dim_qk=padded[0], head_dim_vo=padded[1], padded=True)

    def variants(self) -> list[PrefillKey]:
        """This key, for any plan, and the keys of special kernels."""
        dims = self.head_dim_qk, self.head_dim_vo
        if self.padded:
            return [self]
        plain = self.pos_encoding == "NONE"
        converted = self.fp8 and self.dtype not in FP8
        keys = [self]
        if plain and converted and self.loads != "ragged" and dims in CUDA_PREFILL_FEW_ROWS_HEAD_DIMS:
            keys.append(self._replace(special="few rows", dtype=torch.float16))
        if dims in CUDA_PREFILL_SHARED_ROWS_HEAD_DIMS:
            keys.append(self._replace(special="few rows"))
        if plain and not (self.fp8 or self.custom_mask):
            of = {"large batch": CUDA_PREFILL_LARGE_BATCH_HEAD_DIMS, "short KV": CUDA_PREFILL_SHORT_KV}
            keys.extend(self._replace(special=special) for special, taken in of.items() if dims in taken)
        return keys


def padded_prefill_head_dims(head_dims: tuple[int, int], fp8: bool, custom_mask: bool) -> tuple[int, int] | None:
    """The head dims of the padded kernel for heads of ``head_dims``, of keys and of values; None without one.

    ``fp8``: keys and values are FP8. A row of them is whole vectors, and no padded kernel has FP8 and a custom mask.
    """
    itemsize = 1 if fp8 else 2
    if fp8 and custom_mask:
        return None
    if max(head_dims) <= CUDA_PREFILL_PADDED_FROM or any(dim * itemsize % CUDA_VECTOR for dim in head_dims):
        return None
    plain = () if fp8 or custom_mask else (CUDA_PREFILL_PADDED_PLAIN_HEAD_DIMS,)
    return next((dims for dims in (*plain, *CUDA_PREFILL_PADDED_HEAD_DIMS) if max(head_dims) <= dims[0]), None)


def kv_loads(paged: bool, page_size: int) -> str:
    """How CUDA prefill loads keys and values: ``ragged`` or in ``pages``, by TMA, or by ``tokens``, by cp.async.

    Loads by tokens take pages of any size.
    """
    return "ragged" if not paged else "tokens" if page_size % CUDA_PAGE else "pages"


class MlaKey(NamedTuple):
    """A specialization of MLA.

    kernel     ``"mla"`` or ``"mla_swap_ab"``
    unit_rows  packed rows of a unit. In units of 128 two CTAs share KV tiles by TMA multicast
    splits     CTAs that divide the KV tiles of a unit
    dtype      dtype of the query
    fp8        whether the cache is FP8
    by_tokens  whether the cache is copied by tokens
    """

    kernel: str
    unit_rows: int
    splits: int
    dtype: torch.dtype
    fp8: bool
    by_tokens: bool


def mla_by_tokens(page_size: int) -> bool:
    """Whether CUDA MLA copies KV tiles token by token: a page is not whole tiles, as TMA loads them."""
    return page_size % CUDA_MLA_PAGE != 0


def cuda_mla_swapped_rows(fp8: bool, by_tokens: bool) -> tuple[int, ...]:
    """Packed rows of the units in which CUDA MLA swaps its operands."""
    return CUDA_MLA_SWAPPED_ROWS if by_tokens and not fp8 else CUDA_MLA_SWAPPED_ROWS[:1]


def cuda_mla_keys(dtype: torch.dtype, fp8: bool, by_tokens: bool) -> list[MlaKey]:
    """The specializations of which a plan chooses one."""
    sizes = [("mla_swap_ab", rows) for rows in cuda_mla_swapped_rows(fp8, by_tokens)]
    kernels = [(*size, splits) for size in (*sizes, ("mla", 64)) for splits in (1, 2)]
    kernels += [] if by_tokens else [("mla", 128, 1)]
    return [MlaKey(*kernel, dtype, fp8, by_tokens) for kernel in kernels]
