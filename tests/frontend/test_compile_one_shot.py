"""One-shot functions trace into whole graphs that do not recompile for other lengths, and export."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers.mla_requests import Latents
from helpers.oracle import Expected
from helpers.tracing import CallModule, GraphRecorder
from helpers.wrapper_requests import DEVICE, Requests
from torch import Tensor
from torch._dynamo.utils import warn_once_cache

import attn_ops as flashinfer

pytestmark = pytest.mark.usefixtures("cold")

DECODE = ["page_table", "plan_decode", "batch_decode"]
PREFILL = ["page_table", "plan_prefill", "batch_prefill"]
RAGGED = ["plan_prefill", "ragged_prefill"]
MLA = ["page_table", "plan_prefill", "batch_mla"]
SCALE = 0.125


class Form(NamedTuple):
    """``call(*tensors(r))`` equals ``expected(r)``, by a graph of ``ops``. ``batches`` differ in values only."""

    ops: list[str]
    batches: tuple[Any, Any]
    tensors: Callable[[Any], tuple[Tensor, ...]]
    call: Callable[..., Any]
    expected: Callable[[Any], Expected]


def both(kv_lens: tuple[int, ...], qo_lens: tuple[int, ...] = (), **more: Any) -> tuple[Requests, Requests]:
    """A batch with these lengths, and one with the lengths in reverse order."""
    return Requests(kv_lens, qo_lens, **more), Requests(kv_lens[::-1], qo_lens[::-1], seed=1, **more)


def latents(*lengths: tuple[int, int]) -> tuple[Latents, Latents]:
    return Latents(lengths, dims=(64, 16)), Latents(lengths[::-1], dims=(64, 16))


DECODES = both((37, 0, 130, 1))
PAIRS = both((37, 5, 130, 3), (2, 2, 2, 2))
PREFILLS = both((70, 3, 9, 130), (1, 5, 0, 40))
HND = [tuple(Requests(r.kv_lens, r.qo_lens, kv_layout="HND") for r in pair) for pair in (DECODES, PAIRS, PREFILLS)]


def table(r: Requests) -> tuple[Tensor, ...]:
    return r.q, r.cache("tensor"), r.block_tables(), r.seq_lens


def rows(r: Requests) -> tuple[Tensor, ...]:
    return *table(r), r.qo_indptr


def packed(r: Requests) -> tuple[Tensor, ...]:
    return r.q, *r.ragged(), r.qo_indptr, r.kv_indptr


def lengths(r: Requests) -> tuple[Tensor, ...]:
    kv = r.ragged() if r.kv_layout == "NHD" else (r.cache("tensor"), r.block_tables())
    return r.q, *kv, torch.tensor(r.qo_lens, device=DEVICE), r.seq_lens


def mla(r: Latents) -> tuple[Tensor, ...]:
    return r.q, r.cache, r.block_tables, r.table[2], r.qo_indptr


def causal(r: Requests) -> Expected:
    return r.expected(causal=True)


def trtllm_decode(q: Tensor, cache: Tensor, pages: Tensor, lens: Tensor, cum: Any = None, **options: Any) -> Any:
    return flashinfer.trtllm_batch_decode_with_kv_cache(
        q, cache, None, pages, lens, 130, SCALE, cum_seq_lens_q=cum, return_lse=True, **options
    )


def xqa_decode(q: Tensor, cache: Tensor, pages: Tensor, lens: Tensor, cum: Any = None, **options: Any) -> Any:
    return flashinfer.xqa_batch_decode_with_kv_cache(
        q, cache, None, pages, lens, 130, SCALE, q_cu_seq_lens=cum, **options
    )


TREE_MASK = torch.tensor([[1, 0], [3, 0]], dtype=torch.uint16, device=DEVICE)
"""The causal tree mask of two draft tokens."""


def xqa_tree_mask(q: Tensor, cache: Tensor, pages: Tensor, lens: Tensor) -> Any:
    return xqa_decode(q, cache, pages, lens, q_len_per_req=2, mask=TREE_MASK.expand(pages.shape[0], 2, 2))


def trtllm_context(q: Tensor, cache: Tensor, pages: Tensor, lens: Tensor, cum: Tensor) -> Any:
    return flashinfer.trtllm_batch_context_with_kv_cache(
        q, cache, None, pages, lens, 40, 130, SCALE, 1.0, 4, cum, cum, return_lse=True
    )


def cudnn_decode(q: Tensor, cache: Tensor, pages: Tensor, lens: Tensor, **options: Any) -> Any:
    return flashinfer.cudnn_batch_decode_with_kv_cache(
        q,
        *cache.unbind(1),
        SCALE,
        None,
        max_sequence_kv=130,
        actual_seq_lens_kv=lens,
        block_tables=pages,
        return_lse=True,
        **options,
    )


def cudnn_prefill(q: Tensor, k: Tensor, v: Tensor, qo: Tensor, kv: Tensor, pages: Tensor | None = None) -> Any:
    return flashinfer.cudnn_batch_prefill_with_kv_cache(
        q,
        k,
        v,
        SCALE,
        None,
        max_token_per_sequence=40,
        max_sequence_kv=130,
        actual_seq_lens_q=qo,
        actual_seq_lens_kv=kv,
        block_tables=pages,
        causal=True,
        return_lse=True,
    )


def cudnn_paged_prefill(q: Tensor, cache: Tensor, pages: Tensor, qo: Tensor, kv: Tensor) -> Any:
    return cudnn_prefill(q, *cache.unbind(1), qo, kv, pages)


def deepseek(q: Tensor, k: Tensor, v: Tensor, qo: Tensor, kv: Tensor) -> Any:
    return flashinfer.trtllm_ragged_attention_deepseek(
        q, k, v, None, kv, 40, 130, SCALE, 1.0, None, 4, -1, qo, kv, None, True, True
    )


def xqa(q: Tensor, cache: Tensor, pages: Tensor, lens: Tensor, cum: Any = None) -> Any:
    return flashinfer.xqa(q, cache, cache, pages, lens, q_cu_seq_lens=cum)


def xqa_with_beam(q: Tensor, cache: Tensor, pages: Tensor, lens: Tensor) -> Any:
    out = flashinfer.xqa(q.view(4, 1, 2, 4, 64), cache, cache, pages, lens)
    assert out is not None
    return out.flatten(0, 2)


def xqa_mla(q: Tensor, cache: Tensor, pages: Tensor, lens: Tensor, cum: Tensor) -> Any:
    return flashinfer.xqa_mla(q, cache, cache[..., :64], pages, lens, q_scale=0.1)


def trtllm_mla(q: Tensor, cache: Tensor, pages: Tensor, lens: Tensor, cum: Tensor) -> Any:
    return flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        q, cache, None, 128, 64, 16, pages, lens, 130, bmm1_scale=0.1, cum_seq_lens_q=cum, return_lse=True
    )


def xqa_batch_mla(q: Tensor, cache: Tensor, pages: Tensor, lens: Tensor, cum: Tensor) -> Any:
    out = flashinfer.xqa_batch_decode_with_kv_cache_mla(
        q[:, None], cache, None, 128, 64, 16, pages, lens, 130, bmm1_scale=0.1
    )
    return out[:, 0]


FORMS: dict[str, Form] = {
    "trtllm decode": Form(DECODE, HND[0], table, trtllm_decode, causal),
    "trtllm decode of rows": Form(PREFILL, HND[1], table, lambda *t: trtllm_decode(*t, q_len_per_req=2), causal),
    "trtllm decode of ragged rows": Form(PREFILL, HND[2], rows, trtllm_decode, causal),
    "trtllm context": Form(PREFILL, HND[2], rows, trtllm_context, causal),
    "xqa decode": Form(DECODE, DECODES, table, xqa_decode, causal),
    "xqa decode of rows": Form(PREFILL, PAIRS, table, lambda *t: xqa_decode(*t, q_len_per_req=2), causal),
    "xqa decode with a tree mask": Form(PREFILL, PAIRS, table, xqa_tree_mask, causal),
    "xqa decode of ragged rows": Form(PREFILL, PREFILLS, rows, xqa_decode, causal),
    "cudnn decode": Form(DECODE, HND[0], table, cudnn_decode, causal),
    "cudnn decode of rows": Form(PREFILL, HND[1], table, lambda *t: cudnn_decode(*t, q_len_per_req=2), causal),
    "cudnn paged prefill": Form(PREFILL, HND[2], lengths, cudnn_paged_prefill, causal),
    "cudnn ragged prefill": Form(RAGGED, PREFILLS, lengths, cudnn_prefill, causal),
    "xqa": Form(DECODE, DECODES, table, xqa, causal),
    "xqa of rows": Form(PREFILL, PAIRS, table, xqa_with_beam, causal),
    "xqa of ragged rows": Form(PREFILL, PREFILLS, rows, xqa, causal),
    "xqa_mla": Form(MLA, latents((1, 70), (1, 9), (1, 130)), mla, xqa_mla, lambda m: m.expected(sm_scale=0.1)),
    "trtllm mla": Form(
        MLA, latents((1, 70), (5, 9), (20, 130)), mla, trtllm_mla, lambda m: m.expected(sm_scale=0.1, causal=True)
    ),
    "xqa mla": Form(MLA, latents((1, 70), (1, 9), (1, 130)), mla, xqa_batch_mla, lambda m: m.expected(sm_scale=0.1)),
    "deepseek": Form(RAGGED, PREFILLS, packed, deepseek, causal),
}


def check(form: Form, r: Any, result: Any) -> None:
    form.expected(r).check(*(result if isinstance(result, tuple) else (result,)))


@pytest.mark.parametrize("name", FORMS)
def test_compiles_once(name: str) -> None:
    """Without a warning of Dynamo that it traces through the cache of a function."""
    form, recorder = FORMS[name], GraphRecorder()
    compiled = torch.compile(form.call, fullgraph=True, backend=recorder)
    warn_once_cache.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lru_cache")
        for r in form.batches:
            with torch.compiler.set_stance("default" if r is form.batches[0] else "fail_on_recompile"):
                check(form, r, compiled(*form.tensors(r)))
    assert recorder.ops == form.ops


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", FORMS)
def test_exports(name: str, strict: bool) -> None:
    form = FORMS[name]
    first, second = (form.tensors(r) for r in form.batches)
    program = torch.export.export(CallModule(form.call), first, strict=strict).module()
    for r, tensors in zip(form.batches, (first, second), strict=True):
        check(form, r, program(*tensors))
