"""Small calls of every kernel, to run under compute-sanitizer.

``compute-sanitizer --tool memcheck python -m helpers.sanitizer_calls calls``, in ``tests/`` and with
``PYTORCH_NO_CUDA_MEMORY_CACHING=1``, by which every tensor has an allocation of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from helpers.kernel_calls import ATTENTION, CALLS, astray, call, misplanned, run

GARBAGE = (-(2**31), -1, 0, 1, 1000, 2**31 - 1)


def calls() -> int:
    """Valid calls."""
    for name in CALLS:
        run(*call(name))
    return len(CALLS)


def strays() -> int:
    """Calls with page numbers out of range, and with plans of garbage."""
    done = 0
    for garbage in GARBAGE:
        for change, names in ((astray, CALLS), (misplanned, ATTENTION)):
            for name in names:
                op, kwargs = call(name)
                if not op.startswith("plan_"):
                    run(op, change(kwargs, garbage))
                    done += 1
    return done


@triton.jit
def reads_too_far(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, SIZE)
    tl.store(x + i, tl.load(x + i + 1))


def planted() -> int:
    """A read beyond the end of a tensor, which memcheck must find."""
    reads_too_far[(1,)](torch.zeros(128, device="cuda"), 128)
    return 1


PARTS: dict[str, Callable[[], int]] = {"calls": calls, "strays": strays, "planted": planted}

if __name__ == "__main__":
    count = PARTS[sys.argv[1]]()
    torch.cuda.synchronize()
    print(f"{count} calls done")
