"""Exchange of answers between the ranks of a group: either all ranks get all answers, or all ranks raise.

The answers go through the store of the process group. A collective would be left unmatched by a rank that fails, but
the store works again at the next question, after a rank did not answer in time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from attn_ops.errors import RankError, fail

__all__ = ["RankAnswers", "fingerprint"]

COMPLETE = "complete"
"""The outcome of a question that every rank answered in time. Any other outcome is an error."""


def fingerprint(tensors: Sequence[Tensor]) -> str:
    """A hash of the contents and sizes of integer tensors, of any integer dtypes."""
    digest = hashlib.blake2b(digest_size=16)
    for t in tensors:
        values = t.detach().to("cpu", torch.int64)
        digest.update(repr((tuple(values.shape), values.tolist())).encode())
    return digest.hexdigest()


class RankAnswers:
    """The questions of a group, which all ranks answer in the same order.

    A question has one outcome, which the first rank to see all answers or to run out of time decides. A rank that
    answers later reads the outcome, and raises with the other ranks. Every object has its own connection to the store,
    since a connection that waits blocks other threads.

    Args:
        name: the same on every rank. All ranks make equally many objects with the same ``name`` and ``ranks``.
        ranks: global ranks of the group.

    Raises:
        RankError: the store is out of reach.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.ranks, self._questions = list(ranks), 0
        members = torch.tensor(self.ranks, device="cpu")
        self._rank, prefix = dist.get_rank(), f"attn_ops/{name}/{fingerprint([members])}"
        try:
            shared: Any = distributed_c10d._get_default_store()  # PyTorch's types lack clone()
            store = shared.clone()
            made = store.add(f"{prefix}/{self._rank}", 1)
        except (RuntimeError, dist.DistError) as error:
            self._fail("RankAnswers", str(error), "a store that all ranks reach")
        self._store = dist.PrefixStore(f"{prefix}/{made}", store)

    def exchange(self, where: str, error: Exception | None, answer: Any, timeout: float) -> list[Any]:
        """The answers of all ranks in the order of ``ranks``. JSON can represent them.

        A rank with an ``error`` has no answer: it raises the error, and all other ranks raise a RankError that quotes
        it. The ranks wait ``timeout`` seconds for each other.

        Raises:
            RankError: another rank has an error, or a rank did not answer in time, on all ranks.
        """
        question, self._questions = self._questions, self._questions + 1
        keys, outcome = [f"{question}/{rank}" for rank in self.ranks], COMPLETE
        expected = f"an answer of every rank within {timeout:g} s"
        message = "" if error is None else f"{type(error).__name__}: {error}"
        try:
            self._store.set(f"{question}/{self._rank}", json.dumps([message, answer]))
            try:
                self._store.wait(keys, timedelta(seconds=timeout))
            except (RuntimeError, dist.DistError):
                late = [rank for rank, key in zip(self.ranks, keys, strict=True) if not self._store.check([key])]
                outcome = f"rank {late[0] if late else self._rank} did not answer"
            outcome = self._store.compare_set(f"{question}/outcome", "", outcome).decode()
            answers = [json.loads(text) for text in self._store.multi_get(keys)] if outcome == COMPLETE else []
            if answers and question:  # every rank has left the previous question
                self._clear(question - 1)
        except (RuntimeError, dist.DistError) as raised:
            if error is not None:
                raise error from None
            self._fail(where, str(raised), expected)
        if error is not None:
            raise error
        if outcome != COMPLETE:
            self._fail(where, outcome, expected)
        for rank, (text, _) in zip(self.ranks, answers, strict=True):
            if text:
                fail(RankError, where, f"rank {rank} failed with {text}", "success on every rank", "see that rank")
        return [values for _, values in answers]

    def _clear(self, question: int) -> None:
        """Delete the keys of a question whose outcome every rank has read."""
        self._store.delete_key(f"{question}/{self._rank}")
        if self._rank == self.ranks[0]:
            self._store.delete_key(f"{question}/outcome")

    def _fail(self, where: str, what: str, expected: str) -> NoReturn:
        reason = next(iter(what.splitlines()), "")
        fail(
            RankError,
            where,
            f"{reason} (ranks {self.ranks})",
            expected,
            "take this step on all ranks or on none, and see the log of every rank",
        )
