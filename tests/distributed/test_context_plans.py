"""Plans of one rank's part of the keys, in one process: what they hold, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.page_tables import int32, page_table
from torch import Tensor

from attn_ops import DecodePlanner, PrefillPlanner
from attn_ops.distributed import ContextShard, merge_context
from attn_ops.errors import (
    AttnOpsError,
    CapacityError,
    OptionError,
    PageTableError,
    PlanError,
    RankError,
    ShapeError,
)

SIZES: dict[str, Any] = {"page_size": 16, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16}
SHARD = ContextShard(1, 2, 32)
KV_LENS = (100, 0, 5, 64)


def _decode(**changes: Any) -> DecodePlanner:
    return DecodePlanner(4, 20, **{**SIZES, "context": SHARD, **changes})


def test_a_plan_has_the_keys_of_its_rank() -> None:
    planner = _decode()
    plan = planner.plan(*page_table(KV_LENS, 16))
    assert plan.kv_len.tolist() == [36, 0, 0, 32]
    plan = planner.plan(*page_table((33, 70), 16))  # a repeated call cuts the new table
    assert plan.kv_len.tolist() == [1, 32, 0, 0]
    other = _decode(context=ContextShard(0, 2, 32))
    assert other.plan(*page_table(KV_LENS, 16)).kv_len.tolist() == [64, 0, 5, 32]


def test_splits_are_those_of_the_keys_of_a_rank() -> None:
    lengths = int32([0, 1, 31, 32, 33, 64, 65, 100, 1000])
    for world in (1, 2, 3):
        shards = [ContextShard(rank, world, 16) for rank in range(world)]
        owners = [shards[0].owner(torch.arange(n)) for n in lengths]
        for shard in shards:
            assert shard.owned_tokens(lengths).tolist() == [int((o == shard.rank).sum()) for o in owners]
    sizes = {**SIZES, "fixed_split_size": 4, "max_kv_len": 512}
    whole = PrefillPlanner(1, 1, 32, **sizes, num_ctas=4)
    batch = int32([0, 1]), *page_table((512,), 16)
    with pytest.raises(CapacityError, match="the batch makes 8 splits"):
        whole.plan(*batch)
    PrefillPlanner(1, 1, 32, **sizes, num_ctas=4, context=ContextShard(1, 2, 32)).plan(*batch)


def test_one_rank_has_the_plan_of_all_keys() -> None:
    whole = _decode(context=None)
    alone = _decode(context=ContextShard(0, 1, 16))
    for a, b in zip(whole.plan(*page_table(KV_LENS, 16)), alone.plan(*page_table(KV_LENS, 16)), strict=True):
        assert a.shape == b.shape
        assert torch.equal(a, b)


def test_appended_tokens_of_other_ranks_are_skipped() -> None:
    request, position = int32([0, 0, 3, -1, 2]), int32([31, 32, 95, -1, 64])
    assert SHARD.owned(request, position).tolist() == [-1, 0, -1, -1, -1]
    assert ContextShard(0, 2, 32).owned(request, position).tolist() == [0, -1, 3, -1, 2]
    assert ContextShard(2, 3, 16).owner(position[:3]).tolist() == [1, 2, 2]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _decode(page_size=64), "interleave of context is 32 tokens with page_size 64"),
        (
            lambda: PrefillPlanner(4, 9, 0, **SIZES | {"page_size": 1}, max_kv_len=9, context=SHARD),
            "context with ragged KV",
        ),
        (lambda: ContextShard(-1, 2, 16), "rank is -1"),
        (lambda: ContextShard(0, 2, 0), "interleave is 0"),
        (lambda: ContextShard(0, 2, 16, timeout_s=0), "timeout_s is 0"),
    ],
)
def test_shards_and_planners_that_do_not_go_together(make: Any, words: str) -> None:
    with pytest.raises(OptionError, match=re.escape(words)):
        make()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"max_pages": 11}, CapacityError, "12 pages and the plan capacity for 11"),
        ({"max_kv_len": 99}, CapacityError, "a request has 100 tokens"),
        ({"cache_pages": 3}, PageTableError, "a page of the cache, 0 to 2"),
    ],
)
def test_contents_are_checked(change: dict[str, int], error: type[AttnOpsError], words: str) -> None:
    sizes = {"max_pages": 20, **change}
    planner = DecodePlanner(4, sizes.pop("max_pages"), **SIZES, **sizes, context=SHARD)
    with pytest.raises(error, match=re.escape(words)):
        planner.plan(*page_table(KV_LENS, 16))


def test_page_numbers_of_other_ranks_are_not_checked() -> None:
    kv_indptr, kv_indices, last = int32([0, 4]), int32([-1, -1, 2, 0]), int32([16])
    plan = _decode(cache_pages=3).plan(kv_indptr, kv_indices, last)
    assert plan.kv_indices[:2].tolist() == [2, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("page", "entry"), [(3, 2), (-1, 3), (2**32, 8)])
def test_an_error_counts_pages_as_the_page_table_of_all_ranks(page: int, entry: int, dtype: torch.dtype) -> None:
    """Rank 1 has pages 2 and 3 of the first request, and page 2 of the second, whose entry is 8."""
    kv_indptr, kv_indices, last = int32([0, 6, 9]), torch.zeros(9, dtype=dtype), int32([16, 16])
    page = page if dtype == torch.int64 else min(page, 3)
    kv_indices[entry] = page
    planner = _decode(cache_pages=3)
    before = [t.clone() for t in planner.state]
    with pytest.raises(
        PageTableError, match=re.escape(f"kv_indices[{entry}] is {page}; expected a page of the cache, 0")
    ):
        planner.plan(kv_indptr, kv_indices, last)
    assert all(map(torch.equal, planner.state, before))


def _attend(planner: DecodePlanner, options: dict[str, Any]) -> Any:
    q, cache = torch.zeros(4, 4, 16), torch.zeros(20, 16, 2, 16)
    return torch.ops.attn.batch_decode(q, cache, cache, planner.state, planner.workspace, **options)


def test_sinks_count_once_for_all_ranks() -> None:
    words, sinks = "batch_decode: sinks is given and the plan has the keys of one of 2 ranks", torch.zeros(4)
    planner = _decode()
    _attend(planner, {})
    with pytest.raises(PlanError, match=words):
        _attend(planner, {"sinks": sinks})
    with pytest.raises(Exception, match=words):
        torch.compile(lambda: _attend(planner, {"sinks": sinks}), backend="eager", fullgraph=True)()


def test_a_request_without_keys_in_the_window_is_empty() -> None:
    plan = _decode(window_left=3).plan(*page_table((70, 0, 5, 64), 16))
    assert plan.kv_len.tolist() == [0, 0, 0, 32]  # tokens 64 to 69 are those of rank 0
    assert plan.work[:1].tolist() == [[3, 1, 28, 32, 63, 2, -1, 3]]


def test_planning_ops_take_the_lengths_on_all_ranks() -> None:
    table = page_table(KV_LENS, 16)
    own, plan = SHARD.page_table(16, *table), _decode().state
    lengths = torch.ops.attn.seq_lens(table[0], table[2], 16)
    with pytest.raises(PlanError, match="keys of one of 2 ranks; expected seq_lens"):
        torch.ops.attn.plan_decode(*own, plan)
    with pytest.raises(ShapeError, match="seq_lens has length 3; expected 4"):
        torch.ops.attn.plan_decode(*own, plan, seq_lens=lengths[1:])
    with pytest.raises(PlanError, match="the plan is for whole requests"):
        torch.ops.attn.plan_decode(*table, _decode(context=None).state, seq_lens=lengths)
    torch.ops.attn.plan_decode(*own, plan, seq_lens=lengths)
    assert plan.kv_len.tolist() == [36, 0, 0, 32]


@pytest.mark.parametrize(("rank", "world", "interleave"), [(2, 2, 16), (0, 2, 0), (0, 0, 0), (0, 1 << 20, 1 << 20)])
def test_hostile_shards(rank: int, world: int, interleave: int) -> None:
    planner = _decode()
    problem = planner.problem._replace(rank=rank, world=world, interleave=interleave)
    planner.state = planner.state._replace(problem=problem.as_shape_tensor(torch.device("cpu")))
    with pytest.raises(PlanError, match="expected a rank below world and an interleave"):
        _attend(planner, {})


def test_merging_needs_a_group() -> None:
    with pytest.raises(RankError, match="there is no process group"):
        merge_context(torch.zeros(1, 2, 4), torch.zeros(1, 2))


def test_planning_traces() -> None:
    """The table is cut in the graph, by one op."""
    planner = _decode()

    def plan(*table: Tensor) -> Tensor:
        return planner.plan(*table, validate=False).kv_len.clone()

    program = torch.export.export(_Module(plan), page_table(KV_LENS, 16))
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "attn.shard_page_table.default" in names
    assert program.module()(*page_table(KV_LENS, 16)).tolist() == [36, 0, 0, 32]


class _Module(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Any:
        return self.function(a, b, c)
