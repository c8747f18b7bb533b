"""Whether the ranks that share the keys of a batch plan the same batch. Collective: every rank takes part."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attn_ops.errors import RankError, fail
from attn_ops.plan.context import ContextShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BOTH = "pass the same page table to the planners of all ranks"


class _Summary(NamedTuple):
    """What a rank tells the others about its batch."""

    rank: int
    world: int
    interleave: int
    batch: int
    digest: int
    failed: int


def check_same_batch(
    context: ContextShard,
    group: ProcessGroup,
    device: torch.device,
    lengths: Sequence[Tensor],
    check: Callable[[], None],
) -> None:
    """Run ``check`` and raise its error, or on every rank a RankError if the ranks of ``group`` do not agree.

    ``lengths`` are the indptrs of the batch, ``kv_indptr`` the last of them, and ``kv_last_page_len``.
    ``device`` is this rank's, for a group of NCCL. After a time-out the ranks are out of step, and ``group`` cannot be
    used any more.
    """
    error: Exception | None = None
    batch = digest = 0
    try:
        check()
        batch = lengths[-1].numel()
        *indptrs, last = (t.cpu().long() for t in lengths)
        used = torch.where(indptrs[-1].diff() > 0, last, 0)
        digest = _digest([t.tolist() for t in (*indptrs, used)])
    except Exception as raised:  # whatever it is, the other ranks wait
        error = raised
    own = _Summary(context.rank, context.world, context.interleave, batch, digest, int(error is not None))
    summaries = _gather(own, group, device, context.timeout_s)
    if error is not None:
        raise error
    _compare(summaries)


def _digest(lengths: list[list[int]]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(lengths).encode(), digest_size=7).digest(), "little")


def _gather(own: _Summary, group: ProcessGroup, device: torch.device, timeout_s: float) -> list[_Summary]:
    import torch.distributed as dist

    if dist.get_backend(group) != "nccl":
        device = torch.device("cpu")
    sent = torch.tensor(own, dtype=torch.int64, device=device)
    gathered = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    try:
        work = dist.all_gather(gathered, sent, group=group, async_op=True)
        work.wait(timedelta(seconds=timeout_s))
        return [_Summary(*row.tolist()) for row in gathered]
    except RuntimeError as raised:
        reason = str(raised).partition("\n")[0]
        raise RankError(
            f"plan: a rank of the context group did not answer within {timeout_s:g} s ({reason}); "
            "expected plan(validate=True) on every rank; validate on all ranks or on none, and make "
            "a new group, since the ranks of this one are out of step"
        ) from None


def _compare(summaries: Sequence[_Summary]) -> None:
    first = summaries[0]
    for process, other in enumerate(summaries):
        if other.failed:
            fail(RankError, "plan", f"rank {process} refused the batch", "a batch that every rank takes", BOTH)
        if other.rank != process or other.world != len(summaries):
            fail(
                RankError,
                "plan",
                f"process {process} of {len(summaries)} plans as rank {other.rank} of {other.world}",
                "the rank of each process in the group",
                "make the shard with ContextShard.of(group, interleave=...)",
            )
        if other.interleave != first.interleave:
            fail(
                RankError,
                "plan",
                f"rank {process} has interleave {other.interleave} and rank 0 has {first.interleave}",
                "one interleave",
                "make the shards of all ranks alike",
            )
        if other.batch != first.batch:
            what = f"rank {process} plans {other.batch} requests and rank 0 plans {first.batch}"
            fail(RankError, "plan", what, "one batch", BOTH)
        if other.digest != first.digest:
            fail(RankError, "plan", f"rank {process} has other lengths than rank 0", "one batch", BOTH)
