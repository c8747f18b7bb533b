"""Cases of context parallelism, run by every rank of a group (see ``rank_processes``).

Every rank compares the merged result with the float64 oracle on all keys.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import attn_ops
from attn_ops.distributed import ContextExchange, ContextShard, merge_context
from attn_ops.errors import (
    BackendError,
    CapacityError,
    DTypeError,
    OptionError,
    PageTableError,
    PlanError,
    RankError,
    ShapeError,
)
from helpers import oracle
from helpers.context_batch import DEVICE, PAGE, Batch, Problem, share
from helpers.oracle import Expected
from helpers.page_tables import indptr, int32

Group = dist.ProcessGroup


def _batch(problem: Problem, group: Group, spare: int = 0) -> Batch:
    return Batch(problem, ContextShard.of(group, interleave=problem.interleave), spare)


def _decode(
    problem: Problem, group: Group, *, scatter: bool = False, sinks: bool = False, planner: Any = None, **options: Any
) -> None:
    batch = _batch(problem, group)
    batch.append(batch.lens)
    n = len(batch.lens)
    planner = attn_ops.DecodePlanner(n + 1, 80, **batch.sizes(), **(planner or {}), context=batch.shard)
    plan, q = planner.plan(*batch.table()), batch.queries(n)
    call = (q, batch.k_cache, batch.v_cache, plan, planner.workspace)
    out, lse = torch.ops.attn.batch_decode(*call, return_lse=True, **options)
    sink = torch.linspace(-2, 3, problem.heads[0]).to(DEVICE) if sinks else None
    merged = merge_context(out, lse, group, scatter_heads=scatter, sinks=sink, plan=plan)
    expected = Expected.of(batch.requests(q, [1] * n), sinks=sink, **options)
    (share(expected, batch) if scatter else expected).check(*merged)


def decode(group: Group) -> None:
    """Empty requests, requests of one page, which one rank has no keys of, and page boundaries."""
    _decode(Problem(), group)


def decode_wide_interleave(group: Group) -> None:
    _decode(Problem(interleave=3 * PAGE, heads=(6, 2), dim_vo=16), group, scatter=True)


def decode_bfloat16(group: Group) -> None:
    _decode(Problem(dtype=torch.bfloat16, heads=(8, 1)), group)
    _decode(Problem(dtype=torch.bfloat16, heads=(8, 8)), group, scatter=True)


def decode_with_sinks(group: Group) -> None:
    """A sink counts once, also in a request without keys."""
    _decode(Problem(), group, sinks=True)
    _decode(Problem(), group, sinks=True, scatter=True)


def decode_options(group: Group) -> None:
    _decode(Problem(), group, logits_soft_cap=5.0, sm_scale=0.3)
    _decode(Problem(kv_lens=(500, 40, 300)), group, planner={"fixed_split_size": 8})


def decode_odd_elements(group: Group) -> None:
    """Rows of an odd number of 16-bit elements, which do not fill whole words."""
    _decode(Problem(dtype=torch.bfloat16, heads=(3, 1), dim=16, dim_vo=15), group)


def decode_fp8_cache(group: Group) -> None:
    batch = _batch(Problem(kv_dtype=torch.float8_e4m3fn), group)
    batch.append(batch.lens)
    n, scale = len(batch.lens), torch.tensor([0.5, 2.0]).to(DEVICE)
    planner = attn_ops.DecodePlanner(n, 80, **batch.sizes(), context=batch.shard)
    q = batch.queries(n)
    call = (q, batch.k_cache, batch.v_cache, planner.plan(*batch.table()), planner.workspace)
    merged = merge_context(*torch.ops.attn.batch_decode(*call, return_lse=True, kv_scale=scale), group)
    requests = [(r, k * 0.5, v * 2.0) for r, k, v in batch.requests(q, [1] * n)]
    Expected.of(requests).check(*merged)


def chunked_prefill(group: Group) -> None:
    """New rows attend to the keys before them, dealt to the ranks, and among themselves on every rank."""
    rows = (5, 17, 1, 0, 9)
    problem = Problem(kv_lens=(100, 0, 1, 64, 33))
    for scatter in (False, True):
        batch = _batch(problem, group, spare=max(rows))
        batch.append(batch.lens)
        q, qo_indptr = batch.queries(sum(rows)), indptr(rows).to(DEVICE)
        planner = attn_ops.PrefillPlanner(len(rows), sum(rows), 80, **batch.sizes(), context=batch.shard)
        plan = planner.plan(qo_indptr, *batch.table())
        call = (q, batch.k_cache, batch.v_cache, plan, planner.workspace)
        before = torch.ops.attn.batch_prefill(*call, return_lse=True)
        batch.grow(rows)
        ranges = list(zip(batch.lens, rows, strict=True))
        k, v = (
            torch.cat([t[n - count : n] for t, (n, count) in zip(tokens, ranges, strict=True)]).to(DEVICE)
            for tokens in (batch.keys, batch.values)
        )
        own = [batch.heads(t) for t in (q, k, v)] if scatter else [q, k, v]
        heads = {"num_qo_heads": own[0].shape[1], "num_kv_heads": own[1].shape[1], "page_size": 1}
        among = attn_ops.PrefillPlanner(
            len(rows), sum(rows), 0, **batch.sizes() | heads, max_kv_len=max(rows), causal=True
        )
        new = torch.ops.attn.ragged_prefill(
            *own, among.plan(qo_indptr, qo_indptr), among.workspace, causal=True, return_lse=True
        )
        merged = merge_context(*before, group, scatter_heads=scatter, replicated=new, plan=plan)
        expected = Expected.of(batch.requests(q, rows), causal=True)
        (share(expected, batch) if scatter else expected).check(*merged)


def mla(group: Group) -> None:
    """One latent head: every rank has all query heads, and keeps its share of the result."""
    problem = Problem(heads=(4, 1), dim=40, dim_vo=32)
    batch = _batch(problem, group)
    generator = torch.Generator().manual_seed(1)
    latents = [torch.randn(n, 1, 40, generator=generator) for n in batch.lens]
    kv_indptr, kv_indices, last = batch.table()
    ends = indptr(batch.lens).to(DEVICE)
    seq_lens = int32(batch.lens).to(DEVICE)
    request, position = torch.ops.attn.batch_indices_positions(ends, seq_lens, sum(batch.lens))
    cache = torch.full((201, PAGE, 40), float("nan"), device=DEVICE)
    ckv_cache, kpe_cache = cache[..., :32], cache[..., 32:]
    new = torch.cat(latents)[:, 0].to(DEVICE)
    own = batch.shard.owned(request, position)
    torch.ops.attn.append_mla_kv(new[:, :32], new[:, 32:], ckv_cache, kpe_cache, own, position, kv_indices, kv_indptr)
    n, q = len(batch.lens), batch.queries(len(batch.lens))
    planner = attn_ops.PrefillPlanner(n, n, 80, **batch.sizes(), context=batch.shard)
    plan = planner.plan(indptr([1] * n).to(DEVICE), kv_indptr, kv_indices, last)
    out, lse = torch.ops.attn.batch_mla(
        q[..., :32], q[..., 32:], ckv_cache, kpe_cache, plan, planner.workspace, sm_scale=0.2, return_lse=True
    )
    expected = Expected.of([(q[i : i + 1], t, t[..., :32]) for i, t in enumerate(latents)], sm_scale=0.2)
    expected.check(*merge_context(out, lse, group, plan=plan))
    share(expected, batch).check(*merge_context(out, lse, group, scatter_heads=True))


def compiled_steps(group: Group) -> None:
    """Append, attend and merge in one graph, which several steps of growing requests share."""
    batch = _batch(Problem(kv_lens=(31, 0, 64, 15)), group, spare=4)
    batch.append(batch.lens)
    n, shard = len(batch.lens), batch.shard
    planner = attn_ops.DecodePlanner(n, 80, **batch.sizes(), context=shard)

    def step(q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: Any, workspace: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.attn.batch_decode(q, k_cache, v_cache, plan, workspace, return_lse=True)
        return merge_context(out, lse, group, plan=plan)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            batch.grow([1] * n)
            q = batch.queries(n)
            plan = planner.plan(*batch.table())
            merged = compiled(q, batch.k_cache, batch.v_cache, plan, planner.workspace)
            Expected.of(batch.requests(q, [1] * n)).check(*merged)


def compiled_heads(group: Group) -> None:
    """The all-to-all, with planning from the page table of all ranks in the graph."""
    problem = Problem(dtype=torch.bfloat16)
    batch = _batch(problem, group)
    batch.append(batch.lens)
    n, shard = len(batch.lens), batch.shard
    planner = attn_ops.DecodePlanner(n, 80, **batch.sizes(), context=shard)
    sinks = torch.linspace(-1, 1, problem.heads[0]).to(DEVICE)

    def step(q: Tensor, kv_indptr: Tensor, kv_indices: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        plan = planner.plan(kv_indptr, kv_indices, last, validate=False)
        call = (q, batch.k_cache, batch.v_cache, plan, planner.workspace)
        out, lse = torch.ops.attn.batch_decode(*call, return_lse=True)
        return merge_context(out, lse, group, scatter_heads=True, sinks=sinks)

    q = batch.queries(n)
    merged = torch.compile(step, fullgraph=True, backend="aot_eager")(q, *batch.table())
    share(Expected.of(batch.requests(q, [1] * n), sinks=sinks), batch).check(*merged)


def _planner(batch: Batch, **changes: Any) -> attn_ops.DecodePlanner:
    return attn_ops.DecodePlanner(8, 80, **batch.sizes(), context=replace(batch.shard, **changes))


def _raises(error: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=re.escape(words)):
        call()


def validated_batches(group: Group) -> None:
    """Ranks whose batches differ all raise, before anything is planned, and go on after that."""
    batch = _batch(Problem(), group)
    planner = _planner(batch)
    kv_indptr, kv_indices, last = batch.table()
    planner.plan(kv_indptr, kv_indices, last, validate=True)
    before = [t.clone() for t in planner.state]
    other = batch.shard.rank == 1
    shorter = last - (last > 1).int() if other else last
    fewer = (kv_indptr[:-1], kv_indices, last[:-1]) if other else (kv_indptr, kv_indices, last)
    _raises(RankError, "rank 1 has other lengths", lambda: planner.plan(kv_indptr, kv_indices, shorter, validate=True))
    _raises(RankError, "rank 1 plans 6 requests", lambda: planner.plan(*fewer, validate=True))
    wrong = last + PAGE if other else last
    error, words = (PageTableError, "kv_last_page_len") if other else (RankError, "rank 1 failed with PageTableError")
    _raises(error, words, lambda: planner.plan(kv_indptr, kv_indices, wrong, validate=True))
    assert all(map(torch.equal, before, planner.state))

    def refused(error: type[Exception], words: str) -> tuple[type[Exception], str]:
        """The error that this rank raises: rank 1 its own, the others that rank 1 failed."""
        return (error, words) if other else (RankError, f"rank 1 failed with {error.__name__}")

    floats = last.float() if other else last
    _raises(
        *refused(DTypeError, "kv_last_page_len is float32"),
        lambda: planner.plan(kv_indptr, kv_indices, floats, validate=True),
    )
    scalar = last[0] if other else last
    _raises(
        *refused(ShapeError, "kv_last_page_len"),
        lambda: planner.plan(kv_indptr, kv_indices, scalar, validate=True),
    )
    prefill = attn_ops.PrefillPlanner(8, 8, 80, **batch.sizes(), context=batch.shard)
    qo_indptr = indptr([2 if other else 1] * len(batch.lens)).to(DEVICE)
    _raises(
        *refused(CapacityError, "14 query rows"),
        lambda: prefill.plan(qo_indptr, kv_indptr, kv_indices, last, validate=True),
    )
    twice = _planner(batch, rank=0)
    _raises(RankError, "process 1 of 2 plans as rank 0", lambda: twice.plan(kv_indptr, kv_indices, last, validate=True))
    uneven = _planner(batch, interleave=PAGE * (2 if other else 1))
    _raises(RankError, "rank 1 has interleave 32", lambda: uneven.plan(kv_indptr, kv_indices, last, validate=True))
    planner.plan(kv_indptr, kv_indices, last, validate=True)


def planners_that_differ(group: Group) -> None:
    """Capacities and sizes, of planners that could plan the batch by themselves."""
    batch = _batch(Problem(), group)
    sizes: dict[str, Any] = {"max_batch": 8, "max_pages": 80, **batch.sizes(), "context": batch.shard}
    for name, value, words in (
        ("max_batch", 9, "max_batch 9 and rank 0 has 8"),
        ("max_pages", 90, "max_pages 90 and rank 0 has 80"),
        ("num_qo_heads", 8, "num_qo_heads 8 and rank 0 has 4"),
        ("head_dim_vo", 64, "head_dim_vo 64 and rank 0 has 32"),
        ("window_left", 5, "window 6 and rank 0 has 0"),
    ):
        planner = attn_ops.DecodePlanner(**sizes | ({name: value} if batch.shard.rank == 1 else {}))
        call = functools.partial(planner.plan, *batch.table(), validate=True)
        _raises(RankError, f"plan: rank 1 has {words}; expected planners of the same sizes", call)


def a_group_without_this_rank(group: Group) -> None:
    first, out, lse = dist.new_group([0]), torch.ones(7, 4, 32, device=DEVICE), torch.zeros(7, 4, device=DEVICE)
    if dist.get_rank(group) == 0:
        assert torch.equal(merge_context(out, lse, first)[0], out)
        return
    for call in (lambda: merge_context(out, lse, first), lambda: ContextShard.of(first, interleave=PAGE)):
        _raises(RankError, "this process is not in the group", call)


def plan_of_another_rank(group: Group) -> None:
    batch = _batch(Problem(), group)
    out, lse = torch.zeros(7, 4, 32, device=DEVICE), torch.zeros(7, 4, device=DEVICE)
    other = _planner(batch, rank=1 - batch.shard.rank)
    whole = attn_ops.DecodePlanner(8, 80, **batch.sizes())
    expected = f"made for rank {1 - batch.shard.rank} of 2; expected a plan for rank {batch.shard.rank} of 2"
    _raises(PlanError, expected, lambda: merge_context(out, lse, group, plan=other.state))
    _raises(PlanError, "made for rank 0 of 1", lambda: merge_context(out, lse, group, plan=whole.state))


def unavailable_exchange(group: Group) -> None:
    """Without symmetric memory all ranks know the reason, and merge by a collective."""
    exchange = ContextExchange(8, 4, 32, torch.float32, group=group, device="cpu")
    assert exchange.unavailable == "rank 0: it runs on cuda, not cpu"
    generator = torch.Generator().manual_seed(2)
    v = torch.randn(5, 2, 4, 32, generator=generator)
    s = torch.randn(5, 2, 4, generator=generator)
    rank = dist.get_rank(group)
    out, lse = merge_context(v[:, rank].contiguous().to(DEVICE), s[:, rank].contiguous().to(DEVICE), exchange=exchange)
    torch.testing.assert_close((out.cpu().double(), lse.cpu().double()), oracle.merge(v, s), atol=1e-6, rtol=1e-6)
    uneven = functools.partial(ContextExchange, 8 + 8 * rank, 4, 32, group=group, device="cpu")
    _raises(RankError, "rank 1 asks for 4352 bytes of states and rank 0 for 2176", uneven)
    make = functools.partial(ContextExchange, 8, 4, 32, group=group, device="cpu", required=True)
    _raises(BackendError, "it runs on cuda, not cpu", make)
    for name in ("max_rows", "timeout_s"):  # only of one rank, before all ranks allocate
        sizes = {"max_rows": 8, "timeout_s": 5.0} | ({name: -1} if rank == 1 else {})
        make = functools.partial(ContextExchange, num_heads=4, head_dim=32, group=group, device="cpu", **sizes)
        error, words = (OptionError, f"{name} is -1") if rank == 1 else (RankError, "rank 1 failed with OptionError")
        _raises(error, words, make)


def a_rank_that_does_not_answer(group: Group) -> None:
    """The rank that validates by itself gets an error after its time-out, and the late rank the same; then all plan."""
    batch = _batch(Problem(), group)
    planner, words = _planner(batch, timeout_s=0.5), "rank 1 did not answer (ranks [0, 1]); expected an answer"
    if batch.shard.rank:
        time.sleep(2)
    start = time.monotonic()
    _raises(RankError, words, lambda: planner.plan(*batch.table(), validate=True))
    assert time.monotonic() - start < 10
    dist.barrier(group)
    planner.plan(*batch.table(), validate=True)


CASES: dict[str, Callable[[Group], None]] = {
    case.__name__: case
    for case in (
        decode,
        decode_wide_interleave,
        decode_bfloat16,
        decode_with_sinks,
        decode_options,
        decode_odd_elements,
        decode_fp8_cache,
        chunked_prefill,
        mla,
        compiled_steps,
        compiled_heads,
        validated_batches,
        planners_that_differ,
        a_group_without_this_rank,
        plan_of_another_rank,
        unavailable_exchange,
        a_rank_that_does_not_answer,
    )
}
