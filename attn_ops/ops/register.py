"""From a schema to a running op: define, implement, fake, lower.

Eager     schema -> checks -> registry -> the backend's function; cached on CUDA (:mod:`attn_ops.eager.launch_cache`)
Traced    schema -> checks -> output allocation (:mod:`attn_ops.meta`)
Inductor  schema -> checks -> registry -> the backend's function, inlined (:mod:`attn_ops.ops.inductor`)

The ops are plain ``torch.library.Library`` registrations: about 3 us a call, where ``custom_op`` takes
8 to 12.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.library import Library

from attn_ops.eager.launch_cache import LaunchCache
from attn_ops.errors import AttnOpsError
from attn_ops.meta.outputs import OUTPUTS
from attn_ops.ops import backends
from attn_ops.ops.checks import CHECKS
from attn_ops.ops.inductor import Lowerings, concretize_symints
from attn_ops.ops.schemas import NAMESPACE, SCHEMAS

LIBRARY = Library(NAMESPACE, "FRAGMENT")
LOWERINGS = Lowerings()

LAUNCH_CACHES: dict[str, LaunchCache] = {}
"""The launch cache of each op, for eager calls on CUDA."""


def _real(op: str) -> Callable[..., Any]:
    check = CHECKS[op]

    def implementation(*args: Any, backend: str = "auto", **kwargs: Any) -> Any:
        problem = check(*args, backend=backend, **kwargs)
        return backends.choose(problem, backend).implementation(op)(*args, **kwargs)

    return implementation


def _cached(op: str) -> LaunchCache:
    """As :func:`_real`, with a launch cache for the calls that the backend captures."""
    check = CHECKS[op]

    def on_miss(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        options = dict(kwargs)
        name = options.pop("backend", "auto")
        backend = backends.choose(check(*args, backend=name, **options), name)
        function = backend.implementation(op)
        if backend.capture_launches is None:
            return function(*args, **options), None
        return backend.launch_capturer()(function, args, options)

    return LaunchCache(on_miss)


def _fake(op: str) -> Callable[..., Any]:
    check, outputs = CHECKS[op], OUTPUTS[op]

    def implementation(*args: Any, backend: str = "auto", **kwargs: Any) -> Any:
        LOWERINGS.register_if_compiling()
        try:
            problem = check(*args, backend=backend, **kwargs)
        except AttnOpsError:
            numbers, named = concretize_symints((args, kwargs))
            check(*numbers, backend=backend, **named)  # the same words as in an eager call
            raise
        backends.choose(problem, backend)
        return outputs(*args, **kwargs)

    return implementation


def register() -> None:
    """Define every op of :data:`~attn_ops.ops.schemas.SCHEMAS`, once, on import of the package."""
    for op, schema in SCHEMAS.items():
        LIBRARY.define(op + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
        real = _real(op)
        LIBRARY.impl(op, real, "CPU")
        LAUNCH_CACHES[op] = _cached(op)
        LIBRARY.impl(op, LAUNCH_CACHES[op].op, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{op}", _fake(op), lib=LIBRARY)
        LOWERINGS.add(getattr(getattr(torch.ops, NAMESPACE), op).default, real)


def explain(op: str, *args: Any, **kwargs: Any) -> str:
    """Which backend runs this call, and why each other does not: one line a backend.

    Takes the op's name and the arguments of the call, which are checked but not run.
    """
    return backends.explain(CHECKS[op](*args, **kwargs))
