"""Lengths and tables of a KV cache that the batch does not have are typed errors, before any write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.flash_requests import DenseCache, check_dense, expected
from helpers.wrapper_requests import DEVICE, Requests
from torch import Tensor

from attn_ops import errors
from attn_ops.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache, get_scheduler_metadata

on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="lengths and tables on the host")


def query(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.float16)


# --------------------------------------------------------------------------------------------- lengths that are numbers


@pytest.mark.parametrize("number", [np.int64, np.uint8, int], ids=lambda x: x.__name__)
def test_integers_of_any_type_are_lengths(number: Any) -> None:
    c, q = DenseCache((40, 40)), query(2, 1, 4, 64)
    for n in (3, 9, None):
        out = flash_attn_with_kvcache(q, c.k, c.v, cache_seqlens=None if n is None else number(n))
        requests = [(a, k[:n], v[:n]) for a, k, v in zip(q, c.keys, c.values, strict=True)]
        check_dense(expected(requests), out)


@pytest.mark.parametrize("length", [3.0, np.float32(3), "3"], ids=repr)
def test_other_numbers_are_no_lengths(length: Any) -> None:
    c, q = DenseCache((40, 40)), query(2, 1, 4, 64)
    message = "cache_seqlens is .*expected a tensor, an integer or None"
    with pytest.raises(errors.ArgumentError, match=message):
        flash_attn_with_kvcache(q, c.k, c.v, cache_seqlens=length)
    with pytest.raises(errors.ArgumentError, match=message):
        get_scheduler_metadata(2, 1, 40, 4, 2, 64, length)


# ------------------------------------------------------------------------------------------------------- sizes by shape


@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
def test_a_dense_cache_has_a_row_for_each_request(traced: bool) -> None:
    c, q, new = DenseCache((9, 5), places=(0, 1)), query(3, 1, 4, 64), query(3, 1, 2, 64)
    before = c.k.clone()

    def call(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3)

    run = torch.compile(call, fullgraph=True, backend="eager") if traced else call
    with pytest.raises(Exception, match="k_cache has 2 rows for 3 requests; expected 3 or more") as raised:
        run(q, c.k, c.v, new, new)
    assert traced or raised.type is errors.ShapeError
    assert torch.equal(c.k.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("causal", ["True", [1]], ids=repr)
def test_a_causal_of_another_type_is_refused_before_the_append(causal: Any, rows: int, traced: bool) -> None:
    c, q, new = DenseCache((9, 5)), query(2, rows, 4, 64), query(2, rows, 2, 64)
    before = c.k.clone()

    def call(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> Any:
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3, causal=causal)

    run = torch.compile(call, fullgraph=True, backend="eager") if traced else call
    with pytest.raises(Exception, match=r"causal is .*of type (str|list); expected True or False; pass") as raised:
        run(q, c.k, c.v, new, new)
    assert traced or raised.type is errors.ArgumentTypeError
    assert torch.equal(c.k.nan_to_num(), before.nan_to_num())


# --------------------------------------------------------------------------------------------------- cumulative lengths

CUMULATIVE: list[tuple[list[int], str]] = [
    ([0, 3, 90], "has 7 rows; expected 90 or more, where {name} ends"),
    ([0, 5, 3], "{name} falls from 5 to 3 at request 1"),
    ([1, 3, 7], "{name} starts at 1; expected 0"),
    ([0, 7], r"{name} is \[2\]; expected \[3\]"),
    ([], r"{name} is \[0\]"),
]


@on_cpu
@pytest.mark.parametrize(("values", "message"), CUMULATIVE, ids=str)
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k_new"])
def test_cumulative_lengths_of_a_call_over_pages(name: str, values: list[int], message: str) -> None:
    r, lens = Requests((37, 20), (3, 4)), torch.tensor([30, 9])
    if name == "cu_seqlens_q" and len(values) != 3:
        message = "block_table has 2 rows; expected 1" if values else message
    given = {
        "cu_seqlens_q": r.qo_indptr,
        "cu_seqlens_k_new": r.qo_indptr,
        name: torch.tensor(values, dtype=torch.int32),
    }
    k_cache, v_cache = (t.clone() for t in r.cache())
    new, before = query(7, 2, 64), k_cache.clone()
    with pytest.raises(errors.AttnOpsError, match=message.format(name=name)):
        flash_attn_with_kvcache(
            r.q, k_cache, v_cache, new, new, cache_seqlens=lens, block_table=r.block_tables(), **given
        )
    assert torch.equal(k_cache.nan_to_num(), before.nan_to_num())


@on_cpu
@pytest.mark.parametrize(("values", "message"), CUMULATIVE, ids=str)
def test_cumulative_query_lengths(values: list[int], message: str) -> None:
    r, cumulative = Requests((37, 20), (3, 4)), torch.tensor(values, dtype=torch.int32)
    message = message.format(name="cu_seqlens_q")
    with pytest.raises(errors.AttnOpsError, match=message):
        flash_attn_varlen_func(r.q, *r.cache(), cumulative, r.kv_indptr, 4, 37, block_table=r.block_tables())
    with pytest.raises(errors.AttnOpsError, match=message):
        get_scheduler_metadata(
            2, 4, 37, 4, 2, 64, r.seq_lens, cu_seqlens_q=cumulative, total_q=7, page_size=16,
            block_table=r.block_tables(),
        )  # fmt: skip


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad", "cache_batch_idx"])
def test_metadata_is_on_the_device_of_any_tensor(name: str) -> None:
    given = torch.zeros(3 if name.startswith("cu_seqlens") else 2, dtype=torch.int32, device="meta")
    made = get_scheduler_metadata(2, 1, 40, 4, 2, 64, 3, **{name: given}, total_q=2, total_k_new=2)
    assert {t.device.type for t in (*made.plan, *made[1:])} == {"meta"}


@pytest.mark.parametrize("length", [0, 1])
def test_no_cumulative_lengths(length: int) -> None:
    r, none = Requests((9, 5), (4, 3)), torch.zeros(length, dtype=torch.int32, device=DEVICE)
    with pytest.raises(errors.ShapeError, match=r"cu_seqlens_[qk] is \[[03]\]; expected \[(batch \+ 1|1)\]"):
        flash_attn_varlen_func(r.q, *r.ragged(), none, r.kv_indptr, 4, 9)


# --------------------------------------------------------------------------------------------------------------- tables


class Append:
    """A call that appends a token to each of two requests, of 17 and 5 tokens, in pages of 16."""

    def __init__(self) -> None:
        self.r, self.new = Requests((18, 6)), query(2, 1, 2, 64)
        self.caches = tuple(t.clone() for t in self.r.cache())
        self.lens, self.table = torch.tensor([17, 5]), self.r.block_tables()

    def run(self, **options: Any) -> Tensor:
        given = {"cache_seqlens": self.lens, "block_table": self.table, **options}
        return flash_attn_with_kvcache(query(2, 1, 4, 64), *self.caches, self.new, self.new, **given)

    def refuses(self, kind: type[Exception], message: str, **options: Any) -> None:
        before = [t.clone() for t in self.caches]
        with pytest.raises(kind, match=message):
            self.run(**options)
        for cache, t in zip(self.caches, before, strict=True):
            assert torch.equal(cache.nan_to_num(), t.nan_to_num())


@on_cpu
@pytest.mark.parametrize("number", [-1, 1000])
@pytest.mark.parametrize("lens", [torch.tensor([17, 5]), torch.tensor([17, 5]).int()], ids=["int64", "int32"])
def test_pages_that_the_cache_does_not_have(lens: Tensor, number: int) -> None:
    call = Append()
    call.lens, call.table[0, 1] = lens, number
    pages = call.caches[0].shape[0]
    call.refuses(
        errors.PageTableError, rf"block_table\[0, 1\] is {number}; expected a page of the cache, 0 to {pages - 1}"
    )


@on_cpu
@pytest.mark.parametrize("number", [-1, 1000])
def test_pages_without_tokens_may_have_any_number(number: int) -> None:
    call, want = Append(), Append().run()
    call.table = torch.nn.functional.pad(call.table, (0, 2), value=number)
    call.table[1, 1:] = number
    torch.testing.assert_close(call.run(), want)


@on_cpu
def test_a_smaller_cache_of_equal_tables_is_checked_too() -> None:
    call = Append()
    call.run()
    last = int(call.table.max())
    call.caches = tuple(t[:last].clone() for t in call.caches)
    call.refuses(errors.PageTableError, f"is {last}; expected a page of the cache, 0 to {last - 1}")


@on_cpu
def test_given_metadata_names_pages_of_the_cache() -> None:
    call = Append()
    call.table[0, 1] = 1000
    made = get_scheduler_metadata(
        2, 1, 0, 4, 2, 64, call.lens, page_size=16, block_table=call.table, max_seqlen_k_new=1
    )
    call.refuses(errors.PageTableError, r"kv_indices\[1\] is 1000; expected a page", scheduler_metadata=made)
    call.table[0, 1] = -1
    with pytest.raises(errors.PageTableError, match=r"block_table\[0, 1\] is -1"):
        get_scheduler_metadata(2, 1, 0, 4, 2, 64, call.lens, page_size=16, block_table=call.table)


@on_cpu
@pytest.mark.parametrize("place", [-1, 3, 1 << 20])
@pytest.mark.parametrize("lens", [4, torch.tensor([4, 5])], ids=["number", "tensor"])
def test_rows_that_a_dense_cache_does_not_have(lens: Any, place: int) -> None:
    call, c = Append(), DenseCache((9, 5, 3))
    call.caches = c.k, c.v
    index = torch.tensor([0, place])
    call.refuses(
        errors.PageTableError,
        rf"cache_batch_idx\[1\] is {place}; expected a row of the cache, 0 to 2",
        cache_seqlens=lens,
        block_table=None,
        cache_batch_idx=index,
    )


@pytest.mark.parametrize("dtype", [torch.uint32, torch.uint16, torch.int8, torch.int16, torch.int64], ids=str)
def test_rows_of_a_cache_have_any_integer_dtype(dtype: torch.dtype) -> None:
    c, q = DenseCache((9, 5, 3)), query(2, 1, 4, 64)
    rows, lens = torch.tensor([2, 0]).to(dtype).to(DEVICE), torch.tensor([3, 9], device=DEVICE)
    want = flash_attn_with_kvcache(q, c.k, c.v, cache_seqlens=lens, cache_batch_idx=rows.int())
    made = get_scheduler_metadata(2, 1, 40, 4, 2, 64, lens, cache_batch_idx=rows)
    for given in ({}, {"scheduler_metadata": made}):
        out = flash_attn_with_kvcache(q, c.k, c.v, cache_seqlens=lens, cache_batch_idx=rows, **given)
        torch.testing.assert_close(out, want, rtol=0, atol=0)


@on_cpu
def test_varlen_pages_that_the_cache_does_not_have() -> None:
    r = Requests((37, 20), (3, 4))
    table = r.block_tables()
    table[1, 1] = 99
    for lens in ({"cu_seqlens_k": r.kv_indptr}, {"seqused_k": r.seq_lens}):
        with pytest.raises(errors.PageTableError, match=r"block_table\[1, 1\] is 99; expected a page of the cache"):
            flash_attn_varlen_func(r.q, *r.cache(), r.qo_indptr, **lens, block_table=table)


def test_tables_have_the_rank_of_their_names() -> None:
    call, index = Append(), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for name, table, shape in (
        ("block_table", index, r"\[2\]"),
        ("page_table", index, r"\[2\]"),
        ("cache_batch_idx", call.table, r"\[2, \d+\]"),
    ):
        given = {"block_table": None, name: table}
        call.refuses(errors.ShapeError, rf"{name} is {shape}; expected \[batch", **given)
        with pytest.raises(errors.ShapeError, match=rf"{name} is {shape}; expected \[batch"):
            get_scheduler_metadata(2, 1, 16, 4, 2, 64, call.lens, **given)
    r = Requests((9, 5), (4, 3))
    with pytest.raises(errors.ShapeError, match=r"block_table is \[2\]; expected \[batch, max_pages_per_sequence\]"):
        flash_attn_varlen_func(r.q, *r.cache(), r.qo_indptr, seqused_k=r.seq_lens, block_table=index)
