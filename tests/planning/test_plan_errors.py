"""Bad batches and bad planner arguments raise typed errors that name what is expected, before the plan is written."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.page_tables import int32
from torch import Tensor

from attn_ops import DecodePlanner, PrefillPlanner
from attn_ops.errors import (
    ArgumentError,
    AttnOpsError,
    CapacityError,
    DTypeError,
    OptionError,
    PageTableError,
    ShapeError,
)

SIZES: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16}
PAGED: dict[str, Any] = {**SIZES, "page_size": 16, "max_kv_len": 64, "cache_pages": 9}

GOOD: dict[str, Tensor] = {
    "qo_indptr": int32([0, 3, 3, 8]),
    "kv_indptr": int32([0, 2, 2, 3]),
    "kv_indices": int32([8, 0, 5]),
    "kv_last_page_len": int32([16, 0, 1]),
}

# What is wrong, the error, what was wrong and what was expected in its text; for paged decode and prefill.
BAD_PAGES: list[tuple[dict[str, Tensor], type[AttnOpsError], str, str]] = [
    ({"kv_indptr": int32([1, 2, 2, 3])}, PageTableError, "kv_indptr starts at 1", "0"),
    (
        {"kv_indptr": int32([0, 2, 1, 3])},
        PageTableError,
        "kv_indptr falls from 2 to 1 at request 1",
        "values that never",
    ),
    ({"kv_indptr": int32([])}, ShapeError, "kv_indptr is [0]", "[batch + 1]"),
    ({"kv_indptr": int32([[0, 2]])}, ShapeError, "kv_indptr is [1, 2]", "[batch + 1]"),
    (
        {"kv_indptr": int32([0, 2, 2, 4])},
        PageTableError,
        "kv_indptr ends at 4 and kv_indices has 3",
        "an entry for every",
    ),
    ({"kv_last_page_len": int32([0, 0, 1])}, PageTableError, "kv_last_page_len[0] is 0", "1 to page_size 16"),
    ({"kv_last_page_len": int32([16, 0, 17])}, PageTableError, "kv_last_page_len[2] is 17", "1 to page_size 16"),
    ({"kv_last_page_len": int32([16, 1])}, ShapeError, "kv_last_page_len is [2]", "[3] for the 3 requests"),
    ({"kv_last_page_len": int32(3)}, ShapeError, "kv_last_page_len is []", "[3] for the 3 requests"),
    ({"kv_indices": int32([[8, 0, 5]])}, ShapeError, "kv_indices is [1, 3]", "[pages]"),
    ({"kv_indices": int32([8, 9, 5])}, PageTableError, "kv_indices[1] is 9", "a page of the cache, 0 to 8"),
    ({"kv_indices": int32([8, 0, -1])}, PageTableError, "kv_indices[2] is -1", "a page of the cache, 0 to 8"),
    (
        {"kv_indptr": int32([0, 5, 5, 6]), "kv_indices": int32([0] * 6), "kv_last_page_len": int32([1, 1, 1])},
        CapacityError,
        "a request has 65 tokens and the plan capacity for 64",
        "max_kv_len of at least 65",
    ),
    (  # the pages are short, whatever max_kv_len
        {"kv_indptr": int32([0, 8, 8, 8]), "kv_indices": int32([0] * 8), "kv_last_page_len": int32([1, 0, 0])},
        CapacityError,
        "the batch has 8 pages and the plan capacity for 7",
        "max_pages of at least 8",
    ),
    (
        {"kv_indptr": int32([0, 4, 4, 8]), "kv_indices": int32([0] * 8)},
        CapacityError,
        "the batch has 8 pages and the plan capacity for 7",
        "max_pages of at least 8",
    ),
    (
        {"kv_indptr": int32([0, 0, 0, 0, 0]), "kv_last_page_len": int32([1] * 4), "qo_indptr": int32([0] * 5)},
        CapacityError,
        "the batch has 4 requests and the plan capacity for 3",
        "max_batch of at least 4",
    ),
]

BAD_ROWS: list[tuple[dict[str, Tensor], type[AttnOpsError], str, str]] = [
    ({"qo_indptr": int32([2, 3, 3, 8])}, PageTableError, "qo_indptr starts at 2", "0"),
    (
        {"qo_indptr": int32([0, 3, 2, 8])},
        PageTableError,
        "qo_indptr falls from 3 to 2 at request 1",
        "values that never",
    ),
    ({"qo_indptr": int32([0, 3, 3, 9])}, CapacityError, "the batch has 9 query rows", "max_tokens of at least 9"),
    ({"qo_indptr": int32([0, 3])}, ShapeError, "qo_indptr is [2]", "[4] for the 3 requests"),
]


def _refused(planner: Any, inputs: list[Tensor], error: type[AttnOpsError], what: str, expected: str) -> None:
    for t in planner.state:
        t.fill_(7)
    with pytest.raises(error, match=rf": {re.escape(what)}.*; expected {re.escape(expected)}.*; \w") as raised:
        planner.plan(*inputs)
    assert type(raised.value) is error
    assert all((t == 7).all() for t in planner.state), "something was written"


@pytest.mark.parametrize(("changes", "error", "what", "expected"), BAD_PAGES, ids=[bad[2] for bad in BAD_PAGES])
def test_decode(changes: dict[str, Tensor], error: type[AttnOpsError], what: str, expected: str) -> None:
    inputs = {**GOOD, **changes}
    del inputs["qo_indptr"]
    _refused(DecodePlanner(3, 7, **PAGED), list(inputs.values()), error, what, expected)


@pytest.mark.parametrize(
    ("changes", "error", "what", "expected"),
    [*BAD_PAGES, *BAD_ROWS],
    ids=[bad[2] for bad in [*BAD_PAGES, *BAD_ROWS]],
)
def test_prefill(changes: dict[str, Tensor], error: type[AttnOpsError], what: str, expected: str) -> None:
    inputs = {**GOOD, **changes}
    _refused(PrefillPlanner(3, 8, 7, **PAGED), list(inputs.values()), error, what, expected)


@pytest.mark.parametrize(
    ("kv_indptr", "error", "what", "expected"),
    [
        ([1, 9, 9, 70], PageTableError, "kv_indptr starts at 1", "0"),
        ([0, 9, 8, 70], PageTableError, "kv_indptr falls from 9 to 8 at request 1", "values that never"),
        (
            [0, 9, 9, 74],
            CapacityError,
            "a request has 65 tokens and the plan capacity for 64",
            "max_kv_len of at least 65",
        ),
        ([0, 0, 0, 0, 0], CapacityError, "the batch has 4 requests", "max_batch of at least 4"),
    ],
)
def test_ragged(kv_indptr: list[int], error: type[AttnOpsError], what: str, expected: str) -> None:
    planner = PrefillPlanner(3, 8, 0, max_kv_len=64, **SIZES)
    qo_indptr = GOOD["qo_indptr"] if len(kv_indptr) == 4 else int32([0] * 5)
    _refused(planner, [qo_indptr, int32(kv_indptr)], error, what, expected)


def test_ragged_tokens_fit_in_int32() -> None:
    planner = PrefillPlanner(3, 8, 0, max_kv_len=1 << 30, **SIZES)
    inputs = [GOOD["qo_indptr"], torch.tensor([0, 1 << 30, 1 << 30, 1 << 31])]
    _refused(planner, inputs, PageTableError, f"kv_indptr ends at {1 << 31}", "at most 2147483647")


def _is_of_sizes(error: type[AttnOpsError], what: str) -> bool:
    """Whether a traced call can find it: the contents of a page table are not there yet."""
    return error is ShapeError or "requests" in what


TRACED = [bad for bad in (*BAD_PAGES, *BAD_ROWS) if _is_of_sizes(bad[1], bad[2])]


@pytest.mark.parametrize(("changes", "error", "what", "expected"), TRACED, ids=[bad[2] for bad in TRACED])
def test_a_traced_call_has_the_same_words(
    changes: dict[str, Tensor], error: type[AttnOpsError], what: str, expected: str
) -> None:
    planner = PrefillPlanner(3, 8, 7, **PAGED)
    inputs = {**GOOD, **changes}.values()
    with pytest.raises(error) as eager:
        planner.plan(*inputs)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=re.escape(str(eager.value))):
        torch.compile(planner.plan, backend="aot_eager", fullgraph=True)(*inputs)


def test_the_batch_that_is_broken_here_is_valid() -> None:
    plan = PrefillPlanner(3, 8, 7, **PAGED).plan(*GOOD.values())
    assert plan.kv_len.tolist() == [32, 0, 1]


def test_page_numbers_are_checked_as_far_as_the_cache_is_known() -> None:
    """Without ``cache_pages`` only negative ones are found."""
    planner = DecodePlanner(3, 7, **{**PAGED, "cache_pages": None})
    table = [GOOD["kv_indptr"], int32([100_000, 0, 5]), GOOD["kv_last_page_len"]]
    planner.plan(*table)
    _refused(planner, [table[0], int32([-5, 0, 5]), table[2]], PageTableError, "kv_indices[0] is -5", "a page")


def test_page_numbers_beyond_int32_are_found_before_they_are_converted() -> None:
    planner = DecodePlanner(3, 7, **{**PAGED, "cache_pages": None})
    indices = torch.tensor([2**32, 0, 5])
    inputs = [GOOD["kv_indptr"], indices, GOOD["kv_last_page_len"]]
    _refused(planner, inputs, PageTableError, "kv_indices[0] is 4294967296", "a page of the cache")


@pytest.mark.parametrize(
    ("changes", "error", "what", "expected"),
    [
        ({"max_batch": 0}, OptionError, "max_batch is 0", "at least 1"),
        ({"max_pages": -1}, OptionError, "max_pages is -1", "at least 0"),
        ({"page_size": 0}, OptionError, "page_size is 0", "at least 1"),
        ({"head_dim": 0}, OptionError, "head_dim_qk is 0", "at least 1"),
        ({"num_kv_heads": 0}, OptionError, "num_kv_heads is 0", "at least 1"),
        ({"window_left": -2}, OptionError, "window_left is -2", f"0 or more tokens, at most {2**30 - 1}, or -1"),
        (
            {"window_left": 2**63 - 1},
            OptionError,
            f"window_left is {2**63 - 1}",
            f"0 or more tokens, at most {2**30 - 1}, or -1",
        ),
        ({"cache_pages": 0}, OptionError, "cache_pages is 0", "at least 1"),
        ({"num_qo_heads": 1}, ShapeError, "1 query heads do not share 2 KV heads", "a query head count"),
        ({"num_qo_heads": 5}, ShapeError, "5 query heads do not share 2 KV heads", "a query head count"),
    ],
)
def test_planner(changes: dict[str, Any], error: type[AttnOpsError], what: str, expected: str) -> None:
    message = rf"^planner: {re.escape(what)}.*; expected {re.escape(expected)}.*; \w"
    sizes = {"max_batch": 3, "max_pages": 7, **PAGED, **changes}
    with pytest.raises(error, match=message):
        DecodePlanner(**sizes)
    with pytest.raises(error, match=message):
        PrefillPlanner(max_tokens=8, **sizes)


@pytest.mark.parametrize("name", ["max_batch", "page_size", "head_dim"])
def test_a_size_is_no_flag(name: str) -> None:
    sizes = {"max_batch": 3, "max_pages": 7, **PAGED, name: True}
    with pytest.raises(ArgumentError, match=f"DecodePlanner: {name} is True, of type bool; expected an integer"):
        DecodePlanner(**sizes)
    with pytest.raises(ArgumentError, match=f"PrefillPlanner: {name} is True, of type bool; expected an integer"):
        PrefillPlanner(max_tokens=8, **sizes)


HUGE = 2**30 + 1


@pytest.mark.parametrize(
    ("changes", "error", "what", "expected"),
    [
        *(
            ({name: value}, OptionError, f"{name} is {value}", f"at most {2**30}")
            for value in (HUGE, 2**40, 2**62)
            for name in ("max_batch", "max_pages", "page_size", "max_kv_len", "num_qo_heads", "fixed_split_size")
        ),
        ({"head_dim": HUGE}, OptionError, f"head_dim_qk is {HUGE}", f"at most {2**30}"),
        ({"head_dim_vo": HUGE}, OptionError, f"head_dim_vo is {HUGE}", f"at most {2**30}"),
        ({"head_dim_vo": 0}, OptionError, "head_dim_vo is 0", "at least 1"),
        ({"max_kv_len": 0}, OptionError, "max_kv_len is 0", "at least 1"),
        ({"fixed_split_size": 0}, OptionError, "fixed_split_size is 0", "at least 1"),
        (
            {"max_pages": 2**20, "page_size": 2**11},
            CapacityError,
            "max_pages is 1048576 with page_size 2048 and splits of 0 tokens",
            "at most 2146435072 tokens in all",
        ),
        (
            {"fixed_split_size": 2**27},
            CapacityError,
            "max_pages is 7 with page_size 16 and splits of 2147483648 tokens",
            "at most 2146435072 tokens in all",
        ),
        ({"max_batch": 2**29}, CapacityError, "the plan has 53687", "at most 268435455"),
    ],
)
@pytest.mark.usefixtures("no_allocation")
def test_planner_beyond_int32(changes: dict[str, Any], error: type[AttnOpsError], what: str, expected: str) -> None:
    """Refused before anything is allocated: none of it would fit in memory."""
    message = rf"^planner: {re.escape(what)}.*; expected {re.escape(expected)}.*; \w"
    sizes = {"max_batch": 3, "max_pages": 7, **PAGED, **changes}
    with pytest.raises(error, match=message) as raised:
        DecodePlanner(**sizes)
    assert type(raised.value) is error
    with pytest.raises(error, match=message):
        PrefillPlanner(max_tokens=8, **sizes)


@pytest.mark.parametrize(
    ("changes", "error", "what", "expected"),
    [
        ({"max_tokens": 0}, OptionError, "max_tokens is 0", "at least 1"),
        ({"max_tokens": 2**40}, OptionError, f"max_tokens is {2**40}", f"at most {2**28}"),
        ({"tile_rows": 0}, OptionError, "tile_rows is 0", "at least 1"),
        ({"window_right": -2}, OptionError, "window_right is -2", f"0 or more tokens, at most {2**30 - 1}, or -1"),
        ({"window_right": 2**30}, OptionError, f"window_right is {2**30}", "0 or more tokens"),
        ({"tile_rows": 2**31}, OptionError, f"tile_rows is {2**31}", f"at most {2**30}"),
        ({"tile_rows": 2**28}, OptionError, f"tile_rows is {2**28} with 4 heads of 16 elements", "a partial result of"),
        ({"tile_rows": 31_600_000}, OptionError, "tile_rows is 31600000 with 4 heads of 16 elements", "a partial"),
        ({"num_ctas": -2}, OptionError, "num_ctas is -2", "at least 0"),
        ({"num_ctas": 2**40}, OptionError, f"num_ctas is {2**40}", f"at most {2**30}"),
        ({"num_ctas": 2**30}, CapacityError, "the plan has 10737", "at most 268435455"),
        ({"max_tokens": 2**28, "tile_rows": 1}, CapacityError, "the plan has 2684354", "at most 268435455"),
    ],
)
@pytest.mark.usefixtures("no_allocation")
def test_prefill_planner(changes: dict[str, int], error: type[AttnOpsError], what: str, expected: str) -> None:
    message = rf"^planner: {re.escape(what)}.*; expected {re.escape(expected)}.*; \w"
    with pytest.raises(error, match=message) as raised:
        PrefillPlanner(**{"max_batch": 3, "max_tokens": 8, "max_pages": 7, **PAGED, **changes})
    assert type(raised.value) is error


@pytest.fixture
def no_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor with elements cannot be made by a planner."""
    monkeypatch.setattr(torch, "zeros", None)


@pytest.mark.parametrize("changes", [{"page_size": 16, "max_kv_len": 64}, {}])
def test_ragged_planner_needs_lengths(changes: dict[str, int]) -> None:
    with pytest.raises(OptionError, match=r"^planner: ragged KV .*; expected page_size 1 and a number of tokens; give"):
        PrefillPlanner(3, 8, 0, **SIZES, **changes)


@pytest.mark.parametrize(
    ("num_ctas", "expected"),
    [(-3, "at least 1"), (0, "at least 1"), (65536, "at most 65535"), (2**40, "at most 65535")],
)
def test_decode_planner_bounds_its_ctas(num_ctas: int, expected: str) -> None:
    with pytest.raises(OptionError, match=rf"^planner: num_ctas is {num_ctas}; expected {expected}; \w"):
        DecodePlanner(3, 7, num_ctas=num_ctas, **PAGED)


def test_split_counters_beyond_int32() -> None:
    sizes = {"page_size": 16, "head_dim": 1, "num_kv_heads": 1, "num_ctas": 65535, "device": "meta"}
    DecodePlanner(3, 7, num_qo_heads=16384, **sizes)
    with pytest.raises(
        CapacityError, match=r"^planner: the plan has 131068 slots of 16385 heads; expected at most 21474"
    ):
        DecodePlanner(3, 7, num_qo_heads=16385, **sizes)


def test_unused_entries_of_a_page_table_are_not_read() -> None:
    planner = DecodePlanner(3, 7, cache_pages=3, page_size=16, num_qo_heads=1, num_kv_heads=1, head_dim=1)
    plan = planner.plan(int32([0, 1]), int32([2, 99, -1]), int32([3]))
    assert plan.kv_len.tolist() == [3, 0, 0]


def test_the_largest_workspace() -> None:
    """2^40 elements: slots x tile_rows x heads x (head_dim_vo + 1)."""
    sizes = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim": 1, "tile_rows": 2**26, "device": "meta"}
    PrefillPlanner(1, 1, 1, num_ctas=2**13, **sizes)
    message = (
        r"^planner: the workspace would have 1099780063232 elements; expected at most 1099511627776; make num_ctas"
    )
    with pytest.raises(OptionError, match=message):
        PrefillPlanner(1, 1, 1, num_ctas=2**13 + 2, **sizes)


def test_the_largest_plan_is_not_refused() -> None:
    with torch.device("meta"):
        planner = DecodePlanner(2**12, 2**20, **{**PAGED, "page_size": 2**10, "max_kv_len": None, "num_ctas": 65535})
    assert planner.problem.max_kv_len == 2**30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
@pytest.mark.parametrize("name", ["kv_indptr", "kv_indices", "kv_last_page_len"])
@pytest.mark.parametrize("validate", [None, False])
def test_a_page_table_of_no_integer_dtype_is_refused(name: str, dtype: torch.dtype, validate: bool | None) -> None:
    planner = DecodePlanner(3, 3, **PAGED)
    table = {key: t for key, t in GOOD.items() if key != "qo_indptr"}
    planner.plan(**table)
    before = [t.clone() for t in planner.state]
    with pytest.raises(DTypeError, match=rf"^plan: {name} is {str(dtype)[6:]}; expected an integer dtype; convert it"):
        planner.plan(**{**table, name: table[name].to(dtype)}, validate=validate)
    assert all(map(torch.equal, before, planner.state))


@pytest.mark.parametrize("validate", [None, False])
def test_row_offsets_of_no_integer_dtype_are_refused(validate: bool | None) -> None:
    planner = PrefillPlanner(3, 8, 3, **PAGED)
    with pytest.raises(DTypeError, match=r"^plan: qo_indptr is float32; expected an integer dtype; convert it"):
        planner.plan(**{**GOOD, "qo_indptr": GOOD["qo_indptr"].float()}, validate=validate)


@pytest.mark.parametrize("given", [{"kv_indices"}, {"kv_last_page_len"}, set()], ids=["indices", "last", "neither"])
@pytest.mark.parametrize("validate", [None, False])
def test_a_page_table_comes_whole(given: set[str], validate: bool | None) -> None:
    planner = PrefillPlanner(3, 8, 3, **PAGED)
    planner.plan(**GOOD)
    before = [t.clone() for t in planner.state]
    batch = {name: t for name, t in GOOD.items() if name in {"qo_indptr", "kv_indptr", *given}}
    with pytest.raises(ArgumentError, match=r"^plan: kv_.*; expected both[^;]*; pass the"):
        planner.plan(**batch, validate=validate)
    assert all(map(torch.equal, before, planner.state))
