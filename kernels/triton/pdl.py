"""Programmatic dependent launch (PDL): kernels that start, and read the plan, before the preceding kernel finishes.

A kernel launched with ``launch_pdl`` may run its prologue while the preceding kernel of the stream still runs. Before
``griddepcontrol.wait`` (``gdc_wait``) it may read only what no unfinished kernel writes. It may read a plan: a kernel
that writes a plan publishes what it stored, and every program of a kernel that reads the plan acquires it. There may be
other kernels between the two, which launched their dependents without having waited for the plan's stores themselves.

A kernel waits only for the preceding grid. So in every kernel at least one program waits, even if it has nothing to
do: otherwise its grid could end before an earlier grid.

publish, acquire  in kernels: the release and the acquire side
publish_plan      on the host: publishes a plan that tensor operations of a graph have written
read_plan_early   on the host: whether a kernel may read a plan before it waits
"""

from __future__ import annotations

from collections.abc import Iterable

import triton
import triton.language as tl
from torch import Tensor

from attn_ops.kernels.triton.launch import Options, launch, supports_pdl
from attn_ops.plan.state import is_published


@triton.jit
def publish(stored):
    """Make this program's stores visible to programs that :func:`acquire`; ``stored`` points to an int32 among them."""
    tl.debug_barrier()
    tl.atomic_add(stored, 0, sem="release")


@triton.jit
def acquire():
    """Let this program read what finished programs have published, before ``gdc_wait``."""
    tl.inline_asm_elementwise("fence.acq_rel.gpu; mov.b32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1)


@triton.jit
def publish_kernel(stored):
    """Grid: (1).

    The program owns no memory: it publishes what finished kernels have stored, which includes ``stored``.

    Bound by: the launch.
    """
    publish(stored)


def publish_plan(fields: Iterable[Tensor]) -> None:
    """Publish the ``fields`` of a plan, which earlier kernels have written: one kernel for each field.

    One kernel after all writes would publish all fields. But in a traced graph, only a kernel that itself writes a
    field is ordered after the field's other writes.
    """
    for field in fields:
        if field.numel():
            launch(publish_kernel, (1,), Options(num_warps=1), stored=field)


def read_plan_early(t: Tensor, max_batch: int) -> bool:
    """Whether a kernel on ``t`` may read a plan of capacity ``max_batch`` before the preceding kernel finishes.

    The preceding kernel may be the one that writes the plan. The kernel is an image in packages.
    """
    return supports_pdl(t, image=True) and is_published(max_batch)
