"""From a schema to a running op: define, implement, fake, lower.

Eager     schema -> checks -> registry -> the backend's function; on CUDA remembered (:mod:`attn_ops.repeat`)
Traced    schema -> checks -> output allocation (:mod:`attn_ops.meta`)
Inductor  schema -> checks -> registry -> the backend's function, inlined (:mod:`attn_ops.inductor`)

The ops are plain ``torch.library.Library`` registrations: about 3 us a call, where ``custom_op`` takes
8 to 12.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import Library

from . import registry
from .errors import AttnOpsError
from .inductor import Lowerings, with_numbers
from .meta.outputs import OUTPUTS
from .repeat import Repeats
from .schemas import NAMESPACE, SCHEMAS
from .validation import CHECKS

LIBRARY = Library(NAMESPACE, "FRAGMENT")
LOWERINGS = Lowerings()

REPEATS: dict[str, Repeats] = {}
"""What each op remembers of its calls on CUDA."""


def _real(op: str) -> Callable[..., Any]:
    check = CHECKS[op]

    def implementation(*args: Any, backend: str = "auto", **kwargs: Any) -> Any:
        problem = check(*args, backend=backend, **kwargs)
        return registry.choose(problem, backend).implementation(op)(*args, **kwargs)

    return implementation


def _repeats(op: str) -> Repeats:
    """As :func:`_real`, remembering the calls whose backend can repeat them."""
    check = CHECKS[op]

    def first(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        options = dict(kwargs)
        name = options.pop("backend", "auto")
        backend = registry.choose(check(*args, backend=name, **options), name)
        function = backend.implementation(op)
        if backend.record is None:
            return function(*args, **options), None
        return backend.recorder()(function, args, options)

    return Repeats(first)


def _fake(op: str) -> Callable[..., Any]:
    check, outputs = CHECKS[op], OUTPUTS[op]

    def implementation(*args: Any, backend: str = "auto", **kwargs: Any) -> Any:
        LOWERINGS.register_if_compiling()
        try:
            problem = check(*args, backend=backend, **kwargs)
        except AttnOpsError:
            numbers, named = with_numbers((args, kwargs))
            check(*numbers, backend=backend, **named)  # the same words as in an eager call
            raise
        registry.choose(problem, backend)
        return outputs(*args, **kwargs)

    return implementation


def register() -> None:
    """Define every op of :data:`~attn_ops.schemas.SCHEMAS`, once, on import of the package."""
    for op, schema in SCHEMAS.items():
        LIBRARY.define(op + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
        real = _real(op)
        LIBRARY.impl(op, real, "CPU")
        REPEATS[op] = _repeats(op)
        LIBRARY.impl(op, REPEATS[op].op, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{op}", _fake(op), lib=LIBRARY)
        LOWERINGS.add(getattr(getattr(torch.ops, NAMESPACE), op).default, real)


def explain(op: str, *args: Any, **kwargs: Any) -> str:
    """Which backend runs this call, and why each other does not: one line a backend.

    Takes the op's name and the arguments of the call, which are checked but not run.
    """
    return registry.explain(CHECKS[op](*args, **kwargs))
