"""Runs the call of a seed: prepares it, calls it, compares its result, and checks the memory around it."""

from __future__ import annotations

import torch

from helpers.fuzz.calls import CALLS
from helpers.fuzz.draw import Call, Draw, Guard


class FuzzError(AssertionError):
    """A failed call, with the command that runs it again."""


def run_seed(
    name: str, seed: int, *, device: str = "cpu", backend: str = "auto", size: str = "medium", trace: bool = False
) -> None:
    """Draw the call ``name`` of ``seed``, and run it twice; with ``trace`` also through ``torch.compile``.

    Raises :class:`FuzzError` if anything is wrong.
    """
    call = None
    try:
        with torch.no_grad():
            call = CALLS[name](Draw(seed, device, backend, size))
            _run(call, trace and call.traceable)
    except Exception as error:
        text = "in the draw" if call is None else call.text
        options = f"--device {device} --backend {backend} --size {size}{' --trace' if trace else ''}"
        line = f'python -m helpers.fuzz "{name}" --seed {seed} {options}'
        raise FuzzError(f"{name}: {type(error).__name__}: {error}\n  {text}\n  in tests/: {line}") from error


def _run(call: Call, trace: bool) -> None:
    guard = Guard([*call.reads, *call.writes])
    if call.prepare is not None:
        call.prepare()
    for _ in range(2):
        call.check(call.run())
    if trace:
        torch._dynamo.reset()
        call.check(torch.compile(call.run, fullgraph=True, backend="aot_eager")())
    guard.check(call.writes)
