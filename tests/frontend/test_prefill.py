"""Paged, ragged and single prefill through FlashInfer's names, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from frontend.test_decode import CACHES, GQA
from helpers.oracle import Expected
from helpers.wrapper_requests import DEVICE, Requests, int32, ln, sink_variant, workspace

import attn_ops as flashinfer
from attn_ops import errors

pytestmark = pytest.mark.usefixtures("poisoned_memory")

KINDS = ("paged", "ragged", "single")
each_kind = pytest.mark.parametrize("kind", KINDS)
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"causal": True}, {"causal": True}),
    ({"causal": True, "window_left": 7}, {"causal": True, "window_left": 7}),
    ({"window_left": 0}, {"window_left": 0}),
    ({"window_left": 7, "window_right": 3}, {"window_left": 7, "window_right": 3}),
    ({"causal": True, "window_right": 3}, {"causal": True}),
    ({"sm_scale": 0.3, "logits_soft_cap": 2.0}, {"sm_scale": 0.3, "logits_soft_cap": 2.0}),
    ({"pos_encoding_mode": "ROPE_LLAMA", "causal": True}, {"pos_encoding": "ROPE_LLAMA", "causal": True}),
    (
        {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 4.0, "rope_theta": 1e3},
        {"pos_encoding": "ROPE_LLAMA", "rope_scale": 4.0, "rope_theta": 1e3},
    ),
    ({"pos_encoding_mode": "ALIBI", "causal": True}, {"pos_encoding": "ALIBI", "causal": True}),
]


def requests(kind: str, **changes: Any) -> Requests:
    lengths: dict[str, Any] = {"kv_lens": (70, 3, 9, 130), "qo_lens": (1, 5, 0, 40)}
    if kind == "single":
        lengths = {"kv_lens": (50,), "qo_lens": (12,)}
    return Requests(**{**lengths, **changes})


class Call:
    """plan() and run() of a wrapper, or the call of the single function."""

    def __init__(self, kind: str, r: Requests, memory: Any = None, **options: Any) -> None:
        self.kind, self.r, self.options = kind, r, options
        layout = r.kv_layout
        dtypes = {"q_data_type": r.dtype, "kv_data_type": r.kv_dtype, "head_dim_vo": r.head_dims[1]}
        if kind == "paged":
            self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory or workspace(), layout)
            self.wrapper.plan(r.qo_indptr, *r.table, *r.sizes, **{**dtypes, **options})
        elif kind == "ragged":
            self.wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(memory or workspace(), layout)
            self.wrapper.plan(r.qo_indptr, r.kv_indptr, *r.sizes[:3], **{**dtypes, **options})

    def run(self, *args: Any, **options: Any) -> Any:
        if self.kind == "paged":
            return self.wrapper.run(self.r.q, self.r.cache(), *args, **options)
        if self.kind == "ragged":
            return self.wrapper.run(self.r.q, *self.r.ragged(self.r.kv_layout), *args, **options)
        k, v = self.r.ragged(self.r.kv_layout)
        options = {"kv_layout": self.r.kv_layout, **self.options, **options}
        return flashinfer.single_prefill_with_kv_cache(self.r.q, k, v, **options)


@each_kind
@pytest.mark.parametrize("changes", [{}, *GQA, *CACHES], ids=str)
def test_batches(kind: str, changes: dict[str, Any]) -> None:
    if "kv_lens" in changes:
        changes = {**changes, "qo_lens": (3,) * len(changes["kv_lens"])}
    if kind == "single":
        changes.pop("kv_lens", None), changes.pop("qo_lens", None)
    r = requests(kind, **changes)
    out, lse = Call(kind, r, causal=True).run(return_lse=True)
    r.expected(causal=True).check(out, lse)


@each_kind
@pytest.mark.parametrize(("options", "meaning"), OPTIONS, ids=str)
def test_options(kind: str, options: dict[str, Any], meaning: dict[str, Any]) -> None:
    r = requests(kind)
    out, lse = Call(kind, r, **options).run(return_lse=True)
    r.expected(**meaning).check(out, lse)


@each_kind
@pytest.mark.parametrize("windows", [{}, {"window_left": 9}, {"window_left": 9, "window_right": 3}], ids=str)
def test_custom_mask_overrides_causal(kind: str, windows: dict[str, int]) -> None:
    r = requests(kind)
    expected = r.expected(masked=True, **windows)
    expected.check(*Call(kind, r, custom_mask=r.mask, causal=True, **windows).run(return_lse=True))
    packed = [flashinfer.packbits(m.flatten().to(DEVICE), bitorder="little") for m in r.masks]
    options: dict[str, Any] = {"packed_custom_mask": torch.cat(packed), **windows}
    expected.check(*Call(kind, r, **options).run(return_lse=True))
    # The packed mask has precedence.
    expected.check(*Call(kind, r, custom_mask=~r.mask, **options).run(return_lse=True))


@each_kind
def test_masks_have_any_strides(kind: str) -> None:
    r = requests(kind)
    expected = r.expected(masked=True)
    packed = torch.cat([flashinfer.packbits(m.flatten().to(DEVICE), bitorder="little") for m in r.masks])
    bools = torch.stack((r.mask, ~r.mask), 1)[:, 0]
    octets = torch.stack((packed, 255 - packed), 1)[:, 0]
    assert bools.stride() == octets.stride() == (2,)
    expected.check(Call(kind, r, custom_mask=bools).run())
    expected.check(Call(kind, r, packed_custom_mask=octets).run())


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_every_request_of_a_packed_mask_begins_on_a_byte(kind: str) -> None:
    """Masks of 3, 1, 5 and 9 bits take 5 bytes."""
    r = requests(kind, kv_lens=(3, 1, 5, 9), qo_lens=(1, 1, 1, 1))
    packed = torch.cat([flashinfer.packbits(m.flatten().to(DEVICE), bitorder="little") for m in r.masks])
    assert packed.shape == (5,)
    r.expected(masked=True).check(Call(kind, r, packed_custom_mask=packed).run())


def test_a_packed_mask_of_one_request_ends_on_a_byte() -> None:
    r = requests("single", kv_lens=(9,), qo_lens=(3,))
    packed = flashinfer.packbits(r.mask, bitorder="little")
    out = flashinfer.single_prefill_with_kv_cache(r.q, *r.ragged(), packed_custom_mask=packed)
    assert packed.shape == (4,)
    r.expected(masked=True).check(out)
    with pytest.raises(errors.ShapeError, match=r"packed_custom_mask is \[3\]; expected \[4\]"):
        flashinfer.single_prefill_with_kv_cache(r.q, *r.ragged(), packed_custom_mask=packed[:3])


@pytest.mark.parametrize("window_left", [-1, 9])
@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_multi_item_mask(kind: str, window_left: int) -> None:
    """The first request has part of its prefix cached, the second starts within an item, the last has no items."""
    r = requests(kind, kv_lens=(30, 25, 7), qo_lens=(28, 10, 7))
    prefixes, items = (20, 8, 7), ((4, 2, 4), (9, 8), ())
    r.masks = [
        torch.tensor([[visible(i, j, n, lengths) for j in range(kv)] for i in range(kv - qo, kv)])
        for kv, qo, n, lengths in zip(r.kv_lens, r.rows, prefixes, items, strict=True)
    ]
    places = [[place for n in lengths for place in range(n)] for lengths in items]
    assert [len(p) for p in places] == [10, 17, 0]
    options = {
        "prefix_len_ptr": torch.tensor(prefixes).to(DEVICE, torch.uint32),
        "token_pos_in_items_ptr": torch.tensor([p + [0] * (20 - len(p)) for p in places]).flatten().to(torch.uint16),
        "token_pos_in_items_len": 20,
        "max_item_len_ptr": torch.tensor([3, 8, 0]).to(torch.uint16),
    }
    call = Call(kind, r, causal=True, window_left=window_left, **options)
    r.expected(masked=True, window_left=window_left).check(*call.run(return_lse=True))


def visible(i: int, j: int, prefix: int, lengths: tuple[int, ...]) -> bool:
    """Whether token ``i`` sees token ``j``. ``lengths`` are those of the items behind the prefix, with delimiters."""
    if i < prefix or j < prefix:
        return j <= i
    begin = prefix
    for n in lengths:
        if begin <= i < begin + n:
            return begin < j <= i
        begin += n
    raise AssertionError(i)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"prefix_len_ptr": None}, errors.ArgumentError, "prefix_len_ptr is missing"),
        ({"prefix_len_ptr": torch.tensor([1])}, errors.ShapeError, "prefix_len_ptr has length 1; expected 2"),
        ({"token_pos_in_items_len": 5}, errors.ShapeError, "has 5 tokens of request 0; expected 6, those after"),
        ({"token_pos_in_items_len": 4}, errors.ShapeError, "has 4 tokens of request 0; expected 6, those after"),
        ({"custom_mask": torch.ones(48, dtype=torch.bool)}, errors.ArgumentError, "items and a mask are both given"),
        ({"prefix_len_ptr": torch.tensor([2, 9])}, errors.PageTableError, r"prefix_len_ptr\[1\] is 9; expected 0 to 8"),
        ({"prefix_len_ptr": torch.tensor([-1, 2])}, errors.PageTableError, r"prefix_len_ptr\[0\] is -1; expected 0 to"),
        (
            {"prefix_len_ptr": torch.tensor([2.5, 2.0])},
            errors.DTypeError,
            "prefix_len_ptr is float32; expected an integer dtype",
        ),
        (
            {"token_pos_in_items_ptr": torch.full((12,), 0.5)},
            errors.DTypeError,
            "token_pos_in_items_ptr is float32; expected an integer dtype",
        ),
    ],
)
def test_wrong_multi_item_arguments(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    r = requests("ragged", kv_lens=(8, 8), qo_lens=(3, 3))
    items = {
        "prefix_len_ptr": torch.tensor([2, 2]),
        "token_pos_in_items_ptr": torch.zeros(12, dtype=torch.int32),
        "token_pos_in_items_len": 6,
    }
    with pytest.raises(error, match=words):
        Call("ragged", r, **{**items, **changes})


@pytest.mark.parametrize("name", ["qo_indptr", "kv_indptr"])
@pytest.mark.parametrize("masked", ["custom_mask", "items"])
def test_offsets_are_checked_before_the_mask_that_they_measure(name: str, masked: str) -> None:
    options: dict[str, Any] = {"custom_mask": torch.ones(15, dtype=torch.bool)}
    if masked == "items":
        options = {"prefix_len_ptr": int32(2, 2), "token_pos_in_items_ptr": int32(0, 0)}
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    given = {"qo_indptr": int32(0, 3, 6), "kv_indptr": int32(0, 3, 6), name: int32(0, 3, 1)}
    with pytest.raises(errors.PageTableError, match=f"{name} falls from 3 to 1 at request 1"):
        wrapper.plan(*given.values(), 4, 2, 64, **options)


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_mask_does_not_outlive_its_plan(kind: str) -> None:
    r = requests(kind)
    call = Call(kind, r, custom_mask=r.mask)
    r.expected(masked=True).check(call.run())
    packed = torch.cat([flashinfer.packbits(m.flatten().to(DEVICE), bitorder="little") for m in r.masks])
    assert torch.equal(call.wrapper._custom_mask_buf[: len(packed)], packed)
    with pytest.raises(AttributeError, match=r"_custom_mask_buf cannot be set; give the mask to plan\(\)"):
        call.wrapper._custom_mask_buf = packed
    tables = (r.qo_indptr, *r.table, *r.sizes) if kind == "paged" else (r.qo_indptr, r.kv_indptr, *r.sizes[:3])
    call.wrapper.plan(*tables, causal=True)
    assert call.wrapper._causal
    assert call.wrapper._custom_mask_buf is None
    r.expected(causal=True).check(call.run())


def test_a_mask_may_be_larger_than_that_of_the_plan_before() -> None:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    for lengths in ((9,), (130, 70), (5,)):
        r = Requests(lengths, (8,) * len(lengths))
        wrapper.plan(r.qo_indptr, *r.table, *r.sizes, custom_mask=r.mask)
        r.expected(masked=True).check(wrapper.run(r.q, r.cache()))


def test_later_requests_of_a_batch() -> None:
    """Their page table is the end of a larger one: ``indptr`` does not start at 0."""
    r = Requests((37, 5, 130, 1), (2, 3, 5, 1))
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    indptr, indices, last = r.table
    wrapper.plan(r.qo_indptr[1:] - 2, indptr[1:].cpu(), indices, last[1:], *r.sizes, causal=True)
    later = zip(r.q.split(r.rows)[1:], r.batch.keys[1:], r.batch.values[1:], strict=True)
    Expected.of([(*part, None) for part in later], causal=True).check(wrapper.run(r.q[2:], r.cache()))


@each_kind
def test_fp8_cache(kind: str) -> None:
    r = requests(kind, kv_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16)
    out = Call(kind, r).run(k_scale=0.5, v_scale=3.0)
    r.expected(k_scale=0.5, v_scale=3.0).check(out)
    names = ("scale_k", "scale_v") if kind == "single" else ("k_scale", "v_scale")
    scales = (torch.tensor(0.5, device=DEVICE), torch.tensor([3.0], device=DEVICE))
    r.expected(k_scale=0.5, v_scale=3.0).check(Call(kind, r).run(**dict(zip(names, scales, strict=True))))


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_options_of_run(kind: str) -> None:
    r = requests(kind)
    call = Call(kind, r, causal=True, logits_soft_cap=3.0, window_left=50)
    meaning: dict[str, Any] = {"causal": True, "logits_soft_cap": 3.0}
    expected = r.expected(**meaning, window_left=5, sinks=True, sm_scale=0.5 / 8)
    out, lse = call.run(window_left=5, sinks=r.sinks, q_scale=0.5, return_lse=True, lse_base="ln", lse_layout="HN")
    assert lse.is_contiguous()
    expected.check(out, ln(lse.T))
    r.expected(**meaning).check(call.run(window_left=-1))


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_sink_by_position(kind: str) -> None:
    r = requests(kind)
    if kind == "paged":
        wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), jit_args=sink_variant())
        wrapper.plan(r.qo_indptr, *r.table, *r.sizes, causal=True, sm_scale=0.5)
        tensors = (r.q, r.cache())
    else:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), jit_args=sink_variant())
        wrapper.plan(r.qo_indptr, r.kv_indptr, *r.sizes[:3], causal=True, sm_scale=0.5)
        tensors = (r.q, *r.ragged())
    expected = r.expected(causal=True, sinks=True, sm_scale=0.2)
    expected.check(*wrapper.run(*tensors, r.sinks, 0.2, return_lse=True))
    expected.check(*wrapper.run_return_lse(*tensors, r.sinks, 0.1, q_scale=2.0))
    r.expected(causal=True, sinks=True, sm_scale=0.5).check(wrapper.run(*tensors, r.sinks))
    with pytest.raises(errors.ArgumentError, match="sinks is given twice"):
        wrapper.run(*tensors, r.sinks, sinks=r.sinks)


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_buffers_are_filled_and_returned(kind: str) -> None:
    r = requests(kind)
    out, lse = torch.empty_like(r.q), torch.empty(r.q.shape[1::-1], device=DEVICE)
    got = Call(kind, r).run(out=out, lse=lse, return_lse=True, lse_layout="HN")
    assert got[0] is out
    assert got[1] is lse
    r.expected().check(out, lse.T)


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_arguments_by_position_without_effect(kind: str) -> None:
    """FlashInfer passes them to kernels of ``jit_args``, and ignores them without."""
    r = requests(kind)
    call = Call(kind, r, causal=True)
    for args in ((None, 0.125), (0.5, 2.0), (0.5, 1.5, 2.0), (r.sinks, 0.1), (torch.tensor(0.5),), range(5)):
        for _ in range(2):
            r.expected(causal=True).check(*call.run(*args, return_lse=True))
    r.expected(causal=True, k_scale=0.5).check(call.run(None, 0.125, k_scale=0.5))


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_old_names_and_interface(kind: str) -> None:
    r = requests(kind)
    names: dict[str, Any] = {"head_dim": 64, "data_type": torch.float16, "allow_fp16_qk_reduction": True}
    if kind == "paged":
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", qk_indptr_buf=None)
        wrapper.begin_forward(r.qo_indptr, *r.table, *r.heads, page_size=16, **names)
        arguments = (r.q, r.cache())
    else:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", qk_indptr_buf=None)
        wrapper.begin_forward(r.qo_indptr, r.kv_indptr, *r.heads, **names)
        arguments = (r.q, *r.ragged())
    r.expected().check(wrapper.forward(*arguments))
    r.expected(causal=True, sm_scale=0.2).check(*wrapper.forward_return_lse(*arguments, causal=True, sm_scale=0.2))
    r.expected().check(*wrapper.run_return_lse(*arguments))
    for of_pair in (wrapper.run_return_lse, wrapper.forward_return_lse):
        r.expected().check(*of_pair(*arguments, return_lse=False))  # which the name overrules
    wrapper.end_forward()


def test_workspace_size_takes_the_arguments_of_plan() -> None:
    r = requests("paged")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    size, integers = wrapper.workspace_size(r.qo_indptr, *r.table, *r.sizes, causal=True, sm_scale=0.1)
    assert 0 <= size < 16 << 20
    assert 0 < integers < 16 << 20
    to_o_data_type = (None, None, None, True, "NONE", False, None, -1, None, None, None, "float16", None, None)
    to_max_sequence_kv, splits = (None, None, 0, None, None, None, None, None, None), (1, False)
    others = *to_o_data_type, *to_max_sequence_kv
    by_name = wrapper.workspace_size(
        r.qo_indptr, *r.table, *r.sizes, *others, fixed_split_size=1, disable_split_kv=False
    )
    assert wrapper.workspace_size(r.qo_indptr, *r.table, *r.sizes, *others, *splits) == by_name != (size, integers)
    with pytest.raises(TypeError, match="casual"):
        wrapper.workspace_size(r.qo_indptr, *r.table, *r.sizes, casual=True)
    with pytest.raises(errors.ArgumentError, match=r"fixed_split_size is '4', of type str; expected an integer"):
        wrapper.workspace_size(r.qo_indptr, *r.table, *r.sizes, fixed_split_size="4")


def test_workspace_size_of_offsets_in_elements() -> None:
    r = requests("paged")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="cudnn")
    options = {"seq_lens_q": r.qo_indptr.diff(), "fixed_split_size": 1}
    elements = r.qo_indptr * r.heads[0] * r.head_dims[0]
    in_tokens, in_elements = (
        wrapper.workspace_size(rows, *r.table, *r.sizes, **options) for rows in (r.qo_indptr, elements)
    )
    assert in_elements == in_tokens


def test_workspace_size_in_cuda_graph_mode_is_that_of_the_first_plan() -> None:
    """Which decides the capacity for query rows and splits, also of smaller batches."""
    first, small = requests("paged"), requests("paged", kv_lens=(7, 8, 100, 1), qo_lens=(3, 0, 20, 1))
    sizes = {"qo_indptr_buf": 5, "paged_kv_indptr_buf": 5, "paged_kv_indices_buf": 40, "paged_kv_last_page_len_buf": 4}
    buffers = {name: torch.zeros(n, dtype=torch.int32, device=DEVICE) for name, n in sizes.items()}
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True, **buffers)
    wrapper.plan(first.qo_indptr, *first.table, *first.sizes, fixed_split_size=4)
    found = [wrapper.workspace_size(r.qo_indptr, *r.table, *r.sizes, fixed_split_size=4) for r in (first, small)]
    assert found[0] == found[1]
    assert wrapper._plan_info is not None
    assert found[1][1] == 4 * sum(t.numel() for t in wrapper._plan_info)


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_cuda_graph_mode(kind: str) -> None:
    r, s = requests(kind), requests(kind, kv_lens=(7, 8, 100, 1), qo_lens=(3, 0, 20, 1), seed=1)

    def buffer(n: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(n, dtype=dtype, device=DEVICE)

    buffers: dict[str, Any] = {"qo_indptr_buf": buffer(5), "custom_mask_buf": buffer(2000, torch.uint8)}
    if kind == "paged":
        buffers |= {"paged_kv_indptr_buf": buffer(5), "paged_kv_indices_buf": buffer(20)}
        buffers |= {"paged_kv_last_page_len_buf": buffer(4)}
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True, **buffers)
    else:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            workspace(), use_cuda_graph=True, kv_indptr_buf=buffer(5), **buffers
        )
    assert all(getattr(wrapper, f"_{name}") is t for name, t in buffers.items())
    for batch, masked in ((r, False), (s, True), (r, True)):
        tables = (batch.qo_indptr, *batch.table, *batch.sizes)
        if kind == "ragged":
            tables = (batch.qo_indptr, batch.kv_indptr, *batch.sizes[:3])
        mask = torch.nn.functional.pad(batch.mask, (0, 99), value=True) if masked else None  # of a larger batch
        wrapper.plan(*tables, causal=not masked, custom_mask=mask)
        assert torch.equal(buffers["qo_indptr_buf"], batch.qo_indptr)
        cache = (batch.cache(),) if kind == "paged" else batch.ragged()
        rows = len(batch.q)
        padded = torch.cat((batch.q, torch.zeros_like(r.q[: len(r.q) - rows])))
        out, lse = wrapper.run(padded, *cache, return_lse=True)
        batch.expected(masked=masked, causal=not masked).check(out[:rows], lse[:rows])
        assert (out[rows:] == 0).all()


def test_single_with_lse_and_dtype() -> None:
    r = requests("single")
    out, lse = flashinfer.single_prefill_with_kv_cache_return_lse(r.q, *r.ragged(), o_dtype=torch.float32)
    assert out.dtype == torch.float32
    r.expected().check(out.half(), lse)
    square = r.masks[0].to(DEVICE)
    r.expected(masked=True).check(flashinfer.single_prefill_with_kv_cache(r.q, *r.ragged(), custom_mask=square))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_cudnn_takes_heads_before_places_whatever_the_layout(kv_layout: str) -> None:
    r = requests("paged", kv_layout="HND")
    k, v = r.cache()
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), kv_layout, backend="cudnn")
    wrapper.plan(r.qo_indptr, *r.table, *r.sizes, causal=True)
    strided = k.transpose(1, 2).contiguous().transpose(1, 2), v
    for cache in ((k, v), strided, r.cache("tensor")):
        r.expected(causal=True).check(wrapper.run(r.q, cache))


@pytest.mark.parametrize("kind", ["paged", "ragged"])
@pytest.mark.parametrize("shape", [(4,), (4, 1, 1, 1)])
def test_cudnn_plans_take_offsets_in_elements(kind: str, shape: tuple[int, ...]) -> None:
    """Offsets in elements and in tokens plan the same batch, with the lengths that FlashInfer requires there."""
    r = requests(kind, head_dims=(64, 32) if kind == "ragged" else (64, 64), kv_layout="HND")
    (heads, kv_heads, dim), v_dim = r.sizes[:3], r.head_dims[1]
    q_lens, kv_lens = (torch.tensor(x, device=DEVICE).view(shape) for x in (r.qo_lens, r.kv_lens))
    options: dict[str, Any] = {"causal": True, "seq_lens": kv_lens, "seq_lens_q": q_lens}
    for unit in (1, dim):
        if kind == "paged":
            paged = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="cudnn")
            paged.plan(r.qo_indptr * (heads * unit if unit > 1 else 1), *r.table, *r.sizes, **options)
            out = paged.run(r.q, r.cache())
        else:
            ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="cudnn")
            elements = unit > 1
            ragged.plan(
                r.qo_indptr * (heads * dim if elements else 1),
                r.kv_indptr * (kv_heads * dim if elements else 1),
                *r.sizes[:3],
                head_dim_vo=v_dim,
                v_indptr=r.kv_indptr * (kv_heads * v_dim if elements else 1),
                o_indptr=r.qo_indptr * (heads * v_dim if elements else 1),
                **options,
            )
            out = ragged.run(r.q, *r.ragged())
        r.expected(causal=True).check(out)


def test_cudnn_plans_take_lengths_of_keys_for_those_of_queries() -> None:
    r = requests("ragged", kv_lens=(7, 3, 9), qo_lens=(7, 3, 9))
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="cudnn")
    wrapper.plan(r.qo_indptr * 4 * 64, r.kv_indptr * 2 * 64, *r.sizes[:3], seq_lens=r.seq_lens)
    r.expected().check(wrapper.run(r.q, *r.ragged()))


def test_offsets_of_values_or_output_that_differ_are_refused() -> None:
    r = requests("ragged")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="cudnn")
    refused = {"v_indptr": (r.kv_indptr * 100, r.kv_indptr[:-1]), "o_indptr": (r.qo_indptr + 1, r.qo_indptr[None])}
    for name, indptr in ((name, indptr) for name, indptrs in refused.items() for indptr in indptrs):
        with pytest.raises(errors.UnsupportedError, match=f"{name} differs from .*; omit {name}"):
            wrapper.plan(r.qo_indptr, r.kv_indptr, *r.sizes[:3], **{name: indptr})
