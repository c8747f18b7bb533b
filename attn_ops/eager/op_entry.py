"""The function that an op's name calls: it finds repeated eager calls before the dispatcher.

``torch.ops.attn.name`` and its overload call the function in their attribute ``_op``, which converts every argument,
among them the tensors of a plan, and passes the dispatcher. :func:`install` puts an :class:`OpEntry` in its place. An
entry only looks up calls with plain tensors: the caches behind it leave every call to PyTorch's function that is new
or that a mode, transform, tracer or profiler must observe (:mod:`attn_ops.eager.op_cache`,
:mod:`attn_ops.eager.checked_call`). Traced graphs and exported programs contain the op as if there were no entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_ops.eager.interposition import check_no_grad, may_be_differentiated

Function = Callable[..., Any]


class OpEntry:
    """The function that the name of an op, or of its overload, calls.

    schema       the op's schema
    cuda, cpu    the functions of calls whose first argument is a tensor on CUDA or on the CPU
    function     PyTorch's function, which calls the dispatcher
    """

    __slots__ = ("cpu", "cuda", "function", "schema")

    def __init__(self, schema: Any, cuda: Function, cpu: Function, function: Function) -> None:
        self.schema, self.cuda, self.cpu, self.function = schema, cuda, cpu, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is Tensor:
            if args[0].is_cuda:
                return self.cuda(*args, **kwargs)
            if args[0].is_cpu:
                return self.cpu(*args, **kwargs)
        return self.dispatched(*args, **kwargs)

    def dispatched(self, *args: Any, **kwargs: Any) -> Any:
        """Call PyTorch's function, after a check for gradients of ``torch.func``, which kernels do not see."""
        if may_be_differentiated():
            names = [argument.name for argument in self.schema.arguments]
            named = {**dict(zip(names, args, strict=False)), **kwargs}
            tensors = {name: x for name, x in named.items() if isinstance(x, Tensor) and x.is_floating_point()}
            check_no_grad(self.schema.name.partition("::")[2], **tensors)
        return self.function(*args, **kwargs)


def install(packet: Any, cuda: Function, cpu: Function) -> None:
    """Let ``packet``, an op with one overload, call ``cuda`` and ``cpu`` first. TorchScript still finds the op."""
    for target in (packet, packet.default):
        if hasattr(target, "_op"):
            target._op = OpEntry(packet.default._schema, cuda, cpu, target._op)
            torch.jit._builtins._register_builtin(target._op, packet._qualified_op_name)


def dispatched(packet: Any) -> Function:
    """The function of ``packet`` that calls the dispatcher."""
    function = getattr(packet, "_op", packet)
    found: Function = function.dispatched if isinstance(function, OpEntry) else function
    return found
