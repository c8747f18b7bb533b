"""Threads of one process on a GPU, each with planners of its own: 10,000 eager calls with the bits of one thread's."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_ops

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

NUM_THREADS, CALLS = 4, 2500
PAGE, PAGES = 16, 40
SIZES: dict[str, Any] = {"page_size": PAGE, "num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "device": "cuda"}
LENGTHS = ((33, 1, 160, 7), (5, 90, 16, 48))


class Batches:
    """Two batches of one planner, with caches of their own."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.planner = attn_ops.DecodePlanner(4, PAGES, **SIZES)
        self.tables = [self._table(lengths) for lengths in LENGTHS]
        self.queries = [torch.randn(4, 8, 64, device="cuda", dtype=torch.bfloat16) for _ in LENGTHS]
        self.cache = torch.randn(PAGES, 2, PAGE, 2, 64, device="cuda", dtype=torch.bfloat16)

    @staticmethod
    def _table(lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        tokens = torch.tensor(lengths)
        indptr = torch.nn.functional.pad(((tokens + PAGE - 1) // PAGE).cumsum(0), (1, 0))
        indices = torch.randperm(PAGES)[: int(indptr[-1])]
        return tuple(t.int().cuda() for t in (indptr, indices, (tokens - 1) % PAGE + 1))

    def attend(self, i: int) -> Tensor:
        plan = self.planner.plan(*self.tables[i])
        k, v = self.cache[:, 0], self.cache[:, 1]
        return torch.ops.attn.batch_decode(self.queries[i], k, v, plan, self.planner.workspace)[0]


def test_threads_have_the_results_of_one() -> None:
    batches = [Batches(seed) for seed in range(NUM_THREADS)]
    expected = [[b.attend(i).clone() for i in range(len(LENGTHS))] for b in batches]
    torch.cuda.synchronize()
    wrong: list[int] = []
    errors: list[BaseException] = []
    barrier = threading.Barrier(NUM_THREADS)

    def calls(thread: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                differs = torch.zeros((), dtype=torch.bool, device="cuda")
                for call in range(CALLS):
                    i = call % len(LENGTHS)
                    differs |= (batches[thread].attend(i) != expected[thread][i]).any()
                wrong.append(int(differs))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=calls, args=(i,)) for i in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert wrong == [0] * NUM_THREADS
