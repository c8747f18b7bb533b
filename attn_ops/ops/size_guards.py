"""Size guards of AOTInductor packages: a package refuses sizes that it was not compiled for.

Dynamo and exported programs check the sizes of their inputs. AOTInductor drops these checks: generated code reads each
symbol from one input, and assumes the ranges of symbols and all static sizes. A package with an op of this library
therefore starts with

* the capacity checks of the ops, with the messages of eager calls (:func:`note_capacity`);
* a check of every input tensor's dtype, device type, sizes and strides against the exported ones.

They run on the host, before the first kernel, and throw ``std::runtime_error``. A size that PyTorch specializes on has
no minimum (:data:`_SPECIALIZED`).
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from attn_ops.errors import dtype_name

LOG = logging.getLogger(__name__)

_NO_BOUND = 2**62
"""A maximum from here on is no bound: PyTorch gives every size a maximum below ``2**63``."""

_SPECIALIZED = 3
"""Minima up to here are not checked. PyTorch specializes on sizes of 0 and 1, so the smallest dynamic size is 2, or 3
for cumulative lengths, whose batch is one less. The generated code also runs smaller sizes."""


class Capacity(NamedTuple):
    """A capacity check: a call needs ``needed`` of ``capacity``. ``message`` has ``{needed}`` and ``{capacity}`` in
    place of both."""

    needed: Any
    capacity: Any
    message: str


_noted: ContextVar[list[Capacity] | None] = ContextVar("attn_ops_capacities", default=None)


def note_capacity(needed: Any, capacity: Any, message: str) -> None:
    """Note a capacity that suffices as far as is known. Checks call it, and guards of a package repeat the check."""
    noted = _noted.get()
    if noted is not None and any(isinstance(size, torch.SymInt) for size in (needed, capacity)):
        noted.append(Capacity(needed, capacity, message))


def root_graph(graph: Any) -> Any:
    """The graph that Inductor compiles; ``graph`` may be that of a branch or a loop in it."""
    while hasattr(graph, "parent"):
        graph = graph.parent
    return graph


@contextlib.contextmanager
def guards_of(graph: Any) -> Iterator[None]:
    """Context in which capacities that checks note become guards of ``graph``, an Inductor graph of a package."""
    root = root_graph(graph)
    if not root.aot_mode or not _generates_handles(root):
        yield
        return
    if not hasattr(root, "attn_ops_capacities"):
        root.attn_ops_capacities = []
        _install(root)
    if root is not graph:  # a branch that may not run
        yield
        return
    token = _noted.set(root.attn_ops_capacities)
    try:
        yield
    finally:
        _noted.reset(token)


def _generates_handles(graph: Any) -> bool:
    """Whether inputs of the generated code are tensor handles, which have a rank, sizes and strides."""
    from torch._inductor import config

    array_refs = getattr(config.aot_inductor, "use_minimal_arrayref_interface", False)
    return not array_refs and not getattr(graph, "fx_wrapper", False)


def _install(graph: Any) -> None:
    """Write the guards where the generated function has assigned its inputs and symbols."""
    init_wrapper_code = graph.init_wrapper_code

    def init(*args: Any, **kwargs: Any) -> None:
        init_wrapper_code(*args, **kwargs)
        wrapper = graph.wrapper_code
        codegen_inputs = getattr(wrapper, "codegen_inputs", None)
        if codegen_inputs is None:
            LOG.warning("attn_ops: packages of torch %s do not check the sizes of their inputs", torch.__version__)
            return

        def with_guards() -> None:
            codegen_inputs()
            for line in _lines(graph, wrapper):
                wrapper.prefix.writeline(line)

        wrapper.codegen_inputs = with_guards

    graph.init_wrapper_code = init


_REFUSE = """\
const auto refuse = [](const char* what, int64_t actual, const char* expected, int64_t size) {
    throw std::runtime_error(
        std::string("package: ") + what + " is " + std::to_string(actual) + "; expected " + expected +
        std::to_string(size) + "; pass tensors like the exported ones, or export the program for these sizes");
};"""


def _lines(graph: Any, wrapper: Any) -> list[str]:
    """A C++ block that throws unless the inputs fit."""
    inputs = {name: value for name, value in graph.graph_inputs.items() if hasattr(value, "get_size")}
    bound = set().union(*(_free_symbols(value) for value in graph.graph_inputs.values()))

    def cpp(size: Any) -> str:
        return f"static_cast<int64_t>({wrapper.codegen_cpp_sizevar(size, simplify=False)})"

    capacities: dict[str, None] = {}
    for needed, capacity, message in graph.attn_ops_capacities:
        sizes = [size.node.expr if isinstance(size, torch.SymInt) else size for size in (needed, capacity)]
        if all(_free(size) <= bound for size in sizes):
            # For a size that the graph computes from contents PyTorch generates a runtime assertion instead.
            capacities[_capacity_line(message, *map(cpp, sizes))] = None
    checks = [line for name, value in inputs.items() for line in _input_lines(graph, name, value, cpp)]
    return ["{", *_REFUSE.splitlines(), *capacities, *checks, "}"]


def _capacity_line(message: str, needed: str, capacity: str) -> str:
    text = json.dumps(message)
    for name, size in (("{needed}", needed), ("{capacity}", capacity)):
        text = text.replace(name, f'" + std::to_string({size}) + "')
    return f"if ({needed} > {capacity}) throw std::runtime_error(std::string() + {text});"


def _free_symbols(value: Any) -> set[Any]:
    sizes = (*value.get_size(), *value.get_stride()) if hasattr(value, "get_size") else (value,)
    return set().union(*map(_free, sizes))


def _free(size: Any) -> set[Any]:
    return getattr(size, "free_symbols", set())


def _ranges(graph: Any) -> dict[Any, Any]:
    """Value ranges by symbol. A minimum that PyTorch may have specialized on becomes 0."""
    from torch.utils._sympy.value_ranges import ValueRanges

    ranges = graph.sizevars.shape_env.var_to_range.items()
    return {s: ValueRanges(0, r.upper) if 0 < r.lower <= _SPECIALIZED else r for s, r in ranges}


def _number(bound: Any) -> int | None:
    """A bound of a size, or None if it is infinite."""
    return int(bound) if bound.is_Integer else None


def _input_lines(graph: Any, name: str, value: Any, cpp: Callable[[Any], str]) -> Iterator[str]:
    """Checks of one input tensor. The stride of a dimension of size 1 or of an empty tensor is not checked."""
    from torch.utils._sympy.value_ranges import bound_sympy

    position = list(graph.graph_inputs).index(name)
    dtype = dtype_name(value.get_dtype())
    rank = len(value.get_size())
    yield "{"
    yield f"int64_t rank; AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim({name}, &rank));"
    yield f'if (rank != {rank}) refuse("the rank of input {position}", rank, "", {rank});'
    yield f"int32_t dtype; AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype({name}, &dtype));"
    yield f"const int32_t expected_dtype = aoti_torch_dtype_{dtype}();"
    text = f'"the dtype number of input {position}", dtype, "that of {dtype}, "'
    yield f"if (dtype != expected_dtype) refuse({text}, expected_dtype);"
    yield f"int32_t device; AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type({name}, &device));"
    device = value.get_device().type
    yield f"const int32_t expected_device = aoti_torch_device_type_{device}();"
    text = f'"the device type of input {position}", device, "that of {device}, "'
    yield f"if (device != expected_device) refuse({text}, expected_device);"
    yield f"const auto sizes = {name}.sizes(); const auto strides = {name}.strides();"
    for d, size in enumerate(value.get_size()):
        text = f'"size {d} of input {position}", sizes[{d}]'
        if _free(size):
            bounds = bound_sympy(size, _ranges(graph))
            lower, upper = _number(bounds.lower), _number(bounds.upper)
            if lower is not None and lower > 0:
                yield f'if (sizes[{d}] < {lower}LL) refuse({text}, "at least ", {lower}LL);'
            if upper is not None and upper < _NO_BOUND:
                yield f'if (sizes[{d}] > {upper}LL) refuse({text}, "at most ", {upper}LL);'
        yield f'if (sizes[{d}] != {cpp(size)}) refuse({text}, "", {cpp(size)});'
    filled = " && ".join(["true", *(f"sizes[{d}] > 0" for d in range(len(value.get_size())))])
    yield f"if ({filled}) {{"
    for d, stride in enumerate(value.get_stride()):
        text = f'"stride {d} of input {position}", strides[{d}], "", {cpp(stride)}'
        yield f"if (sizes[{d}] > 1 && strides[{d}] != {cpp(stride)}) refuse({text});"
    yield "}}"
