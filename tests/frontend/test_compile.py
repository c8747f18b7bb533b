"""Wrappers' run() and one-shot functions trace into whole graphs. A new plan() recompiles nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers.tracing import GraphRecorder
from helpers.wrapper_requests import DEVICE, Requests, workspace
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import attn_ops as flashinfer
from attn_ops.errors import PlanError
from attn_ops.plan.page_table import PageTable

pytestmark = pytest.mark.usefixtures("cold")


DECODES = [
    Requests(kv_lens, num_pages=70, seed=i)
    for i, kv_lens in enumerate(((37, 0, 130, 1), (1, 200, 3, 0), (255, 255, 255, 255)))
]
PREFILLS = [
    Requests((70, 3, 9, 130), (1, 5, 0, 40), num_pages=40),
    Requests((1, 100, 9, 30), (1, 40, 3, 2), num_pages=40, seed=1),
    Requests((50, 50), (23, 23), num_pages=40, seed=2),
]


def _decode(r: Requests, wrapper: Any, **options: Any) -> None:
    indptr, indices, last_page_len = r.table
    wrapper.plan(indptr, indices[: int(indptr[-1])], last_page_len, *r.sizes, **options)


@pytest.mark.parametrize("lengths", ["read", "unread"])
def test_decode_is_one_op_and_stays_compiled(lengths: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lengths == "unread":  # as on a GPU
        monkeypatch.setattr(PageTable, "measured", lambda tables, page_size: tables.bounded())
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    recorder = GraphRecorder()

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = wrapper

        def forward(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            return self.attention.run(q * 1, cache, v_scale=2.0, return_lse=True)

    step = torch.compile(Layer(), fullgraph=True, backend=recorder)
    for r in DECODES:
        _decode(r, wrapper, window_left=90)
        with torch.compiler.set_stance("default" if r is DECODES[0] else "fail_on_recompile"):
            out, lse = step(r.q, r.cache("tensor"))
        r.expected(window_left=90, v_scale=2.0).check(out, lse)
    assert recorder.ops == ["batch_decode"]


def test_decode_plans_the_rows_of_run_in_the_graph() -> None:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    recorder = GraphRecorder()
    step = torch.compile(lambda q, cache: wrapper.run(q, cache, q_len_per_req=3), fullgraph=True, backend=recorder)
    for i, kv_lens in enumerate(((37, 5, 130, 3), (4, 200, 0, 1))):
        r = Requests(kv_lens, (3,) * 4, num_pages=70, seed=i)
        _decode(r, wrapper)
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            r.expected(causal=True).check(step(r.q, r.cache("tensor")))
    assert recorder.ops == ["plan_prefill", "batch_prefill"]


@pytest.mark.parametrize("masked", [False, True])
def test_prefill_is_one_op_and_stays_compiled(masked: bool) -> None:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    recorder = GraphRecorder()
    step = torch.compile(lambda q, cache: wrapper.run(q, cache), fullgraph=True, backend=recorder)
    for r in PREFILLS:
        wrapper.plan(r.qo_indptr, *r.table, *r.sizes, custom_mask=r.mask[:] if masked else None, causal=True)
        with torch.compiler.set_stance("default" if r is PREFILLS[0] else "fail_on_recompile"):
            r.expected(causal=True, masked=masked).check(step(r.q, r.cache("tensor")))
    assert recorder.ops == ["batch_prefill"]


def test_a_window_on_both_sides_is_an_option_of_the_op() -> None:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    recorder = GraphRecorder()
    step = torch.compile(lambda q, cache: wrapper.run(q, cache), fullgraph=True, backend=recorder)
    for r in PREFILLS:
        wrapper.plan(r.qo_indptr, *r.table, *r.sizes, window_left=9, window_right=3)
        with torch.compiler.set_stance("default" if r is PREFILLS[0] else "fail_on_recompile"):
            r.expected(window_left=9, window_right=3).check(step(r.q, r.cache("tensor")))
    assert recorder.ops == ["batch_prefill"]


def test_other_numbers_of_rows_compile_once_more() -> None:
    """The second size is traced with a dynamic dimension, which then fits all."""
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace())
    recorder = GraphRecorder()
    step = torch.compile(lambda q, cache: wrapper.run(q, cache), fullgraph=True, backend=recorder)
    for rows in (20, 33, 40, 7):
        r = Requests((70, 90), (rows, 3), num_pages=40)
        wrapper.plan(r.qo_indptr, *r.table, *r.sizes)
        r.expected().check(step(r.q, r.cache("tensor")))
    assert len(recorder.graphs) == 2


def test_other_numbers_of_keys_compile_once_more() -> None:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    recorder = GraphRecorder()
    step = torch.compile(lambda *tensors: wrapper.run(*tensors), fullgraph=True, backend=recorder)
    for rows in (20, 33, 40, 7):
        r = Requests((rows + 50, 90), (rows, 3))
        wrapper.plan(r.qo_indptr, r.kv_indptr, *r.sizes[:3])
        r.expected().check(step(r.q, *r.ragged()))
    assert len(recorder.graphs) == 2
    with pytest.raises(Exception, match="k and v have 146 rows; expected 147 as planned"):
        step(r.q, *(t[:-1] for t in r.ragged()))


def test_captured_ragged_batches_stay_compiled_with_fewer_keys() -> None:
    buffers = [torch.zeros(3, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", True, *buffers)
    step = torch.compile(lambda *tensors: wrapper.run(*tensors), fullgraph=True, backend="eager")
    q, k, v = (torch.randn(n, heads, 64, device=DEVICE).half() for n, heads in ((40, 4), (160, 2), (160, 2)))
    for keys in (160, 120, 90):
        wrapper.plan(*(torch.tensor([0, 5, n]) for n in (40, keys)), 4, 2, 64)
        with torch.compiler.set_stance("default" if keys == 160 else "fail_on_recompile"):
            torch.testing.assert_close(step(q, k, v), wrapper.run(q, k, v))


def test_ragged_and_mla_are_one_op() -> None:
    ragged, recorder = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace()), GraphRecorder()
    r = PREFILLS[0]
    ragged.plan(r.qo_indptr, r.kv_indptr, *r.sizes[:3], causal=True)
    step = torch.compile(lambda *t: ragged.run(*t, sinks=r.sinks), fullgraph=True, backend=recorder)
    r.expected(causal=True, sinks=True).check(step(r.q, *r.ragged()))
    assert recorder.ops == ["ragged_prefill"]

    mla, recorder = flashinfer.BatchMLAPagedAttentionWrapper(workspace()), GraphRecorder()
    tables = r.qo_indptr, *r.table[:2], r.seq_lens
    mla.plan(*tables, 4, 32, 16, 16, True, 0.2)
    q, cache = torch.randn(46, 4, 48, device=DEVICE), torch.randn(40, 16, 48, device=DEVICE)
    latent = torch.compile(lambda q, c: mla.run(query=q, kv_cache=c), fullgraph=True, backend=recorder)
    torch.testing.assert_close(latent(q, cache), mla.run(query=q, kv_cache=cache))
    assert recorder.ops == ["batch_mla"]


def test_one_shot_functions_compile() -> None:
    r = Requests()
    tables = r.block_tables(), r.seq_lens

    def functions(q: torch.Tensor, cache: torch.Tensor, pages: torch.Tensor, seq_lens: torch.Tensor) -> Any:
        hnd = cache.transpose(2, 3)
        return (
            flashinfer.xqa(q, cache, cache, pages, seq_lens),
            flashinfer.trtllm_batch_decode_with_kv_cache(q, hnd, None, pages, seq_lens, 130, 0.125),
            flashinfer.cudnn_batch_decode_with_kv_cache(
                q, hnd[:, 0], hnd[:, 1], 0.125, None, max_sequence_kv=9, actual_seq_lens_kv=seq_lens, block_tables=pages
            ),
        )

    recorder = GraphRecorder()
    for out in torch.compile(functions, fullgraph=True, backend=recorder)(r.q, r.cache("tensor"), *tables):
        r.expected().check(out)
    assert recorder.ops == ["page_table", "plan_decode", "batch_decode"] * 3


def test_a_one_shot_function_exports() -> None:
    r = Requests()

    class Step(nn.Module):
        def forward(self, q: torch.Tensor, cache: torch.Tensor, pages: torch.Tensor, lens: torch.Tensor) -> Any:
            return flashinfer.trtllm_batch_decode_with_kv_cache(q, cache, None, pages, lens, 9, 0.125, kv_layout="NHD")

    example = r.q, r.cache("tensor"), r.block_tables(), r.seq_lens
    program = torch.export.export(Step(), example)
    r.expected().check(program.module()(*example))


@pytest.mark.parametrize("kind", ["single", "xqa", "page"])
def test_single_xqa_and_append_compile(kind: str) -> None:
    r = Requests((70,), (12,))
    k, v = r.ragged()
    if kind == "single":
        out = torch.compile(flashinfer.single_prefill_with_kv_cache, fullgraph=True, backend="aot_eager")(
            r.q, k, v, causal=True
        )
        r.expected(causal=True).check(out)
    elif kind == "xqa":
        compiled = torch.compile(flashinfer.xqa, fullgraph=True, backend="aot_eager")
        out = compiled(r.q[None, None], r.cache("tensor"), r.cache("tensor"), r.block_tables(), r.seq_lens)
        r.expected(causal=True).check(out[0, 0])
    else:

        def append(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor) -> None:
            places = flashinfer.get_batch_indices_positions(r.kv_indptr, r.seq_lens, 70)
            flashinfer.append_paged_kv_cache(k, v, *places, cache, r.table[1], r.table[0], r.table[2])

        cache = r.cache("tensor")
        whole = cache.nan_to_num()
        cache.zero_()
        torch.compile(append, fullgraph=True, backend="aot_eager")(k, v, cache)
        assert torch.equal(cache, whole)


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_wrappers_of_one_workspace_compile_together(dynamic: bool | None) -> None:
    memory, p, d = workspace(), PREFILLS[0], DECODES[0]
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory)
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(memory)
    cascade = flashinfer.MultiLevelCascadeAttentionWrapper(2, memory)
    prefill.plan(p.qo_indptr, *p.table, *p.sizes, causal=True)
    _decode(d, decode)
    none = torch.zeros(1, dtype=torch.int32)
    one = torch.tensor([0, 46], dtype=torch.int32), torch.zeros(2, dtype=torch.int32), none[:0], none
    cascade.plan(*([a, b.cpu()] for a, b in zip(one, (p.qo_indptr, *p.table), strict=True)), *p.sizes)

    def step(p_q: torch.Tensor, p_cache: torch.Tensor, d_q: torch.Tensor, d_cache: torch.Tensor) -> Any:
        return prefill.run(p_q, p_cache), decode.run(d_q, d_cache), cascade.run(p_q, p_cache)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    outs = compiled(p.q, p.cache("tensor"), d.q, d.cache("tensor"))
    for out, expected in zip(outs, (p.expected(causal=True), d.expected(), p.expected()), strict=True):
        expected.check(out)


def test_plans_of_inference_mode_compile_outside_of_it() -> None:
    memory, r = workspace(), DECODES[0]
    wrappers = [flashinfer.BatchDecodeWithPagedKVCacheWrapper(memory) for _ in range(2)]
    with torch.inference_mode():
        _decode(r, wrappers[0])
    _decode(r, wrappers[1])
    for wrapper in wrappers:
        with torch.no_grad():
            out = torch.compile(wrapper.run, fullgraph=True, backend="aot_eager")(r.q, r.cache())
        r.expected().check(out)


@pytest.mark.parametrize("masked", ["bools", "packed"])
def test_batch_pod_with_a_mask(masked: str) -> None:
    # The masks of these requests have 3, 1, 5 and 9 bits, in 5 bytes.
    p, d = Requests((3, 1, 5, 9), (1, 1, 1, 1)), DECODES[0]
    wrapper = flashinfer.BatchPODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(p.qo_indptr, *p.table, d.qo_indptr, *d.table, *d.sizes)
    bits = torch.tensor([0, *(a * b for a, b in zip(p.rows, p.kv_lens, strict=True))]).cumsum(0)
    mask = p.mask if masked == "bools" else flashinfer.segment_packbits(p.mask, bits, "little")[0]
    name = "custom_mask_p" if masked == "bools" else "packed_custom_mask_p"

    def step(p_q: torch.Tensor, p_cache: torch.Tensor, d_q: torch.Tensor, d_cache: torch.Tensor, m: Any) -> Any:
        return wrapper.run(p_q, p_cache, d_q, d_cache, **{name: m})

    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        first, second = call(p.q, p.cache("tensor"), d.q, d.cache("tensor"), mask)
        p.expected(masked=True).check(first)
        d.expected().check(second)


def test_plan_inside_of_a_compiled_function() -> None:
    first, second = DECODES[:2]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    _decode(first, wrapper)

    def step(r: Requests) -> torch.Tensor:
        _decode(r, wrapper)
        return wrapper.run(r.q, r.cache("tensor"))

    second.expected().check(torch.compile(step, backend="aot_eager")(second))
    second.expected().check(wrapper.run(second.q, second.cache("tensor")))


def _export(step: Any, *tables: torch.Tensor) -> None:
    class Step(nn.Module):
        def forward(self, *tables: torch.Tensor) -> torch.Tensor:
            step(*tables)
            return tables[0] + 1

    torch.export.export(Step(), tables)


def _fake(step: Any, *tables: torch.Tensor) -> None:
    with FakeTensorMode() as mode:
        step(*map(mode.from_tensor, tables))


TRACERS = {
    "export": _export,
    "fake tensors": _fake,
    "make_fx": lambda step, *tables: make_fx(step)(*tables),
    "make_fx, fake": lambda step, *tables: make_fx(step, tracing_mode="fake")(*tables),
    "make_fx, symbolic": lambda step, *tables: make_fx(step, tracing_mode="symbolic")(*tables),
}


@pytest.mark.parametrize("cascade", [False, True])
@pytest.mark.parametrize("tracer", TRACERS)
def test_plan_of_traced_tables_is_refused(tracer: str, cascade: bool) -> None:
    r = DECODES[0]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    _decode(r, wrapper)
    levels = flashinfer.MultiLevelCascadeAttentionWrapper(1, workspace())

    def step(*tables: torch.Tensor) -> torch.Tensor:
        if cascade:
            levels.plan([torch.arange(len(r.kv_lens) + 1)], *([t] for t in tables), *r.sizes)
        else:
            wrapper.plan(*tables, *r.sizes)
        return tables[0] + 1

    with pytest.raises(PlanError, match=r"plan: it is traced, .*expected an eager call; call it before the traced"):
        TRACERS[tracer](step, *r.table)
    r.expected().check(wrapper.run(r.q, r.cache("tensor")))  # as planned before


def test_plan_in_a_dispatch_mode() -> None:
    r, wrapper = DECODES[0], flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
    with FlopCounterMode(display=False):
        _decode(r, wrapper)
        r.expected().check(wrapper.run(r.q, r.cache("tensor")))


def test_arguments_without_effect_in_graphs() -> None:
    r = Requests()
    cache, tables = r.cache("tensor"), (r.block_tables(), r.seq_lens, 9, 0.125)

    def step(q: torch.Tensor) -> Any:
        return flashinfer.trtllm_batch_decode_with_kv_cache(q, cache, None, *tables, kv_layout="NHD", o_sf_scale=1.0)

    r.expected().check(torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)(r.q))


@pytest.mark.slow
def test_wrapper_run_with_inductor() -> None:
    wrapper, r = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace()), Requests(dtype=torch.float32)
    _decode(r, wrapper, q_data_type="float32")
    step = torch.compile(lambda q, cache: wrapper.run(q, cache), fullgraph=True)
    r.expected().check(step(r.q, r.cache("tensor")))


Sizes = tuple[int, ...]


class SizedCalls(NamedTuple):
    """A function, its arguments by sizes, sizes of good calls, and those of bad ones by their message."""

    function: Any
    arguments: Any
    good: list[Sizes]
    bad: dict[str, Sizes]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def _ragged_calls() -> SizedCalls:
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace())

    def arguments(rows: int, out_rows: int, window_left: int) -> tuple[Any, ...]:
        indptr = torch.tensor([0, rows])
        wrapper.plan(indptr, indptr, 4, 2, 32, causal=True, q_data_type=torch.float32)
        return *(_random(rows, heads, 32) for heads in (4, 2, 2)), _random(out_rows, 4, 32), window_left

    bad = {"out is [6, 4, 32]; expected [5, 4, 32]": (5, 6, 5), "window_left is -2; expected 0 or more": (5, 5, -2)}
    return SizedCalls(
        lambda q, k, v, out, window: wrapper.run(q, k, v, out=out, window_left=window),
        arguments,
        [(n, n, n) for n in (2, 3, 4)],
        bad,
    )


def _masked_calls() -> SizedCalls:
    def arguments(rows: int, keys: int, bits: int) -> tuple[Any, ...]:
        return _random(rows, 4, 32), _random(keys, 2, 32), _random(keys, 2, 32), _random(bits) < 9

    return SizedCalls(
        lambda q, k, v, mask: flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask),
        arguments,
        [(n, n + 3, n * (n + 3)) for n in (2, 3, 4)],
        {"custom_mask is [45]; expected [40], one for every pair": (5, 8, 45)},
    )


def _decode_calls() -> SizedCalls:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())

    def arguments(rows: int, q_rows: int) -> tuple[Any, ...]:
        indptr = torch.arange(6)
        wrapper.plan(indptr, indptr[:-1], torch.full((5,), 4), 4, 2, 32, 4, q_data_type=torch.float32)
        return _random(q_rows, 4, 32), _random(8, 2, 4, 2, 32), rows

    return SizedCalls(
        lambda q, cache, rows: wrapper.run(q, cache, q_len_per_req=rows),
        arguments,
        [(n, 5 * n) for n in (2, 3, 4)],
        {"q has 29 rows; expected 30, q_len_per_req 6 of each request": (6, 29)},
    )


@pytest.mark.parametrize("calls", [_ragged_calls, _masked_calls, _decode_calls])
def test_errors_show_numbers_where_a_graph_has_symbols(calls: Callable[[], SizedCalls]) -> None:
    """Calls of several sizes leave these open in the graph. The message of a bad call is the eager one."""
    function, arguments, good, bad = calls()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for sizes in good:
        compiled(*arguments(*sizes))
    for message, sizes in bad.items():
        given = arguments(*sizes)
        for run in (function, compiled):
            with pytest.raises(Exception, match=re.escape(message)):
                run(*given)
