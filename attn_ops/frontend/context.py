"""FlashInfer's arguments of context parallelism: a call over the keys of one rank.

Token ``t`` of a request is on rank ``t % cp_world``, as that rank's token ``t // cp_world``. Block tables and
``seq_lens`` have the tokens of this rank. ``causal_seqlens_kv_global`` gives the positions of the query rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.argument_checks import integers
from attn_ops.errors import OptionError, fail
from attn_ops.frontend.arguments import refuse
from attn_ops.plan.context import ContextShard
from attn_ops.plan.state import PlanProblem


class RankKeys(NamedTuple):
    """The keys of one rank.

    shard       which tokens of a request they are
    seq_lens    int32 ``[batch]``: tokens of each request on all ranks, up to its last query row; None if unknown
    positioned  whether the plan needs positions: for several rows per request, or a window
    """

    shard: ContextShard
    seq_lens: Tensor | None
    positioned: bool

    def visible(self, kv_lens: Tensor) -> Tensor:
        """The number of keys on this rank, at most ``kv_lens``, that the last row of each request sees."""
        return kv_lens if self.seq_lens is None else torch.minimum(kv_lens, self.shard.owned_tokens(self.seq_lens))

    def planned(self, problem: PlanProblem) -> tuple[PlanProblem, dict[str, Tensor]]:
        """The problem of a plan of these keys, and the options of its planning op."""
        if not self.positioned or self.shard.world == 1:
            return problem, {}
        assert self.seq_lens is not None
        rank, world, interleave = self.shard.rank, self.shard.world, self.shard.interleave
        return problem._replace(rank=rank, world=world, interleave=interleave), {"seq_lens": self.seq_lens}


def context_shard(
    where: str,
    refused: dict[str, Any],
    *,
    cp_world: int,
    cp_rank: int,
    causal_seqlens_kv_global: Tensor | None,
    enable_dcp: bool = True,
) -> ContextShard | None:
    """The shard of a call over the keys of one rank; None for a call over all keys.

    The only shard of ``cp_world`` 1 has all keys; ``causal_seqlens_kv_global`` still gives the positions of the rows.

    Args:
        refused: arguments, by name, that a call over the keys of one of several ranks does not take.
    """
    if not enable_dcp:
        refuse(where, cp_world=cp_world, cp_rank=cp_rank, causal_seqlens_kv_global=causal_seqlens_kv_global)
        return None
    integers(where, cp_world=cp_world, cp_rank=cp_rank)
    if cp_world < 1:
        fail(OptionError, where, f"cp_world is {cp_world}", "at least 1", "pass the number of ranks")
    if not 0 <= cp_rank < cp_world:
        fail(OptionError, where, f"cp_rank is {cp_rank}", f"0 to {cp_world - 1}, below cp_world", "correct it")
    if cp_world == 1 and causal_seqlens_kv_global is None:
        return None
    for name, value in refused.items():
        if value is not None and cp_world > 1:
            what = f"{name} is given with the keys of one of {cp_world} ranks"
            fix = "pass them to merge_context of attn_ops.distributed" if name == "sinks" else f"leave out {name}"
            fail(OptionError, where, what, "None", fix)
    return ContextShard(cp_rank, cp_world, 1)
