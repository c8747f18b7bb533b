"""Recorded calls: the ops that a call makes while it is built, such as those that plan for it.

A call that plans for itself has a new plan each time, in memory that it allocates. What it launches depends only on its
key, since lengths on a GPU are not read, and calls with tensors on the host are not prepared. So its first call records
the ops, and a prepared call makes their launches too (:mod:`attn_ops.eager.prepared_call`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.eager.captured_call import CONSTANT, CapturedCall, Launch, View, source_of
from attn_ops.eager.op_cache import OP_CACHES
from attn_ops.eager.op_call import OpCall, flatten_tensors, has_gradients
from attn_ops.gpu import current_stream, is_capturing
from attn_ops.tracing import is_compiling

TensorsCall = Callable[[tuple[Tensor, ...]], Any]
"""A function of the tensors of a call. It returns NotImplemented if the call must run as written."""

PLANNING_OPS = ("plan_decode", "plan_prefill")
"""Ops that write all of a plan. If they are recorded, the plan is memory that the call has allocated."""


class Computed(NamedTuple):
    """``result``, that PyTorch has computed as ``function(of)``."""

    function: Callable[[Tensor], Tensor]
    of: Tensor
    result: Tensor


class Recording:
    """The ops that a call has made while it was built.

    launches   their launches
    memory     tensors that they return or plan in, and :func:`allocated` ones; a later call allocates its own
    constants  tensors whose contents are the same in every call of the key
    computed   tensors that a later call computes again, from arguments
    complete   whether the launches are all that the ops do
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.memory: list[Tensor] = []
        self.constants: list[Tensor] = []
        self.computed: list[Computed] = []
        self.complete = True

    def repetition(self, prepared_call: Any, arguments: Sequence[Tensor]) -> TensorsCall | None:
        """A function that makes the prepared call, of the arguments and the computed tensors.

        None if a tensor is not computed from an argument.
        """
        computed = []
        for x in self.computed:
            i, _ = source_of(x.of, arguments, ()) or (CONSTANT, 0)
            if i == CONSTANT:
                return None
            computed.append((i, View.of(x.of, arguments[i]).taker(), x.function))
        constants = _Constants(self.constants) if self.constants else None

        def call(tensors: tuple[Tensor, ...]) -> Any:
            if constants is not None:
                constants.wait()
            return prepared_call.call((*tensors, *[f(view(tensors[i])) for i, view, f in computed]))

        return call

    def call(self, op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call an op on CUDA and record it."""
        cache, tensors = OP_CACHES[op], flatten_tensors((*args, *kwargs.values()))
        converted = None if has_gradients(tensors) else OpCall(op, tuple(args), kwargs).as_dispatched()
        if converted is None:
            self.complete = False
            return cache.direct(*args, **kwargs)
        result, captured = cache.first_call(args, converted)
        self._add(captured)
        if op in PLANNING_OPS:
            self.memory += next(x for x in args if isinstance(x, tuple))
        return result

    def _add(self, captured: CapturedCall | None) -> None:
        if captured is None:
            self.complete = False
            return
        self.launches += captured.launches
        self.memory += (*captured.outputs, *captured.scratch)


class _Constants:
    """The constants of a prepared call, which has their addresses. They have been written on the current stream."""

    def __init__(self, constants: Sequence[Tensor]) -> None:
        self.constants = tuple(constants)
        self.device = self.constants[0].device
        self.stream = current_stream(self.device)
        self.written = torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def wait(self) -> None:
        """Let the current stream wait until they have been written."""
        if current_stream(self.device) != self.stream and self.written is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self.written)
            for t in self.constants:
                t.record_stream(stream)


class _Active(threading.local):
    """The recording of a thread."""

    recording: Recording | None = None


_active = _Active()


@contextmanager
def recording() -> Iterator[Recording]:
    """Record the ops that this thread calls by :func:`~attn_ops.eager.checked_call.call_op`."""
    outer, _active.recording = _active.recording, Recording()
    try:
        yield _active.recording
    finally:
        _active.recording = outer


def active_recording() -> Recording | None:
    """The recording of this thread, if it records. It does not while it traces."""
    return None if is_compiling() else _active.recording


def allocated(t: Tensor) -> Tensor:
    """``t``, new memory with undefined contents."""
    recorded = active_recording()
    if recorded is not None:
        recorded.memory.append(t)
    return t


def computed(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """``function(t)``, which PyTorch computes. The function depends only on the key of the call."""
    result, recorded = function(t), active_recording()
    if recorded is not None:
        recorded.computed.append(Computed(function, t, result))
    return result


def constant(t: Tensor) -> Tensor:
    """``t``, a new tensor whose contents depend only on the key of the call. Nothing writes to it.

    A CUDA graph writes it when it is replayed, so in a capture it is no constant.
    """
    recorded = active_recording()
    if recorded is not None and not is_capturing():
        recorded.constants.append(t)
    return t
