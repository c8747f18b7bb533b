"""What the first call on a GPU waits for besides kernels, begun in other threads when a planner or wrapper is made.

That is building two C modules, ``repeat.c`` and the one of Triton's driver, and Triton's hash of its own installation,
hundreds of megabytes, by which it looks kernels up in its cache: each takes a third of a second or more.

The threads import nothing of Triton, or of what else the program may import meanwhile: imports of one package in two
threads may meet halfway.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from attn_ops.eager import launch_cache


@functools.cache
def _preparing() -> Sequence[Future[Any]]:
    """Triton's driver with the version of its assembler, and its hash."""
    try:
        from triton.compiler import make_backend
        from triton.runtime import driver
        from triton.runtime.cache import triton_key
    except ImportError:
        return ()
    executor = ThreadPoolExecutor(2, "attn_ops")
    return executor.submit(lambda: make_backend(driver.active.get_current_target()).hash()), executor.submit(triton_key)


def prepare(device: torch.device) -> None:
    """Begin with what the first call on such a device waits for, once."""
    if device.type == "cuda":
        launch_cache.is_built()
        _preparing()


def wait() -> None:
    """Return when Triton can compile without doing again what was begun; what failed fails again where it is used."""
    concurrent.futures.wait(_preparing())
