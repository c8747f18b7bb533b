"""Writes into keys and values that are views of one cache, whose offset is symbolic in the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attn_ops
from attn_ops.flash_attn import flash_attn_with_kvcache

BATCH, PAGE_SIZE, HEADS, DIM, WIDTH = 2, 2, 2, 64, 3
PAGES = (40, 98)
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

Views = Callable[[Tensor], tuple[Tensor, ...]]
CACHES: dict[str, tuple[Callable[[int], tuple[int, ...]], Views]] = {
    "values after keys": (lambda pages: (2, pages, PAGE_SIZE, HEADS, DIM), lambda cache: cache.unbind(0)),
    "both in each page": (lambda pages: (pages, 2, PAGE_SIZE, HEADS, DIM), lambda cache: cache.unbind(1)),
    "a layer of all": (lambda pages: (3, 2, pages, PAGE_SIZE, HEADS, DIM), lambda cache: cache[1].unbind(0)),
}
each_cache = pytest.mark.parametrize("form", CACHES)


def attend(q: Tensor, caches: tuple[Tensor, ...], new: Tensor) -> Tensor:
    """Append ``new`` and its negative, and attend."""
    lengths = torch.tensor([3, 4], dtype=torch.int32, device=q.device)
    table = torch.tensor([[0, 1, 2], [5, 6, 7]], dtype=torch.int32, device=q.device)
    k, v = caches
    return flash_attn_with_kvcache(q, k, v, new, -new, cache_seqlens=lengths, block_table=table, causal=True)


def append(q: Tensor, caches: tuple[Tensor, ...], new: Tensor) -> Tensor:
    arange = torch.arange(BATCH, dtype=torch.int32, device=q.device)
    attn_ops.append_paged_kv_cache(
        new[:, 0], -new[:, 0], arange, arange * 0 + 1, caches, 5 + arange, torch.arange(3, device=q.device).int(), None
    )
    return q + 1


CALLS = {"flash_attn_with_kvcache": attend, "append_paged_kv_cache": append}
each_call = pytest.mark.parametrize("call", CALLS)


def inputs(form: str, pages: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(pages)
    shapes = (BATCH, 1, 2 * HEADS, DIM), CACHES[form][0](pages), (BATCH, 1, HEADS, DIM)
    q, cache, new = (torch.randn(shape, generator=generator).half().to(device) for shape in shapes)
    return q, cache, new


def check(compiled: Callable[..., Tensor], call: str, form: str, pages: int, device: str, *, inside: bool) -> None:
    q, cache, new = inputs(form, pages, device)
    expected = cache.clone()
    out = CALLS[call](q, CACHES[form][1](expected), new)
    given = cache if inside else CACHES[form][1](cache)
    torch.testing.assert_close(compiled(q, given, new), out)
    assert torch.equal(cache, expected)


@on_each_device
@each_call
@each_cache
@pytest.mark.parametrize("inside", [True, False], ids=["views in the graph", "views as inputs"])
def test_a_compiled_graph_writes_where_eager_calls_do(inside: bool, form: str, call: str, device: str) -> None:
    def step(q: Tensor, given: Any, new: Tensor) -> Tensor:
        return CALLS[call](q, CACHES[form][1](given) if inside else given, new)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)  # for any number of pages from the second number on
    for pages in PAGES:
        check(compiled, call, form, pages, device, inside=inside)


class Step(nn.Module):
    def __init__(self, call: str, form: str) -> None:
        super().__init__()
        self.call, self.form = call, form

    def forward(self, q: Tensor, cache: Tensor, new: Tensor) -> Tensor:
        return CALLS[self.call](q, CACHES[self.form][1](cache), new)


@pytest.mark.parametrize(("form", "call"), zip(("values after keys", "a layer of all"), CALLS, strict=True))
def test_a_package_writes_where_eager_calls_do(form: str, call: str, tmp_path: Path) -> None:
    given = inputs(form, 40, "cpu")
    dim = given[1].shape.index(40)
    shapes = {}, {dim: torch.export.Dim("pages", min=8, max=1000)}, {}
    with torch.no_grad():
        program = torch.export.export(Step(call, form), given, dynamic_shapes=shapes)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "step.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for pages in PAGES:
        check(package, call, form, pages, "cpu", inside=True)


def test_sizes_that_the_checks_of_an_op_find_equal() -> None:
    """The pages of two views are inputs of the graph, and one symbol."""

    def step(k: Tensor, v: Tensor, new: Tensor, pages: Tensor) -> Tensor:
        arange, positions = torch.arange(3, dtype=torch.int32), pages.int() * 0 + 1
        attn_ops.append_paged_kv_cache(new, -new, arange[:2], positions, (k, v), pages.int(), arange, None)
        return new + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    new, chosen = torch.randn(2, HEADS, DIM), torch.tensor([5, 7])
    for pages in PAGES:
        expected, cache = torch.zeros(2, pages, 2, PAGE_SIZE, HEADS, DIM).unbind(0)
        step(*expected.unbind(1), new, chosen)
        compiled(*cache.unbind(1), new, chosen)
        assert torch.equal(cache, expected)
