"""Context parallelism: which tokens of a request each rank of a group holds.

The tokens of every request are assigned to the ranks in turn, ``interleave`` at a time: the token at position ``t`` is
on rank ``t // interleave % world``. A page is on one rank, so ``interleave`` is a multiple of the page size. All ranks
have the same page table; a page number is an index of the cache of the rank that has the page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_ops.argument_checks import integers
from attn_ops.errors import OptionError, RankError, fail
from attn_ops.plan.plan_checks import MAX_SIZE
from attn_ops.plan.state import PlanProblem

__all__ = ["ContextShard", "context_group"]

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def context_group(where: str, group: ProcessGroup | None) -> ProcessGroup:
    """``group``, by default the group of all processes. Raises a RankError if this process is not in a group."""
    import torch.distributed as dist

    if not dist.is_initialized():
        what, fix = "there is no process group", "call torch.distributed.init_process_group"
        fail(RankError, where, what, "a group of the ranks that share the keys", fix)
    group = dist.group.WORLD if group is None else group
    assert group is not None
    try:
        rank = dist.get_rank(group)
    except ValueError:  # a group of process groups that were destroyed
        rank = -1
    if rank < 0:
        what, fix = "this process is not in the group", "call it only on the ranks of the group"
        fail(RankError, where, what, "a group with this process", fix)
    return group


@dataclass(frozen=True)
class ContextShard:
    """The part of every request's tokens that this rank holds.

    Args:
        rank: rank of this process in the group, 0 to ``world - 1``.
        world: number of ranks of the group.
        interleave: tokens that a rank holds in a row, a multiple of the page size.
        group: if it is given, ``plan(validate=True)`` also compares the batch with the batches of the other ranks,
            which must validate too. If one rank finds an error, all ranks raise. After a rank did not answer in time,
            the next plan starts afresh.
        timeout_s: seconds to wait for the answers of the other ranks.

    Raises:
        OptionError: one of the numbers is out of range, or ``timeout_s`` is not positive.
        ArgumentTypeError: one of the first three is not an integer.
    """

    rank: int
    world: int
    interleave: int
    group: ProcessGroup | None = field(default=None, compare=False, repr=False)
    timeout_s: float = field(default=60.0, compare=False, repr=False)

    def __post_init__(self) -> None:
        where = "ContextShard"
        numbers = {name: getattr(self, name) for name in ("rank", "world", "interleave")}
        for name, number in zip(numbers, integers(where, **numbers), strict=True):  # ranks compare them as JSON
            object.__setattr__(self, name, number)
        if self.world < 1:
            fail(OptionError, where, f"world is {self.world}", "at least 1 rank", "pass the size of the group")
        if not 0 <= self.rank < self.world:
            fail(OptionError, where, f"rank is {self.rank}", f"0 to {self.world - 1}", "pass the rank in the group")
        if not self.interleave >= 1 or self.interleave * self.world > MAX_SIZE:
            fail(
                OptionError,
                where,
                f"interleave is {self.interleave} with {self.world} ranks",
                f"at least 1 token, and at most {MAX_SIZE} in a turn of all ranks",
                "change it",
            )
        if not self.timeout_s > 0:
            fail(OptionError, where, f"timeout_s is {self.timeout_s}", "more than 0 seconds", "change it")

    @classmethod
    def of_problem(cls, problem: PlanProblem) -> ContextShard | None:
        """The shard of a plan; None if it is for whole requests."""
        return cls(problem.rank, problem.world, problem.interleave) if problem.world > 1 else None

    @classmethod
    def of(cls, group: ProcessGroup | None = None, *, interleave: int) -> ContextShard:
        """The shard of this process in ``group``, by default the group of all processes.

        Raises a RankError if there is no process group, or this process is not in it.
        """
        import torch.distributed as dist

        group = context_group("ContextShard.of", group)
        return cls(dist.get_rank(group), dist.get_world_size(group), interleave, group)

    def check_page_size(self, where: str, page_size: int) -> None:
        """Raise an OptionError unless whole pages lie on a rank."""
        if self.interleave % page_size:
            fail(
                OptionError,
                where,
                f"the interleave of context is {self.interleave} tokens with page_size {page_size}",
                "a multiple of page_size",
                "make it a multiple, since a page lies on one rank",
            )

    def owner(self, positions: Tensor) -> Tensor:
        """The rank that holds the token at each of ``positions``."""
        return positions // self.interleave % self.world

    def positions(self, tokens: Tensor) -> Tensor:
        """Positions in the whole request of this rank's ``tokens``, which are counted from 0."""
        return (tokens // self.interleave * self.world + self.rank) * self.interleave + tokens % self.interleave

    def owned_tokens(self, lengths: Tensor) -> Tensor:
        """The number of tokens that this rank holds of requests with ``lengths`` tokens."""
        turn = self.interleave * self.world
        rest = lengths % turn - self.rank * self.interleave
        return lengths // turn * self.interleave + rest.clamp(0, self.interleave)

    def owned(self, batch_indices: Tensor, positions: Tensor) -> Tensor:
        """``batch_indices`` of appended tokens, with -1 for tokens of other ranks, which ``append_kv`` skips.

        Args:
            batch_indices: int ``[nnz]``, the request of each new token, -1 for none.
            positions: int ``[nnz]``, the position of each new token in the whole request.

        ``append_kv`` takes the result, the same positions and the page table of all ranks.
        """
        return torch.where(self.owner(positions) == self.rank, batch_indices, -1)

    def planned(
        self, page_size: int, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Tensor]]:
        """Arguments of planning ops: this rank's part of the page table, and ``seq_lens`` if there are other ranks."""
        own = self.page_table(page_size, kv_indptr, kv_indices, kv_last_page_len)
        if self.world == 1:
            return own, {}
        return own, {"seq_lens": torch.ops.attn.seq_lens(kv_indptr, kv_last_page_len, page_size)}

    def page_table(
        self, page_size: int, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's part of the page table of all ranks, by the op ``attn::shard_page_table``."""
        self.check_page_size("page_table", page_size)
        return torch.ops.attn.shard_page_table(
            kv_indptr, kv_indices, kv_last_page_len, page_size, self.rank, self.world, self.interleave
        )
