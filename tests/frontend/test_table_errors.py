"""Page tables, lengths and page sizes that wrappers refuse: typed errors, before anything is planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.error_cases import Case, check_raises, empty
from helpers.wrapper_requests import DEVICE, Requests, workspace

import attn_ops as flashinfer
from attn_ops import errors

R = Requests()
P = Requests((70, 3, 9, 130), (1, 5, 0, 40))
PAGES = torch.tensor([7, 8, 9, 10])


def attention(**changes: Any) -> None:
    qo_indptr, page_size = changes.get("qo_indptr", P.qo_indptr), changes.get("page_size", 16)
    wrapper = flashinfer.BatchAttention(device=DEVICE)
    wrapper.plan(qo_indptr, *P.table[:2], P.seq_lens, 4, 2, 64, 64, page_size)


def latent_by_lengths() -> None:
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(P.qo_indptr, *P.table[:2], P.seq_lens, 4, 512, 64, 16)
    sizes = (46, 4, 512), (46, 4, 64), (17, 16, 512), (17, 16, 64)
    wrapper.run(*(empty(*size) for size in sizes), kv_len=P.seq_lens)


def listed_prefill(indptr: torch.Tensor, lens: torch.Tensor) -> None:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.plan(torch.arange(3), indptr, PAGES, torch.ones_like(lens), *P.sizes)


def listed_mla(indptr: torch.Tensor, lens: torch.Tensor) -> None:
    flashinfer.BatchMLAPagedAttentionWrapper(workspace()).plan(torch.arange(3), indptr, PAGES, lens, 4, 512, 64, 4)


def listed_attention(indptr: torch.Tensor, lens: torch.Tensor) -> None:
    flashinfer.BatchAttention(device=DEVICE).plan(torch.arange(3), indptr, PAGES, lens, 4, 2, 64, 64, 4)


CASES: dict[str, Case] = {
    "last_page_len": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(
            *(t.cpu() for t in R.table[:2]), torch.tensor([17, 1, 1, 1]), *R.sizes
        ),
        errors.PageTableError,
        "BatchDecodeWithPagedKVCacheWrapper.plan: last_page_len[0] is 17; expected 1 to page_size 16",
    ),
    "last_page_len beyond every capacity": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(
            *(t.cpu() for t in R.table[:2]), torch.tensor([1, 1, 1 << 30, 1]), *R.sizes
        ),
        errors.PageTableError,
        "plan: last_page_len[2] is 1073741824; expected 1 to page_size 16",
    ),
    "falling indptr": (
        lambda: flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace()).plan(
            torch.tensor([0, 5, 3]), torch.tensor([0, 5, 6]), 4, 2, 64
        ),
        errors.PageTableError,
        "qo_indptr falls from 5 to 3",
    ),
    "lengths of tables": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(*R.table[:2], R.table[2][1:], *R.sizes),
        errors.ShapeError,
        "plan: last_page_len has length 3; expected 4",
    ),
    "float tables": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(
            R.table[0].float(), *R.table[1:], *R.sizes
        ),
        errors.DTypeError,
        "plan: indptr is float32; expected int32 or int64",
    ),
    "pages beyond int32": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(
            R.table[0].cpu(), R.table[1].cpu().long() + 2**32, R.table[2].cpu(), *R.sizes
        ),
        errors.PageTableError,
        "plan: indices has a number beyond int32; expected numbers of pages or tokens",
    ),
    **{
        f"{name} of {what}": (
            lambda plan=plan, indptr=indptr, lens=lens: plan(torch.tensor(indptr), torch.tensor(lens)),
            errors.PageTableError,
            words.replace("kv_", "paged_kv_") if name == "prefill" else words,
        )
        for name, plan in (("prefill", listed_prefill), ("MLA", listed_mla), ("attention", listed_attention))
        for what, indptr, lens, words in (
            ("pages beyond the list", [100, 102, 104], [5, 5], "kv_indptr ends at 104 and kv_indices has 4 entries"),
            ("pages before the list", [-1, 1, 3], [5, 5], "kv_indptr starts at -1; expected 0 or more"),
            ("falling pages", [1, 3, 2], [5, 0], "kv_indptr falls from 3 to 2 at request 1"),
        )
    },
    **{
        f"{name} of a negative length": (
            lambda plan=plan: plan(torch.tensor([0, 2, 4]), torch.tensor([5, -3])),
            errors.PageTableError,
            "kv_len_arr[1] is -3; expected 0 or more tokens",
        )
        for name, plan in (("MLA", listed_mla), ("attention", listed_attention))
    },
    "no pages of decoding": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(R.table[0], None, R.table[2], *R.sizes),
        errors.ArgumentError,
        "indices is missing",
    ),
    "no last pages of prefill": (
        lambda: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace()).plan(
            P.qo_indptr, *P.table[:2], None, *P.sizes
        ),
        errors.ArgumentError,
        "paged_kv_last_page_len is missing",
    ),
    "no rows of ragged prefill": (
        lambda: flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace()).plan(None, P.kv_indptr, *P.sizes[:3]),
        errors.ArgumentError,
        "qo_indptr is missing",
    ),
    "no rows of attention": (lambda: attention(qo_indptr=None), errors.ArgumentError, "qo_indptr is missing"),
    "float rows of attention": (
        lambda: attention(qo_indptr=P.qo_indptr + 0.9),
        errors.DTypeError,
        "qo_indptr is float32; expected int32 or int64",
    ),
    "page size of attention": (lambda: attention(page_size=0), errors.OptionError, "page_size is 0; expected at least"),
    "page size of MLA": (
        lambda: flashinfer.BatchMLAPagedAttentionWrapper(workspace()).plan(
            P.qo_indptr, *P.table[:2], P.seq_lens, 4, 512, 64, 0
        ),
        errors.OptionError,
        "page_size is 0; expected at least 1",
    ),
    "page size of decoding": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(*R.table, 4, 2, 64, 0),
        errors.OptionError,
        "page_size is 0; expected at least 1",
    ),
    "MLA pages missing": (
        lambda: flashinfer.BatchMLAPagedAttentionWrapper(workspace()).plan(
            P.qo_indptr.cpu(), P.table[0].cpu(), P.table[1].cpu(), P.seq_lens.cpu() + 16, 4, 512, 64, 16
        ),
        errors.PageTableError,
        "request 0 has 86 tokens and 5 pages of 16; expected 6 pages",
    ),
    "MLA tokens of a request without pages": (
        lambda: flashinfer.BatchMLAPagedAttentionWrapper(workspace()).plan(
            torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([0]), torch.tensor([5]), 4, 512, 64, 16
        ),
        errors.PageTableError,
        "request 0 has 5 tokens and 0 pages of 16; expected 1 pages",
    ),
    "MLA block tables too narrow": (
        lambda: flashinfer.BatchMLAPagedAttentionWrapper(workspace()).plan(
            P.qo_indptr,
            num_heads=4,
            page_size=16,
            block_tables=P.block_tables()[:, :8],
            seq_lens=torch.tensor(P.kv_lens),
        ),
        errors.PageTableError,
        "a request has 130 tokens and block_tables capacity for 128",
    ),
    "page size beyond int32": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan(*R.table, 4, 2, 64, 2**31),
        errors.OptionError,
        "plan: page_size is 2147483648; expected at most 2147483647, an int32",
    ),
    "a list as page table": (
        lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()).plan([0, 1], *R.table[1:], *R.sizes),  # type: ignore[arg-type]
        errors.ArgumentError,
        "indptr is of type list; expected a tensor; make a tensor of it with torch.tensor(indptr)",
    ),
    "MLA lengths without a table": (
        latent_by_lengths,
        errors.ArgumentError,
        "page_table is missing",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_table_raises(name: str) -> None:
    check_raises(CASES[name])
