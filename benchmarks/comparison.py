"""Implementations of one problem, each checked against float32, then timed interleaved in one process."""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from benchmarks.timing import Call, device_rounds, graph_of, spread

Prepare = Callable[[Any], Call]
"""An implementation: takes a problem and returns the function that launches it."""

T = TypeVar("T")


class Named(Protocol):
    """A row of a benchmark."""

    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=Named)

MAX_RELATIVE_ERROR = 1e-2
MAX_FAILURE_SECONDS = 10.0
"""A peer that takes longer to fail, in its compiler, is skipped for the remaining rows."""

SPREAD = "spread, %"
METHOD = (
    "Replays of all implementations are interleaved in one process, in a random order in each round, and the median is "
    f"shown. `{SPREAD}` is the largest interquartile range of an implementation of the row, relative to its median."
)
"""For the notes of tables."""

ROUNDS = 9
"""Timed replays of each implementation."""

ROUNDS_OF_LONG_CALLS = 5
LONG_CALL_MICROSECONDS = 5000.0


class NotMeasuredError(Exception):
    """An implementation does not run a problem. The message gives the reason."""


class EndedError(BaseException):
    """The process is to end, by SIGTERM. Peers may not catch it."""


_ended: list[int] = []
"""The signals that asked the process to end."""


def end(signal: int, *_: object) -> None:
    """Handle SIGTERM: let the benchmark save the rows that it has."""
    _ended.append(signal)
    raise EndedError


def check_ended() -> None:
    """Raise again if the process is to end: Python ignores what is raised while a finalizer runs."""
    if _ended:
        raise EndedError


ALL = "all"
"""In the place of a peer that was not measured: every implementation of the row."""


class NotMeasured(NamedTuple):
    """An entry of the list of what was not measured."""

    peer: str
    row: str
    reason: str


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--rows``."""
    parser.add_argument("--rows", type=int, nargs="*", help="indices of the rows to measure; default: all")


def chosen(rows: Sequence[T], args: argparse.Namespace) -> Sequence[T]:
    """The rows that ``--rows`` selects."""
    return rows if args.rows is None else [rows[i] for i in args.rows]


def add_peers(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--peers``."""
    parser.add_argument(
        "--peers", nargs="*", default=[""], help="prefixes of names of peers to run; none: no peer; default: all"
    )


def selected(peers: Mapping[str, T], args: argparse.Namespace) -> dict[str, T]:
    """The peers that ``--peers`` selects."""
    return {name: peer for name, peer in peers.items() if name.startswith(tuple(args.peers))}


class Comparison:
    """Implementations of this library and its peers, over the rows of one benchmark.

    ``ours`` must return correct results. If one raises :class:`NotMeasuredError`, or a peer does not run a problem with
    a correct result, it is listed in ``not_measured``. ``all_peers`` names the peers of the benchmark; those that are
    not in ``peers`` are listed as left out.
    """

    def __init__(
        self, ours: Mapping[str, Prepare], peers: Mapping[str, Prepare], all_peers: Iterable[str] = ()
    ) -> None:
        self.ours, self.peers = ours, peers
        self.not_measured: list[NotMeasured] = []
        self._left_out = [name for name in all_peers if name not in peers]
        self._gave_up: dict[str, str] = {}  # in which row
        self._spread = 0.0  # of the last row

    def rows(self, rows: Sequence[R], measure: Callable[[R], dict[str, Any]]) -> list[dict[str, Any]]:
        """The result of ``measure`` for each row, and the spread of the times that it took.

        If the process is to end: for the rows before, if there are any.
        """
        results: list[dict[str, Any]] = []
        try:
            for row in rows:
                check_ended()
                results.append({**measure(row), SPREAD: 100 * self._spread})
                release_memory()
        except EndedError:
            if not results:
                raise
            late = "; ".join(row.name for row in rows[len(results) :])
            self.not_measured.append(NotMeasured(ALL, late, "the process was ended before"))
        return results

    def times(self, row: str, problem: Any, expected: float, max_error: float = MAX_RELATIVE_ERROR) -> dict[str, float]:
        """Median microseconds of one launch of each implementation that runs ``problem`` correctly, also printed.

        Args:
            row: name of the problem in reports.
            problem: has ``copies``, the number of copies of its inputs, and ``error(out)``, the relative error.
            expected: microseconds of a launch, by which CUDA graphs are sized.
            max_error: largest relative error of a correct result.

        Raises:
            AssertionError: a result of this library is wrong.
        """
        calls: dict[str, Call] = {}
        for name, prepare in self.ours.items():
            try:
                calls[name] = _checked(prepare, problem, max_error)
            except NotMeasuredError as error:
                self.not_measured.append(NotMeasured(name, row, reason_of(error)))
        self.not_measured += [NotMeasured(name, row, "left out with --peers") for name in self._left_out]
        for name, prepare in self.peers.items():
            check_ended()
            if name in self._gave_up:
                reason = f"it took more than {MAX_FAILURE_SECONDS:g} s to fail in {self._gave_up[name]}"
                self.not_measured.append(NotMeasured(name, row, reason))
                continue
            start = time.perf_counter()
            try:
                call = _checked(prepare, problem, max_error)
                graph_of(call, 1, 1)
                calls[name] = call
            except Exception as error:  # other libraries raise any type
                self.not_measured.append(NotMeasured(name, row, reason_of(error)))
                print(f"{row}: {name} not measured: {reason_of(error)}", flush=True)
                if time.perf_counter() - start > MAX_FAILURE_SECONDS:
                    self._gave_up[name] = row
        rounds = ROUNDS_OF_LONG_CALLS if expected > LONG_CALL_MICROSECONDS else ROUNDS
        found = device_rounds(calls, problem.copies, expected, rounds)
        medians = {name: statistics.median(times) for name, times in found.items()}
        self._spread = max(map(spread, found.values()), default=0.0)
        print(f"{row}: {', '.join(f'{name} {time:.1f} us' for name, time in medians.items())}", flush=True)
        return medians


def _checked(prepare: Prepare, problem: Any, max_error: float) -> Call:
    call = prepare(problem)
    out = call(0)
    error = problem.error(out)
    if not error < max_error:
        raise AssertionError(f"wrong result: relative error {error:.2e}, expected below {max_error:.0e}")
    return call


def reason_of(error: Exception) -> str:
    """Why a peer was not measured, in a line: the type and the first line of the message."""
    if isinstance(error, NotMeasuredError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return f"{type(error).__name__}: {re.sub(r'/[^ :]*/', '', lines[0])[:160]}"


def largest_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest relative error in norm of pairs ``(actual, expected)``. NaN if one is NaN."""
    errors = [(actual.float() - expected).norm() / expected.norm() for actual, expected in pairs]
    return float(torch.stack(errors).max())


def rotated(x: Tensor, position: Tensor) -> Tensor:
    """ROPE_LLAMA of ``x [tokens, heads, head_dim]`` at ``position [tokens]``."""
    pair = torch.arange(x.shape[2] // 2, device=x.device)
    angle = position[:, None].double() * 1e4 ** (-2 * pair.double() / x.shape[2])
    sin, cos = angle.sin().float()[:, None], angle.cos().float()[:, None]
    low, high = x.chunk(2, dim=2)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=2)


def alibi_bias(num_heads: int, distance: Tensor) -> Tensor:
    """ALiBi of ``distance [rows, keys]``, from the query row to the key: ``[rows, num_heads, keys]``, float32."""
    n = 1 << num_heads.bit_length() - 1
    exponents = [-8 * (h + 1) / n if h < n else -4 * (2 * (h - n) + 1) / n for h in range(num_heads)]
    return torch.tensor(exponents, device=distance.device).exp2()[:, None] * distance[:, None].float()


def logit_gap(logits: Tensor, tokens: Tensor) -> float:
    """Largest gap of the logits of ``tokens [...]`` to the greatest of ``logits [..., vocabulary]``.

    In standard deviations of the logits of a token's place.
    """
    gap = logits.amax(-1) - logits.gather(-1, tokens[..., None])[..., 0]
    return float((gap / logits.std(-1)).max())


def release_memory() -> None:
    """Free the memory of a row and the code that was compiled for it."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()
