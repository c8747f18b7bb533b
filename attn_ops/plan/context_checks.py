"""The check that the ranks that share the keys of a batch plan the same batch, with planners of the same sizes.

It is collective: every rank of the group makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from attn_ops.errors import RankError, fail
from attn_ops.plan.context import ContextShard, context_group
from attn_ops.plan.rank_answers import RankAnswers, fingerprint
from attn_ops.plan.state import DecodePlan, PlanProblem, PrefillPlan

SAME_PAGE_TABLE = "pass the same page table to the planners of all ranks"

OF_A_RANK = ("rank", "world", "interleave", "tile_rows")
"""Fields of a problem that are compared separately, or may differ between ranks."""

_answers: WeakKeyDictionary[ProcessGroup, RankAnswers] = WeakKeyDictionary()
"""The answers of the ranks of each group, which its planners share."""


def check_same_batch(
    context: ContextShard,
    group: ProcessGroup,
    plan: Sequence[Tensor],
    lengths: Sequence[Tensor],
    check: Callable[[], None],
) -> None:
    """Run ``check`` and raise its error, or on every rank a RankError if the ranks of ``group`` do not agree.

    Args:
        plan: the plan of this rank. The ranks compare its sizes.
        lengths: the indptrs of the batch, of which ``kv_indptr`` is the last, then ``kv_last_page_len``.
    """
    context_group("plan", group)
    error: Exception | None = None
    answer: dict[str, Any] = {}
    try:
        check()
        *indptrs, last = (t.cpu().long() for t in lengths)
        used = torch.where(indptrs[-1].diff() > 0, last, 0)
        answer = {"rank": context.rank, "world": context.world, "interleave": context.interleave}
        answer["sizes"] = _sizes(plan)
        answer |= {"batch": last.numel(), "lengths": fingerprint((*indptrs, used))}
    except Exception as raised:  # whatever it is, the other ranks wait
        error = raised
    answers = _answers.get(group)
    if answers is None:
        answers = RankAnswers(f"group {group.group_name}", dist.get_process_group_ranks(group))
        _answers[group] = answers
    _compare(answers.exchange("plan", error, answer, context.timeout_s))


def _sizes(plan: Sequence[Tensor]) -> dict[str, int]:
    """The sizes, by name, that the plans of all ranks have in common: capacities, and the problem without the shard."""
    assert isinstance(plan, DecodePlan | PrefillPlan)
    problem = PlanProblem.of(plan.problem)._asdict()
    capacities = {"max_batch": plan.kv_len.shape[0], "max_pages": plan.kv_indices.shape[0]}
    return capacities | {name: size for name, size in problem.items() if name not in OF_A_RANK}


def _compare(answers: Sequence[dict[str, Any]]) -> None:
    first = answers[0]
    for process, other in enumerate(answers):
        if (other["rank"], other["world"]) != (process, len(answers)):
            fail(
                RankError,
                "plan",
                f"process {process} of {len(answers)} plans as rank {other['rank']} of {other['world']}",
                "the rank of each process in the group",
                "make the shard with ContextShard.of(group, interleave=...)",
            )
        if other["interleave"] != first["interleave"]:
            fail(
                RankError,
                "plan",
                f"rank {process} has interleave {other['interleave']} and rank 0 has {first['interleave']}",
                f"{first['interleave']} on every rank",
                "make the shards of all ranks with that interleave",
            )
        for name, size in other["sizes"].items():
            if size != first["sizes"][name]:
                what = f"rank {process} has {name} {size} and rank 0 has {first['sizes'][name]}"
                fail(RankError, "plan", what, "planners of the same sizes", "make them with the same sizes")
        if other["batch"] != first["batch"]:
            what = f"rank {process} plans {other['batch']} requests and rank 0 plans {first['batch']}"
            fail(RankError, "plan", what, "one batch", SAME_PAGE_TABLE)
        if other["lengths"] != first["lengths"]:
            fail(RankError, "plan", f"rank {process} has other lengths than rank 0", "one batch", SAME_PAGE_TABLE)
