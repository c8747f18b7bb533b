"""Errors name the function, the arguments and the part of a call as its caller does, whatever computes it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.error_cases import Case, check_raises, empty
from helpers.wrapper_requests import DEVICE, Requests, int32, workspace

import attn_ops as flashinfer
from attn_ops import errors

H, HK, DIM, PAGE = 4, 2, 16, 4
SIZES = H, HK, DIM, PAGE
QO = torch.tensor([0, 6], dtype=torch.int32)
TABLE = tuple(torch.tensor(t, dtype=torch.int32) for t in ([0, 2], [0, 1], [4]))
"""One request of two full pages, on the host."""

P, D = Requests((50,), (12,)), Requests(seed=1)
LATENTS = empty(4, PAGE, 576)

WRONG = {
    "indptr": (0, (1, 0), "{} falls from 1 to 0 at request 0; expected values that never decrease"),
    "indices": (1, (0, -1), "{}[1] is -1; expected a page of the cache"),
    "last_page_len": (2, (9,), "{}[0] is 9; expected 1 to page_size 4"),
}
"""For each part of a page table: its place, contents that are refused, and the message about them."""


def wrong(part: str) -> list[torch.Tensor]:
    place, contents, _ = WRONG[part]
    return [torch.tensor(contents, dtype=torch.int32) if i == place else t for i, t in enumerate(TABLE)]


def listed(*tables: Any) -> list[list[torch.Tensor]]:
    return [list(parts) for parts in zip(*tables, strict=True)]


def decode() -> Any:
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())


def prefill() -> Any:
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())


def pod() -> Any:
    return flashinfer.PODWithPagedKVCacheWrapper(workspace())


def batch_pod() -> Any:
    return flashinfer.BatchPODWithPagedKVCacheWrapper(workspace())


def cascade() -> Any:
    return flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace())


def shared_decode() -> Any:
    return flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace())


def shared_prefill() -> Any:
    return flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace())


PLANS: dict[str, tuple[Any, str]] = {
    "fast_decode_plan": (lambda t: flashinfer.fast_decode_plan(decode(), *t, *SIZES), "{}"),
    "BatchDecodeWithPagedKVCacheWrapper.plan": (lambda t: decode().plan(*t, *SIZES), "{}"),
    "BatchPrefillWithPagedKVCacheWrapper.plan": (lambda t: prefill().plan(QO, *t, *SIZES), "paged_kv_{}"),
    "PODWithPagedKVCacheWrapper.plan": (lambda t: pod().plan(*t, *SIZES), "{}"),
    "BatchPODWithPagedKVCacheWrapper.plan of the prefill": (
        lambda t: batch_pod().plan(QO, *t, QO, *TABLE, *SIZES),
        "kv_{}_p",
    ),
    "BatchPODWithPagedKVCacheWrapper.plan of the decoding": (
        lambda t: batch_pod().plan(QO, *TABLE, QO, *t, *SIZES),
        "kv_{}_d",
    ),
    "MultiLevelCascadeAttentionWrapper.plan": (
        lambda t: cascade().plan([QO, QO], *listed(TABLE, t), *SIZES),
        "paged_kv_{}_arr[1]",
    ),
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper.begin_forward": (
        lambda t: shared_decode().begin_forward(*t, *SIZES),
        "unique_kv_{}",
    ),
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.begin_forward": (
        lambda t: shared_prefill().begin_forward(QO, *t, *SIZES),
        "paged_kv_{}",
    ),
}
"""A plan() for a page table, by the function that the caller names, and its names of the parts of the table."""

NAMED = {"kv_last_page_len_p": "last_page_len_p", "kv_last_page_len_d": "last_page_len_d"} | {
    "paged_kv_last_page_len_arr[1]": "paged_kv_last_page_len[1]"
}
"""Names that do not follow from those of the other parts."""


@pytest.mark.parametrize("part", WRONG)
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_names_the_page_table_of_its_caller(name: str, part: str) -> None:
    plan, names = PLANS[name]
    called = names.format(part)
    message = f"{name.partition(' of ')[0]}: {WRONG[part][2].format(NAMED.get(called, called))}"
    with pytest.raises(errors.PageTableError, match=f"^{re.escape(message)}"):
        plan(wrong(part))


def mla(**plan: Any) -> None:
    flashinfer.BatchMLAPagedAttentionWrapper(workspace()).plan(
        None, *TABLE[:2], torch.tensor([8]), H, 512, 64, PAGE, **plan
    )


def mla_forward(table: Any = (0, 1), lens: Any = (8,)) -> Any:
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace())
    table, lens = torch.tensor([table]), None if lens is None else torch.tensor(lens)
    return wrapper.forward(empty(1, H, 576), LATENTS, table, lens)


def attention(**changes: Any) -> None:
    tables = {"qo_indptr": QO, "kv_indptr": TABLE[0], "kv_indices": TABLE[1], "kv_len_arr": torch.tensor([8])}
    wrapper = flashinfer.BatchAttention(device=DEVICE)
    wrapper.plan(
        **{**tables, **changes}, num_qo_heads=H, num_kv_heads=HK, head_dim_qk=DIM, head_dim_vo=DIM, page_size=4
    )


def planned_pod() -> Any:
    wrapper = pod()
    wrapper.plan(*D.table, *D.sizes)
    return wrapper


def run_pod(**options: Any) -> Any:
    return planned_pod().run(P.q, *P.ragged(), D.q, D.cache(), **options)


def run_batch_pod(**options: Any) -> Any:
    wrapper = batch_pod()
    wrapper.plan(P.qo_indptr, *P.table, D.qo_indptr, *D.table, *D.sizes)
    return wrapper.run(P.q, P.cache(), D.q, D.cache(), **options)


SHORT = torch.ones(3, dtype=torch.bool, device=DEVICE)

CASES: dict[str, Case] = {
    "output of xqa": (
        lambda: flashinfer.xqa(D.q, *D.cache(), D.block_tables(), D.seq_lens, empty(1, 1)),
        errors.ShapeError,
        "xqa: output is [1, 1]; expected [4, 4, 64]; pass such a buffer, or no output",
    ),
    "output of xqa_mla": (
        lambda: flashinfer.xqa_mla(
            empty(1, H, 576), LATENTS, LATENTS[..., :512], int32(0, 1)[None], int32(8), empty(1, 1)
        ),
        errors.ShapeError,
        "xqa_mla: output is [1, 1]; expected [1, 4, 512]; pass such a buffer, or no output",
    ),
    "long request of MLA": (
        lambda: mla_forward(lens=(99,)),
        errors.PageTableError,
        "BatchMLAPagedAttentionWrapper.forward: a request has 99 tokens and page_table capacity for 8",
    ),
    "negative length of MLA": (
        lambda: mla_forward(lens=(-1,)),
        errors.PageTableError,
        "BatchMLAPagedAttentionWrapper.forward: seq_lens has a length of -1",
    ),
    "no lengths of MLA": (
        lambda: mla_forward(lens=None),
        errors.ArgumentError,
        "BatchMLAPagedAttentionWrapper.forward: seq_lens is missing; expected a value; pass seq_lens",
    ),
    "page of MLA": (
        lambda: mla_forward((0, 9)),
        errors.PageTableError,
        "BatchMLAPagedAttentionWrapper.forward: page_table[0, 1] is 9; expected a page of the cache",
    )
    if DEVICE == "cpu"
    else (lambda: mla_forward(0), errors.ShapeError, "BatchMLAPagedAttentionWrapper.forward: page_table is [1]"),
    "float rows of MLA by their other name": (
        lambda: mla(cum_seq_lens_q=torch.ones(2)),
        errors.DTypeError,
        "BatchMLAPagedAttentionWrapper.plan: cum_seq_lens_q is float32; expected int32 or int64",
    ),
    "falling rows of MLA by their other name": (
        lambda: mla(cum_seq_lens_q=torch.tensor([1, 0])),
        errors.PageTableError,
        "BatchMLAPagedAttentionWrapper.plan: cum_seq_lens_q starts at 1; expected 0",
    ),
    "rows of MLA": (
        lambda: mla(),
        errors.ArgumentError,
        "BatchMLAPagedAttentionWrapper.plan: qo_indptr is missing",
    ),
    "rows of attention": (
        lambda: attention(qo_indptr=torch.tensor([1, 0])),
        errors.PageTableError,
        "BatchAttention.plan: qo_indptr starts at 1; expected 0",
    ),
    "size of a falling table": (
        lambda: decode().workspace_size(*wrong("indptr"), *SIZES),
        errors.PageTableError,
        "BatchDecodeWithPagedKVCacheWrapper.workspace_size: indptr falls from 1 to 0 at request 0",
    ),
    "size of a falling table of prefill": (
        lambda: prefill().workspace_size(QO, *wrong("indptr"), *SIZES),
        errors.PageTableError,
        "BatchPrefillWithPagedKVCacheWrapper.workspace_size: paged_kv_indptr falls from 1 to 0 at request 0",
    ),
    "head dim of decoding": (
        lambda: decode().plan(*TABLE, H, HK, 0, PAGE),
        errors.OptionError,
        "BatchDecodeWithPagedKVCacheWrapper.plan: head_dim is 0; expected at least 1",
    ),
    "head dim of prefill": (
        lambda: prefill().plan(QO, *TABLE, H, HK, 0, PAGE),
        errors.OptionError,
        "BatchPrefillWithPagedKVCacheWrapper.plan: head_dim_qk is 0; expected at least 1",
    ),
    "head dim of prefill by its other name": (
        lambda: prefill().plan(QO, *TABLE, H, HK, head_dim=0, page_size=PAGE),
        errors.OptionError,
        "BatchPrefillWithPagedKVCacheWrapper.plan: head_dim is 0; expected at least 1",
    ),
    "rows of a batch": (
        lambda: batch_pod().plan(QO, *TABLE, int32(0, 1, 2), *TABLE, *SIZES),
        errors.ShapeError,
        "BatchPODWithPagedKVCacheWrapper.plan: qo_indptr_d has length 3; expected 2 as kv_indptr_d has",
    ),
    "no pages of a batch": (
        lambda: batch_pod().plan(QO, *TABLE, QO, TABLE[0], None, TABLE[2], *SIZES),
        errors.ArgumentError,
        "BatchPODWithPagedKVCacheWrapper.plan: kv_indices_d is None; expected a tensor",
    ),
    "rows of a level": (
        lambda: cascade().plan([QO, int32(0, 1, 2)], *listed(TABLE, TABLE), *SIZES),
        errors.ShapeError,
        "MultiLevelCascadeAttentionWrapper.plan: qo_indptr_arr[1] has length 3; expected 2 as paged_kv_indptr_arr[1]",
    ),
    "mask of POD": (
        lambda: run_pod(custom_mask_p=SHORT),
        errors.ShapeError,
        "PODWithPagedKVCacheWrapper.run (_p): custom_mask is [3]; expected [600]",
    ),
    "layout of POD": (
        lambda: run_pod(kv_layout_p="NDH"),
        errors.OptionError,
        "PODWithPagedKVCacheWrapper.run (_p): kv_layout is 'NDH'; expected NHD or HND",
    ),
    "mask of a batch of POD": (
        lambda: run_batch_pod(custom_mask_p=SHORT),
        errors.ShapeError,
        "BatchPODWithPagedKVCacheWrapper.run (_p): custom_mask is [3]; expected [600]",
    ),
    "mask in the place of a head dim of ragged keys": (
        lambda: flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace()).plan(QO, QO, H, HK, DIM, SHORT),
        errors.ArgumentError,
        "head_dim_vo is a tensor; expected an integer; pass what follows head_dim_qk by name",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_names(name: str) -> None:
    check_raises(CASES[name])


def test_the_traced_error_of_a_part_has_the_same_message() -> None:
    torch._dynamo.reset()
    wrapper, tensors = planned_pod(), (P.q, *P.ragged(), D.q, D.cache())

    def call(mask: torch.Tensor) -> Any:
        return wrapper.run(*tensors, custom_mask_p=mask)

    message = "PODWithPagedKVCacheWrapper.run (_p): custom_mask is [3]; expected [600]"
    with pytest.raises(Exception, match=re.escape(message)):
        torch.compile(call, fullgraph=True, backend="eager")(SHORT)


def test_a_planner_says_plan() -> None:
    """As the op and the C++ API do."""
    planner = flashinfer.DecodePlanner(4, 8, page_size=PAGE, num_qo_heads=H, num_kv_heads=HK, head_dim=DIM)
    with pytest.raises(errors.PageTableError, match=r"^plan: kv_indptr starts at 1; expected 0"):
        planner.plan(*wrong("indptr"))


def test_a_refused_plan_keeps_the_earlier_one() -> None:
    p, d = Requests((70, 3, 9, 130), (1, 5, 0, 40)), D
    wrapper = batch_pod()
    wrapper.plan(p.qo_indptr, *p.table, d.qo_indptr, *d.table, *d.sizes)
    before = wrapper.run(p.q, p.cache(), d.q, d.cache())
    with pytest.raises(errors.PageTableError, match="kv_indptr_d falls"):
        wrapper.plan(p.qo_indptr, *p.table, d.qo_indptr, d.table[0].flip(0), *d.table[1:], *d.sizes)
    assert all(map(torch.equal, before, wrapper.run(p.q, p.cache(), d.q, d.cache())))
