"""FlashAttention's functions trace into whole graphs that do not recompile for other lengths, and export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from helpers.flash_requests import dense, expected
from helpers.tracing import CallModule, GraphRecorder
from helpers.wrapper_requests import DEVICE, Requests
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from attn_ops.errors import UnsupportedError
from attn_ops.flash_attn import (
    SchedulerMetadata,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from attn_ops.plan import sizing

pytestmark = pytest.mark.usefixtures("cold")


class Form(NamedTuple):
    """``call(*tensors)`` traces to a graph of ``ops``; the tensors of ``batches`` differ in contents alone."""

    ops: list[str]
    call: Callable[..., Any]
    batches: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


PREFILLS = Requests((70, 3, 9, 130), (1, 5, 0, 40)), Requests((9, 130, 70, 3), (5, 40, 1, 0), seed=1)
DECODES = Requests((37, 0, 130, 1)), Requests((130, 1, 37, 0), seed=1)
APPENDS = Requests((37, 1, 130, 1)), Requests((130, 1, 37, 1), seed=1)


def varlen(r: Requests) -> tuple[Tensor, ...]:
    return r.q, *r.ragged(), r.qo_indptr.long(), r.kv_indptr


def paged(r: Requests) -> tuple[Tensor, ...]:
    return r.q, *r.cache(), r.qo_indptr, r.seq_lens, r.block_tables()


def decode(r: Requests) -> tuple[Tensor, ...]:
    return r.q[:, None], *r.cache(), r.seq_lens, r.block_tables()


def appended(r: Requests) -> tuple[Tensor, ...]:
    new = torch.ones(4, 1, 2, 64, dtype=torch.float16, device=DEVICE)
    return *decode(r), new, 2 * new, *(torch.rand(200, 16, device=DEVICE) for _ in range(2))


def append(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor, *new: Tensor) -> Any:
    """The last token of each request is appended; to two empty ones the first."""
    k_new, v_new, cos, sin = new
    given = {"k": k_new, "v": v_new, "rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
    return flash_attn_with_kvcache(q, k, v, cache_seqlens=lens - 1, block_table=table, **given)


def dense_cache(seed: int) -> tuple[Tensor, ...]:
    """``(q, k, v, lengths, places)`` of three requests in a cache of three places of 20 tokens."""
    q, k, v = dense(3, 1, 20, seed=seed)
    lens = [[7, 0, 20], [20, 3, 1]][seed]
    return q, k, v, *(torch.tensor(t, dtype=torch.int32, device=DEVICE) for t in (lens, [2, 0, 0]))


CAUSAL = {"causal": True, "window_size": (20, 0)}

FORMS: dict[str, Form] = {
    "dense": Form(
        ["single_prefill"],
        lambda *t: flash_attn_func(*t, causal=True, return_softmax_lse=True),
        (dense(3, 9, 20), dense(3, 9, 20, seed=1)),
    ),
    "one dense request": Form(
        ["single_prefill"],
        lambda *t: flash_attn_func(*t, window_size=(5, 3), softcap=2.0),
        (dense(1, 9, 20), dense(1, 9, 20, seed=1)),
    ),
    "varlen": Form(
        ["plan_prefill", "ragged_prefill"],
        lambda *t: flash_attn_varlen_func(*t, 40, 130, **CAUSAL, return_softmax_lse=True),
        (varlen(PREFILLS[0]), varlen(PREFILLS[1])),
    ),
    "varlen over pages": Form(
        ["page_table", "plan_prefill", "batch_prefill"],
        lambda q, k, v, cu, lens, table: flash_attn_varlen_func(
            q, k, v, cu, None, 40, 130, seqused_k=lens, block_table=table, **CAUSAL
        ),
        (paged(PREFILLS[0]), paged(PREFILLS[1])),
    ),
    "decode": Form(
        ["page_table", "plan_decode", "batch_decode"],
        lambda q, k, v, lens, table: flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lens, block_table=table, return_softmax_lse=True
        ),
        (decode(DECODES[0]), decode(DECODES[1])),
    ),
    "chunks": Form(
        ["plan_prefill", "ragged_prefill"],
        lambda *t: flash_attn_func(*t, causal=True, attention_chunk=7),
        (dense(3, 9, 20), dense(3, 9, 20, seed=1)),
    ),
    "chunks of varlen": Form(
        ["plan_prefill", "ragged_prefill"],
        lambda *t: flash_attn_varlen_func(*t, 40, 130, causal=True, attention_chunk=32),
        (varlen(PREFILLS[0]), varlen(PREFILLS[1])),
    ),
    "chunks over pages": Form(
        ["page_table", "plan_prefill", "batch_prefill"],
        lambda q, k, v, cu, lens, table: flash_attn_varlen_func(
            q, k, v, cu, None, 40, 130, seqused_k=lens, block_table=table, causal=True, attention_chunk=32
        ),
        (paged(PREFILLS[0]), paged(PREFILLS[1])),
    ),
    "a dense cache": Form(
        ["page_table", "plan_decode", "batch_decode"],
        lambda q, k, v, lens, where: flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, cache_batch_idx=where),
        (dense_cache(0), dense_cache(1)),
    ),
    "left padding": Form(
        ["page_table", "plan_decode", "batch_decode"],
        lambda q, k, v, lens, pad: flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, cache_leftpad=pad),
        (dense_cache(0), dense_cache(1)),
    ),
    "a value of the query": Form(
        ["single_prefill"],
        lambda q, k, v: flash_attn_func(q, k, v, qv=q, causal=True),
        (dense(3, 9, 20), dense(3, 9, 20, seed=1)),
    ),
    "append": Form(
        [
            "batch_indices_positions",
            "page_table",
            "plan_decode",
            *["batch_indices_positions"] * 2,
            "append_kv",
            "batch_decode",
        ],
        append,
        (appended(APPENDS[0]), appended(APPENDS[1])),
    ),
}


def copies(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.clone() for t in tensors)


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", FORMS)
def test_compiles_once(name: str) -> None:
    form, recorder = FORMS[name], GraphRecorder()
    compiled = torch.compile(form.call, fullgraph=True, backend=recorder)
    for i, tensors in enumerate(form.batches):
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            same(compiled(*copies(tensors)), form.call(*copies(tensors)))
    assert recorder.ops == form.ops


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", FORMS)
def test_exports(name: str, strict: bool) -> None:
    form = FORMS[name]
    form.call(*copies(form.batches[0]))  # a plan of these lengths, which the program must not contain
    program = torch.export.export(CallModule(form.call), copies(form.batches[0]), strict=strict).module()
    for tensors in form.batches:
        same(program(*copies(tensors)), form.call(*copies(tensors)))


def test_dynamic_lengths_and_batches_share_a_graph() -> None:
    recorder = GraphRecorder()

    def call(*t: Tensor) -> Any:
        return flash_attn_func(*t, causal=True)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=recorder)
    for i, sizes in enumerate([(3, 9, 20), (3, 9, 23), (2, 12, 30), (3, 16, 17)]):
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            q, k, v = dense(*sizes)
            out = compiled(q, k, v)
        expected(list(zip(q, k, v, strict=True)), causal=True).check(out.flatten(0, 1))


@pytest.mark.parametrize("dynamic", [None, True])
def test_metadata_of_any_batch_is_an_input_of_a_graph(dynamic: bool | None) -> None:
    """Its sizes are symbolic after another kind of batch, or at once."""

    def call(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, made: SchedulerMetadata, options: dict[str, Any]) -> Tensor:
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, scheduler_metadata=made, **options)

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=dynamic)
    q, k, v = (torch.randn(2, n, h, 16, device=DEVICE).half() for n, h in ((1, 4), (24, 2), (24, 2)))
    lens, pad, rows = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([9, 13], [1, 2], [1, 0]))
    for options in ({}, {"cache_batch_idx": rows}, {"cache_leftpad": pad}, {"attention_chunk": 5}):
        made = get_scheduler_metadata(2, 1, 24, 4, 2, 16, lens, **options)
        same(compiled(q, k, v, lens, made, options), call(q, k, v, lens, made, options))


def test_a_program_with_a_dynamic_batch() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, block_table=table)

    batch = torch.export.Dim("batch", min=1, max=64)
    pages = torch.export.Dim("pages", min=1, max=4096)
    shapes = ({0: batch}, {0: pages}, {0: pages}, {0: batch}, {0: batch})
    program = torch.export.export(CallModule(call), decode(DECODES[0]), dynamic_shapes=(shapes,)).module()
    r = Requests((130, 1, 37, 0, 20, 7))
    want = expected(list(zip(r.q[:, None], r.batch.keys, r.batch.values, strict=True)))
    q, k, v, lens, table = decode(r)
    width = decode(DECODES[0])[4].shape[1]
    padded = torch.nn.functional.pad(table, (0, width - table.shape[1]))
    want.check(program(q, k, v, lens, padded).flatten(0, 1))


LAYERS = 4


def model(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor) -> Tensor:
    """Layers that plan once."""
    made = get_scheduler_metadata(4, 1, 0, 4, 2, 64, lens, page_size=16, block_table=table)
    for _ in range(LAYERS):
        q = flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, block_table=table, scheduler_metadata=made)
    return q


def test_layers_of_a_compiled_model_share_a_plan() -> None:
    recorder = GraphRecorder()
    compiled = torch.compile(model, fullgraph=True, backend=recorder)
    for i, r in enumerate(DECODES):
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            same(compiled(*decode(r)), model(*decode(r)))
    assert recorder.ops == ["page_table", "plan_decode", *["batch_decode"] * LAYERS]


def test_metadata_is_an_input_of_a_program() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, made: Any) -> Any:
        return flash_attn_with_kvcache(q, k, v, scheduler_metadata=made)

    def inputs(r: Requests) -> tuple[Any, ...]:
        q, k, v, lens, table = decode(r)
        return q, k, v, get_scheduler_metadata(4, 1, 0, 4, 2, 64, lens, page_size=16, block_table=table)

    program = torch.export.export(CallModule(layer), inputs(DECODES[0])).module()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for i, r in enumerate(DECODES):
        want = expected(list(zip(r.q[:, None], r.batch.keys, r.batch.values, strict=True)))
        want.check(program(*inputs(r)).flatten(0, 1))
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            want.check(compiled(*inputs(r)).flatten(0, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
def test_compiled_by_inductor_on_a_gpu(name: str) -> None:
    form = FORMS[name]
    compiled = torch.compile(form.call, fullgraph=True)
    for i, tensors in enumerate(form.batches):
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            same(compiled(*copies(tensors)), form.call(*copies(tensors)))


@pytest.mark.gpu
@pytest.mark.parametrize("of_cache", [False, True], ids=["keys", "cache"])
def test_heads_and_their_dims_that_change_between_calls(of_cache: bool) -> None:
    """Dynamo makes them symbols of a graph; each choice of a kernel makes them numbers."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if of_cache:
            return flash_attn_with_kvcache(q, k, v, cache_seqlens=k.shape[1], causal=True)
        return flash_attn_func(q, k, v, causal=True)

    compiled = torch.compile(call, fullgraph=True)
    for heads, dims in (((4, 2), (64, 256)), ((4, 2), (64, 512)), ((6, 6), (64, 64)), ((6, 3), (128, 128))):
        q, k, v = dense(3, 9, 20, heads=heads, head_dims=dims)
        expected(list(zip(q, k, v, strict=True)), causal=True).check(compiled(q, k, v).flatten(0, 1))


@pytest.mark.gpu
def test_batches_and_chunks_that_change_between_calls() -> None:
    """The capacities of plans are symbols of a graph then, and constants of kernels are computed from them."""
    compiled = torch.compile(flash_attn_func, fullgraph=True)
    for sizes, chunk in (((9, 1, 1), 1), ((9, 1, 1), 0), ((5, 9, 20), 7), ((40, 9, 30), 4), ((17, 12, 20), 0)):
        q, k, v = dense(*sizes)
        out = compiled(q, k, v, causal=True, attention_chunk=chunk)
        expected(list(zip(q, k, v, strict=True)), causal=True, attention_chunk=chunk).check(out.flatten(0, 1))


@pytest.mark.skipif(DEVICE == "cuda", reason="the test above")
def test_compiled_by_inductor() -> None:
    """``test_repeated_plans.py`` has decode."""
    form = FORMS["dense"]
    compiled = torch.compile(form.call, fullgraph=True)
    for tensors in form.batches:
        same(compiled(*copies(tensors)), form.call(*copies(tensors)))


@torch._dynamo.config.patch(recompile_limit=2)
def test_functions_that_are_compiled_directly_do_not_share_the_limit_of_recompiles() -> None:
    func = torch.compile(flash_attn_func, fullgraph=True, backend="eager")
    varlen = torch.compile(flash_attn_varlen_func, fullgraph=True, backend="eager")
    for n in (5, 7, 9):
        q, k, v = dense(2, n, n)
        expected(list(zip(q, k, v, strict=True))).check(func(q, k, v).flatten(0, 1))
        one = torch.tensor([0, n], dtype=torch.int32, device=DEVICE)
        expected([(q[0], k[0], v[0])]).check(varlen(q[0], k[0], v[0], one, one))


def test_offsets_that_the_graph_computes() -> None:
    """By ``torch.arange``, whose clamp Inductor of PyTorch 2.13 does not compile."""
    q, k, v = dense(3, 4, 4)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        offsets = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * q.shape[1]
        return flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), offsets, offsets, 4, 4)

    expected(list(zip(q, k, v, strict=True))).check(torch.compile(call, fullgraph=True)(q, k, v))


def test_a_program_whose_dimensions_are_all_automatic() -> None:
    """It has the head dims of the example, as a strict export has."""
    auto = dict.fromkeys(range(4), torch.export.Dim.AUTO)
    module = CallModule(lambda q, k, v: flash_attn_func(q, k, v, causal=True))
    program = torch.export.export(module, dense(2, 5, 5), dynamic_shapes={"tensors": (auto,) * 3}, strict=False)
    q, k, v = dense(3, 7, 7)
    expected(list(zip(q, k, v, strict=True)), causal=True).check(program.module()(q, k, v).flatten(0, 1))


def test_lengths_on_the_host_are_not_read_where_make_fx_records() -> None:
    r = Requests((3, 2), (3, 2))
    tensors = r.q, *r.ragged(), r.qo_indptr.cpu(), r.kv_indptr.cpu()

    def call(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 3, s_aux=r.sinks)

    recorded = make_fx(call)(*tensors)
    r.expected(sinks=True).check(recorded(*tensors))


def test_torch_jit_trace_is_refused() -> None:
    message = r"^flash_attn_func: a call in torch\.jit\.trace, which is not supported"
    with pytest.raises(UnsupportedError, match=message):
        torch.jit.trace(lambda q, k, v: flash_attn_func(q, k, v), dense(2, 5, 5))


def test_symbolic_trace_of_torch_fx_is_refused() -> None:
    message = r"^flash_attn_func: a call in torch\.fx\.symbolic_trace, which is not supported: .*torch\.export"
    with pytest.raises(UnsupportedError, match=message):
        torch.fx.symbolic_trace(lambda q, k, v: flash_attn_func(q, k, v))


def test_a_decode_program_whose_dimensions_are_all_automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sized for the CUDA kernel, which has its head dims: those of the program are symbols."""
    monkeypatch.setattr(sizing, "is_hopper", lambda device: True)
    q, k, v = dense(3, 1, 16)
    auto = dict.fromkeys(range(4), torch.export.Dim.AUTO)
    lens = torch.tensor([5, 16, 9], dtype=torch.int32, device=DEVICE)
    module = CallModule(lambda q, k, v, lens: flash_attn_with_kvcache(q, k, v, cache_seqlens=lens))
    shapes = {"tensors": (auto, auto, auto, {0: torch.export.Dim.AUTO})}
    program = torch.export.export(module, (q, k, v, lens), dynamic_shapes=shapes, strict=False)
    kept = [(a, b[:n], c[:n]) for a, b, c, n in zip(q, k, v, lens.tolist(), strict=True)]
    expected(kept).check(program.module()(q, k, v, lens).flatten(0, 1))
