"""Calls like an earlier one skip the checks, the choice of a backend and the set-up of its kernels.

Eager calls only: a decode step makes the same call for every layer and token, and checking it costs more
than launching it. A backend that can repeat a call offers ``record(function, args, kwargs)``, which makes
the call and returns its result with a ``Repeat`` or None. Lookup and launch are C (``launch_cache.c``), built when a
planner or wrapper on CUDA is made (:mod:`attn_ops.eager.startup`), or at the first call, by the compiler that Triton
needs there too. This module decides what is cached.
"""

from __future__ import annotations

import functools
import logging
import subprocess
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LOG = logging.getLogger(__name__)

ALIGNMENT = 15
"""Kernels are compiled for pointers that are multiples of 16."""

MAX_ENTRIES = 4096
"""Calls remembered of one op; then all of them are forgotten."""

DRIVER = "libcuda.so.1"

First = Callable[[Sequence[Any], dict[str, Any]], tuple[Any, Any]]
"""Makes a call unlike every earlier one: its result, and its ``Repeat`` or None."""


def _build(include_dirs: Sequence[str], compile_module_from_src: Callable[..., Any]) -> Any:
    try:
        source = Path(__file__).with_suffix(".c").read_text()
        headers = [*include_dirs, str(Path(torch.__file__).with_name("include"))]
        module = compile_module_from_src(source, "repeat", include_dirs=headers, ccflags=["-O2"])
        module.connect(DRIVER)
        return module
    except (OSError, RuntimeError, ImportError, subprocess.CalledProcessError) as error:
        LOG.warning(
            "attn_ops: eager calls take longer on the host, since repeat.c could not be built (%s); "
            "install a C compiler and the headers of Python",
            error,
        )
        return None


@functools.cache
def _building() -> Future[Any]:
    try:  # here, not in the other thread: imports of one package in two threads may meet halfway
        from triton.backends.nvidia.driver import include_dirs
        from triton.runtime.build import compile_module_from_src
    except ImportError:
        absent: Future[Any] = Future()
        absent.set_result(None)
        return absent
    return ThreadPoolExecutor(1, "attn_ops").submit(_build, include_dirs, compile_module_from_src)


def is_built() -> bool:
    """Whether :func:`native` need not wait."""
    return _building().done()


def state() -> str:
    """Whether the native launcher is built. Asking does not build it."""
    if not _building.cache_info().currsize:
        return "not built yet: the first planner, wrapper or call on CUDA builds it"
    if not _building().done():
        return "being built"
    return "built" if native() is not None else "not available: eager calls take more host time; see the log"


def native() -> Any:
    """The module of ``repeat.c``; None where it cannot be built, and every call is made as if it were the first."""
    return _building().result()


def runtime_tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors of a call but those in lists, which are plans and stay where they are."""
    return [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


def plan_tensors(args: Sequence[Any]) -> list[Tensor]:
    """The tensors of the plans of a call."""
    return [t for x in args if isinstance(x, (list, tuple)) for t in x]


class LaunchCache:
    """What one op remembers of its calls.

    Calls are alike if a thread makes them with the same options, plans, grad mode and device, all captured in a graph
    or none, and with tensors of the same sizes, strides, dtype, device, alignment and, in grad mode, need of gradients.
    """

    op: functools.partial[Any]
    """Makes a call: a partial, since its function can be exchanged, and one that passes arguments on costs more."""

    def __init__(self, first: First) -> None:
        self._first = first
        self._calls: dict[Hashable, Any] = {}
        self._plans: dict[Hashable, list[weakref.ref[Tensor]]] = {}
        self.op = functools.partial(self._begin)

    def _begin(self, *args: Any, **kwargs: Any) -> Any:
        if not is_built():
            return self._forgettable(*args, **kwargs)
        call, module = self._forgettable, native()
        if module is not None:
            call = module.Calls(self._calls, torch.is_grad_enabled, self._remember)
        self.op.__setstate__((call, (), {}, {}))  # type: ignore[attr-defined]
        return call(*args, **kwargs)

    @property
    def num_entries(self) -> int:
        """The number of calls that can be replayed."""
        return len(self._calls)

    def find(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The ``Repeat`` of a call like this one, None if there is none."""
        return self.op.func.find(*args, **kwargs) if hasattr(self.op.func, "find") else None

    def _forgettable(self, *args: Any, **kwargs: Any) -> Any:
        return self._first(args, kwargs)[0]

    def _remember(self, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a call, and remember it for as long as its plans live: their identity is part of the key."""
        result, repeat = self._first(args, kwargs)
        if repeat is None or key is None:
            return result
        if len(self._plans) >= MAX_ENTRIES:
            self._calls.clear()
            self._plans.clear()
        self._calls[key] = repeat
        self._plans[key] = [weakref.ref(t, lambda _: self._forget(key)) for t in plan_tensors(args)]
        return result

    def _forget(self, key: Hashable) -> None:
        self._calls.pop(key, None)
        self._plans.pop(key, None)
