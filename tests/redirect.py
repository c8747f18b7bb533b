"""Tests of ops on the CPU, run on the kernels of another backend: import them beside a call of :func:`redirected`."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import written
from torch import Tensor

from attn_ops import registry
from attn_ops.registry import TRITON_OPS, Backend, Problem


def redirected(module: str) -> Any:
    """A fixture for the whole module that uses it: ops on the CPU run in the backend module of that name."""

    @pytest.fixture(scope="module", autouse=True)
    def redirect() -> Iterator[None]:
        usual = registry.BACKENDS
        registry.BACKENDS = (Backend("redirected", module, _objections), *usual)
        registry.choose.cache_clear()
        yield
        registry.BACKENDS = usual
        registry.choose.cache_clear()

    return redirect


def _objections(problem: Problem) -> list[str]:
    return [] if problem.device == "cpu" and problem.op in TRITON_OPS else ["it runs somewhere else"]


def _on_gpu(op: str) -> Callable[..., Any]:
    """``op`` of the triton backend for tensors on the CPU: strides, offsets and shared memory stay as they are."""

    def call(*args: Any, **kwargs: Any) -> Any:
        moved: dict[int, torch.UntypedStorage] = {}

        def there(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            storage = t.untyped_storage()
            memory = moved.setdefault(storage.data_ptr(), storage.cuda())
            return torch.empty(0, dtype=t.dtype, device="cuda").set_(memory, t.storage_offset(), t.shape, t.stride())

        on_gpu = torch.utils._pytree.tree_map(there, (args, kwargs))
        result = getattr(torch.ops.attn, op)(*on_gpu[0], **on_gpu[1], backend="triton")
        names = [a.name for a in getattr(torch.ops.attn, op).default._schema.arguments]
        for t in written(op, dict(zip(names, args, strict=False)) | kwargs):
            t.untyped_storage().copy_(moved[t.untyped_storage().data_ptr()])
        return torch.utils._pytree.tree_map(lambda t: t.cpu(), result)

    return call


ON_GPU = "redirected_to_the_gpu"
sys.modules[ON_GPU] = types.ModuleType(ON_GPU)
for _op in TRITON_OPS:
    setattr(sys.modules[ON_GPU], _op, _on_gpu(_op))
