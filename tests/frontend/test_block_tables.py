"""Functions that take block tables, in the forms of TensorRT-LLM, cuDNN and XQA, against the oracle."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.wrapper_requests import DEVICE, Requests, ln, workspace
from torch.fx.experimental.proxy_tensor import make_fx

import attn_ops as flashinfer
from attn_ops import errors
from attn_ops.plan import page_table

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SCALE = 0.125


def scales(as_tensor: bool, *values: float) -> Any:
    return [torch.tensor(v, device=DEVICE) if as_tensor else v for v in values]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_trtllm_decode(kv_layout: str, as_tensor: bool) -> None:
    r = Requests(kv_layout=kv_layout)
    bmm1, bmm2 = scales(as_tensor, 0.2, 3.0)
    out = torch.empty_like(r.q)
    got, lse = flashinfer.trtllm_batch_decode_with_kv_cache(
        r.q,
        r.cache("tensor"),
        workspace(),
        r.block_tables(),
        r.seq_lens,
        130,
        bmm1,
        bmm2,
        window_left=40,
        out=out,
        sinks=[r.sinks],
        kv_layout=kv_layout,
        return_lse=True,
    )
    assert got is out
    r.expected(sm_scale=0.2, v_scale=3.0, window_left=40, sinks=True).check(out, lse)


def test_lengths_and_offsets_may_be_columns() -> None:
    """Of packed metadata, in int32."""
    r = Requests(kv_layout="HND")
    columns = torch.stack((r.seq_lens, r.seq_lens), 1)
    tables = r.block_tables()
    call = functools.partial(flashinfer.trtllm_batch_decode_with_kv_cache, r.q, r.cache(), workspace(), tables)
    of_rows = torch.arange(len(r.seq_lens) + 1, device=DEVICE, dtype=torch.int32)
    offsets = {"cum_seq_lens_q": torch.stack((of_rows, of_rows), 1)[:, 0], "max_q_len": 1}
    expected = call(r.seq_lens, 130, SCALE)
    assert torch.equal(call(columns[:, 0], 130, SCALE), expected)
    assert torch.equal(call(columns[:, 0], 130, SCALE, **offsets), expected)


def test_lengths_fill_their_rows_of_the_table_at_most() -> None:
    r = Requests(kv_lens=(128, 3), kv_layout="HND")
    tables, more = r.block_tables(spare=0), torch.tensor([129, 3])
    call = functools.partial(flashinfer.trtllm_batch_decode_with_kv_cache, r.q, r.cache(), workspace(), tables)
    r.expected(sm_scale=0.125).check(call(r.seq_lens.cpu(), 128, 0.125))
    shown = f"a request has 129 tokens and block_tables capacity for 128, in pages of {r.page_size} by kv_layout 'HND'"
    with pytest.raises(errors.PageTableError, match=shown):
        call(more, 129, 0.125)


def test_unsigned_lengths_on_the_host_are_shown_as_they_are() -> None:
    r = Requests(kv_lens=(128, 3), kv_layout="HND")
    lens = torch.tensor([3_000_000_000, 3], dtype=torch.uint32)
    with pytest.raises(errors.PageTableError, match="a request has 3000000000 tokens and block_tables capacity for"):
        flashinfer.trtllm_batch_decode_with_kv_cache(r.q, r.cache(), workspace(), r.block_tables(), lens, 130, 0.125)


@pytest.mark.parametrize("number", [-1, 1 << 20])
def test_tables_on_the_host_name_pages_of_the_cache(number: int) -> None:
    """As far as a request has tokens, also where the cache is on a GPU."""
    r = Requests(kv_lens=(128, 3), kv_layout="HND")
    tables, lens = r.block_tables(spare=1).cpu(), r.seq_lens.cpu()
    call = functools.partial(flashinfer.trtllm_batch_decode_with_kv_cache, r.q, r.cache(), workspace())
    tables[0, -1], tables[1, 1:] = number, number
    r.expected(sm_scale=0.125).check(call(tables, lens, 128, 0.125))
    tables[0, 1] = number
    expected = rf"block_tables\[0, 1\] is {number}; expected a page of the cache, 0 to {r.cache()[0].shape[0] - 1}"
    with pytest.raises(errors.PageTableError, match=expected):
        call(tables, lens, 128, 0.125)


@pytest.mark.parametrize("rows", [1, 2])
def test_pages_before_the_window_may_be_free(rows: int) -> None:
    r = Requests(kv_lens=(200, 130), qo_lens=(rows,) * 2, kv_layout="HND")
    tables, lens = r.block_tables(spare=0).cpu(), r.seq_lens.cpu()
    decode = functools.partial(flashinfer.trtllm_batch_decode_with_kv_cache, r.q, r.cache(), workspace())
    call = functools.partial(decode, tables, lens, 200, 0.125, q_len_per_req=rows)
    tables[:, : 100 // r.page_size] = -1
    r.expected(sm_scale=0.125, causal=True, window_left=20).check(call(window_left=20))
    with pytest.raises(errors.PageTableError, match=r"block_tables\[0, 0\] is -1"):
        call()


def test_tables_of_mla_name_pages_of_the_cache() -> None:
    cache, tables = torch.randn(4, 8, 576, device=DEVICE), torch.tensor([[1, 4]])
    with pytest.raises(errors.PageTableError, match=r"block_tables\[0, 1\] is 4; expected a page of the cache, 0 to 3"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(
            torch.randn(1, 1, 16, 576, device=DEVICE), cache, workspace(), 128, 512, 64, tables, torch.tensor([9]), 9
        )


def test_tables_of_the_mla_wrapper_without_a_plan_name_pages_of_the_cache() -> None:
    cache, tables = torch.randn(4, 8, 576, device=DEVICE), torch.tensor([[1, 4]])
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace())
    with pytest.raises(errors.PageTableError, match=r"page_table\[0, 1\] is 4; expected a page of the cache, 0 to 3"):
        wrapper.forward(torch.randn(1, 16, 576, device=DEVICE), cache, tables, torch.tensor([9]))


def test_one_tensor_of_keys_and_values_has_two_parts() -> None:
    r = Requests(kv_layout="HND")
    cache = torch.randn(4, 3, r.heads[1], r.page_size, 64, device=DEVICE, dtype=r.dtype)
    with pytest.raises(errors.ShapeError, match=r"xqa: the KV cache is one tensor \[4, 3, .*; expected \[pages, 2"):
        flashinfer.xqa(r.q, cache, cache, r.block_tables(), r.seq_lens, kv_layout="HND")


@pytest.mark.parametrize("q_len", [1, 2])
def test_function_and_wrapper_have_equal_bits(q_len: int) -> None:
    """Equal problems have equal plans, whose capacities differ."""
    r = Requests((70, 3, 9, 130), (q_len,) * 4, kv_layout="HND")
    out = flashinfer.trtllm_batch_decode_with_kv_cache(
        r.q, r.cache(), workspace(), r.block_tables(), r.seq_lens, 130, 0.125, q_len_per_req=q_len
    )
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace(), "HND")
    wrapper.plan(*r.table, *r.sizes, sm_scale=0.125, q_data_type=r.dtype, kv_data_type=r.dtype)
    assert torch.equal(out, wrapper.run(r.q, r.cache(), q_len_per_req=q_len))


SKIPS = "skip_softmax_threshold_scale_factor"


def test_a_factor_that_skips_less_than_rounding_has_no_effect() -> None:
    r = Requests(kv_layout="HND")
    call = functools.partial(flashinfer.trtllm_batch_decode_with_kv_cache, r.q, r.cache(), workspace())
    tables = r.block_tables(), r.seq_lens, 130, 0.125
    out = call(*tables)
    for factor in (1e-30, 2.0**-24, 0, 0.0):
        assert torch.equal(call(*tables, **{SKIPS: factor}), out)
    for factor in (1e-7, -1e-30, 1, math.nan):
        with pytest.raises(errors.UnsupportedError, match=f"{SKIPS} is {factor}, which is not supported"):
            call(*tables, **{SKIPS: factor})


def test_trtllm_scale_in_base_2() -> None:
    r = Requests(kv_layout="HND")
    scale = torch.tensor([0.2 * math.log2(math.e)], device=DEVICE)
    tables = (r.block_tables(), r.seq_lens, 130, 0.7)
    out = flashinfer.trtllm_batch_decode_with_kv_cache(
        r.q, r.cache(), workspace(), *tables, bmm1_scale_log2=scale, q_len_per_req=1
    )
    r.expected(sm_scale=0.2).check(out)


def test_trtllm_decode_of_several_rows() -> None:
    r = Requests(kv_lens=(37, 3, 130), qo_lens=(3, 3, 3), kv_layout="HND")
    tables = (r.block_tables(), r.seq_lens, 130, SCALE)
    out = flashinfer.trtllm_batch_decode_with_kv_cache(r.q, r.cache(), workspace(), *tables, q_len_per_req=3)
    r.expected(causal=True).check(out)
    r = Requests(kv_lens=(37, 3, 130), qo_lens=(3, 0, 5), kv_layout="HND")
    tables = (r.block_tables(), r.seq_lens, 130, SCALE)
    out = flashinfer.trtllm_batch_decode_with_kv_cache(
        r.q, r.cache(), workspace(), *tables, cum_seq_lens_q=r.qo_indptr, max_q_len=5, o_scale=0.5
    )
    r.expected(causal=True).check(out)


def random_tree_mask(r: Requests, words: int, dtype: torch.dtype) -> torch.Tensor:
    """A random tree mask ``[rows, words]``, which ``r.masks`` then hold too. Bits beyond a request's rows are set."""
    generator, lines = torch.Generator().manual_seed(1), []
    bits = 8 * dtype.itemsize
    for b, (rows, length) in enumerate(zip(r.rows, r.kv_lens, strict=True)):
        seen = torch.rand(rows, rows, generator=generator) < 0.5
        whole = torch.ones(rows, length, dtype=torch.bool)
        whole[:, max(length - rows, 0) :] = seen[:, max(rows - length, 0) :]
        r.masks[b] = whole
        spread = torch.ones(rows, words * bits, dtype=torch.int64)
        spread[:, :rows] = seen
        lines.append((spread.view(rows, words, bits) << torch.arange(bits)).sum(-1))
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32}[dtype]
    return torch.cat(lines).to(signed).view(dtype).to(DEVICE)


@pytest.mark.parametrize(("words", "dtype"), [(2, torch.uint16), (1, torch.uint32), (4, torch.uint16)], ids=str)
@pytest.mark.parametrize("window_left", [-1, 20])
def test_tree_masks(words: int, dtype: torch.dtype, window_left: int) -> None:
    r = Requests(kv_lens=(37, 5, 130, 3), qo_lens=(5, 5, 5, 5), kv_layout="HND")
    mask = random_tree_mask(r, words, dtype).view(4, 5, words)
    arguments = r.q, r.cache(), workspace(), r.block_tables(), r.seq_lens, 130, SCALE
    options = {"kv_layout": "HND", "q_len_per_req": 5, "mask": mask, "window_left": window_left}
    expected = r.expected(masked=True, window_left=window_left)
    expected.check(flashinfer.trtllm_batch_decode_with_kv_cache(*arguments, **options))
    expected.check(flashinfer.xqa_batch_decode_with_kv_cache(*arguments, **options))
    # PyTorch calls a mask of one word contiguous whatever the stride of that dimension.
    strided = torch.empty_strided((4, 5, words), (5, 1, 20), dtype=dtype, device=DEVICE).copy_(mask)
    expected.check(flashinfer.trtllm_batch_decode_with_kv_cache(*arguments, **options | {"mask": strided}))
    pages, heads = r.block_tables(), (4, 1, 5, 4, 64)
    out = flashinfer.xqa(
        r.q.view(heads),
        *r.cache(),
        pages,
        r.seq_lens,
        kv_layout="HND",
        q_seq_len=5,
        mask=mask,
        sliding_win_size=window_left + 1,
    )
    assert out is not None
    expected.check(out.view(r.q.shape))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((4, 4, 2), torch.uint16, r"mask is \[4, 4, 2\], of 32 bits per row; expected \[20, words\]"),
        ((4, 5, 2), torch.float32, "mask is float32; expected uint16 or uint32"),
    ],
)
def test_wrong_tree_masks(shape: tuple[int, ...], dtype: torch.dtype, message: str) -> None:
    r = Requests((70, 5, 33, 130), (5, 5, 5, 5))
    with pytest.raises(errors.AttnOpsError, match=message):
        flashinfer.trtllm_batch_decode_with_kv_cache(
            r.q, r.cache(), workspace(), r.block_tables(), r.seq_lens, 130,
            q_len_per_req=5, mask=torch.zeros(shape, dtype=dtype, device=DEVICE), kv_layout=r.kv_layout,
        )  # fmt: skip


def test_tree_masks_of_ragged_rows() -> None:
    r = Requests(kv_lens=(37, 0, 130, 60, 9), qo_lens=(3, 0, 1, 40, 2), kv_layout="HND")
    mask = random_tree_mask(r, 4, torch.uint16)
    arguments = r.q, r.cache(), workspace(), r.block_tables(), r.seq_lens, 130, SCALE
    options = {"cum_seq_lens_q": r.qo_indptr, "max_q_len": 40, "mask": mask}
    r.expected(masked=True).check(flashinfer.trtllm_batch_decode_with_kv_cache(*arguments, **options))
    out = flashinfer.xqa(
        r.q, *r.cache(), r.block_tables(), r.seq_lens, kv_layout="HND", q_cu_seq_lens=r.qo_indptr, mask=mask
    )
    assert out is not None
    r.expected(masked=True).check(out)


@pytest.mark.parametrize("dtype", [torch.uint32, torch.int64], ids=str)
def test_cumulative_rows_of_any_dtype_on_the_host(dtype: torch.dtype) -> None:
    r = Requests(kv_lens=(70, 30), qo_lens=(3, 2), kv_layout="HND")
    arguments = r.q, r.cache(), workspace(), r.block_tables(), r.seq_lens, 70, SCALE
    call = functools.partial(flashinfer.trtllm_batch_decode_with_kv_cache, *arguments, max_q_len=3)
    rows = r.qo_indptr.cpu().to(dtype)
    r.expected(causal=True).check(call(cum_seq_lens_q=rows))
    mask = random_tree_mask(r, 2, torch.uint16)
    r.expected(masked=True).check(call(cum_seq_lens_q=rows, mask=mask))


def test_a_tree_mask_has_a_bit_for_each_row_of_the_longest_request() -> None:
    r = Requests(kv_lens=(70, 30), qo_lens=(3, 20), kv_layout="HND")
    mask = torch.zeros(23, 1, dtype=torch.uint16, device=DEVICE)
    arguments = r.q, *r.cache(), r.block_tables(), r.seq_lens
    with pytest.raises(errors.ShapeError, match=r"mask is \[23, 1\], of 16 bits per row; expected"):
        flashinfer.xqa(*arguments, kv_layout="HND", q_cu_seq_lens=r.qo_indptr.cpu(), mask=mask)
    with pytest.raises(errors.ShapeError, match=r"mask is \[23, 1\], of 16 bits per row; expected"):
        flashinfer.trtllm_batch_decode_with_kv_cache(
            r.q, r.cache(), None, *arguments[3:], 70, max_q_len=20, cum_seq_lens_q=r.qo_indptr.cpu(), mask=mask
        )


def test_falling_row_offsets_stay_inside_of_a_tree_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_table, "seen", lambda _: False)  # as on a GPU
    r = Requests(kv_lens=(37, 3, 130), qo_lens=(3, 3, 3), kv_layout="HND")
    arguments = r.q, r.cache(), workspace(), r.block_tables(), r.seq_lens, 130, SCALE
    hidden = torch.zeros(9, 64, dtype=torch.uint16, device=DEVICE)
    for rows in ([0, 200, 3, 9], [-500, 3, 6, 9], [0, 3, 6, 500]):
        indptr = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        out = flashinfer.trtllm_batch_decode_with_kv_cache(*arguments, cum_seq_lens_q=indptr, mask=hidden)
        assert out.shape == r.q.shape
    indptr = torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=DEVICE)
    seen = torch.full((9, 2), 7, dtype=torch.uint16, device=DEVICE)
    out = flashinfer.trtllm_batch_decode_with_kv_cache(*arguments, cum_seq_lens_q=indptr, mask=seen)
    r.expected(causal=False).check(out)


def test_a_causal_tree_mask_equals_causal_attention() -> None:
    r = Requests(kv_lens=(37, 3, 130), qo_lens=(3, 3, 3), kv_layout="HND")
    mask = torch.tensor([[1, 0], [3, 0], [7, 0]], dtype=torch.uint16, device=DEVICE).expand(3, 3, 2)
    tables = (r.block_tables(), r.seq_lens, 130, SCALE)
    out = flashinfer.trtllm_batch_decode_with_kv_cache(r.q, r.cache(), workspace(), *tables, q_len_per_req=3, mask=mask)
    r.expected(causal=True).check(out)


def test_cudnn_offsets_in_elements_of_views() -> None:
    r = Requests((70, 3, 9, 130), (1, 5, 0, 40))
    both = [torch.stack((t, t), 1)[:, 0] for t in (r.q, *r.ragged())]
    strides = [t.stride(0) for t in both]
    assert strides == [2 * 4 * 64, 2 * 2 * 64, 2 * 2 * 64]
    options = {"max_token_per_sequence": 40, "max_sequence_kv": 130, "causal": True, "return_lse": True}
    out, lse = flashinfer.cudnn_batch_prefill_with_kv_cache(
        *both,
        SCALE,
        workspace(),
        actual_seq_lens_q=torch.tensor(r.qo_lens, device=DEVICE),
        actual_seq_lens_kv=r.seq_lens,
        batch_offsets_q=r.qo_indptr * strides[0],
        batch_offsets_o=(r.qo_indptr * 4 * 64).view(-1, 1, 1, 1),
        batch_offsets_k=r.kv_indptr * strides[1],
        batch_offsets_v=r.kv_indptr * strides[2],
        **options,
    )
    r.expected(causal=True).check(out, lse)


def test_xqa_batch_decode() -> None:
    r = Requests()
    tables = (workspace(), r.block_tables(), r.seq_lens, 130, SCALE)
    out = flashinfer.xqa_batch_decode_with_kv_cache(r.q, r.cache(), *tables, sinks=r.sinks)
    r.expected(sinks=True).check(out)


@pytest.mark.parametrize("causal", [True, False])
def test_trtllm_context(causal: bool) -> None:
    r = Requests((70, 3, 9, 130), (1, 5, 0, 40), kv_layout="HND", dtype=torch.bfloat16)
    out, lse = flashinfer.trtllm_batch_context_with_kv_cache(
        r.q,
        r.cache(),
        workspace(),
        r.block_tables(),
        r.seq_lens,
        40,
        130,
        SCALE,
        1.0,
        4,
        r.qo_indptr,
        r.kv_indptr,
        causal=causal,
        return_lse=True,
        out_dtype="float32",
    )
    assert out.dtype == torch.float32
    r.expected(causal=causal).check(out.bfloat16(), lse)


def test_cudnn_decode() -> None:
    r = Requests(kv_layout="HND")
    out, lse = flashinfer.cudnn_batch_decode_with_kv_cache(
        r.q,
        *r.cache(),
        SCALE,
        workspace(),
        max_sequence_kv=130,
        actual_seq_lens_kv=r.seq_lens.view(-1, 1, 1, 1),
        block_tables=r.block_tables(),
        batch_offsets_q=torch.arange(5) * 256,
        batch_offsets_o=torch.arange(4) * 256,
        return_lse=True,
    )
    r.expected().check(out, lse)


def _cudnn_prefill(r: Requests, paged: bool, rows: torch.Tensor | None, **options: Any) -> Any:
    """``rows`` are the query rows of each request, at most 40."""
    return flashinfer.cudnn_batch_prefill_with_kv_cache(
        r.q,
        *(r.cache() if paged else r.ragged()),
        SCALE,
        workspace(),
        max_token_per_sequence=40,
        max_sequence_kv=130,
        **{
            "actual_seq_lens_q": rows,
            "actual_seq_lens_kv": r.seq_lens,
            "causal": True,
            "return_lse": True,
            "block_tables": r.block_tables() if paged else None,
            **options,
        },
    )


@pytest.mark.parametrize("paged", [True, False])
def test_cudnn_prefill(paged: bool) -> None:
    r = Requests((70, 3, 9, 130), (1, 5, 0, 40), kv_layout="HND")
    lengths = torch.tensor(r.qo_lens, device=DEVICE).view(-1, 1, 1, 1)
    options: dict[str, Any] = {}
    if not paged:
        options = {"batch_offsets_k": r.kv_indptr, "batch_offsets_units": "tokens", "batch_offsets_q": r.qo_indptr}
    scales = {"q_scale": torch.tensor(0.5, device=DEVICE), "v_scale": torch.tensor(3.0, device=DEVICE)}
    out, lse = _cudnn_prefill(r, paged, lengths, **scales, lse_base="ln", **options)
    r.expected(causal=True, sm_scale=SCALE / 2, v_scale=3.0).check(out, ln(lse))


@pytest.mark.parametrize("paged", [True, False])
def test_cudnn_lengths_by_offsets_in_tokens(paged: bool) -> None:
    r = Requests((70, 3, 9, 130), (1, 5, 0, 40), kv_layout="HND")
    options: dict[str, Any] = {"batch_offsets_q": r.qo_indptr, "batch_offsets_units": "tokens"}
    if not paged:
        options |= {"batch_offsets_k": r.kv_indptr[:, None], "actual_seq_lens_kv": None}
    r.expected(causal=True).check(*_cudnn_prefill(r, paged, None, **options))


def test_cudnn_offsets_of_a_traced_call() -> None:
    """Fake tensors have no contents to compare."""
    r = Requests((70, 3, 9, 130), (1, 5, 0, 40), kv_layout="HND")
    names = ("q", "k", "v", "qo_indptr", "kv_indptr", "seq_lens")
    tensors = dict(zip(names, (r.q, *r.ragged(), r.qo_indptr, r.kv_indptr, r.seq_lens), strict=True))

    def call(*given: torch.Tensor) -> Any:
        q, k, v, qo_indptr, kv_indptr, seq_lens = given
        return flashinfer.cudnn_batch_prefill_with_kv_cache(
            q, k, v, SCALE, workspace(), max_token_per_sequence=40, max_sequence_kv=130, causal=True,
            actual_seq_lens_q=qo_indptr.diff(), actual_seq_lens_kv=seq_lens, return_lse=True,
            batch_offsets_q=qo_indptr, batch_offsets_k=kv_indptr, batch_offsets_units="tokens",
        )  # fmt: skip

    graph = make_fx(call, tracing_mode="fake")(*tensors.values())
    r.expected(causal=True).check(*graph(*tensors.values()))


NONE = torch.zeros(0, dtype=torch.int32, device=DEVICE)
FROM_0 = torch.zeros(1, dtype=torch.int32, device=DEVICE)
NO_ROWS, NO_KEYS, NO_LATENT_ROWS = (torch.zeros(0, *shape, device=DEVICE) for shape in ((4, 64), (2, 64), (4, 576)))
HND, LATENT = torch.zeros(5, 2, 2, 16, 64, device=DEVICE), torch.zeros(5, 16, 576, device=DEVICE)
SIZES: dict[str, int] = {"max_token_per_sequence": 0, "max_sequence_kv": 0}


def _mla_by_page_table(pages: torch.Tensor) -> torch.Tensor:
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace())
    return wrapper.run(query=NO_LATENT_ROWS, kv_cache=LATENT, page_table=pages, kv_len=NONE)


EMPTY: dict[str, Callable[[torch.Tensor], Any]] = {
    "decode": lambda pages: flashinfer.trtllm_batch_decode_with_kv_cache(
        NO_ROWS, HND, workspace(), pages, NONE, 0, return_lse=True
    ),
    "tree mask": lambda pages: flashinfer.trtllm_batch_decode_with_kv_cache(
        NO_ROWS, HND, workspace(), pages, NONE, 0, mask=torch.zeros(0, 2, dtype=torch.uint16, device=DEVICE)
    ),
    "context": lambda pages: flashinfer.trtllm_batch_context_with_kv_cache(
        NO_ROWS, HND, workspace(), pages, NONE, 0, 0, 0.1, 1.0, 0, FROM_0, FROM_0, return_lse=True
    ),
    "deepseek": lambda _: flashinfer.trtllm_ragged_attention_deepseek(
        *(NO_ROWS, NO_KEYS, NO_KEYS, workspace(), NONE, 0, 0, 0.1, 1.0, -1, 0, -1, FROM_0, FROM_0, False, True, True)
    ),
    "xqa": lambda pages: flashinfer.xqa(NO_ROWS, HND[:, 0], HND[:, 1], pages, NONE, kv_layout="HND"),
    "xqa_mla": lambda pages: flashinfer.xqa_mla(NO_LATENT_ROWS, LATENT, LATENT[..., :512], pages, NONE),
    "MLA": lambda pages: flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        NO_LATENT_ROWS[:, None], LATENT, workspace(), 128, 512, 64, pages, NONE, 0
    ),
    "MLA by page table": _mla_by_page_table,
    "cudnn decode": lambda pages: flashinfer.cudnn_batch_decode_with_kv_cache(
        *(NO_ROWS, HND[:, 0], HND[:, 1], 0.1, workspace()),
        max_sequence_kv=0,
        actual_seq_lens_kv=NONE,
        block_tables=pages,
    ),
    **{
        f"cudnn {kind}": lambda pages, kv=kv, paged=paged: flashinfer.cudnn_batch_prefill_with_kv_cache(
            *(NO_ROWS, *kv, 0.1, workspace()),
            **SIZES,
            actual_seq_lens_q=NONE,
            actual_seq_lens_kv=NONE,
            block_tables=pages if paged else None,
            causal=True,
            return_lse=True,
        )
        for kind, kv, paged in (("prefill", (HND[:, 0], HND[:, 1]), True), ("ragged", (NO_KEYS, NO_KEYS), False))
    },
}


@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("name", EMPTY)
def test_a_batch_of_no_requests(name: str, width: int) -> None:
    result = EMPTY[name](torch.zeros(0, width, dtype=torch.int32, device=DEVICE))
    out, *lse = result if isinstance(result, tuple) else (result,)
    assert out.shape[0] == 0
    assert out.shape[-2:] == ((4, 512) if "MLA" in name.upper() else (4, 64))
    assert [t.shape for t in lse] in ([], [(0, 4)])


@pytest.mark.parametrize("rows", [(1, 5, 0, 40), (0, 0, 0, 0)])
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32], ids=str)
def test_cudnn_prefill_pads_lse(dtype: torch.dtype, paged: bool, rows: tuple[int, ...]) -> None:
    r = Requests((70, 3, 9, 130), rows, kv_layout="HND")
    lse = torch.full((4, 40, 4), math.nan, device=DEVICE)
    out, got = _cudnn_prefill(r, paged, torch.tensor(r.qo_lens).to(dtype).to(DEVICE), lse=lse)
    assert got is lse
    r.expected(causal=True).check(out, torch.cat([x[:n] for x, n in zip(lse, rows, strict=True)]))
    assert all(x[n:].isnan().all() for x, n in zip(lse, rows, strict=True))


@pytest.mark.parametrize("form", ["[B, H, D]", "[B, 1, H, D]", "[B, 1, Q, H, D]"])
@pytest.mark.parametrize("lengths", ["int32", "uint32 [B, 1]"])
def test_xqa(form: str, lengths: str) -> None:
    rows = 2 if "Q" in form else 1
    r = Requests((37, 5, 130, 3), (rows,) * 4)
    seq_lens = r.seq_lens if lengths == "int32" else r.seq_lens.view(torch.uint32)[:, None]
    q = {"[B, H, D]": r.q, "[B, 1, H, D]": r.q[:, None], "[B, 1, Q, H, D]": r.q.view(4, 1, rows, 4, 64)}[form]
    cache = r.cache("tensor")
    out = flashinfer.xqa(q, cache, cache, r.block_tables(), seq_lens, head_dim=64, page_size=16)
    assert out is not None
    assert out.shape == q.shape
    r.expected(causal=True).check(out.view(r.q.shape))


def test_xqa_fills_output() -> None:
    from attn_ops.xqa import xqa

    r = Requests()
    out = torch.empty_like(r.q)
    semaphores = torch.zeros(8, dtype=torch.uint32, device=DEVICE)
    none = xqa(
        r.q,
        *r.cache(),
        r.block_tables(),
        r.seq_lens,
        out,
        workspace(),
        semaphores,
        2,
        16,
        r.sinks,
        0.5,
        2.0,
        sliding_win_size=8,
        rcp_out_scale=3.0,
    )
    assert none is None
    r.expected(sm_scale=SCALE, v_scale=6.0, window_left=7, sinks=True).check(out)


def test_forms_of_sinks() -> None:
    r = Requests()
    for sinks in (r.sinks.view(2, 2), [r.sinks], r.sinks.repeat_interleave(2)[::2]):
        out = flashinfer.xqa(r.q, *r.cache(), r.block_tables(), r.seq_lens, sinks=sinks)
        r.expected(sinks=True).check(out)


def test_xqa_of_ragged_rows() -> None:
    r = Requests((37, 3, 130), (3, 0, 5))
    out = flashinfer.xqa(r.q, *r.cache(), r.block_tables(), r.seq_lens, q_cu_seq_lens=r.qo_indptr)
    r.expected(causal=True).check(out)


def test_xqa_is_a_module_and_a_function() -> None:
    import attn_ops.xqa as module

    assert module.xqa is flashinfer.xqa
    assert flashinfer.xqa.xqa_mla is flashinfer.xqa_mla


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_keys_that_are_the_values(layout: str) -> None:
    """A cache ``[pages, 1, ...]``."""
    r = Requests()
    keys = r.cache()[0]
    if layout == "HND":
        keys = keys.transpose(1, 2).contiguous()
    for call in (flashinfer.trtllm_batch_decode_with_kv_cache, flashinfer.xqa_batch_decode_with_kv_cache):
        given = workspace(), r.block_tables(), r.seq_lens, 130
        of_pair = call(r.q, (keys, keys), *given, bmm1_scale=0.1, kv_layout=layout)
        assert torch.equal(call(r.q, keys[:, None], *given, bmm1_scale=0.1, kv_layout=layout), of_pair)
        with pytest.raises(errors.ShapeError, match=r"expected \[pages, 1 or 2, \.\.\.\] of 5 dimensions"):
            call(r.q, torch.stack((keys,) * 3, 1), *given, kv_layout=layout)
