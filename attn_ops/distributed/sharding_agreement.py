"""Agreement of ranks: all of them do a step with the same values, or all of them raise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attn_ops.distributed.sharding_plan import check_in_mesh
from attn_ops.errors import OptionError, RankError, fail
from attn_ops.plan.rank_answers import RankAnswers, fingerprint
from attn_ops.typed import typed

__all__ = ["RankAgreement"]


class RankAgreement:
    """Makes the ranks of a mesh agree that each of them has planned, and for the same batch.

    A rank that raises in ``plan()`` would leave the others waiting in the next collective. In a block of :meth:`step`
    it makes all ranks raise::

        agreement = RankAgreement(mesh)  # once
        with agreement.step(kv_indptr, kv_indices, kv_last_page_len):  # every step
            plan = planner.plan(kv_indptr, kv_indices, kv_last_page_len)

    All ranks of the mesh make it, and end every block, in the same order. They wait for each other on the host, through
    the store of the process group. Do not capture that in a CUDA graph. After a rank did not answer in time, all raise
    at the end of that block, and the next block works.

    Args:
        mesh: the ranks.
        timeout: seconds that a rank waits for the others.

    Raises:
        RankError: there is no process group, this rank is not in the mesh, or the store is out of reach.
        OptionError: ``timeout`` is not positive.
    """

    @typed
    def __init__(self, mesh: DeviceMesh, timeout: float = 60.0) -> None:
        check_in_mesh("RankAgreement", mesh, "create it only on those ranks")
        if not timeout > 0:
            fail(OptionError, "RankAgreement", f"timeout is {timeout}", "more than 0 seconds", "change it")
        self.ranks, self.timeout = sorted(mesh.mesh.flatten().tolist()), timeout
        self._answers = RankAnswers("mesh", self.ranks)

    @contextlib.contextmanager
    def step(self, *same: Tensor) -> Iterator[None]:
        """A block that every rank ends, or none.

        Args:
            same: integer tensors that must be equal on all ranks, such as the page table. Those on a GPU are read,
                which synchronizes.

        Raises:
            RankError: another rank raised in its block, the tensors differ, or a rank does not answer in time. A rank
                that raised itself raises that error.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        values = self._answers.exchange("step", error, "" if error else fingerprint(same), self.timeout)
        for rank, value in zip(self.ranks, values, strict=True):
            if value != values[0]:
                what = f"rank {rank} has other values than rank {self.ranks[0]}"
                fail(RankError, "step", what, "the same tensors on every rank", "give every rank the same batch")
