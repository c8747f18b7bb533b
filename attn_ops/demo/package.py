"""Packages of the prefill and decode steps, and the C++ server that runs them: ``examples/cpp_serving/server.cpp``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.export import Dim

import attn_ops
from attn_ops import cpp
from attn_ops.demo.engine import Request
from attn_ops.demo.errors import DemoError
from attn_ops.demo.memory import Memory
from attn_ops.demo.model import LanguageModel
from attn_ops.demo.steps import DecodeStep, PrefillStep
from attn_ops.planner import DecodePlanner, PrefillPlanner

PYTHON_LIBRARIES = ("libpython", "libtorch_python")


class Packages(NamedTuple):
    """Paths of the packages of the two steps."""

    prefill: Path
    decode: Path


class Served(NamedTuple):
    """The output of the C++ process.

    Attributes:
        lines: new tokens of each request, or why it was refused.
        numbers: the numbers of the summary by name: seconds, free_pages, preemptions and so on.
        python_mapped: whether the process loaded libpython.
    """

    lines: list[str]
    numbers: dict[str, float]
    python_mapped: bool

    @property
    def outputs(self) -> list[list[int]]:
        """The new tokens of each request.

        Raises:
            DemoError: a request was refused.
        """
        for line in self.lines:
            if line.startswith("refused"):
                raise DemoError(f"the C++ server refused a request: {line}")
        return [[int(token) for token in line.split()] for line in self.lines]


@torch.no_grad()
def export(model: LanguageModel, memory: Memory, folder: Path, configs: Mapping[str, Any] | None = None) -> Packages:
    """Package both steps with the capacities of ``memory``. ``configs`` are options of Inductor."""
    packages = Packages(folder / "prefill.pt2", folder / "decode.pt2")
    steps: tuple[tuple[nn.Module, DecodePlanner | PrefillPlanner, int], ...] = (
        (PrefillStep(model), memory.prefill, memory.capacity.prefill_tokens),
        (DecodeStep(model), memory.decode, memory.capacity.max_batch),
    )
    for (step, planner, most), path in zip(steps, packages, strict=True):
        tokens = torch.zeros(most, dtype=torch.int64, device=memory.device)
        dynamic = {"tokens": {0: Dim("tokens", min=1, max=most)}} if most > 1 else {}
        inputs = (tokens, memory.caches, planner.state, planner.workspace)
        attn_ops.export_package(step, planner, inputs, path, dynamic_shapes=dynamic, inductor_configs=configs)
    return packages


def build_server(folder: Path) -> Path:
    """Compile the server.

    Raises:
        DemoError: g++ is absent or fails.
    """
    with resources.as_file(resources.files("attn_ops.cpp_serving") / "server.cpp") as source:
        try:
            return cpp.build(source, folder / "server")
        except cpp.BuildError as error:
            raise DemoError(f"the C++ server was not built, and the packages not checked: {error}") from error


def write_requests(requests: Iterable[Request], path: Path) -> Path:
    """The file of requests that the server reads, in order of arrival."""
    lines = [f"{r.arrival} {r.max_new_tokens} {' '.join(map(str, r.prompt))}\n" for r in requests]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def serve(server: Path, packages: Packages, requests: Path, stop_tokens: Collection[int] = ()) -> Served:
    """Serve a file of requests in a C++ process, with the number of threads of this process.

    Raises:
        DemoError: the process fails.
    """
    command = [server, *packages, requests, *sorted(stop_tokens)]
    # The loader writes the files that the process loads to libraries.PID.
    libraries = requests.with_name("libraries")
    options = {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(libraries), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | options
    )
    out, summary = process.communicate()
    if process.returncode:
        raise DemoError(f"the C++ server failed (exit status {process.returncode}):\n{summary.strip()[-2000:]}")
    return Served(out.splitlines(), _numbers(summary.splitlines()), _maps_python(libraries, process.pid))


def _numbers(lines: Sequence[str]) -> dict[str, float]:
    return {name: float(number) for name, number in map(str.split, lines)}


def _maps_python(libraries: Path, pid: int) -> bool:
    file = libraries.with_name(f"{libraries.name}.{pid}")
    loaded = file.read_text(encoding="utf-8", errors="replace")
    file.unlink()
    if "libtorch_cpu" not in loaded:
        raise DemoError("the dynamic loader did not say which libraries the C++ server loads; run the demo with glibc")
    return any(name in loaded for name in PYTHON_LIBRARIES)
