"""Calls made for the CPU, run on the kernels of another backend.

A module that imports tests of ops on the CPU, beside a fixture made by :func:`redirected`, runs them on that backend.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_ops.ops import backends
from attn_ops.ops.backends import TRITON_OPS, Backend, Problem
from helpers.calls import written


def redirected(module: str) -> Any:
    """A fixture for the whole module that uses it: ops on the CPU run in the backend module of that name."""

    @pytest.fixture(scope="module", autouse=True)
    def redirect() -> Iterator[None]:
        usual = backends.BACKENDS
        backends.BACKENDS = (Backend("redirected", module, _objections), *usual)
        backends.choose.cache_clear()
        yield
        backends.BACKENDS = usual
        backends.choose.cache_clear()

    return redirect


def _objections(problem: Problem) -> list[str]:
    return [] if problem.device.type == "cpu" and problem.op in TRITON_OPS else ["it runs somewhere else"]


class Moved:
    """Tensors on the GPU with the strides and offsets of those on the CPU, which share memory if those do."""

    def __init__(self) -> None:
        self.memory: dict[int, torch.UntypedStorage] = {}

    def there(self, tree: Any) -> Any:
        return torch.utils._pytree.tree_map_only(Tensor, self._there, tree)

    def _there(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in self.memory:
            self.memory[storage.data_ptr()] = storage.cuda()
        memory = self.memory[storage.data_ptr()]
        return torch.empty(0, dtype=t.dtype, device="cuda").set_(memory, t.storage_offset(), t.shape, t.stride())

    def bring_back(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        storage.copy_(self.memory[storage.data_ptr()])


def _on_gpu(op: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        moved = Moved()
        there_args, there_kwargs = moved.there((args, kwargs))
        result = getattr(torch.ops.attn, op)(*there_args, **there_kwargs, backend="triton")
        names = [a.name for a in getattr(torch.ops.attn, op).default._schema.arguments]
        for t in written(op, dict(zip(names, args, strict=False)) | kwargs):
            moved.bring_back(t)
        return torch.utils._pytree.tree_map_only(Tensor, Tensor.cpu, result)

    return call


ON_GPU = "redirected_to_the_gpu"
"""A backend module for tensors on the CPU whose functions run the kernels of triton on the GPU."""

sys.modules[ON_GPU] = types.ModuleType(ON_GPU)
for _op in TRITON_OPS:
    setattr(sys.modules[ON_GPU], _op, _on_gpu(_op))
