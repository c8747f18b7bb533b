"""Tasks that the first call on a GPU waits for, started in the background when a planner or wrapper is made.

Triton builds the C module of its driver, and hashes its installation, hundreds of megabytes, for the keys of its kernel
cache. Each task takes a third of a second or more. Meanwhile the calling thread imports the kernels and Triton's front
end.

The background threads import nothing: of two threads that import one package at the same time, one can see it half
initialized.
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
    """The background tasks, started once even if several threads ask at the same time."""
    with _lock:
        return _start()


@functools.cache  # one entry for the life of the process
def _start() -> Sequence[Future[Any]]:
    """Start the tasks: Triton's driver with the version of its assembler, and the hash of Triton's installation."""
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
    """Start the tasks that the first call on ``device`` waits for, once, and import the kernels."""
    if device.type == "cuda":
        _preparing()


def wait_until_prepared() -> None:
    """Wait for the tasks of :func:`prepare`, so that Triton does not do them again.

    Their errors are not raised here; Triton raises them again where it needs the result.
    """
    concurrent.futures.wait(_preparing())
