"""Modes, transforms, tracers and profilers, which must observe the ops of a call."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from attn_ops.errors import GradientError, fail
from attn_ops.tracing import is_compiling


def _is_profiled_or_differentiated() -> bool:
    """Whether a profiler runs in any thread, since it may observe all threads, or forward-mode AD is active."""
    return profiler._is_profiler_enabled or forward_ad._current_level >= 0


INTERPOSITION_CHECKS = (
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._autograd._profiler_enabled,
    _is_profiled_or_differentiated,
    torch._C._is_tracing,
)
"""Functions without arguments. If any returns true, a mode, transform, tracer or profiler must observe the op."""


def is_traced() -> bool:
    """Whether ops may be recorded in a graph or transformed. Their results are then valid only in this call.

    In a mode or transform, such as ``make_fx`` and ``vmap``, a tensor may stand for other tensors.
    """
    return bool(
        is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack()
        or torch._C._get_tracing_state()
    )


def is_recorded() -> bool:
    """Whether ``make_fx`` records the ops. The contents of tensors are then those of the example inputs."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # imports SymPy

    return get_proxy_mode() is not None


def may_be_differentiated() -> bool:
    """Whether arguments may have gradients that kernels do not see: those of ``torch.func``, or tangents."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def check_no_grad(where: str, **tensors: Tensor | None) -> None:
    """Raise a GradientError if one of ``tensors`` is differentiated."""
    backward, forward = torch.is_grad_enabled(), forward_ad._current_level >= 0
    if not backward and not forward:
        return
    for name, t in tensors.items():
        if t is None:
            continue
        if backward and t.requires_grad:
            expected, fix = "inference, these ops have no backward", f"call under torch.no_grad() or detach {name}"
            fail(GradientError, where, f"{name} requires grad", expected, fix)
        if forward and forward_ad.unpack_dual(t).tangent is not None:
            expected = "inference, these ops have no forward-mode derivative"
            fail(GradientError, where, f"{name} has a tangent", expected, f"detach {name}")
