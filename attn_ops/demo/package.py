"""AOTInductor packages of the decode step, and the C++ process that runs them.

One package plans a batch, the other runs a decode step. ``runner.cpp`` loads both and a file of input tensors, and
decodes greedily in a process without Python and without this library.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attn_ops.demo.engine import Snapshot
from attn_ops.demo.errors import DemoError
from attn_ops.demo.memory import Memory
from attn_ops.demo.model import LanguageModel
from attn_ops.demo.pages import page_table
from attn_ops.demo.steps import DecodeStep, PlanStep

RUNNER_SOURCE = Path(__file__).with_name("runner.cpp")


class RunnerResult(NamedTuple):
    """The output of the C++ process.

    Attributes:
        tokens: ``[steps][max_batch]``.
        seconds: the shortest time of all repeats.
        python_mapped: whether libpython is mapped in the process.
    """

    tokens: list[list[int]]
    seconds: float
    python_mapped: bool


class Artifact(NamedTuple):
    """Paths of the two packages, and their folder."""

    plan: Path
    decode: Path
    folder: Path


@torch.no_grad()
def build(model: LanguageModel, memory: Memory, folder: Path) -> Artifact:
    """Export the plan and decode steps with the shapes of ``memory``, and compile each to a package in ``folder``."""
    artifact = Artifact(folder / "plan.pt2", folder / "decode.pt2", folder)
    empty = page_table([[]] * memory.capacity.max_batch, [0] * memory.capacity.max_batch, 1, memory.decode.max_pages)
    table = [t.to(memory.device) for t in empty]
    tokens = torch.zeros(memory.capacity.max_batch, dtype=torch.int64, device=memory.device)
    _package(PlanStep(), (*table, memory.decode.state), artifact.plan)
    inputs = (tokens, memory.caches, memory.decode.state, memory.decode.workspace)
    _package(DecodeStep(model), inputs, artifact.decode)
    return artifact


def _package(step: nn.Module, inputs: tuple[object, ...], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        program = torch.export.export(step, inputs)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def compile_runner(folder: Path, device: torch.device, source: Path = RUNNER_SOURCE) -> Path:
    """Compile ``source`` with g++ and the headers of the installed torch.

    Raises:
        DemoError: g++ is absent or fails.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise DemoError(
            "g++ is not on the PATH, so the C++ runner was not built and the package not checked; install g++"
        )
    binary = folder / source.stem
    torch_folder = Path(torch.__file__).parent
    include, lib = torch_folder / "include", torch_folder / "lib"
    command = [compiler, "-std=c++20", "-O1", str(source), "-o", str(binary)]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-isystem{include}"]
    command += [f"-isystem{include / 'torch/csrc/api/include'}", f"-L{lib}", f"-Wl,-rpath,{lib}"]
    command += ["-Wl,--no-as-needed", *[f"-l{library}" for library in ("torch", "torch_cpu", "c10")]]
    command += _cuda_options() if device.type == "cuda" else []
    _check(subprocess.run(command, capture_output=True, text=True, check=False), "g++ could not compile the C++ runner")
    return binary


def _cuda_options() -> list[str]:
    """Options for a program that uses torch's CUDA streams and graphs: torch's CUDA libraries, and the runtime's."""
    from torch.utils.cpp_extension import CUDA_HOME

    site, home = Path(torch.__file__).parents[1], Path(CUDA_HOME or "/usr/local/cuda")
    runtimes = [*site.glob("nvidia/cu*/lib/libcudart.so.*"), *site.glob("nvidia/cuda_runtime/lib/libcudart.so.*")]
    runtimes += [path for path in (home / "lib64/libcudart.so",) if path.exists()]
    includes = [path for path in (home / "include", *site.glob("nvidia/cu*/include")) if path.is_dir()]
    options = ["-ltorch_cuda", "-lc10_cuda", *(f"-isystem{path}" for path in includes)]
    return [*options, *(str(path) for path in runtimes[:1]), *(f"-Wl,-rpath,{path.parent}" for path in runtimes[:1])]


def save_state(memory: Memory, start: Snapshot, path: Path) -> None:
    """Write the inputs of ``runner.cpp`` for decoding from ``start``."""
    allocated = torch.zeros(len(start.pages), memory.capacity.pages_per_request, dtype=torch.int32)
    for row, pages in zip(allocated, start.pages, strict=True):
        row[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
    state: dict[str, Tensor | list[Tensor]] = {
        "tokens": torch.tensor(start.tokens),
        "lengths": torch.tensor(start.lengths, dtype=torch.int32),
        "page_table": allocated,
        "page_size": torch.tensor(memory.capacity.page_size, dtype=torch.int32),
        "kv_indices": torch.zeros(memory.decode.max_pages, dtype=torch.int32),
        "caches": [cache.cpu() for cache in memory.caches],
        "plan": [t.cpu() for t in memory.decode.state],
        "workspace": memory.decode.workspace.cpu(),
    }
    torch.save(state, path)


def run(runner: Path, artifact: Artifact, memory: Memory, start: Snapshot, steps: int, repeats: int) -> RunnerResult:
    """Decode ``steps`` tokens from ``start`` in a C++ process, with the number of threads of this process.

    Raises:
        DemoError: the process fails.
    """
    state = artifact.folder / "state.pt"
    save_state(memory, start, state)
    command = [runner, artifact.plan, artifact.decode, state, steps, repeats, memory.device]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, env=os.environ | threads
    )
    _check(done, "the C++ runner failed")
    return _parse(done.stdout.splitlines())


def _parse(lines: Sequence[str]) -> RunnerResult:
    words = [line.split() for line in lines]
    fields = {line[0]: line[1] for line in words if line[0] != "tokens"}
    tokens = [[int(token) for token in line[1:]] for line in words if line[0] == "tokens"]
    return RunnerResult(tokens, float(fields["seconds"]), fields["python"] != "absent")


def _check(done: subprocess.CompletedProcess[str], what: str) -> None:
    if done.returncode:
        raise DemoError(f"{what} (exit status {done.returncode}):\n{done.stderr.strip()[-2000:]}")
