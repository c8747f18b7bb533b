"""The launch cache of an op: eager calls with the same cache key replay the kernel launches of the first.

A decode step makes the same calls for every layer and token, and checking one, choosing its backend and preparing its
kernels takes the host longer than launching them. A backend that supports this has a function
``capture_launches(function, args, kwargs)``, which makes the call and returns its result with a ``PreparedCall``, or
with None for a call that cannot be replayed.

Lookup and replay are C (``launch_cache.c``), built by the C compiler that Triton needs too when a planner or wrapper on
CUDA is constructed (:mod:`attn_ops.eager.startup`), or at the first call. Without a compiler no call is cached. This
module decides what is inserted and evicted.
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

ALIGNMENT_MASK = 15
"""Kernels are compiled for pointers that are multiples of 16 bytes: ``not pointer & ALIGNMENT_MASK``."""

MAX_ENTRIES = 4096
"""Entries of a launch cache, and of a prepared method. An insertion beyond it first evicts all of them."""

DRIVER = "libcuda.so.1"

OnMiss = Callable[[Sequence[Any], dict[str, Any]], tuple[Any, Any]]
"""``on_miss(args, kwargs)`` makes a call that has no entry: its result, and its ``PreparedCall`` or None."""


def _build(include_dirs: Sequence[str], compile_module_from_src: Callable[..., Any]) -> Any:
    try:
        source = Path(__file__).with_suffix(".c").read_text()
        headers = [*include_dirs, str(Path(torch.__file__).with_name("include"))]
        module = compile_module_from_src(source, "launch_cache", include_dirs=headers, ccflags=["-O2"])
        module.connect(DRIVER)
        return module
    except (OSError, RuntimeError, ImportError, subprocess.CalledProcessError) as error:
        LOG.warning(
            "attn_ops: eager calls take longer on the host, since launch_cache.c could not be built (%s); "
            "install a C compiler and the headers of Python",
            error,
        )
        return None


@functools.cache  # one entry; tests clear it
def _building() -> Future[Any]:
    try:  # imported here, not in the other thread: two threads that import one package can see half of it
        from triton.backends.nvidia.driver import include_dirs
        from triton.runtime.build import compile_module_from_src
    except ImportError:
        absent: Future[Any] = Future()
        absent.set_result(None)
        return absent
    return ThreadPoolExecutor(1, "attn_ops").submit(_build, include_dirs, compile_module_from_src)


def is_built() -> bool:
    """Whether :func:`native` returns without waiting. The first call starts the build in another thread."""
    return _building().done()


def state() -> str:
    """Whether the native launcher is built. Asking does not build it."""
    if not _building.cache_info().currsize:
        return "not built yet: the first planner, wrapper or call on CUDA builds it"
    if not _building().done():
        return "being built"
    return "built" if native() is not None else "not available: eager calls take more host time; see the log"


def native() -> Any:
    """The C module, built if necessary; None where it cannot be built."""
    return _building().result()


def runtime_tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors of a call that differ from replay to replay: all but those in lists, which are plans."""
    return [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


def plan_tensors(args: Sequence[Any]) -> list[Tensor]:
    """The tensors of the plans of a call. A plan keeps its tensors, and their addresses, for life."""
    return [t for x in args if isinstance(x, (list, tuple)) for t in x]


class LaunchCache:
    """The prepared calls of one op, by cache key.

    Two calls have the same key if one thread makes them with the same options, plans, device and grad mode, both or
    neither in a CUDA graph capture, and with tensors of the same sizes, strides, dtype, device, alignment and, in grad
    mode, ``requires_grad``. An entry is evicted when a tensor of its plan is freed, and all are at ``MAX_ENTRIES``.
    """

    op: functools.partial[Any]
    """Makes a call. A partial, whose function :meth:`_start` replaces; a Python function that forwards costs more."""

    def __init__(self, on_miss: OnMiss) -> None:
        self._on_miss = on_miss
        self._entries: dict[Hashable, Any] = {}
        self._plans: dict[Hashable, list[weakref.ref[Tensor]]] = {}
        """For each entry, the tensors of its plans, with callbacks that evict the entry."""
        self.op = functools.partial(self._start)

    def _start(self, *args: Any, **kwargs: Any) -> Any:
        """Make calls without the cache until the C module is built, then use it from now on."""
        if not is_built():
            return self._uncached(*args, **kwargs)
        call, module = self._uncached, native()
        if module is not None:
            call = module.CallCache(self._entries, torch.is_grad_enabled, self._insert)
        self.op.__setstate__((call, (), {}, {}))  # type: ignore[attr-defined]
        return call(*args, **kwargs)

    @property
    def num_entries(self) -> int:
        """The number of calls that can be replayed."""
        return len(self._entries)

    def lookup(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The ``PreparedCall`` of a call with these arguments, or None."""
        return self.op.func.lookup(*args, **kwargs) if hasattr(self.op.func, "lookup") else None

    def _uncached(self, *args: Any, **kwargs: Any) -> Any:
        return self._on_miss(args, kwargs)[0]

    def _insert(self, key: Hashable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make a call and insert it under ``key`` for as long as its plans live: their identity is part of the key."""
        result, prepared_call = self._on_miss(args, kwargs)
        if prepared_call is None or key is None:
            return result
        if len(self._plans) >= MAX_ENTRIES:
            self._entries.clear()
            self._plans.clear()
        self._entries[key] = prepared_call
        self._plans[key] = [weakref.ref(t, lambda _: self._evict(key)) for t in plan_tensors(args)]
        return result

    def _evict(self, key: Hashable) -> None:
        self._entries.pop(key, None)
        self._plans.pop(key, None)
