"""AOTInductor packages that describe themselves: :func:`export_package`.

A package has the model ``model``, a step that takes a plan, and the model ``plan``, which fills the plan. The metadata
of ``model`` says what a C++ process needs to allocate and to check, in strings, as ``attn_ops/include/attn_ops`` reads
them::

    attn_ops.format           FORMAT
    attn_ops.version          version of this library
    attn_ops.plan             DecodePlan or PrefillPlan
    attn_ops.problem          "page_size=16 num_qo_heads=32 ...", the fields of PlanProblem
    attn_ops.capacity         "max_batch=8 max_pages=64 max_tokens=8 cache_pages=0 max_splits=0", 0: there is none
    attn_ops.kv_block         KV tokens in a KV block
    attn_ops.device           device type of the plan
    attn_ops.fields           names of the plan's fields, in order
    attn_ops.field.<name>     sizes of a field, as "0,16,32"; all fields are int32
    attn_ops.workspace        float32 elements of the workspace
    attn_ops.inputs           number of tensors that the step takes
    attn_ops.input.<i>        one of them, i from 0: "<role> <name> <dtype> <device type> <sizes> <strides> <access>"

A role is ``plan``, ``workspace`` or ``input``. Sizes and strides are numbers joined by commas, ``?`` for a dynamic one
and ``-`` for a scalar. The access is ``read``, or ``write`` of a tensor that the step writes.
"""

from __future__ import annotations

import inspect
import os
import platform
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from attn_ops.errors import ArgumentError, ArgumentTypeError, OptionError, UnsupportedError, dtype_name, fail
from attn_ops.plan.context import ContextShard
from attn_ops.plan.state import KV_BLOCK, DecodePlan, PlanProblem, PrefillPlan, num_partials
from attn_ops.planner import DecodePlanner, PrefillPlanner
from attn_ops.typed import typed
from attn_ops.version import __version__

__all__ = ["export_package"]

WHERE = "export_package"

FORMAT = "2"
"""Format of the metadata. A C++ process refuses packages of another format."""

METADATA = "aot_inductor.metadata"
"""Inductor's option for what is stored in a package: strings by name."""

ARCHITECTURES = {256: "x86-64-v3", 512: "x86-64-v4"}
"""x86-64 level by the number of bits of its vectors. The C++ API takes any CPU with such vectors for one of that
level."""


@typed
def export_package(
    module: nn.Module,
    planner: DecodePlanner | PrefillPlanner,
    inputs: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Mapping[str, Any] | None = None,
    strict: bool = False,
    inductor_configs: Mapping[str, Any] | None = None,
) -> str:
    """Export ``module`` and the planning of ``planner``, compile both, and write them to one package.

    The package is one for ``attn_ops/attn_ops.h`` in C++. In Python,
    ``torch._inductor.package.load_package(path, "model")`` loads the step. With ``context`` in the planner it is that
    of one rank, and plans from the page table of all ranks.

    Args:
        module: a step, which takes the plan and the workspace as arguments of ``forward``.
        planner: the planner of that plan. Its capacities are those of the package.
        inputs: example arguments of ``forward``, with ``planner.state`` and ``planner.workspace`` among them. The plan
            may be empty. The example has 2 or more of what is dynamic. Views of one tensor, such as ``cache[:, 0]`` and
            ``cache[:, 1]``, are inputs of their own: all but the first are copied for the export.
        path: the file to write, ``*.pt2``.
        dynamic_shapes: by the name of an argument, as for ``torch.export.export``. Arguments that are left out have
            fixed sizes; plan and workspace always have.
        strict: as for ``torch.export.export``.
        inductor_configs: further options of Inductor. Metadata among them is kept.

    Returns:
        ``path``.

    Raises:
        ArgumentError: ``inputs`` do not fit ``forward``, do not contain the plan or contain a tensor twice;
            ``dynamic_shapes`` names no argument.
        OptionError: ``path`` does not end with ``.pt2``; ``dynamic_shapes`` has an entry for the plan or the workspace.
        UnsupportedError: an input is not a tensor, or metadata is not a mapping of strings.
    """
    from torch._inductor.package import package_aoti

    target = os.fspath(path)
    if not target.endswith(".pt2"):
        fail(OptionError, WHERE, f"path is {target!r}", "a name that ends with .pt2", "rename the file")
    bound = _bound(module, planner, inputs)
    arguments = bound.arguments
    shapes = _dynamic_shapes(planner, arguments, dynamic_shapes or {})
    configs = dict(inductor_configs or {})
    own = configs.pop(METADATA, {})
    if not all(isinstance(word, str) for pair in dict(own).items() for word in pair):
        fail(UnsupportedError, WHERE, f"{METADATA} is {own!r}", "strings by name", "convert keys and values to strings")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        step = torch.export.export(module, bound.args, dynamic_shapes=shapes, strict=strict)
        metadata = {**own, **_plan_metadata(planner), **_input_metadata(planner, arguments, step)}
        plan = _export_plan(planner)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        files = {"model": _compile(step, configs, metadata), "plan": _compile(plan, configs, _plan_metadata(planner))}
        package_aoti(target, files)
    return target


def _compile(program: ExportedProgram, configs: Mapping[str, Any], metadata: dict[str, str]) -> Any:
    args, kwargs = program.example_inputs
    options = {**_architecture(configs), **configs, "aot_inductor.package": True}
    options[METADATA] = dict(metadata)  # Inductor adds to it
    return torch._inductor.aot_compile(program.module(check_guards=False), args, kwargs, options=options)


def _architecture(configs: Mapping[str, Any]) -> dict[str, str]:
    """Inductor's option that keeps the code on the host to vectors of ``cpp.simdlen`` bits, where that is given.

    ``cpp.simdlen`` by itself limits only the code that Inductor writes. The C++ compiler may use any instruction of
    this CPU.
    """
    from torch._inductor import config

    bits = configs.get("cpp.simdlen", config.cpp.simdlen)
    known = platform.machine() in ("x86_64", "AMD64") and getattr(config.cpp, "march", "") is None
    return {"cpp.march": ARCHITECTURES.get(bits, "x86-64")} if known and bits is not None else {}


def _bound(module: nn.Module, planner: DecodePlanner | PrefillPlanner, inputs: Sequence[Any]) -> inspect.BoundArguments:
    """``inputs`` by the names of the arguments of ``forward``, in its order; those of ``*args`` are a tuple."""
    if not isinstance(inputs, Sequence):
        kind = type(inputs).__name__
        fail(
            ArgumentTypeError,
            WHERE,
            f"inputs is of type {kind}",
            "a tuple",
            "pass the arguments of forward in its order",
        )
    try:
        bound = inspect.signature(module.forward).bind(*inputs)
    except TypeError as error:
        fail(
            ArgumentError,
            WHERE,
            f"inputs do not fit forward of {type(module).__name__}: {error}",
            "one example for each argument",
            "pass them in the order of forward, which takes them by position",
        )
    arguments = bound.arguments
    if not any(value is planner.state for value in arguments.values()):
        fail(
            ArgumentError,
            WHERE,
            "no input is the plan of the planner",
            "planner.state as an argument of forward",
            "take the plan as an argument; one that is an attribute of the module would be a constant of the graph",
        )
    _check_apart(arguments)
    for name, value in arguments.items():
        if value is planner.state or value is planner.workspace:
            continue
        if isinstance(value, DecodePlan | PrefillPlan):
            fail(UnsupportedError, WHERE, f"{name} is a plan of another planner", "one plan", "export two packages")
        for leaf in pytree.tree_leaves(value):
            if not isinstance(leaf, Tensor):
                kind = type(leaf).__name__
                fail(UnsupportedError, WHERE, f"{name} has a value of type {kind}", "tensors", "make it an attribute")
    bound.arguments = _with_own_storage(arguments, planner)
    return bound


def _check_apart(arguments: dict[str, Any]) -> None:
    """No tensor is given twice: torch.export takes the two for one input, and the package would ignore the other."""
    held: dict[int, str] = {}
    for argument, value in arguments.items():
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            name = f"{argument}{pytree.keystr(path)}"
            if isinstance(leaf, Tensor) and held.setdefault(id(leaf), name) != name:
                shown, expected = f"{name} is the same tensor as {held[id(leaf)]}", "an example of its own for each"
                fail(ArgumentError, WHERE, shown, expected, f"pass a copy as {name}")


def _with_own_storage(arguments: dict[str, Any], planner: DecodePlanner | PrefillPlanner) -> dict[str, Any]:
    """``arguments``, in which views that share storage with an earlier one are copies with the same strides.

    AOTAutograd fails where a step writes one of two such views. The planner's tensors stay as they are.
    """
    planned = planner.state, planner.workspace
    seen = {StorageWeakRef(leaf.untyped_storage()) for leaf in pytree.tree_leaves(planned)}

    def own(leaf: Tensor) -> Tensor:
        storage = StorageWeakRef(leaf.untyped_storage())
        if storage not in seen:
            seen.add(storage)
            return leaf
        sizes, strides = leaf.size(), leaf.stride()
        span = 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True)) if leaf.numel() else 0
        return leaf.detach().as_strided((span,), (1,)).clone().as_strided(sizes, strides)

    return {
        name: value if any(value is one for one in planned) else pytree.tree_map(own, value)
        for name, value in arguments.items()
    }


def _dynamic_shapes(
    planner: DecodePlanner | PrefillPlanner, arguments: dict[str, Any], given: Mapping[str, Any]
) -> tuple[Any, ...]:
    """One entry for each argument, in order; fields of the plan have fixed sizes."""
    for name in given:
        if name not in arguments:
            names = ", ".join(arguments)
            fail(ArgumentError, WHERE, f"dynamic_shapes has {name!r}", f"some of {names}", "correct the name")
        if arguments[name] is planner.state or arguments[name] is planner.workspace:
            expected = "no entry, since the capacity of a plan is fixed"
            fail(OptionError, WHERE, f"dynamic_shapes has {name!r}, which is the planner's", expected, "leave it out")
    return tuple(
        given[name] if name in given else pytree.tree_map(lambda t: {}, value) for name, value in arguments.items()
    )


class _Plan(nn.Module):
    """Base class of the planning of a package, as a module for ``torch.export``."""

    def __init__(self, context: ContextShard | None) -> None:
        super().__init__()
        self.context = context

    def table(self, plan: DecodePlan | PrefillPlan, *table: Tensor) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
        """The page table that ``plan`` is for, and its lengths on all ranks."""
        if self.context is None:
            return table, {}
        return self.context.planned(PlanProblem.of(plan.problem).page_size, *table)


class _PlanDecode(_Plan):
    """Fills a decode plan."""

    def forward(self, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, plan: DecodePlan) -> None:
        table, lengths = self.table(plan, kv_indptr, kv_indices, kv_last_page_len)
        torch.ops.attn.plan_decode(*table, plan, **lengths)


class _PlanPrefill(_Plan):
    """Fills a prefill plan."""

    def forward(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, plan: PrefillPlan
    ) -> None:
        table, lengths = self.table(plan, kv_indptr, kv_indices, kv_last_page_len)
        torch.ops.attn.plan_prefill(qo_indptr, *table, plan, **lengths)


def _export_plan(planner: DecodePlanner | PrefillPlanner) -> ExportedProgram:
    """A program that plans up to ``max_batch`` requests, from up to ``max_pages`` page numbers."""
    max_batch, max_pages = int(planner.state.kv_len.shape[0]), planner.max_pages
    indptr = torch.zeros(max_batch + 1, dtype=torch.int32, device=planner.device)
    table = indptr, indptr.new_zeros(max_pages), indptr[1:].clone()
    batch = Dim("batch", min=1, max=max_batch) if max_batch > 1 else None
    many: tuple[dict[int, Any], dict[int, Any]] = ({0: batch + 1}, {0: batch}) if batch else ({}, {})
    pages = {0: Dim("pages", min=0, max=max_pages)} if max_pages > 1 else {}
    table_shapes: tuple[Any, ...] = (many[0], pages, many[1], pytree.tree_map(lambda t: {}, planner.state))
    if isinstance(planner, DecodePlanner):
        return torch.export.export(_PlanDecode(planner.context), (*table, planner.state), dynamic_shapes=table_shapes)
    inputs = (torch.zeros_like(indptr), *table, planner.state)
    return torch.export.export(_PlanPrefill(planner.context), inputs, dynamic_shapes=(many[0], *table_shapes))


def _plan_metadata(planner: DecodePlanner | PrefillPlanner) -> dict[str, str]:
    plan = planner.state
    max_batch = int(plan.kv_len.shape[0])
    capacity = {
        "max_batch": max_batch,
        "max_pages": planner.max_pages,
        "max_tokens": planner.max_tokens if isinstance(planner, PrefillPlanner) else max_batch,
        "cache_pages": planner.cache_pages or 0,
        "max_splits": num_partials(plan) if isinstance(plan, PrefillPlan) else 0,
    }
    entries = {
        "format": FORMAT,
        "version": __version__,
        "plan": type(plan).__name__,
        "problem": _named(planner.problem._asdict()),
        "capacity": _named(capacity),
        "kv_block": str(KV_BLOCK),
        "device": planner.device.type,
        "fields": " ".join(plan._fields),
        "workspace": str(planner.workspace.numel()),
        **{f"field.{name}": _joined(field.shape) for name, field in plan._asdict().items()},
    }
    return {f"attn_ops.{name}": value for name, value in entries.items()}


def _input_metadata(
    planner: DecodePlanner | PrefillPlanner, arguments: dict[str, Any], program: ExportedProgram
) -> dict[str, str]:
    """Metadata of each tensor of the arguments, in order: its role, name, form and whether the program writes it."""
    named: list[tuple[str, str]] = []
    for name, value in arguments.items():
        role = "plan" if value is planner.state else "workspace" if value is planner.workspace else "input"
        fields = planner.state._fields if role == "plan" else None
        leaves, _ = pytree.tree_flatten_with_path(value)
        for i, (path, _) in enumerate(leaves):
            named.append((role, f"{name}.{fields[i]}" if fields else f"{name}{pytree.keystr(path)}".replace(" ", "")))
    user_inputs = set(program.graph_signature.user_inputs)
    nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in user_inputs]
    written = set(program.run_decompositions({}).graph_signature.user_inputs_to_mutate.values())
    entries = {"inputs": str(len(named))}
    for i, ((role, name), node) in enumerate(zip(named, nodes, strict=True)):
        t = node.meta["val"]
        words = role, name, dtype_name(t.dtype), t.device.type, _joined(t.shape), _joined(t.stride())
        entries[f"input.{i}"] = " ".join((*words, "write" if node.name in written else "read"))
    return {f"attn_ops.{name}": value for name, value in entries.items()}


def _named(numbers: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in numbers.items())


def _joined(sizes: Sequence[Any]) -> str:
    """``sizes`` as text, with ``?`` for symbols."""
    return ",".join("?" if isinstance(size, torch.SymInt) else str(size) for size in sizes) or "-"
