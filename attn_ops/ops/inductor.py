"""Inductor lowering: an op stays opaque through tracing, and becomes the body of its backend in Inductor.

Dynamo, export, functionalization and re-inplacing see one node per op, so a graph stays readable and a write into a
view of the KV cache copies nothing. When Inductor lowers that node, the chosen backend's function is traced with
``make_fx``, and its aten ops and Triton kernels are lowered in the node's place: an AOTInductor package needs neither
this library nor Python. A graph that can call Python keeps a call where a kernel runs that Inductor does not generate.

This module holds the private PyTorch API that shapes graphs. Where that API is missing, every op stays a call, and only
the Python-free package is lost.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from attn_ops import kernels, meta
from attn_ops.native import package
from attn_ops.ops import size_guards, tuning_table
from attn_ops.ops.inductor_fixes import fix_lowerings
from attn_ops.ops.repeated_plans import SHARED_OPS, Made, RepeatedPlans
from attn_ops.tracing import is_compiling

LOG = logging.getLogger(__name__)

Body = Callable[..., Any]

SOURCES = ("py", "h", "cpp", "cu", "cuh")
"""Suffixes of the files that a lowering depends on."""


@functools.cache
def sources_tag() -> str:
    """A hash of this library's sources and tables: Inductor's cache key holds an op's name, not its lowering."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in (root, *map(Path, kernels.__path__), *map(Path, meta.__path__)):
        for source in sorted(path for suffix in SOURCES for path in folder.rglob(f"*.{suffix}")):
            digest.update(source.read_bytes())
    table = tuning_table.file()
    if table is not None and table.is_file():
        digest.update(table.read_bytes())
    return f"attn_ops-{digest.hexdigest()[:16]}"


class Lowerings:
    """Registers the lowerings once Inductor is imported, which takes more than a second."""

    def __init__(self) -> None:
        self._pending: dict[torch._ops.OpOverload, tuple[Body, Callable[..., bool]]] = {}

    def add(self, op: torch._ops.OpOverload, body: Body, is_lowerable: Callable[..., bool]) -> None:
        """``body`` is inlined in place of ``op``, unless the graph can call ops and ``is_lowerable`` is false."""
        self._pending[op] = body, is_lowerable

    def register_if_compiling(self) -> None:
        """Called by every fake implementation: a graph is traced before it is lowered or found in Inductor's cache."""
        if not self._pending or "torch._inductor" not in sys.modules:
            return
        pending, self._pending = self._pending, {}
        try:
            fix_lowerings()
            for op, (body, is_lowerable) in pending.items():
                _register(op, body, is_lowerable)
        except (ImportError, AttributeError) as error:
            LOG.warning(
                "attn_ops cannot inline its ops with torch %s (%s): compiled graphs call them, and an "
                "AOTInductor package needs this library loaded",
                torch.__version__,
                error,
            )
            return
        config = torch.compiler.config
        if sources_tag() not in config.cache_key_tag:
            config.cache_key_tag = f"{config.cache_key_tag}{sources_tag()}"


def _register(op: torch._ops.OpOverload, body: Body, is_lowerable: Callable[..., bool]) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import fallback_handler, process_subgraph_nodes, register_lowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    num_returns = len(op._schema.returns)
    names = [argument.name for argument in op._schema.arguments]

    def inline(call: tuple[Any, Any], fake_call: tuple[Any, Any]) -> Any:
        """Trace ``body`` on the fake tensors of a call, and lower the graph on its values."""
        leaves, spec = pytree.tree_flatten(fake_call)
        values = pytree.tree_leaves(call, is_leaf=lambda x: not isinstance(x, (list, tuple, dict)))
        inputs = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _TRACED)]
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), None)

        def flat(*traced: Any) -> tuple[Any, ...]:
            filled = list(leaves)
            for i, value in zip(inputs, traced, strict=True):
                filled[i] = value
            a, k = pytree.tree_unflatten(filled, spec)
            out = body(*a, **k)
            return () if out is None else out if isinstance(out, tuple) else (out,)

        def trace() -> torch.fx.GraphModule:
            return make_fx(
                flat,
                decomposition_table=select_decomp_table(),
                tracing_mode="real",
                _allow_non_fake_inputs=True,
            )(*[leaves[i] for i in inputs])

        with V.fake_mode, size_guards.guards_of(V.graph):
            graph = package.traced(V.graph, device, trace)
        out = process_subgraph_nodes(graph, [values[i] for i in inputs])
        return None if num_returns == 0 else out[0] if num_returns == 1 else tuple(out)

    def lower(*args: Any, **kwargs: Any) -> Any:
        node = V.graph.current_node
        call = (tuple(node.args), dict(node.kwargs))
        # Inductor may have normalized the arguments to the schema's form and order: take them as the node has them.
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        repeated = _repeated_plans(V.graph, node) if op._opname in SHARED_OPS else None
        made = None if repeated is None else repeated.find(node)
        if made is not None:
            V.graph.env.update(zip(_fields(call, names), made.fields, strict=True))
            return made.result
        if op._opname.startswith("plan_"):
            counters["attn_ops"]["plans"] += 1  # next to Inductor's own counters
        fields = named.get("plan", ())
        args, kwargs = tuple(named[name] for name in names[: len(call[0])]), {name: named[name] for name in call[1]}
        fake_call = pytree.tree_map_only(torch.fx.Node, lambda n: n.meta["val"], call)
        calls_python = not V.graph.aot_mode and not V.graph.cpp_wrapper
        if calls_python and not is_lowerable(*fake_call[0], **fake_call[1]):
            result = fallback_handler(op, add_to_fallback_set=False)(*args, **kwargs)
        else:
            result = inline((args, kwargs), fake_call)
        if repeated is not None:
            repeated.keep(node, Made(fields, result))
        return result

    register_lowering(op, type_promotion_kind=None)(lower)


def _fields(call: tuple[tuple[Any, ...], dict[str, Any]], names: list[str]) -> Sequence[torch.fx.Node]:
    """The nodes of the plan that a call writes, empty if it writes no plan."""
    args, kwargs = call
    return {**dict(zip(names, args, strict=False)), **kwargs}.get("plan", ())


def _repeated_plans(lowering: Any, node: torch.fx.Node) -> RepeatedPlans:
    """The planning nodes of the graph that Inductor lowers. They are dropped with it."""
    repeated = getattr(lowering, "attn_ops_repeated_plans", None)
    if repeated is None or repeated.graph is not node.graph:
        repeated = lowering.attn_ops_repeated_plans = RepeatedPlans(node.graph)
    return repeated


_TRACED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


def concretize_symints(tree: Any) -> Any:
    """Arguments with each symbol replaced by its hint, if it has one."""

    def number(x: Any) -> Any:
        return x if not isinstance(x, torch.SymInt | torch.SymFloat) or x.node.hint is None else x.node.hint

    def concrete(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return number(x)
        sizes = [tuple(map(number, size)) for size in (x.shape, x.stride())]
        return torch.empty_strided(*sizes, dtype=x.dtype, device=x.device, requires_grad=x.requires_grad)

    return pytree.tree_map(concrete, tree)


def mark_dynamic_rows(t: torch.Tensor) -> torch.Tensor:
    """``t``, with a first dimension that graphs may take as dynamic."""
    if "torch._dynamo" in sys.modules and not is_compiling():
        torch._dynamo.maybe_mark_dynamic(t, 0)
    return t


def mark_static(*tensors: torch.Tensor) -> None:
    """Fix the tensors' addresses for CUDA-graph trees, which then neither copy nor refuse to mutate them."""
    if tensors[0].is_cuda and not is_compiling():
        for t in tensors:
            torch._dynamo.mark_static_address(t, guard=False)


def mark_static_size(t: torch.Tensor) -> None:
    """Graphs take the first size of ``t`` as a constant."""
    # torch._dynamo.mark_static(t, 0) without the import of torch._dynamo
    t._dynamo_static_indices = {0}  # type: ignore[attr-defined]
