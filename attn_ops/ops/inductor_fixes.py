"""Corrections of Inductor's lowerings, on which writes into views of a KV cache depend.

Each leaves a PyTorch that needs no correction as it is.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch


def fix_lowerings() -> None:
    """Install the corrections. Inductor is imported.

    Raises:
        ImportError, AttributeError: this PyTorch has other names.
    """
    _fix_as_strided()
    _fix_storage_offset()
    _fix_replaced_symbols()


def _fix_as_strided() -> None:
    """Lower ``as_strided`` from the right element. PyTorch before 2.13 counts from the first element of the base.

    Without an offset it begins at the first element of the view that it is given. Caches with a page table for each KV
    head are such views (:mod:`attn_ops.frontend.head_tables`). An offset counts from the start of the storage, which is
    not that of an input of the graph: keys and values of one cache are such inputs.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    original = lowering.as_strided
    if "storage_offset_relative_to_input_storage" in inspect.signature(original).parameters:
        return

    def offset_of_input(x: Any) -> Any:
        """The storage offset of the graph's input that ``x`` is, or is a view of."""
        while x is not None and not isinstance(x, ir.InputBuffer):
            x = getattr(x, "data", None)
        if x is None:
            return 0
        graph: Any = V.graph
        inputs = graph.module.graph.find_nodes(op="placeholder")
        found = [node.meta["val"] for node in inputs if graph.qualify_name(node.target) == x.get_name()]
        offset = found[0].storage_offset() if found else 0
        return offset.node.expr if isinstance(offset, torch.SymInt) else offset

    def as_strided(x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        if storage_offset is not None:
            storage_offset = storage_offset - offset_of_input(x)
        elif isinstance(x, ir.TensorBox) and isinstance(x.data, ir.BaseView):
            layout = x.maybe_get_layout()
            storage_offset = None if layout is None else layout.offset
        return original(x, size, stride, storage_offset)

    # By its name: of a packet, only overloads that have no lowering yet are registered.
    lowering.register_lowering(torch.ops.aten.as_strided.default, type_promotion_kind=None)(as_strided)


def _fix_storage_offset() -> None:
    """Lower ``sym_storage_offset`` to the offset of the traced tensor. Without a lowering it is 0.

    Functionalization makes such a node for each view that an op writes, if the offset is symbolic: the values of a
    cache ``[2, pages, ...]`` with any number of pages.
    """
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    op = torch.ops.aten.sym_storage_offset.default
    if op in lowering.lowerings:
        return

    def storage_offset(x: Any) -> Any:
        offset = V.graph.current_node.meta["val"]
        return offset.node.expr if isinstance(offset, torch.SymInt) else int(offset)

    lowering.register_lowering(op, type_promotion_kind=None)(storage_offset)


def _fix_replaced_symbols() -> None:
    """Bind the symbol that sizes of tensors have, where a graph's input is a symbol that another one has replaced.

    The inputs of two views of one cache are such symbols, which the checks of an op have found to be equal.
    """
    from torch._inductor import graph

    original = getattr(graph, "_get_placeholder_expr", None)  # earlier versions bind the symbol of sizes
    if original is None or getattr(original, "of_attn_ops", False):
        return

    def placeholder_expr(node: Any) -> Any:
        expr, replaced = original(node), node.expr
        return replaced if expr is node._expr and replaced.is_Symbol else expr

    placeholder_expr.of_attn_ops = True  # type: ignore[attr-defined]
    graph._get_placeholder_expr = placeholder_expr  # type: ignore[assignment]
