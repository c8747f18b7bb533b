"""Contenders on one problem: prepared, checked against float32, then timed in turns in one process."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .timing import Call, device_microseconds, graph_of

Prepare = Callable[[Any], Call]
"""A contender: from a problem to what launches it."""

WORST_ERROR = 1e-2
SLOW_SECONDS = 10.0
"""A peer that fails after this long, in its compiler, is not tried on further rows."""

ROUNDS, FEW_ROUNDS, LONG = 9, 5, 5000.0
"""Turns of a contender, and of one that is expected to take longer than so many microseconds."""


class NotMeasuredError(Exception):
    """Why a contender does not run a problem."""


class Refusal(NamedTuple):
    peer: str
    row: str
    reason: str


def add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", nargs="*", default=[""], help="those whose names begin with one of these, none if none; default: all"
    )


def chosen(peers: Mapping[str, Prepare], args: argparse.Namespace) -> dict[str, Prepare]:
    """The ``peers`` that :func:`add_peers` lets the user name."""
    return {name: prepare for name, prepare in peers.items() if name.startswith(tuple(args.peers))}


class Contest:
    """One benchmark's contenders over its rows. Ours must run and be right; a peer may refuse, and is named."""

    def __init__(self, ours: Mapping[str, Prepare], peers: Mapping[str, Prepare]) -> None:
        self.ours, self.peers = ours, peers
        self.refusals: list[Refusal] = []
        self._given_up: set[str] = set()

    def times(self, row: str, problem: Any, expected: float, worst: float = WORST_ERROR) -> dict[str, float]:
        """Median microseconds of one launch of each contender that runs ``problem`` with an error below ``worst``.

        ``problem`` offers ``copies`` and ``error(out)``; ``expected`` microseconds size the graphs.
        """
        calls = {name: _checked(prepare, problem, worst) for name, prepare in self.ours.items()}
        for name, prepare in self.peers.items():
            if name in self._given_up:
                continue
            began = time.perf_counter()
            try:
                call = _checked(prepare, problem, worst)
                graph_of(call, 1, 1)
                calls[name] = call
            except Exception as error:  # whatever another library raises
                self.refusals.append(Refusal(name, row, _reason(error)))
                print(f"{row}: {name} not measured: {_reason(error)}", flush=True)
                if time.perf_counter() - began > SLOW_SECONDS:
                    self._given_up.add(name)
        rounds = FEW_ROUNDS if expected > LONG else ROUNDS
        return device_microseconds(calls, problem.copies, expected, rounds)


def _checked(prepare: Prepare, problem: Any, worst: float) -> Call:
    call = prepare(problem)
    out = call(0)
    error = problem.error(out)
    if not error < worst:
        raise AssertionError(f"wrong: error {error:.2e}, expected below {worst:.0e}")
    return call


def _reason(error: Exception) -> str:
    if isinstance(error, NotMeasuredError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return f"{type(error).__name__}: {re.sub(r'/[^ :]*/', '', lines[0])[:160]}"


def worst_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest relative error in norm of pairs ``(actual, expected)``; NaN where one is."""
    errors = [(actual.float() - expected).norm() / expected.norm() for actual, expected in pairs]
    return float(torch.stack(errors).max())


def best(times: dict[str, float], names: Iterable[str]) -> float | None:
    """The least of the times of those ``names`` that were measured."""
    return min((times[name] for name in names if name in times), default=None)


def release() -> None:
    """Give the memory of a row that is done back, and forget what was compiled for it."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()
