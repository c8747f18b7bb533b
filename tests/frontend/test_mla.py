"""MLA through FlashInfer's names, against the oracle: one KV head whose value is a part of its key."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from helpers.mla_requests import Latents
from helpers.oracle import Expected
from helpers.wrapper_requests import DEVICE, int32, ln, workspace
from torch import Tensor

import attn_ops as flashinfer
from attn_ops import errors, planner
from attn_ops.frontend import call_plans
from attn_ops.plan import page_table

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def planned(m: Latents, **options: Any) -> Any:
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(m.qo_indptr, *m.table, 3, *m.dims, m.page_size, **{"sm_scale": 0.1, **options})
    return wrapper


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
def test_split_and_packed_queries_and_caches(causal: bool, page_size: int) -> None:
    m = Latents(page_size=page_size)
    wrapper = planned(m, causal=causal, q_data_type=torch.float16, kv_data_type=torch.float16)
    expected = m.expected(sm_scale=0.1, causal=causal)
    for queries in ({"query": m.q}, {"query": m.split(m.q)}, dict(zip(("q_nope", "q_pe"), m.split(m.q), strict=True))):
        for caches in (
            {"kv_cache": m.cache},
            {"kv_cache": list(m.split(m.cache))},
            dict(zip(("ckv_cache", "kpe_cache"), m.split(m.cache), strict=True)),
        ):
            expected.check(*wrapper.run(**queries, **caches, return_lse=True))


def test_private_attributes_hold_the_options_of_a_plan() -> None:
    wrapper = planned(Latents(), causal=True)
    assert wrapper._causal
    assert wrapper._sm_scale == 0.1
    assert wrapper._logits_soft_cap == 0.0


@pytest.mark.parametrize("given", [("kv_indptr",), ("kv_indices",), ("kv_indices", "kv_len_arr")])
def test_a_page_table_beside_block_tables_is_named(given: tuple[str, ...]) -> None:
    m = Latents()
    tables = dict(zip(("kv_indptr", "kv_indices", "kv_len_arr"), m.table, strict=True))
    arguments = {"num_heads": 3, "page_size": m.page_size, "block_tables": m.block_tables, "seq_lens": m.table[2]}
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace())
    with pytest.raises(errors.ArgumentError, match=rf"\.plan: {', '.join(given)} and block_tables are both given; "):
        wrapper.plan(m.qo_indptr, **{name: tables[name] for name in given}, **arguments, sm_scale=0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q_data_type": "float16", "output_dtype": torch.int8}, errors.UnsupportedError, "output_dtype is int8"),
        ({"causal": "bottom-right"}, errors.ArgumentError, "causal is 'bottom-right', of type str"),
    ],
)
def test_errors_of_plan_name_its_arguments(
    arguments: dict[str, Any], error: type[errors.AttnOpsError], message: str
) -> None:
    with pytest.raises(error, match=rf"^BatchMLAPagedAttentionWrapper\.plan: {message}"):
        planned(Latents(), **arguments)


def test_default_scale_of_512_and_64() -> None:
    m = Latents(((1, 40), (3, 20)), dims=(512, 64))
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(m.qo_indptr, *m.table, 3, 512, 64, 16, False)
    m.expected(sm_scale=1 / math.sqrt(192)).check(wrapper.run(*m.split(m.q), *m.split(m.cache)))


def test_lse_and_buffers() -> None:
    m = Latents()
    wrapper, tensors = planned(m), (*m.split(m.q), *m.split(m.cache))
    out, lse = torch.empty(26, 3, 64, dtype=torch.float16, device=DEVICE), torch.empty(26, 3, device=DEVICE)
    got = wrapper.run(*tensors, out, lse, True, return_lse_base_on_e=True)
    assert got[0] is out
    assert got[1] is lse
    m.expected(sm_scale=0.1).check(out, ln(lse))
    _, natural = planned(m, lse_mode="basee").run_return_lse(*tensors)
    torch.testing.assert_close(natural, lse)
    assert planned(m, output_dtype="float32").run(*tensors).dtype == torch.float32


def test_scales_and_sinks() -> None:
    m = Latents(kv_dtype=torch.float8_e4m3fn, dtype=torch.float32)
    sinks = torch.randn(3, device=DEVICE)
    wrapper, tensors = planned(m), (*m.split(m.q), *m.split(m.cache))
    m.expected(0.5, 2.0, sm_scale=0.1, sinks=sinks).check(
        *wrapper.run(*tensors, return_lse=True, ckv_scale=0.5, kpe_scale=2.0, sinks=sinks)
    )
    out = wrapper.run(*tensors, bmm1_scale=torch.tensor(0.3, device=DEVICE), bmm2_scale=4.0)
    m.expected(sm_scale=0.3).check(out / 4)


@pytest.mark.parametrize(("ckv_scale", "kpe_scale"), [(0.5, 0.0), (None, 0.0), (0.5, None), (None, 2.0)])
def test_a_scale_of_none_is_one_and_a_scale_of_zero_is_zero(ckv_scale: float | None, kpe_scale: float | None) -> None:
    m = Latents(dtype=torch.float32)
    ckv, kpe = (1.0 if scale is None else scale for scale in (ckv_scale, kpe_scale))
    out = planned(m).run(*m.split(m.q), *m.split(m.cache), ckv_scale=ckv_scale, kpe_scale=kpe_scale)
    m.expected(ckv, kpe, sm_scale=0.1).check(out)


def test_table_with_more_pages_than_tokens() -> None:
    m = Latents()
    starts, indices, tokens = (t.tolist() for t in m.table)
    padded, ends = [], [0]
    for a, b in itertools.pairwise(starts):
        padded += [*indices[a:b], 10**6, 10**6]
        ends.append(len(padded))
    m.table = tuple(torch.tensor(t, device=DEVICE) for t in (ends, padded, tokens))  # type: ignore[assignment]
    m.expected(sm_scale=0.1).check(planned(m).run(query=m.q, kv_cache=m.cache))


def test_table_with_more_offsets_than_requests() -> None:
    m = Latents()
    starts, indices, tokens = m.table
    m.table = torch.cat((starts, starts.new_tensor([10**6, -3]))), indices, tokens
    m.expected(sm_scale=0.1).check(planned(m).run(query=m.q, kv_cache=m.cache))
    m.table = starts[:-1], indices, tokens
    with pytest.raises(errors.ShapeError, match="kv_indptr has length 4; expected 5 or more"):
        planned(m)


def test_plan_from_block_tables() -> None:
    m = Latents()
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(
        num_heads=3,
        head_dim_ckv=64,
        head_dim_kpe=16,
        page_size=16,
        sm_scale=0.1,
        cum_seq_lens_q=m.qo_indptr,
        block_tables=m.block_tables,
        seq_lens=m.table[2],
    )
    m.expected(sm_scale=0.1).check(wrapper.run(query=m.q, kv_cache=m.cache))


def test_without_a_plan() -> None:
    m = Latents(((1, 40), (1, 0), (1, 20)), dims=(512, 64))
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace())
    expected = m.expected(sm_scale=1 / math.sqrt(192))
    expected.check(wrapper.forward(m.q, m.cache, m.block_tables, m.table[2]))
    expected.check(wrapper.forward(m.q[:, None], m.cache[:, :, None], m.block_tables, m.table[2]))
    tensors = (*m.split(m.q), *m.split(m.cache))
    expected.check(*wrapper.run(*tensors, return_lse=True, page_table=m.block_tables, kv_len=m.table[2]))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_plans_know_the_tiles_of_a_batch(kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which clusters divide KV. A wrapper has room for four requests of a row, and a call for those it has."""
    found: list[int] = []
    for module in (planner, call_plans):
        monkeypatch.setattr(module, "splits_per_head", lambda device, problem, tiles: found.append(tiles) or 0)
    m = Latents(((1, 70), (1, 9), (1, 64)), dims=(512, 64), dtype=torch.bfloat16, kv_dtype=kv_dtype, page_size=64)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(m.qo_indptr, *m.table, 3, 512, 64, 64, False, None, torch.bfloat16, kv_dtype)
    pages = torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)
    wrapper.run(*m.split(m.q), *m.split(m.cache), page_table=pages, kv_len=m.table[2].int(), ckv_scale=1, kpe_scale=1)
    assert found == [4, 3]


def test_cuda_graph_mode() -> None:
    m = Latents()
    names, sizes = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), (5, 5, 40, 4)
    buffers = {n: torch.zeros(s, dtype=torch.int32, device=DEVICE) for n, s in zip(names, sizes, strict=True)}
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(), use_cuda_graph=True, **buffers)
    for lengths in (((1, 70), (5, 9), (0, 3), (20, 130)), ((1, 1), (1, 100), (1, 0), (1, 16))):
        m = Latents(lengths)
        wrapper.plan(m.qo_indptr, *m.table, 3, *m.dims, 16, False, 0.1)
        assert buffers["kv_len_arr"].tolist() == m.table[2].tolist()
        m.expected(sm_scale=0.1).check(wrapper.run(query=m.q, kv_cache=m.cache))


def test_a_request_without_pages_takes_none_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where lengths are not compared with pages, such as those of padding."""
    monkeypatch.setattr(page_table, "seen", lambda _: False)
    table = page_table.by_length("plan", int32(0, 1, 1, 3), int32(7, 5, 6), int32(4, 1, 20), 16)
    assert [t.tolist() for t in (table.kv_indptr, table.kv_indices, table.kv_last_page_len)] == [
        [0, 1, 1, 3],
        [7, 5, 6],
        [4, 0, 4],
    ]


def test_cuda_graph_mode_keeps_the_page_table_of_the_caller() -> None:
    """The buffers are the page table of the caller, with pages for future tokens. Lengths are updated in place."""
    m = Latents(((1, 70), (1, 33), (1, 3), (1, 130)))
    whole = m.latents
    qo_indptr, kv_indptr, kv_len_arr = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (5, 5, 4))
    kv_indices = torch.zeros(40, dtype=torch.int32, device=DEVICE)
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(workspace(), True, qo_indptr, kv_indptr, kv_indices, kv_len_arr)
    starts, indices, _ = m.table
    kv_indptr.copy_(starts)
    kv_indices[: len(indices)] = indices
    before = kv_indptr.clone(), kv_indices.clone()
    for lengths in ([60, 9, 1, 112], m.tokens):
        kv_len_arr.copy_(torch.tensor(lengths))
        wrapper.plan(m.qo_indptr, kv_indptr, kv_indices, kv_len_arr, 3, *m.dims, 16, False, 0.1)
        assert torch.equal(kv_indptr, before[0])
        assert torch.equal(kv_indices, before[1])
        assert kv_len_arr.tolist() == lengths
        m.latents = [latent[:n] for latent, n in zip(whole, lengths, strict=True)]
        m.expected(sm_scale=0.1).check(wrapper.run(query=m.q, kv_cache=m.cache))


@pytest.mark.parametrize(("given", "flat"), [(True, False), (False, False), (False, True)])
def test_xqa_mla(given: bool, flat: bool) -> None:
    m = Latents(((1, 40), (1, 5), (1, 20)), dims=(512, 64), page_size=32)
    out = torch.empty(3, 1, 3, 512, dtype=torch.float16, device=DEVICE) if given else None
    tables = (m.block_tables, m.table[2].to(torch.int32).view(torch.uint32)[:, None])
    cache = m.cache.flatten(0, 1) if flat else m.cache
    result = flashinfer.xqa_mla(
        m.q[:, None], cache, cache[..., :512], *tables, out, page_size=32, q_scale=0.05, kv_scale=2.0
    )
    assert (result is None) == given
    output = out if result is None else result
    assert output is not None
    m.expected(sm_scale=0.1).check(output[:, 0] / 2)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("width", "flat"), [(576, False), (576, True), (512, False)])
@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_xqa_mla_with_values_of_their_own(kv_dtype: torch.dtype, width: int, flat: bool, compiled: bool) -> None:
    """In memory of their own. Columns from ``ckv`` on are not read."""
    m = Latents(((1, 40), (1, 5), (1, 20)), dims=(512, 64), page_size=32)
    keys = m.cache.nan_to_num(0.0).to(kv_dtype)
    values = torch.randn(*keys.shape[:2], width, device=DEVICE).to(kv_dtype)
    values[..., 512:] = torch.nan
    table, lens = m.block_tables, m.table[2].to(torch.int32)

    def call(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lens: Tensor) -> Any:
        caches = (t.flatten(0, 1) if flat else t for t in (keys, values))
        return flashinfer.xqa_mla(q, *caches, table, lens, page_size=32, q_scale=0.05, kv_scale=2.0)

    if compiled:
        torch.compiler.reset()
    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    out = run(m.q, keys, values, table, lens)
    requests = []
    for b, length in enumerate(lens.tolist()):
        pages = table[b, : -(-length // 32)].long()
        k, v = (t[pages].flatten(0, 1)[:length, None].float().cpu() for t in (keys, values))
        requests.append((m.q[b : b + 1].float().cpu(), k, v[..., :512]))
    Expected.of(requests, sm_scale=0.1).check(out / 2, eps=2.0**-10)


def test_xqa_mla_refuses_values_of_other_pages() -> None:
    m = Latents(((1, 40), (1, 5), (1, 20)), dims=(512, 64), page_size=32)
    with pytest.raises(
        errors.ShapeError, match=r"xqa_mla: v_cache is .*; expected \[\d+, 32, 512\], the pages of k_cache"
    ):
        flashinfer.xqa_mla(m.q, m.cache, m.cache[1:, :, :512].clone(), m.block_tables, m.table[2])
