"""Registration of every op: schema, implementations, fake implementation, Inductor lowering.

Eager     check -> choose a backend -> its function; repeated calls on CUDA are prepared
          (:mod:`attn_ops.eager.op_cache`), on the CPU checked once (:mod:`attn_ops.eager.checked_call`)
Traced    check -> output allocation (:mod:`attn_ops.meta`)
Inductor  check -> choose a backend -> its function, inlined (:mod:`attn_ops.ops.inductor`)

The ops are plain ``torch.library.Library`` registrations: about 3 us a call, where ``custom_op`` takes 8 to 12.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import Library

from attn_ops.eager import op_entry
from attn_ops.eager.checked_call import CHECKED_CALLS, Bases, Check, CheckedCalls
from attn_ops.eager.launches import capture_launches
from attn_ops.eager.op_cache import OP_CACHES, OpCache
from attn_ops.errors import AttnOpsError, OptionError
from attn_ops.meta.outputs import OUTPUTS
from attn_ops.native import images
from attn_ops.ops import backends, functions
from attn_ops.ops.backends import Backend
from attn_ops.ops.checks import CHECKS
from attn_ops.ops.inductor import Lowerings, concretize_symints
from attn_ops.ops.schemas import NAMESPACE, SCHEMAS

LOG = logging.getLogger(__name__)

LIBRARY = Library(NAMESPACE, "FRAGMENT")
LOWERINGS = Lowerings()


def _run(function: Callable[..., Any], device: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a backend's function without autocast, which would change the dtypes inside it."""
    if not torch.is_autocast_enabled(device):
        return function(*args, **kwargs)
    with torch.autocast(device, enabled=False):
        return function(*args, **kwargs)


def _choose(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Backend, str, dict[str, Any]]:
    """Check an eager call: its backend, the type of its device, and ``kwargs`` without ``backend``."""
    options = dict(kwargs)
    name = options.pop("backend", "auto")
    problem = CHECKS[op](*args, backend=name, **options)
    return backends.choose(problem, name), problem.device.type, options


def _checked(op: str) -> Check:
    """The check of the op on the CPU: it chooses the backend, and returns the function that runs the call."""

    def checked(args: Sequence[Any], kwargs: dict[str, Any], bases: Bases | None = None) -> Any:
        chosen, device, options = _choose(op, args, kwargs)
        function = chosen.for_key(op, args, options, bases)
        if function is None or bases is not None:
            return function

        def call(*args: Any, backend: str = "auto", **kwargs: Any) -> Any:
            if torch.is_autocast_enabled(device):
                return _run(function, device, args, kwargs)
            return function(*args, **kwargs)

        return call

    return checked


def _lowering(op: str) -> Callable[..., Any]:
    """The body of the op in graphs: check the call and run the chosen backend.

    It chooses among the entries that Inductor can inline and, while a package collects images, those that have images.
    """
    check = CHECKS[op]

    def implementation(*args: Any, backend: str = "auto", **kwargs: Any) -> Any:
        problem = check(*args, backend=backend, **kwargs)
        chosen = backends.choose(problem, backend, True, images.collecting() is not None)
        LOG.debug("%s: a graph contains the kernels of %s", op, chosen.label(op))
        return _run(chosen.implementation(op), problem.device.type, args, kwargs)

    return implementation


def _op_cache(op: str) -> OpCache:
    """The cache of the op on CUDA. A first call is checked and runs the chosen backend, which may capture launches."""

    def first_call(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        backend, device, options = _choose(op, args, kwargs)
        function = backend.implementation(op)
        if backend.prepared:
            return capture_launches(function, args, options)
        return _run(function, device, args, options), None

    return OpCache(op, functools.partial(_choose, op), first_call)


def _fake(op: str) -> Callable[..., Any]:
    check, outputs = CHECKS[op], OUTPUTS[op]

    def implementation(*args: Any, backend: str = "auto", **kwargs: Any) -> Any:
        LOWERINGS.register_if_compiling()
        try:
            problem = check(*args, backend=backend, **kwargs)
        except AttnOpsError:
            numbers, named = concretize_symints((args, kwargs))
            check(*numbers, backend=backend, **named)  # the message of an eager call, with numbers for symbols
            raise
        LOG.debug("%s: %s runs the traced call", op, backends.choose(problem, backend, traced=True).label(op))
        return outputs(*args, **kwargs)

    return implementation


def _is_lowerable(op: str) -> Callable[..., bool]:
    """Whether Inductor can inline the kernel that a compiled graph with these arguments runs."""
    check = CHECKS[op]

    def is_lowerable(*args: Any, backend: str = "auto", **kwargs: Any) -> bool:
        chosen = backends.choose(check(*args, backend=backend, **kwargs), backend, traced=True)
        if not chosen.inductor_lowerable:
            LOG.debug("%s: a graph calls the op, as Inductor does not generate the kernel %s", op, chosen.label(op))
        return chosen.inductor_lowerable

    return is_lowerable


def register() -> None:
    """Define every op of :data:`~attn_ops.ops.schemas.SCHEMAS`, once, on import of the package."""
    for op, schema in SCHEMAS.items():
        LIBRARY.define(op + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
        CHECKED_CALLS[op] = CheckedCalls(op, _checked(op))
        LIBRARY.impl(op, CHECKED_CALLS[op].op, "CPU")
        OP_CACHES[op] = _op_cache(op)
        LIBRARY.impl(op, OP_CACHES[op].op, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{op}", _fake(op), lib=LIBRARY)
        packet = getattr(getattr(torch.ops, NAMESPACE), op)
        packet.__doc__ = getattr(functions, op).__doc__
        op_entry.install(packet, OP_CACHES[op].planned, CHECKED_CALLS[op].direct)
        LOWERINGS.add(packet.default, _lowering(op), _is_lowerable(op))


def explain(op: str, *args: Any, **kwargs: Any) -> str:
    """Which kernel runs this call, in eager calls, compiled graphs and packages, and why each other kernel does not.

    Takes the op's name and the arguments of the call, which are checked but not run. One line per entry of the backend
    table that has the op::

        >>> print(attn_ops.explain("batch_prefill", q, k_cache, v_cache, plan, workspace))
        cuda.prefill: runs it, kernel prefill; packages launch its image
        triton: can run it, kernel prefill
        reference: can run it

    Raises:
        AttnOpsError: the error that the call itself would raise.
    """
    if op not in CHECKS:
        raise OptionError(f"explain: there is no op {op!r}; expected one of {', '.join(CHECKS)}; pass its name")
    return backends.explain(CHECKS[op](*args, **kwargs), kwargs.get("backend", "auto"))
