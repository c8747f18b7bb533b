"""A launch in a package: the call of ``attn::launch_image`` that a launch on fake tensors traces.

Sizes that the graph leaves open become integers of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from attn_ops.gpu import ALIGNMENT
from attn_ops.native.images import Image, ImageSet, TensorSpec
from attn_ops.native.launch_arguments import LaunchArguments, operands
from attn_ops.native.op import launch_image
from attn_ops.symbolic_sizes import statically_known_true


def is_aligned(t: Tensor) -> bool:
    """Whether a fake tensor starts at a multiple of 16 bytes if its storage does."""
    return statically_known_true(t.storage_offset() * t.itemsize % ALIGNMENT == 0)


class PackagedTensors:
    """The tensors of a call, each once: outputs first, as the op takes them. Tensors without elements are left out.

    arguments     what the launch gives the parameters of the kernel
    writes        the parameters that the kernel writes
    alignment_of  bytes that the address of a parameter's tensor must be a multiple of; the launcher checks it
    """

    def __init__(
        self, arguments: LaunchArguments, writes: Sequence[str], alignment_of: Callable[[str, Tensor], int]
    ) -> None:
        self.arguments = arguments
        tensors = [(n, t) for n, t in arguments.named_tensors() if not statically_known_true(t.numel() == 0)]
        tensors.sort(key=lambda item: item[0] not in writes)
        written = {id(t) for n, t in tensors if n in writes}
        found: dict[int, tuple[str, Tensor, int]] = {}
        for name, t in tensors:
            first, _, alignment = found.get(id(t), (name, t, 1))
            found[id(t)] = first, t, max(alignment, alignment_of(name, t))
        self.all = [t for _, t, _ in found.values()]
        self._slots = {key: i for i, key in enumerate(found)}
        self.num_outputs = len(written)
        self.specs = tuple(TensorSpec(name, t.dtype, t.dim(), alignment) for name, t, alignment in found.values())

    def slot_of(self, t: Tensor) -> int | None:
        """The position of ``t`` in the call; None without elements."""
        return self._slots.get(id(t))

    def launch(self, images: ImageSet, image: Image, grid: Sequence[Any]) -> None:
        """Trace a launch of ``image``, to which it gives the table of these tensors."""
        _, integers, floats = operands(self.arguments.kinds, self.arguments.values, grid)
        scalars = [int(n) if isinstance(n, bool) else n for n in integers[3:]]  # the op takes no bools
        sizes = [n for t in self.all for n in (*t.shape, *t.stride())]
        name = images.add(image._replace(tensors=self.specs))
        outputs, inputs = self.all[: self.num_outputs], self.all[self.num_outputs :]
        launch_image(outputs, inputs, [*integers[:3], *sizes, *scalars], list(floats), name)
