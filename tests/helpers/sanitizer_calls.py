"""Small calls of every kernel, to run under compute-sanitizer.

``compute-sanitizer --tool memcheck python -m helpers.sanitizer_calls calls``, in ``tests/`` and with
``PYTORCH_NO_CUDA_MEMORY_CACHING=1``, by which every tensor has an allocation of its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from attn_ops.errors import AttnOpsError
from helpers.hostile_plans import TABLES, cut_plans, foreign_plan, random_plan, random_tables, zero_plan
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


def hostile_plans() -> int:
    """Calls with plans of random extremes, of other batches, of zeros, and with plans that are cut."""
    done = 0
    for name in ATTENTION:
        op, kwargs = call(name)
        if "plan" not in kwargs or op.startswith("plan_"):
            continue
        for seed in range(3):
            run(op, random_plan(call(name)[1], seed))
        run(op, zero_plan(call(name)[1]))
        others = [other for other in ATTENTION if CALLS[other][0] == op and other != name]
        for other in others[:2]:
            run(op, foreign_plan(call(name)[1], call(other)[1]))
        for _, cut in cut_plans(kwargs):
            with contextlib.suppress(AttnOpsError):  # most are refused before anything is launched
                run(op, cut)
        torch.cuda.synchronize()
        done += 4 + len(others[:2])
    return done


def hostile_tables() -> int:
    """Planning and other calls with page tables and lengths of random extremes."""
    names = [name for name, (op, _) in CALLS.items() if op in TABLES]
    for name in names:
        for seed in range(6):
            op, kwargs = call(name)
            run(op, random_tables(op, kwargs, seed))
    return 6 * len(names)


@triton.jit
def reads_too_far(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, SIZE)
    tl.store(x + i, tl.load(x + i + 1))


def planted() -> int:
    """A read beyond the end of a tensor, which memcheck must find."""
    reads_too_far[(1,)](torch.zeros(128, device="cuda"), 128)
    return 1


PARTS: dict[str, Callable[[], int]] = {
    "calls": calls,
    "strays": strays,
    "hostile_plans": hostile_plans,
    "hostile_tables": hostile_tables,
    "planted": planted,
}

if __name__ == "__main__":
    count = PARTS[sys.argv[1]]()
    torch.cuda.synchronize()
    print(f"{count} calls done")
