"""Attention on each rank's part of the keys, all ranks in one process, merged and compared with the oracle.

Every option that depends on positions: those of one rank's keys are not consecutive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from helpers import oracle
from helpers.backends import each_backend, each_case
from helpers.context_batch import PAGE, Batch, Problem
from helpers.oracle import Expected
from helpers.page_tables import indptr
from torch import Tensor

import attn_ops
from attn_ops.distributed import ContextShard

pytestmark = pytest.mark.usefixtures("poisoned_memory")
State = tuple[Tensor, Tensor]
SHORT = (70, 0, 1, 16, 33, 130)


@dataclass(frozen=True)
class Case:
    """A call on ``world`` ranks. ``planned``: options of the planner, by default those of the call.

    ``rows`` of each request for prefill, None for decode.
    """

    options: dict[str, Any] = field(default_factory=dict)
    problem: Problem = field(default_factory=lambda: Problem(SHORT))
    world: int = 2
    rows: Sequence[int] | None = None
    planned: dict[str, Any] | None = None

    def __str__(self) -> str:
        default, p = Problem(SHORT), self.problem
        changes = {n: v for n, v in vars(p).items() if v != getattr(default, n)}
        kind = "decode" if self.rows is None else "prefill"
        parts = {**self.options, **changes, **(self.planned or {})}
        return " ".join([kind, f"x{self.world}", *(f"{name} {value}" for name, value in parts.items())])

    def plan_options(self) -> dict[str, Any]:
        names = ("window_left",) if self.rows is None else ("window_left", "window_right", "causal")
        return {n: v for n, v in self.options.items() if n in names} if self.planned is None else self.planned

    def on_rank(self, rank: int, device: str, backend: str) -> tuple[State, Batch, Tensor]:
        """The state of a rank, its batch and the query."""
        rows = self.rows or [1] * len(self.problem.kv_lens)
        batch = Batch(self.problem, ContextShard(rank, self.world, self.problem.interleave), device=device)
        batch.append(batch.lens)
        q, planned = batch.queries(sum(rows)), {**batch.sizes(), "context": batch.shard, **self.plan_options()}
        if self.rows is None:
            decode = attn_ops.DecodePlanner(len(rows) + 1, 80, **planned)
            call, plan, workspace = torch.ops.attn.batch_decode, decode.plan(*batch.table()), decode.workspace
        else:
            prefill = attn_ops.PrefillPlanner(len(rows) + 1, sum(rows) + 3, 80, **planned)
            plan = prefill.plan(indptr(rows).to(device), *batch.table())
            call, workspace = torch.ops.attn.batch_prefill, prefill.workspace
        options = {"return_lse": True, "kv_layout": self.problem.kv_layout, "backend": backend, **self.options}
        return call(q, *batch.cache(), plan, workspace, **options), batch, q

    def check(self, device: str, backend: str) -> None:
        ranks = [self.on_rank(rank, device, backend) for rank in range(self.world)]
        out, lse = merge([state for state, _, _ in ranks])
        _, batch, q = ranks[0]
        rows = self.rows or [1] * len(self.problem.kv_lens)
        options = {**self.options, "causal": self.options.get("causal", self.rows is None)}
        expected = Expected.of(batch.requests(q, rows), **options)
        expected.check(out.to(self.problem.dtype), lse.float())


def merge(states: Sequence[State]) -> State:
    """A rank without visible keys gives 0 and -inf."""
    for out, lse in states:
        assert not out[lse == -torch.inf].any()
        assert not out.isnan().any()
    outs, lses = zip(*states, strict=True)
    return oracle.merge(torch.stack(outs, 1), torch.stack(lses, 1))


WIDE = Problem(SHORT, interleave=3 * PAGE, heads=(6, 2), dim_vo=16)
DECODE = [
    *(Case({"window_left": left}) for left in (0, 3, 15, 16, 40, 1000)),
    *(Case({"window_left": left}, WIDE, 3) for left in (0, 20, 100)),
    Case({"window_left": 20}, planned={}),
    Case({"window_left": 20}, planned={"window_left": 70}),
    Case({"window_left": 90}, planned={"window_left": 90, "num_ctas": 3}),
    Case({"window_left": 90}, Problem((500, 40, 300)), 3, planned={"window_left": 90, "fixed_split_size": 4}),
    Case({"window_left": 300}, Problem((500, 40, 300)), planned={"window_left": 300, "num_ctas": 5}),
    Case({"window_left": 33, "logits_soft_cap": 5.0}, replace(WIDE, kv_layout="HND"), 4),
    Case({"window_left": 33}, Problem(SHORT, dtype=torch.float16, heads=(8, 1))),
    Case({"pos_encoding": "ROPE_LLAMA", "rope_theta": 100.0}, world=3),
    Case({"pos_encoding": "ALIBI", "window_left": 50}),
    Case({"window_left": 33}, Problem(SHORT, kv_dtype=torch.float8_e4m3fn)),
]
ROWS = (5, 0, 3, 16, 1, 40)
PREFILL = [
    Case({"causal": True}, rows=ROWS),
    Case({"causal": True}, WIDE, 3, ROWS),
    *(Case({"causal": True, "window_left": left}, rows=ROWS) for left in (0, 3, 31, 100)),
    Case({"causal": True, "window_left": 20}, WIDE, 4, ROWS),
    Case({"window_right": 5}, rows=ROWS),
    Case({"window_left": 18, "window_right": 7}, WIDE, 2, ROWS),
    Case({"window_left": 18, "window_right": 0}, world=3, rows=ROWS, planned={}),
    Case({"causal": True, "window_left": 9}, rows=ROWS, planned={"window_left": 40}),
    Case({"causal": True}, Problem((500, 70)), rows=(3, 60), planned={"causal": True, "num_ctas": 6}),
    Case({"causal": True}, Problem((500, 70)), rows=(3, 60), planned={"causal": True, "fixed_split_size": 8}),
    Case({"causal": True, "logits_soft_cap": 5.0}, replace(WIDE, kv_layout="HND"), 2, ROWS),
    Case({"causal": True, "window_left": 25}, Problem(SHORT, dtype=torch.float16, heads=(8, 1)), rows=ROWS),
    Case({"causal": True, "pos_encoding": "ROPE_LLAMA", "rope_theta": 100.0}, world=3, rows=ROWS),
    Case({"causal": True, "pos_encoding": "ALIBI"}, rows=ROWS),
    Case({"causal": True, "window_left": 9}, Problem(SHORT, kv_dtype=torch.float8_e5m2), rows=ROWS),
]
SLOW_IN_THE_INTERPRETER = [case for case in PREFILL if case.problem.kv_lens != SHORT]


@each_case([*DECODE, *PREFILL], [case for case in (*DECODE[::2], *PREFILL[::2]) if case not in SLOW_IN_THE_INTERPRETER])
def test_matches_oracle(case: Case, device: str, backend: str) -> None:
    case.check(device, backend)


@each_backend
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"causal": True, "window_left": 12}, {"window_left": 40}], ids=str
)
def test_mla(options: dict[str, Any], device: str, backend: str) -> None:
    """Latents of 32 + 8. The kernels for Hopper leave causal attention on a rank's keys to the general kernel."""
    rows, states, world = [2, 0, 3], [], 2
    generator = torch.Generator().manual_seed(1)
    problem = Problem((70, 5, 40), heads=(4, 1), dim=40)
    for rank in range(world):
        batch = Batch(problem, ContextShard(rank, world, PAGE), device=device)
        batch.append(batch.lens)
        planner = attn_ops.PrefillPlanner(3, 5, 20, **batch.sizes(), context=batch.shard, **options)
        plan = planner.plan(indptr(rows).to(device), *batch.table())
        q, cache = torch.randn(5, 4, 40, generator=generator.manual_seed(2)).to(device), batch.k_cache[:, :, 0]
        call = (q[..., :32], q[..., 32:], cache[..., :32], cache[..., 32:], plan, planner.workspace)
        given = {name: value for name, value in options.items() if value is not None}
        states.append(torch.ops.attn.batch_mla(*call, sm_scale=0.2, return_lse=True, backend=backend, **given))
    out, lse = merge(states)
    requests = [(r, k, k[..., :32]) for r, k, _ in batch.requests(q, rows)]
    Expected.of(requests, sm_scale=0.2, **options).check(out.float(), lse.float())


def test_compiled() -> None:
    """Inductor inlines attention, with the positions of a rank's keys as constants."""
    batch = Batch(Problem((40, 0, 33)), ContextShard(1, 2, PAGE))
    batch.append(batch.lens)
    planner = attn_ops.DecodePlanner(3, 9, **batch.sizes(), context=batch.shard, window_left=20)
    call = (batch.queries(3), *batch.cache(), planner.plan(*batch.table()), planner.workspace)

    def attend(*call: Any) -> State:
        return torch.ops.attn.batch_decode(*call, window_left=20, return_lse=True)

    torch.testing.assert_close(torch.compile(attend, fullgraph=True)(*call), attend(*call))
