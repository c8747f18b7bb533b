"""Page tables, append and bit packing through FlashInfer's names."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from helpers.wrapper_requests import DEVICE, Requests, int32

import attn_ops as flashinfer
from attn_ops import decode, errors, page, quantization


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_batch_indices_positions(dtype: torch.dtype) -> None:
    indptr, seq_lens = int32(0, 1, 3, 3, 6).to(dtype), int32(4, 10, 7, 3).to(dtype)
    batch, positions = page.get_batch_indices_positions(indptr, seq_lens, 8)
    assert batch.dtype == positions.dtype == torch.int32
    assert batch.tolist() == [0, 1, 1, 3, 3, 3, -1, -1]
    assert positions[:6].tolist() == [3, 8, 9, 0, 1, 2]
    assert positions[6:].tolist() == [-1, -1]
    buffers = torch.empty_like(batch), torch.empty_like(batch)
    got = flashinfer.get_batch_indices_positions(indptr, seq_lens, 8, *buffers)
    assert got[0] is buffers[0]
    assert torch.equal(buffers[1], positions)
    for length in (7, 9):
        with pytest.raises(errors.ArgumentError, match=rf"positions is int32 \[{length}\]; expected int32 \[8\]"):
            page.get_batch_indices_positions(indptr, seq_lens, 8, positions=batch.new_empty(length))


def test_buffers_of_the_places_are_checked_before_they_are_filled() -> None:
    tables = int32(0, 2, 4), int32(3, 2)
    first = torch.full((4,), 7, dtype=torch.int32, device=DEVICE)
    for wrong, error, message in (
        (first[:1].expand(4), errors.ShapeError, "positions is written and its elements overlap, with stride 0"),
        (first.to("meta"), errors.DeviceError, f"positions is on meta, without contents; expected {DEVICE}"),
    ):
        with pytest.raises(error, match=message):
            page.get_batch_indices_positions(*tables, 4, first, wrong)
    assert first.tolist() == [7] * 4


@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
def test_buffers_of_the_places_are_int32(traced: bool) -> None:
    def call(indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int, buffer: torch.Tensor) -> object:
        return page.get_batch_indices_positions(indptr, seq_lens, nnz, buffer)

    call = torch.compile(call, fullgraph=True, backend="eager", dynamic=True) if traced else call
    for shape, dtype in (([4], "int64"), ([5], "int32")):
        buffer = torch.zeros(shape, dtype=getattr(torch, dtype), device=DEVICE)
        message = rf"batch_indices is {dtype} \{shape}; expected int32 \[4\]; pass such a buffer, or none"
        with pytest.raises(Exception, match=message) as raised:
            call(int32(0, 2, 4), int32(3, 2), 4, buffer)
        assert traced or raised.type is errors.ArgumentError


@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
def test_buffers_of_the_places_that_are_one_tensor_are_refused(traced: bool) -> None:
    indptr, seq_lens, buffer = int32(0, 2, 4), int32(3, 2), torch.full((4,), 7, dtype=torch.int32, device=DEVICE)

    def call(buffer: torch.Tensor) -> object:
        return page.get_batch_indices_positions(indptr, seq_lens, 4, buffer, buffer)

    call = torch.compile(call, fullgraph=True, backend="eager") if traced else call
    with pytest.raises(Exception, match="positions shares memory with batch_indices; expected memory of its own") as e:
        call(buffer)
    assert traced or e.type is errors.ArgumentError
    assert buffer.tolist() == [7] * 4


def test_buffers_of_the_places_that_share_memory() -> None:
    tables, memory = (int32(0, 2, 4), int32(3, 2)), torch.full((8,), 7, dtype=torch.int32, device=DEVICE)
    pairs = memory.view(4, 2)
    for first, second in ((memory[:4], memory[3:7]), (memory[2:6], memory[:4]), (pairs[:, 1], pairs[:, 1])):
        with pytest.raises(errors.ArgumentError, match="positions shares memory with batch_indices"):
            page.get_batch_indices_positions(*tables, 4, first, second)
    assert memory.tolist() == [7] * 8
    page.get_batch_indices_positions(*tables, 4, *pairs.unbind(1))
    assert pairs.tolist() == [[0, 1], [0, 2], [1, 0], [1, 1]]


@pytest.mark.skipif(DEVICE == "cuda", reason="offsets on the host")
def test_offsets_that_fall_are_refused() -> None:
    with pytest.raises(errors.PageTableError, match="append_indptr falls from 4 to 2 at request 1"):
        page.get_batch_indices_positions(int32(0, 4, 2), int32(4, 4), 4)


def test_seq_lens() -> None:
    assert decode.get_seq_lens is page.get_seq_lens
    assert page.get_seq_lens(int32(0, 2, 2, 5), int32(3, 9, 16), 16).tolist() == [19, 0, 48]
    assert page.get_seq_lens(int32(0), int32(), 16).tolist() == []
    columns = int32(0, 0, 2, 3, 2, 9, 5, 16).view(4, 2)
    assert page.get_seq_lens(columns[:, 0], columns[1:, 1], 16).tolist() == [19, 0, 48]


@pytest.mark.skipif(DEVICE == "cuda", reason="page tables on the host")
def test_page_tables_of_the_lengths_are_checked() -> None:
    for indptr, last, message in (
        (int32(0, 3, 2), int32(1, 1), "kv_indptr falls from 3 to 2 at request 1; expected values that never decrease"),
        (int32(-1, 3), int32(1), "kv_indptr starts at -1; expected 0 or more"),
        (int32(0, 3, 4), int32(4, 5), r"kv_last_page_len\[1\] is 5; expected 1 to page_size 4"),
        (int32(0, 3, 4), int32(0, 4), r"kv_last_page_len\[0\] is 0; expected 1 to page_size 4"),
    ):
        with pytest.raises(errors.PageTableError, match=f"^get_seq_lens: {message}"):
            page.get_seq_lens(indptr, last, 4)
    assert page.get_seq_lens(int32(2, 5, 5), int32(4, 9), 4).tolist() == [12, 0]


def test_lengths_are_moved_to_the_device_of_the_offsets() -> None:
    indptr, seq_lens = torch.zeros(3, dtype=torch.int32, device="meta"), torch.tensor([4, 10])
    assert all(t.is_meta for t in page.get_batch_indices_positions(indptr, seq_lens, 8))


def test_lengths_beyond_int32_are_refused() -> None:
    indptr, last = torch.tensor([0, 3, 3 + (1 << 20)], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with pytest.raises(
        errors.PageTableError, match="a request of 1048576 pages of page_size 2048 has up to 2147483648"
    ):
        page.get_seq_lens(indptr, last, 2048)
    assert page.get_seq_lens(indptr, last, 2047).tolist() == [4095, ((1 << 20) - 1) * 2047 + 1]


@pytest.mark.parametrize("form", ["pair", "tensor", "list"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_append(form: str, kv_layout: str) -> None:
    r = Requests(kv_layout=kv_layout)
    whole = r.batch.memory[0].clone()
    r.batch.memory[0].fill_(0)
    k, v = r.ragged()
    batch, positions = page.get_batch_indices_positions(r.kv_indptr, r.seq_lens, len(k))
    flashinfer.append_paged_kv_cache(
        k, v, batch, positions, r.cache(form), r.table[1], r.table[0], r.table[2], kv_layout=kv_layout
    )
    assert torch.equal(r.batch.memory[0], whole.nan_to_num())


@pytest.mark.parametrize("traced", [False, True], ids=["", "traced"])
def test_one_tensor_as_both_caches(traced: bool) -> None:
    """It has room for keys that are the values, and its parts for both."""
    cache, places = torch.zeros(3, 4, 2, 16, device=DEVICE), (int32(0, 0, 1), int32(0, 1, 0))
    table = int32(2, 0), int32(0, 1, 2), int32(2, 1)
    k, v = torch.randn(2, 3, 2, 16, device=DEVICE)

    def append(k: torch.Tensor, v: torch.Tensor, *caches: torch.Tensor) -> None:
        page.append_paged_kv_cache(k, v, *places, caches, *table)

    append = torch.compile(append, fullgraph=True, backend="eager") if traced else append
    with pytest.raises(Exception, match="k_cache and v_cache are one tensor, and k and v are not") as raised:
        append(k, v, cache, cache)
    assert traced or raised.type is errors.ArgumentError
    assert not cache.any()
    append(k, k, cache, cache)
    assert torch.equal(cache[2, :2], k[:2])
    append(v.view(3, 2, 16), v.view(3, 2, 16), cache, cache)  # of one tensor
    assert torch.equal(cache[2, :2], v[:2])
    halves = cache[..., :8], cache[..., 8:]
    append(k[..., :8], v[..., :8], *halves)
    assert torch.equal(cache[0, 0], torch.cat((k[2, :, :8], v[2, :, :8]), -1))


def test_append_latent() -> None:
    ckv, kpe = torch.zeros(4, 3, 8, device=DEVICE), torch.zeros(4, 3, 2, device=DEVICE)
    new = torch.randn(5, 8, device=DEVICE), torch.randn(5, 2, device=DEVICE)
    places = int32(0, 0, 0, 0, 1), int32(0, 1, 2, 3, 0)
    table = int32(2, 0, 3), int32(0, 2, 3), int32(1, 1)
    flashinfer.append_paged_mla_kv_cache(*new, *places, ckv, kpe, *table)
    for cache, tokens in ((ckv, new[0]), (kpe, new[1])):
        assert torch.equal(cache[2], tokens[:3])
        assert torch.equal(cache[0, 0], tokens[3])
        assert torch.equal(cache[3, 0], tokens[4])
    one = torch.zeros_like(ckv)
    flashinfer.append_paged_mla_kv_cache(*new, *places, one, None, *table)
    assert torch.equal(one, ckv)
    other = torch.zeros_like(kpe)
    flashinfer.append_paged_mla_kv_cache(None, new[1], *places, None, other, *table)
    assert torch.equal(other, kpe)


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("length", [0, 1, 8, 77])
def test_packbits(length: int, bitorder: str) -> None:
    x = torch.rand(length, device=DEVICE) < 0.5
    expected = np.packbits(x.cpu().numpy(), bitorder=bitorder)
    assert quantization.packbits(x, bitorder).tolist() == expected.tolist()
    assert flashinfer.packbits(x).tolist() == np.packbits(x.cpu().numpy()).tolist()
    assert torch.equal(flashinfer.packbits(torch.stack((x, ~x), 1)[:, 0]), flashinfer.packbits(x))


@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_segment_packbits(bitorder: str) -> None:
    x, indptr = torch.rand(30, device=DEVICE) < 0.5, [0, 3, 3, 20, 30]
    packed, byte_indptr = flashinfer.segment_packbits(x, torch.tensor(indptr, device=DEVICE), bitorder)
    assert byte_indptr.tolist() == [0, 1, 1, 4, 6]
    parts = [np.packbits(x[a:b].cpu().numpy(), bitorder=bitorder) for a, b in itertools.pairwise(indptr)]
    assert packed.tolist() == np.concatenate(parts).tolist()


def test_segments_lie_within_their_elements() -> None:
    x = torch.ones(12, dtype=torch.bool, device=DEVICE)
    packed, byte_indptr = flashinfer.segment_packbits(x, int32(2, 5, 12), "little")
    assert packed.tolist() == [0b111, 0b1111111]
    assert byte_indptr.tolist() == [0, 1, 2]
    with pytest.raises(errors.ShapeError, match="indptr ends at 13 and x has 12; expected at most 12; correct it"):
        flashinfer.segment_packbits(x, int32(2, 5, 13))
