"""Where a test runs: the device of its tensors and the backend of its ops.

===========  ======  ================================================================================
id           device  kernels
===========  ======  ================================================================================
reference    cpu     the ``reference`` backend
triton       cuda    the ``triton`` backend; marked ``gpu``
interpreter  cpu     the ``triton`` backend in Triton's interpreter; marked ``interpreter``
===========  ======  ================================================================================

Triton decides when its kernels are imported whether to interpret them. Tests marked ``interpreter`` therefore run
in processes with ``TRITON_INTERPRET=1``, which ``kernels/test_interpreter.py`` starts. Elsewhere they are skipped.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_ops.ops import backends
from attn_ops.ops.backends import Backend, Problem
from attn_ops.ops.unsupported import TRITON_KERNELS
from helpers import fast_interpreter
from helpers.calls import schema, written
from helpers.device_copies import DeviceCopies

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

REFERENCE = pytest.param("cpu", "reference", id="reference")
TRITON = pytest.param("cuda", "triton", id="triton", marks=pytest.mark.gpu)
INTERPRETER = pytest.param("cpu", "interpreter", id="interpreter", marks=pytest.mark.interpreter)

each_backend = pytest.mark.parametrize(("device", "backend"), [REFERENCE, TRITON, INTERPRETER])
each_triton = pytest.mark.parametrize(("device", "backend"), [TRITON, INTERPRETER])


def each_case(cases: Sequence[Any], interpreted: Iterable[Any] = ()) -> pytest.MarkDecorator:
    """Parametrize ``case``, ``device`` and ``backend``: all ``cases``, and those that the interpreter runs too."""
    targets = [(REFERENCE, cases), (TRITON, cases), (INTERPRETER, interpreted)]
    return pytest.mark.parametrize(
        ("case", "device", "backend"),
        [
            pytest.param(case, *target.values, id=f"{case}-{target.id}", marks=target.marks)
            for target, chosen in targets
            for case in chosen
        ],
    )


def _unsupported_reasons(problem: Problem) -> list[str]:
    takes = problem.device.type == "cpu" and problem.op in TRITON_KERNELS
    return [] if takes else [f"it runs the triton kernels of CPU calls, not {problem.op} on {problem.device.type}"]


def install_interpreter() -> None:
    """Let ops on the CPU take ``backend="interpreter"``; ``auto`` still takes the reference."""
    fast_interpreter.install()
    interpreter = Backend("interpreter", "attn_ops.kernels.triton", _unsupported_reasons)
    backends.BACKENDS = (*backends.BACKENDS, interpreter)


def _on_gpu(op: str) -> Callable[..., Any]:
    """The op on the CPU, computed by the ``triton`` backend on copies of its tensors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        copies = DeviceCopies()
        gpu_args, gpu_kwargs = copies.copy((args, kwargs))
        result = getattr(torch.ops.attn, op)(*gpu_args, **gpu_kwargs, backend="triton")
        names = [a.name for a in schema(op).arguments]
        for t in written(op, dict(zip(names, args, strict=False)) | kwargs):
            copies.copy_back(t)
        return torch.utils._pytree.tree_map_only(Tensor, Tensor.cpu, result)

    return call


ON_GPU = types.ModuleType("cpu_calls_on_the_gpu")
"""A backend module: what :func:`_on_gpu` makes of every op."""

for _op in TRITON_KERNELS:
    setattr(ON_GPU, _op, _on_gpu(_op))

CPU_CALL_MODULES = {"triton": ON_GPU.__name__, "interpreter": "attn_ops.kernels.triton"}
"""Backend modules that take calls on CPU tensors, by the id of the target."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(target.values[1], id=target.id, marks=target.marks) for target in (REFERENCE, TRITON, INTERPRETER)
    ],
)
def cpu_calls_on_each_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a module's tests, which are written for CPU tensors, on every backend.

    For tests of ops other than attention. Module-wide, as Hypothesis wants it.
    """
    module = CPU_CALL_MODULES.get(request.param)
    if module is None:
        yield
        return
    usual = backends.BACKENDS
    sys.modules.setdefault(ON_GPU.__name__, ON_GPU)
    backends.BACKENDS = (Backend("redirected", module, _unsupported_reasons), *usual)
    backends.choose.cache_clear()
    yield
    backends.BACKENDS = usual
    backends.choose.cache_clear()
