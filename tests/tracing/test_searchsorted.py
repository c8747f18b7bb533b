"""What Inductor gets to search is a buffer of its own, from its first element on.

On CUDA, Inductor's ``searchsorted`` reads the sorted sequence by the name of its buffer. PyTorch 2.11 raises
``NotImplementedError: SliceView`` for a view that is not realized, and loses the offset of one that is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.page_tables import int32
from torch import Tensor
from torch._inductor import ir, lowering
from torch._inductor.graph import GraphLowering

import attn_ops

SEARCH = torch.ops.aten.searchsorted.Tensor
SIZES = {"page_size": 4, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16}
TABLE = int32([0, 2, 3]), int32([5, 1, 7]), int32([3, 4])


class Lowered(BaseException):
    """The graph is lowered. Code generation is not part of these tests."""


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each search of the lowered graph is given: ``"buffer"``, or a view and its offset."""
    found: list[str] = []
    original = lowering.lowerings[SEARCH]

    def search(sorted_sequence: ir.TensorBox, *args: Any, **kwargs: Any) -> Any:
        if isinstance(sorted_sequence.data, ir.StorageBox):
            sorted_sequence.realize()
            layout = sorted_sequence.get_layout()
            found.append("buffer" if layout.offset == 0 and layout.stride[-1] == 1 else f"layout {layout}")
        else:
            found.append(type(sorted_sequence.data).__name__)
        return original(sorted_sequence, *args, **kwargs)

    def codegen(self: GraphLowering) -> None:
        raise Lowered

    monkeypatch.setitem(lowering.lowerings, SEARCH, search)
    monkeypatch.setattr(GraphLowering, "codegen", codegen)
    return found


def _lower(function: Callable[..., Any], *args: Any) -> None:
    try:
        torch.compile(function, fullgraph=True)(*args)
    except Lowered:
        return
    raise AssertionError("the function must be lowered")


def test_the_fixture_finds_a_view(searched: list[str]) -> None:
    _lower(lambda x, y: torch.searchsorted((x + 1)[1:], y), torch.arange(5), torch.arange(3))
    _lower(lambda x, y: torch.searchsorted(x[1:], y), torch.arange(5), torch.arange(3))
    assert len(searched) == 2
    assert "buffer" not in searched


def _tree_masked(q: Tensor, cache: Tensor, tables: Tensor, seq_lens: Tensor, mask: Tensor) -> Tensor:
    options: dict[str, Any] = {"kv_layout": "NHD", "q_len_per_req": 3, "mask": mask}
    return attn_ops.trtllm_batch_decode_with_kv_cache(q, cache, None, tables, seq_lens, 99, 0.25, **options)


def test_tree_masks_search_a_buffer(searched: list[str]) -> None:
    visible = torch.tensor([1, 3, 7], dtype=torch.int32).to(torch.uint16).view(1, 3, 1).repeat(4, 1, 1)
    tables = torch.arange(8, dtype=torch.int32).view(4, 2)
    _lower(_tree_masked, torch.randn(12, 4, 16), torch.randn(20, 2, 4, 2, 16), tables, int32([7] * 4), visible)
    assert searched
    assert set(searched) == {"buffer"}


def _places(indptr: Tensor, seq_lens: Tensor) -> Any:
    return torch.ops.attn.batch_indices_positions(indptr[1:], seq_lens, 3)


def _merge(v: Tensor, s: Tensor, indptr: Tensor) -> Any:
    return torch.ops.attn.merge_states_varlen(v, s, indptr[1:])


def _pack(x: Tensor, indptr: Tensor) -> Any:
    return torch.ops.attn.segment_packbits(x, indptr[1:], 4)


OPS = [
    pytest.param(_places, (int32([0, 0, 1, 3]), int32([4, 5])), id="batch_indices_positions"),
    pytest.param(_merge, (torch.randn(4, 2, 8), torch.randn(4, 2), int32([0, 0, 1, 4])), id="merge_states_varlen"),
    pytest.param(_pack, (torch.rand(20) < 0.5, int32([0, 0, 9, 20])), id="segment_packbits"),
]


@pytest.mark.parametrize(("function", "args"), OPS)
def test_ops_on_a_slice_search_a_buffer(function: Any, args: Any, searched: list[str]) -> None:
    _lower(function, *args)
    assert searched
    assert set(searched) == {"buffer"}


@pytest.mark.parametrize("options", [{}, {"fixed_split_size": 16}, {"window_left": 5}], ids=str)
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
def test_plan_ops_search_a_buffer(prefill: bool, options: dict[str, Any], searched: list[str]) -> None:
    if prefill:
        prefiller = attn_ops.PrefillPlanner(4, 9, 8, num_ctas=4, **SIZES, **options)
        _lower(lambda rows, *t: torch.ops.attn.plan_prefill(rows, *t, prefiller.state), int32([0, 2, 5]), *TABLE)
    else:
        decoder = attn_ops.DecodePlanner(4, 8, num_ctas=4, **SIZES, **options)
        _lower(lambda *t: torch.ops.attn.plan_decode(*t, decoder.state), *TABLE)
    assert searched
    assert set(searched) == {"buffer"}


MAPS = torch.tensor([[[True, False, True], [False, True, True]]] * 2)
SIZES_OF_BLOCKS = int32([[3, 2]] * 2), int32([[4, 4, 8]] * 2)


@pytest.mark.parametrize("causal", [False, True])
def test_block_sparse_planners_search_a_buffer(causal: bool, searched: list[str]) -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "page_size"} | {"causal": causal}
    bsr = attn_ops.BlockSparsePlanner(5, 16, 3, 4, 8, **sizes)
    _lower(lambda indptr, indices: bsr.plan(indptr[1:], indices), int32([0, 0, 2, 3]), int32([0, 3, 1]))
    variable = attn_ops.VariableBlockSparsePlanner(5, 16, 2, 3, 40, **SIZES, causal=causal)
    _lower(variable.plan, MAPS, *SIZES_OF_BLOCKS)
    assert searched
    assert set(searched) == {"buffer"}
