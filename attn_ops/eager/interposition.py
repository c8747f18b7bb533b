"""Modes, transforms, tracers and profilers, which must observe the ops of a call."""

from __future__ import annotations

import torch
from torch.autograd import profiler
from torch.compiler import is_compiling


def _is_profiled() -> bool:
    """Whether a profiler of any thread runs: it may observe all of them."""
    return profiler._is_profiler_enabled


INTERPOSITION_CHECKS = (
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._autograd._profiler_enabled,
    _is_profiled,
    torch._C._is_tracing,
)
"""Functions without arguments. If any returns true, a mode, transform, tracer or profiler must observe the op."""


def is_traced() -> bool:
    """Whether the results of ops may become part of a graph, so that they hold for this call alone.

    In a mode or transform, such as ``make_fx`` and ``vmap``, tensors may stand for others.
    """
    return bool(
        is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack()
        or torch._C._get_tracing_state()
    )
