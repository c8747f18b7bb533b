"""Functions that plan by block tables in each call: repeated calls, with other contents and lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.mla_requests import Latents
from helpers.wrapper_requests import DEVICE, Requests, workspace
from torch import Tensor

from attn_ops.decode import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from attn_ops.eager.extension import is_available
from attn_ops.frontend import cudnn, deepseek, trtllm
from attn_ops.frontend.cudnn import cudnn_batch_decode_with_kv_cache
from attn_ops.mla import trtllm_batch_decode_with_kv_cache_mla
from attn_ops.prefill import trtllm_batch_context_with_kv_cache, trtllm_ragged_attention_deepseek

LENGTHS = ((37, 8, 130, 5), (130, 1, 16, 77), (2, 128, 129, 3))
"""KV lengths of batches whose tensors have equal sizes."""

ROWS = ((9, 1, 40, 5), (1, 20, 16, 18), (50, 2, 1, 2))
"""Their query rows."""

SCALES = 0.125, 1.0
"""Of the logits, for heads of 64, and of the output."""


def _batch(i: int, several_rows: bool = False) -> Requests:
    return Requests(LENGTHS[i], ROWS[i] if several_rows else (), num_pages=24, seed=i, kv_layout="HND")


def _table(r: Requests) -> Tensor:
    table = r.block_tables()
    return torch.nn.functional.pad(table, (0, 10 - table.shape[1]), value=-1)


def _decode(i: int, out: Tensor | None) -> None:
    r = _batch(i)
    given = r.q, r.cache(), workspace(), _table(r), r.seq_lens, max(r.kv_lens), *SCALES
    r.expected().check(trtllm_batch_decode_with_kv_cache(*given, out=out))


def _decode_with_lse(i: int, out: Tensor | None) -> None:
    r = _batch(i)
    given = r.q, r.cache(), workspace(), _table(r), r.seq_lens, max(r.kv_lens), *SCALES
    r.expected().check(*trtllm_batch_decode_with_kv_cache(*given, out=out, return_lse=True))


def _xqa(i: int, out: Tensor | None) -> None:
    r = _batch(i)
    more: dict[str, Any] = {"max_seq_len": max(r.kv_lens), "bmm1_scale": SCALES[0], "kv_layout": "HND", "out": out}
    r.expected().check(
        xqa_batch_decode_with_kv_cache(
            query=r.q,
            kv_cache=r.cache(),
            workspace_buffer=workspace(),
            block_tables=_table(r),
            seq_lens=r.seq_lens,
            **more,
        )
    )


def _several_rows(i: int, out: Tensor | None) -> None:
    """Two rows in each request, whose offsets the call makes."""
    lengths = tuple(n + 1 for n in LENGTHS[i])
    r = Requests(lengths, (2,) * 4, num_pages=24, seed=i, kv_layout="HND")
    given = r.q, r.cache(), workspace(), _table(r), r.seq_lens, max(lengths), *SCALES
    r.expected(causal=True).check(trtllm_batch_decode_with_kv_cache(*given, out=None, q_len_per_req=2))


def _context(i: int, out: Tensor | None) -> None:
    r = _batch(i, several_rows=True)
    given = r.q, r.cache(), workspace(), _table(r), r.seq_lens, max(ROWS[i]), 160, *SCALES
    result = trtllm_batch_context_with_kv_cache(*given, 4, r.qo_indptr, r.kv_indptr, out=out)
    r.expected(causal=True).check(result)


def _latent(i: int, out: Tensor | None) -> None:
    kv_lens = ((1, 70), (1, 9), (1, 3), (1, 130))
    m = Latents((*kv_lens[i:], *kv_lens[:i]))
    tables = m.block_tables.int(), m.table[2].int(), max(m.tokens[:2])
    given = m.q[:, None], m.cache, workspace(), 128, *m.dims, *tables
    m.expected(sm_scale=0.1).check(trtllm_batch_decode_with_kv_cache_mla(*given, bmm1_scale=0.1)[:, 0])


def _ragged(i: int, out: Tensor | None) -> None:
    r = Requests(LENGTHS[i], ROWS[i], seed=i)
    keys = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 300 - sum(r.kv_lens)), value=torch.nan) for t in r.ragged()]
    lengths = r.seq_lens, max(ROWS[i]), 160, *SCALES, None, 4, -1, r.qo_indptr, r.kv_indptr
    result = trtllm_ragged_attention_deepseek(r.q, *keys, workspace(), *lengths, None, True, False, out=out)
    r.expected(causal=True).check(result)


def _cudnn(i: int, out: Tensor | None) -> None:
    r = _batch(i)
    tables = {"actual_seq_lens_kv": r.seq_lens, "block_tables": _table(r), "max_sequence_kv": max(r.kv_lens)}
    r.expected().check(cudnn_batch_decode_with_kv_cache(r.q, *r.cache(), SCALES[0], workspace(), **tables, out=out))


CALLS = (_decode, _decode_with_lse, _xqa, _several_rows, _context, _latent, _ragged, _cudnn)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("has_buffer", [False, True], ids=["", "out"])
@pytest.mark.parametrize("call", CALLS)
def test_repeated_calls_attend_to_their_own_batch(call: Callable[..., None], has_buffer: bool) -> None:
    for i in (0, 1, 2, 0):
        rows = sum(ROWS[i]) if call in (_context, _ragged) else 4
        call(i, torch.empty(rows, 4, 64, dtype=torch.float16, device=DEVICE) if has_buffer else None)


@pytest.mark.gpu
@pytest.mark.skipif(not is_available(), reason="needs the extension module")
@pytest.mark.parametrize("call", CALLS)
def test_repeated_calls_run_no_body(call: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    call(0, None)
    for module in (cudnn, deepseek, trtllm):
        for function in ("block_table_call", "latent_call", "ragged_call"):
            monkeypatch.setattr(module, function, None, raising=False)
    call(1, None)
    call(2, None)
