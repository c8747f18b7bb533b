"""Compiled kernels as the CUDA driver launches them: which parameters a kernel takes, in which order.

Triton's own launcher reads every argument at every launch, constants too, and before Triton 3.7 a C compiler builds one
for each kernel, in a third of a second. A launch here needs only the cubin and the metadata that Triton compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from attn_ops.native.launch_arguments import LaunchArguments

SCALARS = ("i32", "i64", "fp32")
"""Parameters that are not pointers, by Triton's name of the type."""

SCRATCH_PARAMETERS = 2
"""Triton's last parameters, the global scratch and the profile scratch, which kernels here do not use."""


class Layout(NamedTuple):
    """The names and kinds of a kernel's parameters, and the positions of their arguments in a launch.

    After these, the kernel takes :data:`SCRATCH_PARAMETERS`.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    positions: tuple[int, ...]

    def select(self, values: Sequence[Any]) -> list[Any]:
        """The values of the parameters, out of ``values`` of all arguments, which include constants."""
        return [values[i] for i in self.positions]

    def arguments(self, values: Sequence[Any]) -> LaunchArguments:
        return LaunchArguments(self.names, self.kinds, self.select(values))


def parameter_layout(compiled: Any) -> Layout | None:
    """The parameters of a compiled kernel.

    None if a launch needs more than parameters (clusters, a cooperative grid, scratch memory) or a parameter of a type
    that is not known here.
    """
    meta = compiled.metadata
    rows = [
        (name, "pointer" if kind[0] == "*" else str(kind), i)
        for i, (name, kind) in enumerate(compiled.src.signature.items())
        if kind != "constexpr"
    ]
    plain = meta.num_ctas == 1 and not meta.launch_cooperative_grid
    known = all(kind in (*SCALARS, "pointer") for _, kind, _ in rows)
    if not known or not plain or meta.global_scratch_size or meta.profile_scratch_size:
        return None
    return Layout(*zip(*rows, strict=True))
