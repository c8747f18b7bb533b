"""Starts in the background what the first call on a GPU waits for besides kernels, when a planner or wrapper is made.

That is building the C module of Triton's driver, and hashing Triton's installation, hundreds of megabytes, which is
part of the keys of Triton's kernel cache. Each takes a third of a second or more. Meanwhile the calling thread imports
the kernels, and the compiler's front end.

The threads import nothing: two threads that import one package at the same time can see half of it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import importlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

_lock = threading.RLock()


def _preparing() -> Sequence[Future[Any]]:
    """The preparations, which threads that ask at the same time start once."""
    with _lock:
        return _start()


@functools.cache  # one entry for the life of the process
def _start() -> Sequence[Future[Any]]:
    """Triton's driver with the version of its assembler, and the hash of Triton."""
    try:
        from triton.compiler import make_backend
        from triton.runtime import driver
        from triton.runtime.cache import triton_key
    except ImportError:
        return ()
    executor = ThreadPoolExecutor(2, "attn_ops")
    assembler = executor.submit(lambda: make_backend(driver.active.get_current_target()).hash())
    preparing = assembler, executor.submit(triton_key)
    with contextlib.suppress(ImportError):  # the backend table says why kernels cannot run
        for module in ("attn_ops.kernels.triton", "triton.compiler.code_generator"):
            importlib.import_module(module)
    return preparing


def prepare(device: torch.device) -> None:
    """Start what the first call on ``device`` waits for, once, and import the kernels."""
    if device.type == "cuda":
        _preparing()


def wait_until_prepared() -> None:
    """Wait for what :func:`prepare` started for Triton, so that nothing is done twice.

    Errors are not raised here; Triton raises them again where it needs the result.
    """
    concurrent.futures.wait(_preparing())
