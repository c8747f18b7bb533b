"""Checks of plans: their fields fit together, and their capacities fit the int32 arithmetic of the kernels.

Only sizes are read, which the host knows: no check synchronizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from torch import Tensor

from attn_ops.errors import CapacityError, OptionError, PlanError, ShapeError, fail
from attn_ops.plan.state import (
    INT32_MAX,
    KV_BLOCK,
    WORK_FIELDS,
    DecodePlan,
    PlanProblem,
    PrefillPlan,
    decode_shapes,
    num_partials,
    prefill_shapes,
)
from attn_ops.symbolic_sizes import guard_or_true

MAX_SIZE = 1 << 30
"""Largest capacity, size and option of a plan: the sum of any two fits int32."""

MAX_KV_TOKENS = (1 << 31) - (1 << 20)
"""Most tokens of ragged KV, or in all pages of a plan and one split: kernels add tiles to positions in int32."""

MAX_QUERY_ROWS = 1 << 28
"""Most query rows of a call. In a request with more rows than keys positions of rows are negative, and int32 too."""

MAX_CTAS_PER_HEAD = (1 << 16) - 1
"""Largest ``num_ctas`` of a decode plan. One CTA of the planning kernel holds an entry for each."""

MAX_WORK_ITEMS = INT32_MAX // len(WORK_FIELDS)

NUM_SIZES = PlanProblem._fields.index("tile_rows") + 1
"""Number of leading fields of a problem that are at least 1 in every plan."""

AS_MADE = "pass the plan as the planner made it"


def check_plan(where: str, plan: DecodePlan | PrefillPlan) -> None:
    """Raise unless the shape of every field of ``plan`` agrees with its problem and its other fields.

    Kernels read a field at offsets below the size of another field, so they would read and write outside of a plan that
    fails here. The fields' ranks and dtypes have been checked. Symbolic sizes get guards that every plan satisfies.

    Raises:
        PlanError: names the field, its shape and the expected shape.
        CapacityError: the pages have more tokens than kernels count.
    """
    problem = PlanProblem.of(plan.problem)
    if not all(guard_or_true(size >= 1) for size in problem[:NUM_SIZES]) or problem.split % KV_BLOCK:
        expected = f"sizes of at least 1 and a split that is a multiple of {KV_BLOCK}"
        fail(PlanError, where, f"plan.problem is {problem}", expected, AS_MADE)
    if problem.world != 1 and not (problem.rank < problem.world and 0 < problem.interleave * problem.world <= MAX_SIZE):
        expected = "a rank below world and an interleave, or world 1"
        fail(PlanError, where, f"plan.problem is {problem}", expected, AS_MADE)
    capacities = _capacities(plan)
    if not (guard_or_true(capacities.max_batch >= 1) and _agrees(plan, capacities.shapes(problem))):
        _fail_plan(where, plan, problem)
    if type(capacities.max_pages) is int:
        check_kv_tokens(where, capacities.max_pages, problem)


def check_groups(where: str, num_qo_heads: int, num_kv_heads: int, fix: str = "repeat or regroup the heads") -> None:
    """Raise unless the number of query heads is a multiple of the number of KV heads, and both are at least 1."""
    if min(num_qo_heads, num_kv_heads) < 1 or num_qo_heads % num_kv_heads:
        fail(
            ShapeError,
            where,
            f"{int(num_qo_heads)} query heads do not share {int(num_kv_heads)} KV heads evenly",
            "a query head count that is a multiple of the KV head count, both at least 1",
            fix,
        )


def check_head_shards(where: str, heads: Mapping[str, int], ranks: int) -> None:
    """Raise unless ``ranks`` ranks divide each of these head counts, by name, evenly.

    Raises:
        ShapeError: names the count.
    """
    for name, count in heads.items():
        if count % ranks:
            fail(
                ShapeError,
                where,
                f"{name} has {count} heads for {ranks} ranks",
                f"a multiple of {ranks}",
                "repeat or replicate the heads, or divide them over fewer ranks",
            )


def check_kv_tokens(where: str, max_pages: int, problem: PlanProblem) -> None:
    """Raise unless positions of tokens in ``max_pages`` pages, and positions a split further, fit int32."""
    if max_pages * problem.page_size + problem.split > MAX_KV_TOKENS:
        fail(
            CapacityError,
            where,
            f"max_pages is {max_pages} with page_size {problem.page_size} and splits of {problem.split} tokens",
            f"at most {MAX_KV_TOKENS} tokens in all pages and a split",
            "plan for fewer pages at a time, or with a smaller fixed_split_size",
        )


def check_products(where: str, problem: PlanProblem, max_pages: int, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise unless products of sizes that kernels compute in int32 fit, for a plan with fields of ``shapes``.

    Raises:
        OptionError: a query tile is too large.
        CapacityError: the plan has too many pages, work items or split counters.
    """
    check_kv_tokens(where, max_pages, problem)
    partial = problem.tile_rows * problem.num_qo_heads * (problem.head_dim_vo + 1)
    if partial > INT32_MAX:
        fail(
            OptionError,
            where,
            f"tile_rows is {problem.tile_rows} with {problem.num_qo_heads} heads of {problem.head_dim_vo} elements",
            f"a partial result of at most {INT32_MAX} elements, not {partial}",
            "make tile_rows smaller",
        )
    fewer = "make max_batch, max_tokens, max_pages or num_ctas smaller, or fixed_split_size larger"
    if shapes["work"][0] > MAX_WORK_ITEMS:
        fail(CapacityError, where, f"the plan has {shapes['work'][0]} work items", f"at most {MAX_WORK_ITEMS}", fewer)
    slots, heads = shapes.get("split_counters", (0, 0))
    if slots * heads > INT32_MAX:
        fail(CapacityError, where, f"the plan has {slots} slots of {heads} heads", f"at most {INT32_MAX}", fewer)


class _Capacities(NamedTuple):
    """The capacities of a plan that are not in its problem, each read from the size of one field.

    max_batch       from ``kv_len``
    max_pages       from ``kv_indices``
    num_ctas        from ``cta_indptr``; None for prefill
    num_full_tiles  from ``work``; None for decode
    max_splits      from ``split_tiles``; None for decode
    """

    max_batch: int
    max_pages: int
    num_ctas: int | None = None
    num_full_tiles: int | None = None
    max_splits: int | None = None

    def shapes(self, problem: PlanProblem) -> dict[str, tuple[int, ...]]:
        """The shapes that the fields have if they agree."""
        if self.num_ctas is not None:
            return decode_shapes(problem, self.max_batch, self.max_pages, self.num_ctas)
        assert self.num_full_tiles is not None
        assert self.max_splits is not None
        return prefill_shapes(self.max_batch, self.num_full_tiles, self.max_pages, self.max_splits)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._asdict().items() if value is not None)


def _capacities(plan: DecodePlan | PrefillPlan, max_batch: int | None = None) -> _Capacities:
    """The capacities of ``plan``, with ``max_batch`` if it is given.

    A field that is too short gives the smallest capacity that a plan can have.
    """
    if max_batch is None:
        max_batch = plan.kv_len.shape[0]
    max_pages = plan.kv_indices.shape[0]
    if isinstance(plan, DecodePlan):
        num_ctas = plan.cta_indptr.shape[0] - 1
        return _Capacities(max_batch, max_pages, num_ctas=num_ctas if guard_or_true(num_ctas >= 1) else 1)
    max_splits = num_partials(plan)
    num_full_tiles = plan.work.shape[0] - max_batch - max_splits
    num_full_tiles = num_full_tiles if guard_or_true(num_full_tiles >= 0) else 0
    return _Capacities(max_batch, max_pages, num_full_tiles=num_full_tiles, max_splits=max_splits)


def _agrees(plan: DecodePlan | PrefillPlan, shapes: dict[str, tuple[int, ...]]) -> bool:
    if type(plan.kv_len) is Tensor:  # sizes are integers
        return all(getattr(plan, field).shape == shape for field, shape in shapes.items())
    return all(_agree(getattr(plan, field).shape, shape) for field, shape in shapes.items())


def _agree(actual: Sequence[int], expected: Sequence[int]) -> bool:
    return all(guard_or_true(a == b) for a, b in zip(actual, expected, strict=True))


def _fail_plan(where: str, plan: DecodePlan | PrefillPlan, problem: PlanProblem) -> NoReturn:
    """Raise for the first field that disagrees with most other fields."""
    indptr = plan.merge_indptr if isinstance(plan, DecodePlan) else plan.qo_indptr
    max_batch = max(1, _median(plan.kv_len.shape[0], plan.kv_indptr.shape[0] - 1, indptr.shape[0] - 1))
    capacities = _capacities(plan, max_batch)
    if isinstance(plan, DecodePlan) and not problem.split:
        by_slots = plan.split_counters.shape[0] // 2 + 1
        num_ctas = _median(plan.cta_indptr.shape[0] - 1, plan.work.shape[0] - max_batch, by_slots)
        capacities = capacities._replace(num_ctas=max(1, num_ctas))
    for field, shape in capacities.shapes(problem).items():
        actual = getattr(plan, field).shape
        if not _agree(actual, shape):
            fail(PlanError, where, f"plan.{field} is {list(actual)}", f"{list(shape)} for {capacities}", AS_MADE)
    raise AssertionError("no field disagrees")


def _median(a: int, b: int, c: int) -> int:
    """The median of three numbers: if two are equal, that number."""
    return sorted((a, b, c))[1]
