"""Timing: CUDA graphs of many launches over rotating inputs, implementations interleaved, medians of replays."""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

L2_BYTES = 60 << 20
ROTATION_BYTES = 5 * L2_BYTES
GRAPH_MICROSECONDS = 3000.0
"""Device time of a graph, long compared with its launch."""

HOST_WARM_UP_SECONDS = 0.5
"""An idle CPU core reaches its full clock rate in this time."""

Call = Callable[[int], object]
"""``call(i)`` launches the work on copy ``i`` of the inputs."""


def copies_for(num_bytes: int) -> int:
    """The number of copies of an input of ``num_bytes`` that rotate, so that none stays in the L2 cache."""
    return max(1, -(-ROTATION_BYTES // num_bytes))


def graph_of(call: Call, copies: int, launches: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of this number of launches, over the copies in turn."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            call(i % copies)
    return graph


def replay_microseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Device time of one replay."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000


def device_rounds(calls: dict[str, Call], copies: int, expected: float, rounds: int = 9) -> dict[str, list[float]]:
    """Microseconds of one launch of each call, in each round. ``expected`` ones size the graphs."""
    launches = copies * max(1, round(GRAPH_MICROSECONDS / expected / copies))
    graphs = {name: graph_of(call, copies, launches) for name, call in calls.items()}
    replays = {name: functools.partial(replay_microseconds, graph) for name, graph in graphs.items()}
    return {name: [time / launches for time in times] for name, times in interleaved(replays, rounds).items()}


def interleaved(measurements: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The results of each measurement in each round, after a round that does not count.

    Within a round the order is random: the clock of a GPU at its power limit depends on what ran before.
    """
    results: dict[str, list[float]] = {name: [] for name in measurements}
    order, generator = list(measurements), random.Random(0)
    for round_ in range(rounds + 1):
        generator.shuffle(order)
        for name in order:
            result = measurements[name]()
            if round_:
                results[name].append(result)
    return results


def device_microseconds(calls: dict[str, Call], copies: int, expected: float, rounds: int = 9) -> dict[str, float]:
    """The medians of :func:`device_rounds`."""
    return {name: statistics.median(times) for name, times in device_rounds(calls, copies, expected, rounds).items()}


def spread(times: Sequence[float]) -> float:
    """The interquartile range of several times, relative to their median."""
    low, median, high = statistics.quantiles(times, method="inclusive")
    return (high - low) / median


class HostTime(NamedTuple):
    """Microseconds of a call: least and median of the means of all rounds. Other load only adds to them."""

    least: float
    median: float


def host_microseconds(
    calls: dict[str, Callable[[], object]], count: int = 200, rounds: int = 40
) -> dict[str, HostTime]:
    """Host time of calls that only enqueue work, in interleaved rounds that begin with an empty queue."""
    warm = time.perf_counter() + HOST_WARM_UP_SECONDS
    while time.perf_counter() < warm:
        for call in calls.values():
            _host_round(call, count)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(_host_round(call, count))
    return {name: HostTime(min(values), statistics.median(values)) for name, values in times.items()}


def _host_round(call: Callable[[], object], count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / count * 1e6
