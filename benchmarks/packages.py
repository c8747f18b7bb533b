"""Packages in a C++ process compared with the eager ops: microseconds in CUDA graphs, and host time."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attn_ops import cpp
from attn_ops.native.images import LIBCUDA
from benchmarks import report
from benchmarks.comparison import release_memory
from benchmarks.decode_problem import DecodeProblem
from benchmarks.decode_rows import DecodeRow
from benchmarks.prefill_problem import MlaProblem, PrefillProblem
from benchmarks.prefill_rows import MlaRow, PrefillRow
from benchmarks.timing import GRAPH_MICROSECONDS, graph_of, host_microseconds, interleaved, replay_microseconds

RUNNER = Path(__file__).with_name("time_package.cpp")
NOTE = (
    "Microseconds per launch of an op alone, bf16. `eager` is the op in a CUDA graph; `package` is an AOTInductor "
    "package in a CUDA graph of a C++ process, on the same inputs. The two processes replay in turn, in random order; "
    "medians. Launches rotate over copies of the KV cache, with one query, plan and workspace. `nodes` are those of a "
    "launch in a CUDA graph. `host` times are of calls that only enqueue work."
)
GOAL = 1.03
"""Time of a package, relative to the eager op."""

ROUNDS = 15


class Problem(NamedTuple):
    """An op with its options, and its tensors: those of each copy, then the plan and the workspace.

    Copies may have tensors in common. What launches have in common stays in the L2 cache.
    """

    op: str
    options: dict[str, Any]
    copies: Sequence[tuple[Tensor, ...]]
    plan: Any
    workspace: Tensor

    def on_host(self) -> tuple[list[Tensor], list[list[int]]]:
        """The tensors of all copies on the host, each once; and of each copy, the positions of its inputs in them."""
        inputs = [(*copy, *self.plan, self.workspace) for copy in self.copies]
        tensors = {id(t): t for copy in inputs for t in copy}
        places = {key: i for i, key in enumerate(tensors)}
        return [t.cpu() for t in tensors.values()], [[places[id(t)] for t in copy] for copy in inputs]


def _decode(batch: int, length: int) -> Problem:
    row = DecodeRow("", (length,) * batch, 32, 8, None)
    p = DecodeProblem(row)
    planner = p.planner()
    planner.plan(*p.table.arguments)
    return Problem("batch_decode", {}, [(p.q, *p.caches(i)) for i in range(p.copies)], planner.state, planner.workspace)


def _prefill(length: int) -> Problem:
    p = PrefillProblem(PrefillRow("", (length,), (length,), None))
    planner = p.planner(paged=True)
    copies = [(p.q, p.k_caches[i], p.v_caches[i]) for i in range(p.copies)]
    return Problem("batch_prefill", {"causal": True}, copies, planner.state, planner.workspace)


def _mla(batch: int, length: int) -> Problem:
    p = MlaProblem(MlaRow("", (length,) * batch, 0.0))
    planner = p.planner()
    q_nope, q_pe = p.q_nope.contiguous(), p.q_pe.contiguous()
    copies = [(q_nope, q_pe, p.ckv[i], p.kpe[i]) for i in range(p.copies)]
    return Problem("batch_mla", {}, copies, planner.state, planner.workspace)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "decode, 1 x 4k": lambda: _decode(1, 4096),
    "decode, 32 x 4k": lambda: _decode(32, 4096),
    "prefill, 1 x 8k": lambda: _prefill(8192),
    "mla, 64 x 4k": lambda: _mla(64, 4096),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    report.add_output(parser)
    parser.add_argument("--rows", nargs="*", choices=list(PROBLEMS), default=list(PROBLEMS), help="all by default")


class Attend(nn.Module):
    """One call of an op."""

    def __init__(self, p: Problem) -> None:
        super().__init__()
        self.op, self.options = getattr(torch.ops.attn, p.op), p.options

    def forward(self, *inputs: Any) -> Tensor:
        return self.op(*inputs, **self.options)[0]


@torch.no_grad()
def _package(name: str, path: Path) -> float:
    """Package a problem; seconds."""
    p = PROBLEMS[name]()
    begin = time.time()
    program = torch.export.export(Attend(p), (*p.copies[0], p.plan, p.workspace))
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return time.time() - begin


def _nodes(call: Callable[[int], object]) -> int:
    """Nodes in a CUDA graph of one launch."""
    graph, count = torch.cuda.CUDAGraph(keep_graph=True), ctypes.c_size_t()
    with torch.cuda.graph(graph):
        call(0)
    error = ctypes.CDLL(LIBCUDA).cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    if error:
        raise RuntimeError(f"cuGraphGetNodes: CUDA error {error}; expected the number of nodes of a captured graph")
    return count.value


class Runner:
    """The C++ process of ``time_package.cpp``, which replays its graph when it is asked to."""

    def __init__(self, program: Path, package: Path, inputs: Path, launches: int) -> None:
        self.words = [str(program), str(package), str(inputs), str(launches)]
        self.process = subprocess.Popen(self.words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def replay_microseconds(self) -> float:
        """Device time of one replay."""
        requests, results = self.process.stdin, self.process.stdout
        assert requests is not None
        assert results is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no result either
            print(file=requests, flush=True)
        return float(results.readline() or self._failed())

    def end(self) -> tuple[int, float]:
        """The nodes of a launch, and the least host time of a call in microseconds."""
        nodes, host = (self.process.communicate()[0] or self._failed()).split()
        return int(nodes), float(host)

    def _failed(self) -> str:
        words = " ".join(self.words)
        raise RuntimeError(f"{words} ended with status {self.process.wait()} before it printed a result")

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def _measure(name: str, p: Problem, runner: Path, package: Path, packaging: float) -> report.Row:
    model, inputs = Attend(p), package.with_name("inputs.pt")

    def call(i: int) -> object:
        return model(*p.copies[i], p.plan, p.workspace)

    copies = len(p.copies)
    estimate = replay_microseconds(graph_of(call, copies, copies)) / copies
    launches = copies * max(1, round(GRAPH_MICROSECONDS / estimate / copies))
    torch.save(p.on_host(), inputs)
    graph = graph_of(call, copies, launches)
    with Runner(runner, package, inputs, launches) as packaged:
        replays = {"eager": lambda: replay_microseconds(graph), "package": packaged.replay_microseconds}
        times = {key: statistics.median(of) / launches for key, of in interleaved(replays, ROUNDS).items()}
        nodes, host = packaged.end()
    row = {
        "row": name,
        **times,
        "of eager": times["package"] / times["eager"],
        "goal": GOAL,
        "eager nodes": _nodes(call),
        "package nodes": nodes,
        "eager host": host_microseconds({"eager": lambda: call(0)})["eager"].least,
        "package host": host,
        "packaging, s": packaging,
        "size, KiB": package.stat().st_size >> 10,
    }
    print(json.dumps(row), flush=True)
    return row


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Measure and save the rows."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{i}.pt2" for i, name in enumerate(args.rows)}
        with ProcessPoolExecutor(len(paths), multiprocessing.get_context("spawn")) as processes:
            packaging = {name: processes.submit(_package, name, path) for name, path in paths.items()}
            runner = cpp.build(RUNNER, Path(folder) / RUNNER.stem, cpp.cuda_flags())
        for name, path in paths.items():
            results.append(_measure(name, PROBLEMS[name](), runner, path, packaging[name].result()))
            release_memory()
    ratios = [row["of eager"] for row in results]
    headline = f"Packages take {min(ratios):.2f} to {max(ratios):.2f} of the time of the eager ops, in CUDA graphs."
    report.save("packages", "Packages", NOTE, results, args.output, headline)
