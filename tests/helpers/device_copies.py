"""Copies of CPU tensors on the GPU with the same strides, offsets and shared storage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class DeviceCopies:
    """GPU copies of the tensors of one call. CPU tensors of one storage get GPU tensors of one storage."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}

    def copy(self, tree: Any) -> Any:
        """``tree`` with every tensor replaced by its copy on the GPU."""
        return torch.utils._pytree.tree_map_only(Tensor, self._copy, tree)

    def copy_back(self, t: Tensor) -> None:
        """Overwrite the storage of the CPU tensor ``t`` with that of its copy."""
        storage = t.untyped_storage()
        storage.copy_(self.storages[storage.data_ptr()])

    def _copy(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in self.storages:
            self.storages[storage.data_ptr()] = storage.cuda()  # type: ignore[assignment]
        copied = self.storages[storage.data_ptr()]
        return torch.empty(0, dtype=t.dtype, device="cuda").set_(copied, t.storage_offset(), t.shape, t.stride())
