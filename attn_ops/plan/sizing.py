"""Sizes of plans: query tiles, CTAs, splits and clusters, decided on the host from the device and the problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attn_ops.gpu import HOPPER, hopper_sms, is_hopper, properties
from attn_ops.ops.cuda_kernels import (
    CUDA_PREFILL_LARGE_BATCH_HEAD_DIMS,
    CUDA_PREFILL_PADDED_FROM,
    CUDA_PREFILL_PADDED_PLAIN_HEAD_DIMS,
    CUDA_PREFILL_SHORT_KV,
    cuda_decode_kv_heads,
)
from attn_ops.ops.options import MLA_HEAD_DIMS
from attn_ops.ops.unsupported import has_cuda_decode
from attn_ops.plan.state import CTAS_PER_SM, PlanProblem, PrefillPlan, full_tiles, num_partials
from attn_ops.symbolic_sizes import at_least, decide, statically_known_true

CTA_MULTIPLE = 8
"""The number of CTAs per KV head is a multiple of this if it is large enough: 2^n requests then often need no split."""

MIN_PACKED_ROWS, MAX_PACKED_ROWS = 64, 256
"""Packed rows (query rows times query heads per KV head) of a prefill tile by default."""

PACKED_ROWS = (MIN_PACKED_ROWS, 128, MAX_PACKED_ROWS)
"""Packed rows of query tiles by default: the fewest that hold a request, or the most."""

MLA_PACKED_ROWS = (16, 32, *PACKED_ROWS)
"""Packed rows of query tiles for heads above :data:`LARGE_HEAD_DIM`. Units of ``mla_swap_ab.cu`` have 16 or 32."""

THREE_CONSUMERS_PACKED_ROWS = (MIN_PACKED_ROWS, 128, 192, 384)
"""Packed rows of query tiles for heads of :func:`takes_three_consumers` on Hopper."""

LARGE_BATCH_PACKED_ROWS = 768
"""Packed rows of a query tile of large batches: whole units of three and of two consumers, and whole Triton tiles."""

CTA_PACKED_ROWS = 128
"""Packed rows that a CTA of a prefill kernel holds."""

THREE_CONSUMERS_HEAD_DIMS = (64, 64)
"""Head dims of keys and values of the CUDA prefill kernel that always has three consumers in 16 bits. That of
``CUDA_PREFILL_PADDED_PLAIN_HEAD_DIMS`` has them too."""

THREE_CONSUMERS_CTA_PACKED_ROWS = 192
"""Packed rows that a CTA of three consumers holds."""

LARGE_BATCH_WAVES, LARGE_BATCH_REQUEST_ROWS = 8, 1024
"""Units of three consumers for each SM, and packed rows of a request, that large batches have at least.

With fewer units more SMs are idle in the last wave. A unit of few rows, as of decode, takes as long as a full one.
"""

FEW_WAVES, FEW_WAVES_KV_LEN = 4, 1024
"""Units for each SM, and keys of a request, up to which causal batches that fill the device are for the kernel of short
KV, whose smaller units divide the work of the last wave better."""

LARGE_HEAD_DIM = 256
"""Head dim above which a CTA of a prefill kernel holds only ``MIN_PACKED_ROWS``."""

MIN_CLUSTER_SMS_PERCENT = 85
"""Clusters divide KV, which saves partial results, if they use this percentage of the SMs that single CTAs would."""

SMALL_HEAD_DIM = 128
"""Head dim of values up to which a prefill plan has capacity for two splits of each query tile of a wave."""


def power_of_two_from(size: int) -> int:
    """The first power of two that is not less than ``size``, an integer of Python or NumPy, 1 or more."""
    return 1 << (int(size) - 1).bit_length()


def rows_per_tile(
    num_qo_heads: int, num_kv_heads: int, rows: int | None = None, packed_rows: Sequence[int] = PACKED_ROWS
) -> int:
    """Default ``tile_rows`` of a prefill plan, in query rows.

    ``rows`` is the number of query rows of a request, or None for the largest tile. ``packed_rows`` are the sizes of
    tiles, ascending.
    """
    group = max(1, num_qo_heads // max(1, num_kv_heads))  # the head counts are checked later, with a message
    *sizes, most = packed_rows
    size = most if rows is None else next((size for size in sizes if decide(rows * group <= size)), most)
    return max(1, size // group)


def packed_rows_of_tiles(
    head_dim_qk: int, head_dim_vo: int, device: torch.device, large_batch: bool = False
) -> tuple[int, ...]:
    """``packed_rows`` of :func:`rows_per_tile` for these head dims."""
    if max(head_dim_qk, head_dim_vo) > LARGE_HEAD_DIM:
        return MLA_PACKED_ROWS
    if not is_hopper(device):
        return PACKED_ROWS
    if takes_three_consumers((head_dim_qk, head_dim_vo)):
        return THREE_CONSUMERS_PACKED_ROWS
    if head_dim_qk != head_dim_vo:
        return PACKED_ROWS
    return (*PACKED_ROWS, LARGE_BATCH_PACKED_ROWS) if large_batch else PACKED_ROWS


def default_tile_rows(
    device: torch.device,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    rows: int | None = None,
    *,
    large_batch: bool = False,
    unsplit: bool = False,
) -> int:
    """Query rows of a query tile by default.

    rows         query rows of a request, or None for the largest tile
    large_batch  the batch is one of :func:`is_large_batch`
    unsplit      the plan splits no request, or each at the same places in every batch
    """
    sizes = (
        unsplit_packed_rows(*head_dims, device) if unsplit else packed_rows_of_tiles(*head_dims, device, large_batch)
    )
    return rows_per_tile(num_qo_heads, num_kv_heads, rows, sizes)


def is_large_batch(
    num_qo_heads: int, num_kv_heads: int, head_dims: tuple[int, int], batch: int, rows: int, device: torch.device
) -> bool:
    """Whether plans for ``batch`` requests and ``rows`` query rows in all are for units of three consumers.

    ``head_dims`` are those of keys and values. The partial results of the splits must not take more workspace than
    those of plans for other batches. False if symbolic sizes do not decide.
    """
    # By !=: the dims of a program may be symbols, which have no hash.
    if num_kv_heads == 0 or all(head_dims != dims for dims in CUDA_PREFILL_LARGE_BATCH_HEAD_DIMS):
        return False
    sms = hopper_sms(device)
    if num_kv_heads * (LARGE_BATCH_PACKED_ROWS // THREE_CONSUMERS_CTA_PACKED_ROWS) > sms:  # sms is 0 on other devices
        return False
    units = rows * num_qo_heads // THREE_CONSUMERS_CTA_PACKED_ROWS
    request_rows = rows * num_qo_heads // num_kv_heads // at_least(batch, 1)
    return statically_known_true(units >= LARGE_BATCH_WAVES * sms) and statically_known_true(
        request_rows >= LARGE_BATCH_REQUEST_ROWS
    )


def is_short_kv(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dims: tuple[int, int],
    batch: int,
    rows: int,
    device: torch.device,
    *,
    max_kv_len: int,
    causal: bool,
) -> bool:
    """Whether plans for requests of at most ``max_kv_len`` keys are for the CUDA prefill kernel of short KV.

    The other arguments are those of :func:`is_large_batch`, whose batches are not. Such plans split no request. False
    if symbolic sizes do not decide.
    """
    most = next((keys for dims, keys in CUDA_PREFILL_SHORT_KV.items() if head_dims == dims), 0)  # symbols have no hash
    sms = hopper_sms(device)
    if most == 0 or sms == 0 or is_large_batch(num_qo_heads, num_kv_heads, head_dims, batch, rows, device):
        return False
    if statically_known_true(max_kv_len <= most):
        return True
    unit_rows = THREE_CONSUMERS_CTA_PACKED_ROWS if takes_three_consumers(head_dims) else CTA_PACKED_ROWS
    units = rows * num_qo_heads // unit_rows
    few = statically_known_true(units >= sms) and statically_known_true(units <= FEW_WAVES * sms)
    return causal and few and statically_known_true(max_kv_len <= FEW_WAVES_KV_LEN)


def unsplit_packed_rows(head_dim_qk: int, head_dim_vo: int, device: torch.device) -> tuple[int, ...]:
    """:func:`packed_rows_of_tiles` from :data:`MIN_PACKED_ROWS` on, for plans without splits and for block rows."""
    return tuple(size for size in packed_rows_of_tiles(head_dim_qk, head_dim_vo, device) if size >= MIN_PACKED_ROWS)


def fills_three_consumers(packed_rows: int) -> bool:
    """Whether the packed rows of a query tile are units of three consumers of the CUDA prefill kernel."""
    return -(-packed_rows // MIN_PACKED_ROWS) % 3 == 0


def takes_three_consumers(head_dims: tuple[int, int]) -> bool:
    """Whether the CUDA prefill kernel for these head dims, of keys and of values, always has three consumers."""
    padded = CUDA_PREFILL_PADDED_FROM < max(head_dims) <= max(CUDA_PREFILL_PADDED_PLAIN_HEAD_DIMS)
    return padded or head_dims == THREE_CONSUMERS_HEAD_DIMS


def has_three_consumers(problem: PlanProblem) -> bool:
    """Whether the CUDA prefill kernel has three consumers in 16 bits."""
    if problem.head_dims in CUDA_PREFILL_LARGE_BATCH_HEAD_DIMS:
        return fills_three_consumers(packed_rows_of_tile(problem))
    return takes_three_consumers(problem.head_dims)


def has_large_head_dim(problem: PlanProblem) -> bool:
    return max(problem.head_dims) > LARGE_HEAD_DIM


def packed_rows_of_tile(problem: PlanProblem) -> int:
    return problem.tile_rows * problem.num_qo_heads // problem.num_kv_heads


def cta_packed_rows(problem: PlanProblem) -> int:
    """Packed rows that a CTA of a prefill kernel holds.

    Heads of at most 96 have the number of the CUDA kernel on every device: with 128 packed rows in a CTA, tiles of
    :data:`PACKED_ROWS` would take as many CTAs.
    """
    if has_large_head_dim(problem):
        return MIN_PACKED_ROWS
    return THREE_CONSUMERS_CTA_PACKED_ROWS if has_three_consumers(problem) else CTA_PACKED_ROWS


def ctas_of_tile(problem: PlanProblem) -> int:
    """CTAs that compute a query tile for one KV head, each a part of its packed rows."""
    return -(-packed_rows_of_tile(problem) // cta_packed_rows(problem))


def mla_cluster(packed_rows: int) -> int:
    """CTAs of CUDA MLA that share KV tiles: two, unless one would be left without packed rows."""
    return 1 if -(-packed_rows // MIN_PACKED_ROWS) % 2 else 2


def cluster_splits(
    sms: int, problem: PlanProblem, tiles: int, holds: Callable[[Any], bool] = statically_known_true
) -> int:
    """CTAs of a cluster that divide the KV tiles of the same packed rows, if there are ``tiles`` query tiles.

    It is 2 for CUDA MLA if all clusters run at the same time, and CTAs do not share KV tiles already: an H100 runs 30
    clusters of four CTAs at a time, on 120 of its 132 SMs. It is 1 with a fixed split size, since a sum of two partial
    results has other bits; and if clusters leave SMs idle, as 40 clusters in place of 120 CTAs, unless the number of
    tiles is symbolic. ``holds`` decides a condition on symbolic sizes.
    """
    is_cuda_mla = problem.head_dims == MLA_HEAD_DIMS and problem.num_kv_heads == 1
    if not is_cuda_mla or problem.split or problem.window or mla_cluster(packed_rows_of_tile(problem)) > 1:
        return 1
    if not holds(2 * tiles * ctas_of_tile(problem) <= sms):
        return 1
    of_clusters, of_ctas = (_splits_at_a_time(sms // ctas, problem, tiles) for ctas in (2, 1))
    leaves_sms_idle = statically_known_true(100 * 2 * of_clusters < MIN_CLUSTER_SMS_PERCENT * of_ctas)
    return 1 if leaves_sms_idle else 2


def _splits_at_a_time(resident: int, problem: PlanProblem, tiles: int) -> int:
    """Splits of each query tile that ``resident`` CTAs or clusters compute at a time, by the default of max_splits."""
    return tiles_per_wave(problem, _default_splits(problem, resident // ctas_of_tile(problem))) // max(tiles, 1)


def most_tiles(problem: PlanProblem, max_batch: int, max_tokens: int) -> int:
    """Query tiles of a batch that fills a plan, if its requests have about as many rows each."""
    return at_least(full_tiles(problem, max_tokens), max_batch)


def cluster_splits_of(sms: int, plan: PrefillPlan) -> int:
    """:func:`cluster_splits` for the capacities of a plan, and for the query tiles that it computes at a time.

    It is what the planner has used if ``max_splits`` is the default, and 1 for a plan that splits nothing.
    """
    problem, max_batch, max_splits = PlanProblem.of(plan.problem), plan.kv_len.shape[0], num_partials(plan)
    if statically_known_true(max_splits == 0):
        return 1
    splits = cluster_splits(sms, problem, at_least(plan.work.shape[0] - max_splits - max_batch, max_batch))
    wave = splits * tiles_per_wave(problem, max_splits) * ctas_of_tile(problem)
    return splits if splits == 1 or statically_known_true(wave <= sms) else 1


def planned_cluster_splits(plan: PrefillPlan) -> int:
    """:func:`cluster_splits_of` on the device of the plan."""
    return cluster_splits_of(hopper_sms(plan.kv_len.device), plan)


def splits_per_head(device: torch.device, problem: PlanProblem, tiles: int | None = None) -> int:
    """Default ``max_splits`` of a prefill plan: two for each query tile that the device computes at a time.

    It is 0 on the CPU and for short KV, and three for two tiles where a slot is larger: the workspace then has at most
    28 MB on a GPU of 132 SMs, in FlashInfer's usual buffers of 32 MB and more. With the number of ``tiles`` of a full
    batch, two CTAs may divide the KV of a tile (:func:`cluster_splits`): half as many tiles are then computed at a
    time.
    """
    if device.type != "cuda" or problem.short_kv:
        return 0
    ctas, gpu = resident_ctas(device, problem), properties(device)
    if tiles is not None and gpu.major == HOPPER:
        ctas //= cluster_splits(gpu.multi_processor_count, problem, tiles, decide)
    return _default_splits(problem, ctas // (problem.num_kv_heads * ctas_of_tile(problem)))


def resident_ctas(device: torch.device, problem: PlanProblem) -> int:
    """CTAs of a prefill kernel that run at a time, 1 on the CPU. Few packed rows share an SM, except on Hopper."""
    if device.type != "cuda":
        return 1
    gpu = properties(device)
    few = packed_rows_of_tile(problem) <= MIN_PACKED_ROWS and not has_large_head_dim(problem)
    return gpu.multi_processor_count * (CTAS_PER_SM if few and gpu.major != HOPPER else 1)


def _default_splits(problem: PlanProblem, resident: int) -> int:
    """Splits of a plan whose device computes ``resident`` query tiles at a time, one or more."""
    resident = max(1, resident)
    return 2 * resident if problem.head_dim_vo <= SMALL_HEAD_DIM else max(2, 3 * resident // 4 * 2)


def tiles_per_wave(problem: PlanProblem, max_splits: int) -> int:
    """Query tiles that a device computes at a time if ``max_splits``, 2 or more, is its default."""
    return max_splits // 2 if problem.head_dim_vo <= SMALL_HEAD_DIM else (2 * max_splits + 1) // 3


def ctas_per_head(device: torch.device, problem: PlanProblem, fp8: bool) -> int:
    """Default ``num_ctas`` of a decode plan: CTAs that divide the work of one KV head, 1 on the CPU.

    The CUDA kernel, where it takes these sizes, has one CTA per SM, of one or two KV heads. ``fp8``: the cache is FP8.
    """
    num_kv_heads, group = problem.num_kv_heads, problem.num_qo_heads // problem.num_kv_heads
    if is_hopper(device) and has_cuda_decode(problem.head_dims, group, problem.page_size):
        return _ctas_per_head(device, num_kv_heads // cuda_decode_kv_heads(problem.head_dim_vo, num_kv_heads, fp8), 1)
    return general_ctas_per_head(device, num_kv_heads)


def general_ctas_per_head(device: torch.device, num_kv_heads: int) -> int:
    """Default ``num_ctas`` of a decode plan for the general kernel, which has :data:`CTAS_PER_SM` CTAs per SM."""
    return _ctas_per_head(device, num_kv_heads, CTAS_PER_SM)


def _ctas_per_head(device: torch.device, num_kv_heads: int, ctas_per_sm: int) -> int:
    if device.type != "cuda":
        return 1
    ctas = properties(device).multi_processor_count * ctas_per_sm // num_kv_heads
    return max(1, ctas // CTA_MULTIPLE * CTA_MULTIPLE or ctas)


def max_splits_for(problem: PlanProblem, max_batch: int, max_tokens: int, max_kv_len: int) -> int:
    """The largest result of :func:`.query_tiles.count_splits` for batches of at most this size."""
    tiles = full_tiles(problem, max_tokens) + max_batch
    longest = -(-max_kv_len // problem.split)
    return tiles * (longest + longest % 2) if longest > 1 else 0
