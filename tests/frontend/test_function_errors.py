"""Wrong calls of one-shot functions raise typed errors, as those of wrappers do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.error_cases import Case, check_raises, empty
from helpers.wrapper_requests import DEVICE, Requests, workspace

import attn_ops as flashinfer
from attn_ops import errors

R = Requests()
P = Requests((70, 3, 9, 130), (1, 5, 0, 40))
H = Requests((70, 3, 9, 130), (1, 5, 0, 40), kv_layout="HND")
QO, KV, LENS = (torch.tensor(t, dtype=torch.int32) for t in ([0, 1, 6, 6, 46], [0, 70, 73, 82, 212], H.kv_lens))
"""Lengths of H, on the host."""


def cache(kv_heads: int | None) -> Any:
    """Of H, or of another number of heads."""
    return H.cache() if kv_heads is None else empty(15, 2, kv_heads, 16, 64)


def context(
    q: torch.Tensor = H.q, indptr: torch.Tensor = QO, seq_lens: torch.Tensor = LENS, kv_heads: int | None = None
) -> Any:
    tables = H.block_tables(), seq_lens
    return flashinfer.trtllm_batch_context_with_kv_cache(
        q, cache(kv_heads), workspace(), *tables, 40, 130, 0.1, 1.0, 4, indptr, KV
    )


def several(q: torch.Tensor = H.q, indptr: torch.Tensor = QO) -> Any:
    tables = H.block_tables(), LENS
    return flashinfer.trtllm_batch_decode_with_kv_cache(
        q, H.cache(), workspace(), *tables, 130, cum_seq_lens_q=indptr, max_q_len=40
    )


def latent(q: torch.Tensor, indptr: torch.Tensor = QO) -> Any:
    cache, dims = empty(15, 16, 576), (128, 512, 64)
    tables = H.block_tables(), LENS, 130
    return flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        q, cache, workspace(), *dims, *tables, cum_seq_lens_q=indptr, max_q_len=40
    )


def deepseek(
    q: torch.Tensor = H.q,
    keys: int = 212,
    qo: torch.Tensor = QO,
    kv: torch.Tensor = KV,
    kv_heads: int | None = None,
) -> Any:
    k, v = (t[:keys] for t in H.ragged())
    if kv_heads is not None:
        k = v = empty(keys, kv_heads, 64)
    sizes = 40, 130, 0.1, 1.0, -1, len(qo) - 1, -1
    return flashinfer.trtllm_ragged_attention_deepseek(q, k, v, workspace(), LENS, *sizes, qo, kv, False, True, False)


def cudnn(q: torch.Tensor = H.q, keys: int = 212, **changes: Any) -> Any:
    lengths: dict[str, Any] = {"actual_seq_lens_q": QO.diff(), "actual_seq_lens_kv": LENS}
    return flashinfer.cudnn_batch_prefill_with_kv_cache(
        q,
        *(t[:keys] for t in H.ragged()),
        0.1,
        workspace(),
        **{"max_token_per_sequence": 40, "return_lse": False, **lengths, **changes},
        max_sequence_kv=130,
        causal=True,
    )


def cudnn_decode(offsets: torch.Tensor) -> Any:
    return flashinfer.cudnn_batch_decode_with_kv_cache(
        R.q,
        *Requests(kv_layout="HND").cache(),
        0.1,
        None,
        max_sequence_kv=130,
        actual_seq_lens_kv=R.seq_lens,
        block_tables=R.block_tables(),
        batch_offsets_q=offsets,
    )


def decoding(tables: Any, lens: Any = LENS, kv_heads: int | None = None, **changes: Any) -> Any:
    pages = cache(kv_heads)
    return flashinfer.trtllm_batch_decode_with_kv_cache(R.q, pages, workspace(), tables, lens, 130, **changes)


def deepseek_into(dtype: torch.dtype) -> Any:
    k, v = H.ragged()
    sizes, out = (40, 130, 0.1, 1.0, -1, 4, -1), empty(46, 4, 64, dtype=dtype)
    return flashinfer.trtllm_ragged_attention_deepseek(
        H.q, k, v, workspace(), LENS, *sizes, QO, KV, False, True, False, out=out
    )


def segments(*indptr: int) -> Any:
    return flashinfer.segment_packbits(torch.ones(10, dtype=torch.bool, device=DEVICE), torch.tensor(indptr))


TABLES = H.block_tables().cpu()
V, S = torch.zeros(3, 4, 64, device=DEVICE), torch.zeros(3, 4, device=DEVICE)
NONE = torch.zeros(0, dtype=torch.int32, device=DEVICE)

CASES: dict[str, Case] = {
    "block tables of bools": (
        lambda: decoding(TABLES > 0),
        errors.DTypeError,
        "block_tables is bool; expected int32 or int64",
    ),
    "block tables of floats": (
        lambda: decoding(TABLES + 0.5),
        errors.DTypeError,
        "block_tables is float32; expected int32 or int64",
    ),
    "pages beyond int32": (
        lambda: decoding(TABLES.long() + (1 << 32)),
        errors.PageTableError,
        "block_tables has a number beyond int32",
    ),
    "no block tables": (lambda: decoding(None), errors.ArgumentError, "block_tables is missing"),
    "no lengths": (lambda: decoding(TABLES, None), errors.ArgumentError, "seq_lens is missing"),
    **{
        f"{heads} KV heads {op}": (
            call,
            errors.ShapeError,
            f"{name}: 4 query heads do not share {heads} KV heads evenly",
        )
        for heads in (0, 3)
        for op, name, call in (
            ("decode", "trtllm_batch_decode_with_kv_cache", lambda n=heads: decoding(TABLES, kv_heads=n)),
            ("context", "trtllm_batch_context_with_kv_cache", lambda n=heads: context(kv_heads=n)),
            ("ragged", "trtllm_ragged_attention_deepseek", lambda n=heads: deepseek(kv_heads=n)),
        )
    },
    "sinks on meta": (
        lambda: decoding(TABLES, sinks=torch.zeros(4, device="meta")),
        errors.DeviceError,
        f"sinks is on meta, without contents; expected {R.q.device}, where the query is",
    ),
    "sparse sinks": (
        lambda: decoding(TABLES, sinks=torch.ones(4, device=DEVICE).to_sparse()),
        errors.ArgumentError,
        "sinks is sparse_coo; expected a strided tensor; pass sinks.to_dense()",
    ),
    "no causal, and no workspace, which is not needed": (
        lambda: flashinfer.trtllm_batch_context_with_kv_cache(
            H.q, H.cache(), None, H.block_tables(), LENS, 40, 130, 0.1, 1.0, 4, QO, KV, causal=None
        ),
        errors.ArgumentError,
        "trtllm_batch_context_with_kv_cache: causal is None; expected True or False",
    ),
    **{
        f"complex LSE of {name}": (
            call,
            errors.DTypeError,
            f"{name}: s{suffix} is complex64; expected a tensor of real",
        )
        for name, suffix, call in (
            ("merge_state", "_b", lambda: flashinfer.merge_state(V, S, V, S.to(torch.complex64))),
            ("merge_states", "", lambda: flashinfer.merge_states(V[:, None], S[:, None].to(torch.complex64))),
        )
    },
    "no rows a request": (
        lambda: decoding(TABLES, q_len_per_req=0),
        errors.OptionError,
        "q_len_per_req is 0; expected at least 1",
    ),
    "no rows of context": (
        lambda: context(indptr=None),  # type: ignore[arg-type]
        errors.ArgumentError,
        "cum_seq_lens_q is missing",
    ),
    **{
        f"{name} of another rank": (lambda call=call: call(H.q[0]), errors.ShapeError, message)
        for name, call, message in (
            ("context", context, "query is [4, 64]; expected [rows, num_qo_heads, head_dim]; reshape query"),
            ("several rows", several, "query is [4, 64]; expected [rows, num_qo_heads, head_dim]"),
            ("deepseek", deepseek, "query is [4, 64]; expected [rows, heads, head_dim]"),
            ("cudnn", cudnn, "q is [4, 64]; expected [rows, heads, head_dim]"),
        )
    },
    "negative window of xqa": (
        lambda: flashinfer.xqa(R.q, *R.cache(), TABLES, LENS, sliding_win_size=-1),
        errors.OptionError,
        "sliding_win_size is -1; expected 1 to 1073741824 tokens, or 0 for no window",
    ),
    "no values of xqa": (
        lambda: flashinfer.xqa(R.q, R.cache()[0], None, TABLES, LENS),
        errors.ArgumentError,
        "xqa: v_cache is missing",
    ),
    **{
        f"{what} out of deepseek": (
            lambda dtype=dtype: deepseek_into(dtype),
            error,
            f"out is {what}; expected",
        )
        for what, dtype, error in (
            ("float64", torch.float64, errors.UnsupportedError),
            ("int32", torch.int32, errors.DTypeError),
        )
    },
    "float64 output of xqa": (
        lambda: flashinfer.xqa(
            R.q, *R.cache(), R.block_tables(), R.seq_lens, output=empty(4, 4, 64, dtype=torch.float64)
        ),
        errors.UnsupportedError,
        "output is float64; expected float16, bfloat16, float32, float8_e4m3fn or float8_e5m2",
    ),
    "padded LSE too short": (
        lambda: cudnn(max_token_per_sequence=39, lse=empty(4, 39, 4, dtype=torch.float32), return_lse=True),
        errors.ShapeError,
        "a request has 40 query rows and max_token_per_sequence is 39",
    ),
    "single with heads of nothing": (
        lambda: flashinfer.single_prefill_with_kv_cache(empty(2, 2, 0), empty(3, 2, 0), empty(3, 2, 0)),
        errors.OptionError,
        "head_dim is 0; expected at least 1",
    ),
    "rank of the keys of single prefill": (
        lambda: flashinfer.single_prefill_with_kv_cache(P.q, empty(9), empty(9), kv_layout="HND"),
        errors.ShapeError,
        "k is [9]; expected [kv_len, num_kv_heads, head_dim]",
    ),
    "segments beyond their bits": (
        lambda: segments(0, 20),
        errors.ShapeError,
        "segment_packbits: indptr ends at 20 and x has 10",
    ),
    "segments from before their bits": (
        lambda: segments(-3, 5),
        errors.PageTableError,
        "segment_packbits: indptr starts at -3",
    ),
    "falling segments": (
        lambda: segments(0, 10, 5),
        errors.PageTableError,
        "segment_packbits: indptr falls from 10 to 5",
    ),
    "no segment's indptr": (
        lambda: torch.ops.attn.segment_packbits(empty(8) == 0, NONE, 0),
        errors.ShapeError,
        "segment_packbits: indptr is [0]; expected [segments + 1], which is [1] where there are none",
    ),
    "no merged row's indptr": (
        lambda: torch.ops.attn.merge_states_varlen(empty(3, 2, 8), empty(3, 2, dtype=torch.float32), NONE),
        errors.ShapeError,
        "merge_states_varlen: indptr is [0]; expected [rows + 1]",
    ),
    "latents that are not given": (
        lambda: flashinfer.append_paged_mla_kv_cache(
            None, empty(1, 64), *(torch.zeros(1),) * 2, empty(1, 4, 512), empty(1, 4, 64), *(torch.zeros(2),) * 3
        ),
        errors.ArgumentError,
        "append_ckv is missing",
    ),
    "single mode": (
        lambda: flashinfer.single_prefill_with_kv_cache(P.q, *P.ragged(), pos_encoding_mode="x"),
        errors.OptionError,
        "NONE, ROPE_LLAMA, ALIBI",
    ),
    "no query heads": (
        lambda: flashinfer.single_prefill_with_kv_cache(P.q[:, :0], *P.ragged()),
        errors.OptionError,
        "single_prefill_with_kv_cache: num_qo_heads is 0; expected at least 1",
    ),
    "no query heads of one row": (
        lambda: flashinfer.single_decode_with_kv_cache(P.q[0, :0], *P.ragged()),
        errors.OptionError,
        "num_qo_heads is 0; expected at least 1",
    ),
    "rank of the query of single prefill": (
        lambda: flashinfer.single_prefill_with_kv_cache(P.q[0], *P.ragged()),
        errors.ShapeError,
        "q is [4, 64]; expected [qo_len, num_qo_heads, head_dim]",
    ),
    "transposed mask": (
        lambda: flashinfer.single_prefill_with_kv_cache(P.q, *P.ragged(), custom_mask=empty(212, 46) == 0),
        errors.ShapeError,
        "custom_mask is [212, 46]; expected [46, 212], or flat",
    ),
    "rows of xqa twice": (
        lambda: flashinfer.xqa(R.q[:, None, None], *R.cache(), R.block_tables(), R.seq_lens, q_seq_len=5),
        errors.ShapeError,
        "q_seq_len is 5; expected 1 as q has",
    ),
    "block tables too narrow": (
        lambda: flashinfer.xqa(R.q, *R.cache(), R.block_tables()[:, :8], torch.tensor(R.kv_lens, dtype=torch.int32)),
        errors.PageTableError,
        "a request has 130 tokens and page_table capacity for 128",
    ),
    "lengths of another name": (
        lambda: flashinfer.cudnn_batch_decode_with_kv_cache(
            R.q,
            *R.cache(),
            0.1,
            None,
            max_sequence_kv=130,
            actual_seq_lens_kv=R.seq_lens.float(),
            block_tables=R.block_tables(),
        ),
        errors.DTypeError,
        "actual_seq_lens_kv is float32; expected int32 or int64",
    ),
    "fewer query lengths than tables": (
        lambda: flashinfer.cudnn_batch_prefill_with_kv_cache(
            R.q,
            *R.cache(),
            0.1,
            None,
            max_token_per_sequence=4,
            max_sequence_kv=130,
            actual_seq_lens_q=QO[1:2],
            actual_seq_lens_kv=R.seq_lens,
            block_tables=R.block_tables(),
            causal=True,
            return_lse=False,
        ),
        errors.ShapeError,
        "actual_seq_lens_q has 1 lengths; expected 4, the rows of block_tables",
    ),
    "dtype of the query": (
        lambda: flashinfer.trtllm_batch_decode_with_kv_cache(
            R.q.int(), R.cache(), None, R.block_tables(), R.seq_lens, 1
        ),
        errors.DTypeError,
        "query is int32; expected float16, bfloat16, float32, float8_e4m3fn or float8_e5m2",
    ),
    "dtypes of query and cache": (
        lambda: flashinfer.xqa_batch_decode_with_kv_cache(
            R.q.bfloat16(), R.cache(), None, R.block_tables(), R.seq_lens, 1
        ),
        errors.DTypeError,
        "kv_cache is float16 and query bfloat16; expected bfloat16, float8_e4m3fn or float8_e5m2",
    ),
    "dtypes of a pair": (
        lambda: flashinfer.xqa_batch_decode_with_kv_cache(
            R.q, (R.cache()[0], R.cache()[1].bfloat16()), None, R.block_tables(), R.seq_lens, 1
        ),
        errors.DTypeError,
        "kv_cache is float16 and bfloat16; expected one dtype",
    ),
    "dtypes of query and latents": (
        lambda: flashinfer.trtllm_batch_decode_with_kv_cache_mla(
            R.q[:, None], R.cache()[0][:, :, 0].bfloat16(), None, 32, 48, 16, R.block_tables(), R.seq_lens, 1
        ),
        errors.DTypeError,
        "kv_cache is bfloat16 and query float16",
    ),
    "xqa beam": (
        lambda: flashinfer.xqa(R.q.view(2, 2, 4, 64), *R.cache(), R.block_tables(), R.seq_lens),
        errors.ShapeError,
        "q has a beam of 2; expected 1",
    ),
    "tree mask of bools": (
        lambda: flashinfer.xqa(
            R.q, *R.cache(), R.block_tables(), R.seq_lens, mask=torch.ones(4, 2, dtype=torch.bool, device=DEVICE)
        ),
        errors.DTypeError,
        "mask is bool; expected uint16 or uint32",
    ),
    "tree mask of other rows": (
        lambda: flashinfer.xqa(
            R.q, *R.cache(), R.block_tables(), R.seq_lens, mask=torch.ones(3, 2, dtype=torch.uint16, device=DEVICE)
        ),
        errors.ShapeError,
        "mask is [3, 2], of 32 bits per row; expected [4, words]",
    ),
    **{
        f"rows of {name}": (
            lambda call=call, q=q: call(q[1:]),
            errors.ShapeError,
            f"{what} has 45 rows; expected 46 or more, where {lengths} ends",
        )
        for name, call, q, what, lengths in (
            ("context", context, H.q, "the query", "cum_seq_lens_q"),
            ("several", several, H.q, "the query", "cum_seq_lens_q"),
            ("latent", latent, empty(46, 4, 576), "query", "cum_seq_lens_q"),
            ("deepseek", deepseek, H.q, "query", "cum_seq_lens_q"),
            ("cudnn", cudnn, H.q, "q", "actual_seq_lens_q"),
        )
    },
    **{
        f"keys of {name}": (
            lambda call=call: call(keys=211),
            errors.ShapeError,
            f"{what} has 211 rows; expected 212 or more, where {lengths} ends",
        )
        for name, call, what, lengths in (
            ("deepseek", deepseek, "key", "cum_seq_lens_kv"),
            ("cudnn", cudnn, "k_cache", "actual_seq_lens_kv"),
        )
    },
    "rows of xqa": (
        lambda: flashinfer.xqa(H.q[1:], *H.cache(), H.block_tables(), LENS, kv_layout="HND", q_cu_seq_lens=QO),
        errors.ShapeError,
        "q has 45 rows; expected 46 or more, where q_cu_seq_lens ends",
    ),
    "falling rows of context": (
        lambda: context(indptr=torch.tensor([0, 9, 5, 5, 46])),
        errors.PageTableError,
        "trtllm_batch_context_with_kv_cache: cum_seq_lens_q falls from 9 to 5 at request 1",
    ),
    "falling rows of decoding": (
        lambda: several(indptr=torch.tensor([0, 9, 5, 5, 46])),
        errors.PageTableError,
        "trtllm_batch_decode_with_kv_cache: cum_seq_lens_q falls from 9 to 5 at request 1",
    ),
    "falling keys of deepseek": (
        lambda: deepseek(kv=KV.flip(0) - KV),
        errors.PageTableError,
        "cum_seq_lens_kv starts at 212; expected 0",
    ),
    "float rows of context": (
        lambda: context(indptr=QO + 0.7),
        errors.DTypeError,
        "cum_seq_lens_q is float32; expected int32 or int64",
    ),
    "requests of deepseek": (
        lambda: deepseek(kv=KV[:-1]),
        errors.ShapeError,
        "cum_seq_lens_kv is [4]; expected [5], for the 4 requests of the batch",
    ),
    "float lengths of context": (
        lambda: context(seq_lens=LENS.float()),
        errors.DTypeError,
        "seq_lens is float32; expected int32 or int64",
    ),
    "negative lengths of cudnn": (
        lambda: cudnn(actual_seq_lens_kv=LENS - 4),
        errors.PageTableError,
        "actual_seq_lens_kv has a length of -1; expected 0 or more",
    ),
    "lengths of cudnn by offsets in elements": (
        lambda: cudnn(actual_seq_lens_q=None, batch_offsets_q=QO * 256),
        errors.ArgumentError,
        "actual_seq_lens_q is missing; expected it, or batch_offsets_q in tokens",
    ),
    "lengths of pages by offsets": (
        lambda: cudnn(actual_seq_lens_kv=None, block_tables=H.block_tables(), batch_offsets_units="tokens"),
        errors.ArgumentError,
        "actual_seq_lens_kv is missing",
    ),
    "falling offsets of cudnn": (
        lambda: cudnn(actual_seq_lens_kv=None, batch_offsets_k=KV - KV * 2, batch_offsets_units="tokens"),
        errors.PageTableError,
        "batch_offsets_k falls from 0 to -70 at request 0",
    ),
    **{
        f"offsets of {offsets.dtype} of cudnn": (
            lambda offsets=offsets: cudnn(batch_offsets_o=offsets),
            errors.DTypeError,
            f"batch_offsets_o is {errors.dtype_name(offsets.dtype)}; expected int32 or int64; convert it",
        )
        for offsets in (
            (QO * 256).to(dtype) for dtype in (torch.float64, torch.complex64, torch.float8_e5m2, torch.bool)
        )
    },
    **{
        f"offsets {list(offsets.shape)} of cudnn": (
            lambda name=name, offsets=offsets: cudnn(**{name: offsets}),
            errors.ShapeError,
            f"{name} is {list(offsets.shape)}; expected [5], for the 4 requests of the batch; make the two agree",
        )
        for name, offsets in (
            ("batch_offsets_q", QO[0]),
            ("batch_offsets_k", QO[:0]),
            ("batch_offsets_v", KV[:-1] * 128),
        )
    },
    "offsets of one request of cudnn": (
        lambda: cudnn_decode(QO[:1]),
        errors.ShapeError,
        "batch_offsets_q is [1]; expected [4] or [5], for the 4 requests of the batch; make the two agree",
    ),
    **{
        f"rank of the query of {call.__name__}": (
            lambda call=call, q=q: call(q.flatten(1)),
            errors.ShapeError,
            f"{what}; expected [rows, ",
        )
        for call, q, what in (
            (context, H.q, "query is [46, 256]"),
            (several, H.q, "query is [46, 256]"),
            (latent, empty(46, 4, 576), "query is [46, 2304]"),
            (deepseek, H.q, "query is [46, 256]"),
            (cudnn, H.q, "q is [46, 256]"),
        )
    },
    "xqa cache": (
        lambda: flashinfer.xqa(R.q, *(t.flatten(0, 2) for t in R.cache()), R.block_tables(), R.seq_lens),
        errors.ShapeError,
        "xqa: a KV cache is [480, 64]; expected [pages, page_size, num_kv_heads, head_dim]",
    ),
    "xqa sizes": (
        lambda: flashinfer.xqa(R.q, *R.cache(), R.block_tables(), R.seq_lens, num_kv_heads=4),
        errors.ShapeError,
        "num_kv_heads is 4; expected 2 as the tensors have",
    ),
    "gaps": (
        lambda: cudnn_decode(torch.arange(5) * 300),
        errors.UnsupportedError,
        "batch_offsets_q leaves gaps between requests",
    ),
    "a 4-bit output": (
        lambda: decoding(TABLES, out_dtype="nvfp4"),
        errors.UnsupportedError,
        "out_dtype is 'nvfp4', which is not supported: 4-bit outputs are not written here; use a float16, bfloat16",
    ),
    "falling offsets of states": (
        lambda: flashinfer.variable_length_merge_states(V, S, torch.tensor([0, 3, 1])),
        errors.PageTableError,
        "variable_length_merge_states: indptr falls from 3 to 1 at request 1; expected values that never decrease",
    ),
    "offsets before the states": (
        lambda: flashinfer.variable_length_merge_states(V, S, torch.tensor([-1, 3])),
        errors.PageTableError,
        "variable_length_merge_states: indptr starts at -1; expected 0 or more",
    ),
    "offsets beyond the states": (
        lambda: flashinfer.variable_length_merge_states(V, S, torch.tensor([0, 2, 4])),
        errors.ShapeError,
        "variable_length_merge_states: v has 3 states; expected 4 or more, where indptr ends",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_call_raises(name: str) -> None:
    check_raises(CASES[name])


LATENTS, SCALAR = empty(15, 16, 576), empty()
OF_LATENTS = empty(4, 4, 576), LATENTS, LATENTS[..., :512], TABLES, R.seq_lens
OF_PAGES = R.q, *R.cache(), TABLES, R.seq_lens

TRACED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = {
    "page size of xqa": (
        flashinfer.xqa,
        OF_PAGES,
        {"page_size": 9},
        "xqa: page_size is 9; expected 16 as the tensors have; correct one",
    ),
    "page size of xqa_mla": (
        flashinfer.xqa_mla,
        OF_LATENTS,
        {"page_size": 9},
        "xqa_mla: page_size is 9; expected 16 as the tensors have; correct one",
    ),
    "query of MLA": (
        flashinfer.trtllm_batch_decode_with_kv_cache_mla,
        (OF_LATENTS[0], LATENTS, None, 128, 512, 64, TABLES, R.seq_lens, 130),
        {},
        "query is [4, 4, 576]; expected [batch, q_len, num_heads, 576]; reshape it",
    ),
    "batch of context": (
        flashinfer.trtllm_batch_context_with_kv_cache,
        (H.q, H.cache(), None, H.block_tables(), LENS, 40, 130, 0.1, 1.0, 5, QO, KV),
        {},
        "trtllm_batch_context_with_kv_cache: batch_size is 5; expected 4, the rows of block_tables; correct it",
    ),
    "offsets of cudnn": (
        flashinfer.cudnn_batch_prefill_with_kv_cache,
        (H.q, *H.ragged(), 0.1, None),
        {
            **{"max_token_per_sequence": 40, "max_sequence_kv": 130, "causal": True, "return_lse": False},
            **{"actual_seq_lens_q": QO.diff(), "actual_seq_lens_kv": LENS, "batch_offsets_q": QO[:4] * 256},
        },
        "cudnn_batch_prefill_with_kv_cache: batch_offsets_q is [4]; expected [5], for the 4 requests of the batch; "
        "make the two agree",
    ),
    **{
        f"{name} of {function.__name__} without dimensions": (
            function,
            tuple(SCALAR if i == place else t for i, t in enumerate(tensors)),
            {},
            f"{function.__name__}: {name} is a tensor without dimensions; expected the dimensions that the "
            f"documentation names; reshape {name}",
        )
        for function, tensors, place, name in (
            (flashinfer.xqa, OF_PAGES, 0, "q"),
            (flashinfer.xqa_mla, OF_LATENTS, 1, "k_cache"),
            (flashinfer.xqa_mla, OF_LATENTS, 2, "v_cache"),
        )
    },
}


@pytest.mark.parametrize("name", TRACED)
def test_compiled_calls_have_the_messages_of_eager_calls(name: str) -> None:
    """With numbers for symbolic sizes."""
    function, args, kwargs, message = TRACED[name]
    check_raises((lambda: function(*args, **kwargs), errors.ShapeError, message))
    with pytest.raises(Exception, match=re.escape(message)):
        torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)(*args, **kwargs)
