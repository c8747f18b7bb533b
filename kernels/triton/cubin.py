"""Compiled kernels as the CUDA driver launches them: which parameters a kernel takes, in which order.

Triton's own launcher reads every argument at every launch, constants too, and before Triton 3.7 a C compiler builds one
for each kernel, in a third of a second. Of Triton a launch here needs the cubin and its metadata alone.
"""

from __future__ import annotations

from typing import Any

SCALARS = ("i32", "i64", "fp32")
"""Parameters that are not pointers, by Triton's name of the type."""

Layout = tuple[tuple[int, str], ...]
"""See :func:`parameter_layout`."""

SCRATCH_PARAMETERS = 2
"""Triton's last parameters, the global scratch and the profile scratch, which kernels here do not use."""


def parameter_layout(compiled: Any) -> Layout | None:
    """``(index of the argument, Triton's type)`` of each parameter.

    After these, a kernel takes :data:`SCRATCH_PARAMETERS`. None if a launch needs more than parameters (clusters, a
    cooperative grid, scratch memory) or a parameter of a type that is not known here.
    """
    meta = compiled.metadata
    layout = tuple((i, str(kind)) for i, kind in enumerate(compiled.src.signature.values()) if kind != "constexpr")
    plain = meta.num_ctas == 1 and not meta.launch_cooperative_grid
    known = all(kind in SCALARS or kind[0] == "*" for _, kind in layout)
    return None if not known or not plain or meta.global_scratch_size or meta.profile_scratch_size else layout
