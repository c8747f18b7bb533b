"""Layers of a graph that Inductor compiles share plans of equal lengths, and only those."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.wrapper_requests import DEVICE, Requests
from torch import Tensor
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering

from attn_ops.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from attn_ops.ops.repeated_plans import SHARED_OPS, Made, RepeatedPlans

LAYERS = 3


@pytest.fixture(autouse=True)
def _empty_cache(cold: None) -> Iterator[None]:
    with torch._inductor.utils.fresh_cache():
        yield


class _StoppedError(Exception):
    """Inductor is about to lower a graph."""


def lowered(call: Callable[..., Any], tensors: tuple[Tensor, ...], **options: Any) -> Counter[str]:
    """How often each op that plans is lowered in the graph of ``call``, as Inductor would lower it."""
    graphs: list[torch.fx.Graph] = []

    def run(lowering: Any, *_: Any) -> None:
        graphs.append(lowering.graph)
        raise _StoppedError

    with mock.patch.object(GraphLowering, "run", run), pytest.raises(InductorError, match="_StoppedError"):
        torch.compile(call, fullgraph=True, **options)(*(t.clone() for t in tensors))
    (graph,) = graphs
    repeated, found = RepeatedPlans(graph), Counter[str]()
    for node in graph.nodes:
        name = str(node.target).removeprefix("attn.").removesuffix(".default")
        if name in SHARED_OPS and repeated.find(node) is None:
            repeated.keep(node, Made((), None))
            found[name] += 1
    return found


def same(call: Callable[..., Any], *batches: tuple[Tensor, ...], **options: Any) -> None:
    """Compiled, ``call`` gives what it gives eagerly, and leaves the same in its arguments."""
    compiled = torch.compile(call, fullgraph=True, **options)
    for tensors in batches:
        eager, given = ([t.clone() for t in tensors] for _ in range(2))
        want = call(*eager)
        got = compiled(*given)
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(given, eager, equal_nan=True)


def decode(r: Requests) -> tuple[Tensor, ...]:
    return r.q[:, None], *r.cache(), r.seq_lens, r.block_tables()


BATCHES = decode(Requests((37, 8, 130, 1))), decode(Requests((130, 1, 37, 8), seed=1))


def attend(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor, *new: Tensor, **options: Any) -> Tensor:
    return flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=lens, block_table=table, **options)


def layers(q: Tensor, *rest: Tensor) -> Tensor:
    for _ in range(LAYERS):
        q = attend(q, *rest)
    return q


def two_layers(q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    out = attend(q, *rest)
    return attend(out, *rest, return_softmax_lse=True)[:2]


def appending(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor) -> Tensor:
    for _ in range(2):
        new = q[:, :, :2] * 0.5
        q = attend(q, k, v, lens - 1, table, new, new + 1)
    return q


def kinds(q: Tensor, *rest: Tensor) -> Tensor:
    for window in (-1, 20, -1, 20):
        q = attend(q, *rest, window_size=(window, 0), causal=True)
    return q


def varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> Tensor:
    for _ in range(LAYERS):
        q = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 40, 70, causal=True)
    return q


def equal_lengths(q: Tensor) -> Tensor:
    for _ in range(LAYERS):
        q = flash_attn_func(q, q[:, :, :2], q[:, :, 2:], causal=True, attention_chunk=4)
    return q


def changed_after(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor) -> Tensor:
    for _ in range(2):
        q = attend(q, k, v, lens, table)
    lens.sub_(1)
    return q


RAGGED = Requests((33, 3, 9, 70), (4, 5, 2, 40))
VARLEN = RAGGED.q, *RAGGED.ragged(), RAGGED.qo_indptr.long(), RAGGED.kv_indptr
DENSE = (torch.randn(2, 9, 4, 64, device=DEVICE),)

MODELS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, int]]] = {
    "layers": (layers, BATCHES[0], {"page_table": 1, "plan_decode": 1}),
    "layers that append": (
        appending,
        BATCHES[0],
        {"page_table": 1, "plan_decode": 1, "batch_indices_positions": 1},
    ),
    "kinds of layers": (kinds, BATCHES[0], {"page_table": 1, "plan_decode": 2}),
    "varlen layers": (varlen, VARLEN, {"plan_prefill": 1}),
    "layers of equal lengths": (equal_lengths, DENSE, {"plan_prefill": 1}),
    "a change after the last layer": (changed_after, BATCHES[0], {"page_table": 1, "plan_decode": 1}),
}


DYNAMIC = ("layers", "layers that append", "varlen layers", "layers of equal lengths")
"""The other models call the same ops as ``layers``, with sizes of their graphs in the same arguments."""


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, False) for name in MODELS), *((name, True) for name in DYNAMIC)]
)
def test_layers_share_a_plan(name: str, dynamic: bool) -> None:
    model, tensors, found = MODELS[name]
    assert lowered(model, tensors, dynamic=dynamic) == found


torch.library.define("attn_ops_tests::lengthen", "(Tensor(a!) lens) -> ()")


@torch.library.impl("attn_ops_tests::lengthen", "CompositeExplicitAutograd")
def _lengthen(lens: Tensor) -> None:
    lens.sub_(1)


torch.library.register_fake("attn_ops_tests::lengthen", lambda lens: None)

CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda lens: lens.sub_(1),
    "through a view": lambda lens: lens[:2].sub_(1),
    "by an op": torch.ops.attn_ops_tests.lengthen,
    "by an op through a view": lambda lens: torch.ops.attn_ops_tests.lengthen(lens[:1]),
}


def changing(change: str, copied: bool) -> Callable[..., Any]:
    def model(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        lens = lens.clone() if copied else lens
        first = attend(q, k, v, lens, table)
        CHANGES[change](lens)
        return first, attend(q, k, v, lens, table)

    return model


@pytest.mark.parametrize("copied", [False, True], ids=["", "a copy"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_lengths_have_a_plan_of_their_own(change: str, copied: bool) -> None:
    assert lowered(changing(change, copied), BATCHES[0])["plan_decode"] == 2


def places(indptr: Tensor, lens: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.ops.attn.batch_indices_positions(indptr, lens, 4)[0] for _ in range(2))


def views_of_places(indptr: Tensor, lens: Tensor) -> tuple[Tensor, ...]:
    return tuple(t[1:] for t in places(indptr, lens))


def returned_plans(lens: Tensor, table: Tensor) -> tuple[Any, ...]:
    return tuple(get_scheduler_metadata(2, 1, 0, 4, 2, 64, lens, page_size=16, block_table=table) for _ in range(2))


INDPTR, LENS = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 2, 4], [9, 5]))

RETURNED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "results": (places, (INDPTR, LENS), "batch_indices_positions"),
    "views of results": (views_of_places, (INDPTR, LENS), "batch_indices_positions"),
    "plans": (returned_plans, (LENS, torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)), "plan_decode"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_what_a_graph_returns_is_not_shared(name: str) -> None:
    call, tensors, op = RETURNED[name]
    assert lowered(call, tensors)[op] == 2


@pytest.mark.slow
def test_compiled_results_have_memory_of_their_own() -> None:
    first, second = torch.compile(places, fullgraph=True)(INDPTR, LENS)
    assert first.data_ptr() != second.data_ptr()
    first.fill_(7)
    torch.testing.assert_close(second, places(INDPTR, LENS)[1])


@pytest.mark.slow
def test_compiled_layers_give_what_eager_ones_give(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="attn_ops")
    same(two_layers, *BATCHES)
    assert sum(m.startswith("plan_decode: a graph contains the kernels of") for m in caplog.messages) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_compiled_layers_on_a_gpu(name: str) -> None:
    model, tensors, _ = MODELS[name]
    same(model, tensors, tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("copied", [False, True], ids=["", "a copy"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_lengths_on_a_gpu(change: str, copied: bool) -> None:
    same(changing(change, copied), BATCHES[0])
