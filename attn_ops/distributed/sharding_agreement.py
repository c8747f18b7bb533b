"""Agreement of ranks: all of them do a step with the same values, or all of them raise."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from attn_ops.errors import RankError, fail

__all__ = ["RankAgreement"]

MESSAGE_BYTES = 480
"""Bytes of an error's message that other ranks see."""

_OK = 0
_HEADER = 4  # int64: status, fingerprint, bytes of the message, one unused


class RankAgreement:
    """Makes the ranks of a mesh agree that each of them has planned, and for the same batch.

    A rank that raises in ``plan()`` would leave the others waiting in the next collective. In a block of :meth:`step`
    it makes all ranks raise::

        agreement = RankAgreement(mesh)  # once
        with agreement.step(kv_indptr, kv_indices, kv_last_page_len):  # every step
            plan = planner.plan(kv_indptr, kv_indices, kv_last_page_len)

    Creating it and the end of every block are collectives of all ranks of the mesh, over gloo on the host. Do not
    capture them in a CUDA graph.

    Args:
        mesh: the ranks.
        timeout: seconds that a rank waits for the others.

    Raises:
        RankError: there is no process group, this rank is not in the mesh, or the others do not answer in time.
    """

    def __init__(self, mesh: DeviceMesh, timeout: float = 60.0) -> None:
        if not dist.is_initialized():
            what, fix = "there is no process group", "call torch.distributed.init_process_group"
            fail(RankError, "RankAgreement", what, "one with the ranks of the mesh", fix)
        if mesh.get_coordinate() is None:
            what, fix = "this rank is not in the mesh", "create it on those ranks alone"
            fail(RankError, "RankAgreement", what, "a rank of the mesh", fix)
        self.ranks, self.timeout = sorted(mesh.mesh.flatten().tolist()), timeout
        with self._answers("RankAgreement"):
            self._group = dist.new_group(
                self.ranks,
                timeout=datetime.timedelta(seconds=timeout),
                backend="gloo",
                use_local_synchronization=True,
            )

    @contextlib.contextmanager
    def step(self, *same: Tensor) -> Iterator[None]:
        """A block that every rank ends, or none.

        Args:
            same: integer tensors that must be equal on all ranks, such as the page table. Those on a GPU are read,
                which synchronises.

        Raises:
            RankError: another rank raised in its block, the tensors differ, or a rank does not answer in time. A rank
                that raised itself raises that error.
        """
        try:
            yield
        except Exception as error:
            self._exchange(f"{type(error).__name__}: {error}", same)
            raise
        rows = self._exchange("", same)
        for rank, (status, _, size, _), message in rows:
            if status != _OK:
                text = bytes(message[:size].tolist()).decode(errors="replace")
                fail(RankError, "step", f"rank {rank} failed with {text}", "success on every rank", "see that rank")
        first = rows[0]
        for rank, (_, fingerprint, _, _), _ in rows:
            if fingerprint != first[1][1]:
                what = f"rank {rank} has other values than rank {first[0]}"
                fail(RankError, "step", what, "the same tensors on every rank", "give every rank the same batch")

    def _exchange(self, error: str, same: tuple[Tensor, ...]) -> list[tuple[int, list[int], Tensor]]:
        """Rank, header and message of every rank."""
        text = error.encode()[:MESSAGE_BYTES]
        row = torch.zeros(8 * _HEADER + MESSAGE_BYTES, dtype=torch.uint8)
        row[: 8 * _HEADER].view(torch.int64)[:3] = torch.tensor([bool(error), _fingerprint(same), len(text)])
        row[8 * _HEADER : 8 * _HEADER + len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in self.ranks]
        with self._answers("step"):
            dist.all_gather(rows, row, group=self._group)
        return [
            (rank, r[: 8 * _HEADER].view(torch.int64).tolist(), r[8 * _HEADER :])
            for rank, r in zip(self.ranks, rows, strict=True)
        ]

    @contextlib.contextmanager
    def _answers(self, where: str) -> Iterator[None]:
        """Turns a time-out, or a connection that closed, into a RankError."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            line = next(iter(str(error).splitlines()), type(error).__name__)
            what = f"a rank of {self.ranks} did not answer ({line})"
            fail(RankError, where, what, f"an answer within {self.timeout:g} s", "see the log of every rank")


def _fingerprint(tensors: tuple[Tensor, ...]) -> int:
    """A 64-bit hash of the contents and sizes of integer tensors."""
    total = torch.zeros((), dtype=torch.int64)
    for t in tensors:
        values = t.detach().cpu().flatten().to(torch.int64)
        weights = torch.arange(1, values.numel() + 1) * 0x1E3779B97F4A7C15 + 0x3F58476D1CE4E5B9
        mixed = (values + weights) * 0x14D049BB133111EB
        total = total * 0x2545F4914F6CDD1D + ((mixed ^ (mixed >> 29)) * 0x1B03738712FAD5C9).sum() + values.numel()
    return int(total)
