"""A value that is no flag is refused in every function and wrapper, in the same words eager and traced.

Python takes any value for true or false: 0.125 was causal, and a string asked for the LSE.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.wrapper_requests import DEVICE, Requests, int32, workspace
from torch import Tensor

import attn_ops as flashinfer
from attn_ops import errors, flash_attn

pytestmark = pytest.mark.usefixtures("no_grad")

P = Requests((70, 3, 9, 130), (1, 5, 0, 40))
H = Requests((70, 3, 9, 130), (1, 5, 0, 40), kv_layout="HND")
D = Requests(seed=1)
Q, K, V = (torch.zeros(n, heads, 64, dtype=P.dtype, device=DEVICE) for n, heads in ((6, 4), (8, 2), (8, 2)))

Call = Callable[..., Any]


def single() -> Call:
    return lambda **flag: flashinfer.single_prefill_with_kv_cache(Q, K, V, **flag)


def single_decode() -> Call:
    return lambda **flag: flashinfer.single_decode_with_kv_cache(Q[0], K, V, **flag)


def context() -> Call:
    lens, indptrs = H.seq_lens, (H.qo_indptr, H.kv_indptr)
    sizes = (40, 130, 0.1, 1.0, 4)
    tables, scratch = (H.block_tables(), lens), workspace()
    function = flashinfer.trtllm_batch_context_with_kv_cache
    return lambda **flag: function(H.q, H.cache(), scratch, *tables, *sizes, *indptrs, **flag)


def deepseek() -> Call:
    function, scratch = flashinfer.trtllm_ragged_attention_deepseek, workspace()
    sizes = (40, 130, 0.1, 1.0, None, 4, -1)
    tensors, indptrs = (P.q, *P.ragged(), scratch, P.seq_lens), (P.qo_indptr, P.kv_indptr)

    def call(is_causal: Any = False, return_lse: Any = False) -> Any:
        return function(*tensors, *sizes, *indptrs, None, is_causal, return_lse)

    return call


def cudnn() -> Call:
    lengths = {"actual_seq_lens_q": int32(6), "actual_seq_lens_kv": int32(8)}
    sizes = {"max_token_per_sequence": 6, "max_sequence_kv": 8}
    function, scratch = flashinfer.cudnn_batch_prefill_with_kv_cache, workspace()

    def call(causal: Any = False, return_lse: Any = False) -> Any:
        return function(Q, K, V, 0.125, scratch, **sizes, **lengths, causal=causal, return_lse=return_lse)

    return call


def decode_run() -> Call:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*D.table, *D.sizes)
    return lambda **flag: wrapper.run(D.q, D.cache(), **flag)


def decode_plan() -> Call:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    return lambda **flag: wrapper.plan(*D.table, *D.sizes, q_len_per_req=2, **flag)


def prefill() -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.plan(P.qo_indptr, *P.table, *P.sizes)
    return wrapper


def prefill_run() -> Call:
    wrapper = prefill()
    return lambda **flag: wrapper.run(P.q, P.cache(), **flag)


def prefill_forward() -> Call:
    wrapper = prefill()
    return lambda **flag: wrapper.forward(P.q, P.cache(), **flag)


def pod() -> Call:
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*D.table, *D.sizes)
    return lambda **flag: wrapper.run(Q, K, V, D.q, D.cache(), **flag)


def batch_pod() -> Call:
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(P.qo_indptr, *P.table, D.qo_indptr, *D.table, *D.sizes)
    return lambda **flag: wrapper.run(P.q, P.cache(), D.q, D.cache(), **flag)


def shared_prefix() -> Call:
    wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace())
    wrapper.begin_forward(P.qo_indptr, *P.table, *P.sizes)
    return lambda **flag: wrapper.forward(P.q, K, V, P.cache(), **flag)


def cascade() -> Call:
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace())
    lists = [P.qo_indptr] * 2, *([t] * 2 for t in P.table)
    return lambda **flag: wrapper.plan(*lists, *P.sizes, **flag)


def flash() -> Call:
    return lambda **flag: flash_attn.flash_attn_func(Q[None], K[None], V[None], **flag)


def flash_varlen() -> Call:
    indptrs = int32(0, 6), int32(0, 8)
    return lambda **flag: flash_attn.flash_attn_varlen_func(Q, K, V, *indptrs, **flag)


def flash_cache() -> Call:
    cache, table = (t[None].clone() for t in (K, V)), torch.zeros(8, 32, device=DEVICE)
    rotary = {"rotary_cos": table, "rotary_sin": table}
    keys, values = cache
    return lambda **flag: flash_attn.flash_attn_with_kvcache(
        Q[None, :1], keys, values, K[None, :1], V[None, :1], **rotary, cache_seqlens=int32(3), **flag
    )


TRACED = {
    "single_prefill_with_kv_cache": (single, ("causal", "return_lse")),
    "single_decode_with_kv_cache": (single_decode, ("return_lse",)),
    "trtllm_batch_context_with_kv_cache": (context, ("causal", "return_lse")),
    "trtllm_ragged_attention_deepseek": (deepseek, ("is_causal", "return_lse")),
    "cudnn_batch_prefill_with_kv_cache": (cudnn, ("causal", "return_lse")),
    "BatchDecodeWithPagedKVCacheWrapper.run": (decode_run, ("return_lse",)),
    "BatchPrefillWithPagedKVCacheWrapper.run": (prefill_run, ("return_lse",)),
    "BatchPrefillWithPagedKVCacheWrapper.forward": (prefill_forward, ("causal", "return_lse")),
    "PODWithPagedKVCacheWrapper.run": (pod, ("causal_p", "causal_d", "return_lse_p", "return_lse_d")),
    "BatchPODWithPagedKVCacheWrapper.run": (batch_pod, ("causal_p", "return_lse")),
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper.forward": (shared_prefix, ("causal",)),
    "flash_attn_func": (flash, ("causal", "return_softmax_lse")),
    "flash_attn_varlen_func": (flash_varlen, ("causal", "return_softmax_lse")),
    "flash_attn_with_kvcache": (flash_cache, ("causal", "return_softmax_lse", "rotary_interleaved")),
}


def prefill_size() -> Call:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    return lambda **flag: wrapper.workspace_size(P.qo_indptr, *P.table, *P.sizes, **flag)


def mla_run() -> Call:
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace())
    offsets, lens = int32(0, 1, 2), int32(5, 9)
    wrapper.plan(offsets, offsets, int32(0, 1), lens, 4, 512, 64, 16, False, 0.1, torch.float16, torch.float16)
    q, cache = (torch.zeros(2, n, 576, dtype=torch.float16, device=DEVICE) for n in (4, 16))
    return lambda **flag: wrapper.run(*q.split((512, 64), 2), *cache.split((512, 64), 2), return_lse=True, **flag)


EAGER = {
    "BatchPrefillWithPagedKVCacheWrapper.workspace_size": (prefill_size, ("causal",)),
    "BatchMLAPagedAttentionWrapper.run": (mla_run, ("return_lse_base_on_e",)),
    "BatchDecodeWithPagedKVCacheWrapper.plan": (decode_plan, ("is_causal",)),
    "MultiLevelCascadeAttentionWrapper.plan": (cascade, ("causal",)),
}


def _cases(table: dict[str, tuple[Callable[[], Call], tuple[str, ...]]]) -> list[Any]:
    flags = ((where, make, name) for where, (make, names) in table.items() for name in names)
    return [pytest.param(where, make, name, id=f"{where}-{name}") for where, make, name in flags]


def _shown(value: Any) -> str:
    return "a tensor []" if isinstance(value, Tensor) else f"{value!r}, of type {type(value).__name__}"


@pytest.mark.parametrize("value", [1.0, "no", torch.tensor(True)], ids=str)
@pytest.mark.parametrize(("where", "make", "name"), _cases(TRACED | EAGER))
def test_a_value_that_is_no_flag_is_refused(where: str, make: Callable[[], Call], name: str, value: Any) -> None:
    """Also after calls with a flag, which may be repeated without the function's own code."""
    call = make()
    for flag in (True, False, True):
        call(**{name: flag})
    message = f"{where}: {name} is {_shown(value)}; expected True or False; pass "
    with pytest.raises(errors.ArgumentError, match=f"^{re.escape(message)}"):
        call(**{name: value})


@pytest.mark.parametrize(("where", "make", "name"), _cases(TRACED))
def test_the_traced_error_has_the_same_message(where: str, make: Callable[[], Call], name: str) -> None:
    torch._dynamo.reset()
    call, value = make(), 0.125
    message = f"{where}: {name} is 0.125, of type float; expected True or False; pass True or False"
    with pytest.raises(Exception, match=re.escape(message)):
        torch.compile(lambda: call(**{name: value}), fullgraph=True, backend="eager")()


def test_an_append_is_not_made_before_the_error() -> None:
    k, v = (torch.zeros(1, 8, 2, 64, device=DEVICE) for _ in range(2))
    new = torch.ones(1, 1, 2, 64, device=DEVICE)
    for name in ("return_softmax_lse", "rotary_interleaved"):
        table = torch.ones(8, 32, device=DEVICE)
        with pytest.raises(errors.ArgumentError, match=f"flash_attn_with_kvcache: {name} is 'no'"):
            flash_attn.flash_attn_with_kvcache(new, k, v, new, new, table, table, int32(3), **{name: "no"})
    assert not k.any()
    assert not v.any()


@pytest.mark.parametrize("flag", [True, 1, np.bool_(True)], ids=repr)
def test_integers_and_flags_of_numpy_are_flags(flag: Any) -> None:
    q, k = torch.randn(6, 4, 64, device=DEVICE), torch.randn(8, 2, 64, device=DEVICE)
    expected = flashinfer.single_prefill_with_kv_cache(q, k, k, causal=True)
    assert torch.equal(flashinfer.single_prefill_with_kv_cache(q, k, k, causal=flag), expected)
    out, lse = flashinfer.single_prefill_with_kv_cache(q, k, k, causal=flag, return_lse=flag)
    assert torch.equal(out, expected)
    assert lse.shape == (6, 4)


def test_a_condition_of_a_graph_is_a_flag() -> None:
    q, k = torch.randn(6, 4, 64, device=DEVICE), torch.randn(8, 2, 64, device=DEVICE)

    def call(q: Tensor, rows: int) -> Any:
        return flashinfer.single_prefill_with_kv_cache(q, k, k, causal=rows > 3)

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    for rows in (2, 5):
        torch.testing.assert_close(compiled(q, rows), call(q, rows))
