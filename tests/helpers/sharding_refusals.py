"""Cases of tensor parallelism that end in errors, on one rank or on all: see ``sharding_ranks``."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import attn_ops
from attn_ops import errors
from attn_ops.distributed import RankAgreement, shard_plan
from attn_ops.plan.state import PlanProblem
from helpers import calls
from helpers.cases import DECODE_BASE
from helpers.harness import Setup
from helpers.page_tables import int32
from helpers.sharded_calls import DEVICE, HEADS, Group, axis_of, call, mesh, part, sharded, to_device


def _raises(error: type[Exception], message: str, function: Callable[[], Any]) -> None:
    """``function`` raises the error itself, with this text."""
    with pytest.raises(error, match=re.escape(message)):
        function()


def _refused(error: type[errors.AttnOpsError], message: str, op: str, arguments: dict[str, Any]) -> None:
    """The call raises before it communicates or writes, with the same message in an eager and in a traced call."""
    before = [t.clone() for t in calls.written(op, arguments)]
    _raises(error, message, lambda: call(op, arguments))
    function = torch.compile(lambda: getattr(torch.ops.attn, op)(**arguments), fullgraph=True, backend="eager")
    with torch.no_grad():
        _raises(Exception, message, function)
    torch._dynamo.reset()
    for t, was in zip(calls.written(op, arguments), before, strict=True):
        local, was = (x.to_local() if isinstance(x, DTensor) else x for x in (t, was))
        assert torch.equal(local.nan_to_num(), was.nan_to_num())


def refusals(group: Group) -> None:
    world = dist.get_world_size()
    heads = axis_of("batch_decode", "heads")
    setup = Setup("decode", replace(DECODE_BASE, heads=HEADS[world][1]), DEVICE)
    arguments = setup.arguments | {"return_lse": False}
    valid = sharded("batch_decode", arguments, heads)

    def refused(error: type[errors.AttnOpsError], message: str, **changes: Any) -> None:
        _refused(error, message, "batch_decode", valid | changes)

    refused(errors.PlacementError, "q is S(0) on mesh dimension 'tp'; expected S(1) or R", q=part(setup.q, 0))
    cache = part(setup.k, None)
    refused(errors.PlacementError, "k_cache is R on mesh dimension 'tp'; expected S(2), since q is S(1)", k_cache=cache)
    refused(errors.PlacementError, "k_cache is S(2) on mesh dimension 'tp'; expected S(1)", kv_layout="HND")
    refused(errors.PlacementError, "v_cache is a plain tensor on mesh dimension 'tp'; expected S(2)", v_cache=setup.v)
    refused(errors.PlacementError, "k_cache is S(2) on mesh dimension 'tp'; expected R, since q is a", q=setup.q)
    counters = valid["plan"]._replace(split_counters=part(valid["plan"].split_counters, 1))
    refused(errors.PlacementError, "plan.7 is S(1) on mesh dimension 'tp'; expected R", plan=counters)
    refused(errors.UnsupportedError, "pos_encoding is ALIBI and the heads are sharded", pos_encoding="ALIBI")
    rank_plan = shard_plan(setup.planner.state, mesh())
    local_heads = HEADS[world][1][0] // world
    refused(errors.PlanError, f"the plan was made for num_qo_heads {local_heads}; expected a plan for", plan=rank_plan)
    refused(errors.OptionError, "kv_layout is NDH", kv_layout="NDH")
    odd = Setup("decode", replace(DECODE_BASE, heads=(world + 1, 1)), DEVICE)
    message = f"q has {world + 1} heads for {world} ranks; expected a multiple of {world}"
    _refused(errors.ShapeError, message, "batch_decode", sharded("batch_decode", odd.arguments, heads))
    appended = to_device(calls.arguments("append_kv", heads=HEADS[world][1]))
    some = sharded("append_kv", appended, axis_of("append_kv", "heads"))
    message = "k_cache is R on mesh dimension 'tp'; expected S(2), since k is S(1)"
    _refused(errors.PlacementError, message, "append_kv", some | {"k_cache": part(appended["k_cache"], None)})
    graded = part(setup.q.clone(), 1).requires_grad_()
    _raises(errors.GradientError, "q requires grad", lambda: torch.ops.attn.batch_decode(**(valid | {"q": graded})))
    _raises(
        errors.ShapeError,
        f"num_kv_heads has 3 heads for {world} ranks",
        lambda: attn_ops.DecodePlanner(
            1, 1, page_size=1, num_qo_heads=3 * world, num_kv_heads=3, head_dim=8, head_shards=world
        ),
    )
    uneven = attn_ops.DecodePlanner(1, 1, page_size=1, num_qo_heads=3, num_kv_heads=3, head_dim=8)
    _raises(errors.ShapeError, f"num_qo_heads has 3 heads for {world} ranks", lambda: shard_plan(uneven.state, mesh()))


def shard_plans(group: Group) -> None:
    """The plan of a rank is of views of the planner's tensors, and the same ones in every call."""
    setup = Setup("decode", replace(DECODE_BASE, heads=HEADS[dist.get_world_size()][1]), DEVICE)
    plan = shard_plan(setup.planner.state, mesh())
    again = shard_plan(setup.planner.state, mesh())
    assert all(a is b for a, b in zip(plan, again, strict=True))
    for name, t in plan._asdict().items():
        if name != "problem":
            assert t.data_ptr() == getattr(setup.planner.state, name).data_ptr(), name
    assert PlanProblem.of(plan.problem).num_qo_heads == 8 // 2 or dist.get_world_size() > 2


def agreement(group: Group) -> None:
    """A rank that fails in plan(), or that has another batch, makes all ranks raise."""
    rank, others = dist.get_rank(), RankAgreement(mesh(), timeout=30)
    planner = attn_ops.DecodePlanner(2, 4, page_size=4, num_qo_heads=4, num_kv_heads=4, head_dim=16, device=DEVICE)
    table = int32([0, 1, 3]), int32([0, 1, 2]), int32([4, 2])
    too_long = int32([0, 1, 6]), int32([0, 1, 2, 3, 4, 5]), int32([4, 2])

    def plan(batch: tuple[Tensor, ...]) -> None:
        with others.step(*batch):
            planner.plan(*batch)

    plan(table)
    if rank == 1:
        _raises(errors.CapacityError, "max_pages", lambda: plan(too_long))
    else:
        _raises(errors.RankError, "rank 1 failed with CapacityError: plan", lambda: plan(table))
    plan(table)
    swapped = table[0], table[1].flip(0), table[2]
    _raises(errors.RankError, "rank 1 has other values than rank 0", lambda: plan(swapped if rank == 1 else table))
    plan(swapped)


def agreements_of_threads(group: Group) -> None:
    """A thread that waits for the other ranks keeps no other thread from the store, whose keys do not add up."""
    first, second = (RankAgreement(mesh(), timeout=10) for _ in range(2))
    turns = (first, second) if dist.get_rank() == 0 else (second, first)

    def steps(agreement: RankAgreement) -> None:
        for i in range(3):
            with agreement.step(int32([i])):
                pass

    def keys() -> int:
        dist.barrier(group)  # each rank deletes its own
        number: int = torch.distributed.distributed_c10d._get_default_store().num_keys()
        dist.barrier(group)
        return number

    numbers = []
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(steps, turns[0])
            time.sleep(1)  # by then it waits
            pool.submit(steps, turns[1]).result()
            waiting.result()
        numbers.append(keys())
    assert numbers[0] == numbers[1]


def a_rank_that_does_not_answer(group: Group) -> None:
    """All ranks raise, those too that come late, and the next step is a new one."""
    others, start = RankAgreement(mesh(), timeout=1), time.monotonic()

    def step() -> None:
        with others.step(int32([1, 2])):
            pass

    if dist.get_rank():
        time.sleep(3)
    _raises(errors.RankError, "did not answer", step)
    assert time.monotonic() - start < 20
    dist.barrier(group)
    step()
