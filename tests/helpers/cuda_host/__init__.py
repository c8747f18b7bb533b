"""CUDA kernels on the host: their unchanged sources, compiled by g++ and run by a machine of this folder.

Headers without PTX are those of ``kernels/cuda``. In place of ``basics.cuh``, ``hopper.cuh`` and ``cluster.cuh``, which
wrap PTX, are the headers here of the same names, which call the machine of ``machine.h``. A :class:`Host` launches what
:func:`attn_ops.kernels.cuda.launch.launch` would, on tensors of the CPU::

    host = Host(sms=3)
    with host.installed():
        out, lse = prefill.batch_prefill(q, k, v, plan, workspace, causal=True)

``docs/contributing/kernels/host.md`` says what the machine checks, and what it cannot.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import math
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from attn_ops.kernels.cuda.build import MODULES, specializations
from attn_ops.kernels.cuda.compile import sources
from attn_ops.kernels.cuda.kernel import Specialization, TensorMap
from attn_ops.plan.state import PlanProblem, num_partials, num_slots
from helpers import cpp_runner
from helpers.oracle import merge

HERE = Path(__file__).parent

FLAGS = ("-std=c++20", "-g1", "-fPIC", "-march=native", "-U_FORTIFY_SOURCE", "-w")

KERNEL_FLAGS = ("-fsanitize=thread,signed-integer-overflow,integer-divide-by-zero,shift,bounds,alignment",)
"""The compiler calls functions of ``memory.cpp`` at each access to memory, and where behavior is undefined."""

SOURCE = """
#include <cstddef>
#include <type_traits>
#include <utility>
extern "C" int planted;
int planted = 0;
#include "{source}"
template <class... P, std::size_t... I>
__attribute__((no_sanitize("thread")))
static void call(void (*kernel)(P...), void** arguments, std::index_sequence<I...>) {{
  kernel(*static_cast<std::remove_const_t<P>*>(arguments[I])...);
}}
template <class... P>
static void call(void (*kernel)(P...), void** arguments) {{
  call(kernel, arguments, std::index_sequence_for<P...>());
}}
extern "C" {{
extern __attribute__((weak, visibility("hidden"))) char __start_cuda_shared[], __stop_cuda_shared[];
char* static_begin() {{ return __start_cuda_shared; }}
char* static_end() {{ return __stop_cuda_shared; }}
{functions}
}}
"""

FUNCTION = "void call_{name}(void** arguments) {{ call(attn_ops::{name}, arguments); }}"

PLAN = ("qo_indptr", "kv_indices", "work", "queue", "cta_indptr", "kv_len", "merge_indptr")
"""Parameters that are tensors of a plan."""

C_TYPES = {"pointer": ctypes.c_void_p, "i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}

MACHINE = ("cuda.h", "basics.", "hopper.", "cluster.", "wgmma_fp8.", "??")
"""Beginnings of places that are not the kernel's."""

MAX_BOX, MAX_STRIDE, ALIGNMENT = 256, 1 << 40, 16

needs_a_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or shutil.which("addr2line") is None, reason="needs g++ and addr2line"
)


class HostError(AssertionError):
    """An error that the machine found in a kernel, with the lines of its source."""


class _Region(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("granule", ctypes.c_int32),
        ("is_plan", ctypes.c_int32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_int32 * 3),
        ("cluster", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("regions", ctypes.POINTER(_Region)),
        ("num_regions", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
    )


_stacks = ctypes.c_void_p()
"""Stacks of the threads of all launches. A launch allocates them if there are none."""


class Fault(NamedTuple):
    """A change of statements of a kernel's files: ``old`` occurs ``times`` times."""

    old: str
    new: str
    times: int = 1


def _included(name: str, texts: dict[str, str]) -> set[str]:
    """The file ``name`` and what it includes of ``texts``."""
    found, following = set(), {name}
    while following:
        found |= following
        names = {one for file in following for one in re.findall(r'#include "(.*)"', texts[file])}
        following = (names & texts.keys()) - found
    return found


def _plant(texts: dict[str, str], faults: Sequence[Fault]) -> dict[str, str]:
    """Every fault at once: ``planted`` is the number of the one that is there, from 1 on."""
    texts = dict(texts)
    for number, fault in enumerate(faults, 1):
        found = sum(text.count(fault.old) for text in texts.values())
        assert found == fault.times, f"{fault.old!r} occurs {found} times"
        here = f"if (planted == {number}) {{ {fault.new} }} else {{ {fault.old} }}\n"
        texts = {name: text.replace(fault.old, here) for name, text in texts.items()}
    return texts


def _compile(name: str, texts: dict[str, str], *words: str) -> Path:
    """The output of g++ for the file ``name`` of ``texts``, once in a test run for the same texts and words."""
    digest = hashlib.sha256(repr((name, sorted(texts.items()), words)).encode()).hexdigest()[:16]
    folder = cpp_runner.folder / f"host-{digest}"
    output = folder / "output"
    with FileLock(f"{folder}.lock"):
        if not output.exists():
            folder.mkdir(exist_ok=True)
            for file, text in texts.items():
                (folder / file).write_text(text)
            command = ["g++", *FLAGS, *words, name, "-o", output.name]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                raise HostError(f"{name} does not compile on the host:\n{done.stderr}")
    return output


def _own(*names: str) -> dict[str, str]:
    return {name: (HERE / name).read_text() for name in names}


def machine() -> Path:
    """The object file of all C++ files here. They compile faster as one."""
    names = sorted(path.name for path in HERE.glob("*.cpp"))
    texts = _own(*names, *(path.name for path in HERE.glob("*.h")))
    texts["machine.cpp"] = "".join(f'#include "{name}"\n' for name in names)
    return _compile("machine.cpp", texts, "-O2", "-ftree-vectorize", "-fvisibility=hidden", "-c")


def _with_host_headers(one: Specialization) -> tuple[dict[str, str], list[str]]:
    """The files that the source of ``one`` needs on the host, and the options of its macros."""
    source, headers = sources(one)
    texts = {name: text.decode() for name, text in headers.items()} | {one.kernel.source: source.decode()}
    texts |= _own("cuda.h", "interface.h", "numbers.h", *(path.name for path in HERE.glob("*.cuh")))
    return texts, one.definitions


def library_of(one: Specialization, faults: Sequence[Fault] = ()) -> Path:
    """The shared library of a kernel's file, for the macros of ``one``."""
    names = {other.kernel.function for other in specializations() if other.kernel.source == one.kernel.source}
    texts, macros = _with_host_headers(one)
    of_kernel = _included(one.kernel.source, texts) - {path.name for path in HERE.iterdir()}
    texts |= _plant({name: texts[name] for name in of_kernel}, faults)
    calls = "\n".join(FUNCTION.format(name=name) for name in sorted(names))
    texts["kernel.cpp"] = SOURCE.format(source=one.kernel.source, functions=calls)
    return _link(_compile("kernel.cpp", texts, *KERNEL_FLAGS, *macros, "-Og", "-c"))


def program(one: Specialization, main: str) -> Path:
    """An executable of C++ that calls device functions of a kernel's file which wait for no other thread.

    It ends with an error where behavior is undefined.
    """
    texts, macros = _with_host_headers(one)
    texts["main.cpp"] = f'#include "{one.kernel.source}"\n{main}'
    sanitizers = "-fsanitize=undefined,address", "-fsanitize-undefined-trap-on-error"
    return _compile("main.cpp", texts, str(machine()), *sanitizers, *macros, "-O1", "-D__global__=inline")


READ_NUMBERS = """
#include <cstdio>
#include <vector>
using namespace attn_ops;

int main() {
  std::vector<int> n;
  for (int value; std::scanf("%d", &value) == 1;) n.push_back(value);
  const int* at = n.data();
  const auto array = [&] { const int size = *at++; const int* first = at; at += size; return first; };
"""
"""The beginning of a ``main`` that :func:`rows_of` runs: ``*at`` is the next number, ``array()`` the next of them."""


def rows_of(program: Path, numbers: Sequence[int]) -> list[list[int]]:
    """The numbers in each line that a program prints, which reads ``numbers``."""
    run = subprocess.run([program], input=" ".join(map(str, numbers)), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [list(map(int, line.split())) for line in run.stdout.splitlines()]


@functools.cache
def _link(kernel: Path) -> Path:
    target = kernel.with_name("kernel.so")
    with FileLock(f"{target}.lock"):
        if not target.exists():
            subprocess.run(["g++", "-shared", str(kernel), str(machine()), "-ldl", "-o", str(target)], check=True)
    return target


@functools.cache
def _load(library: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library))
    loaded.host_launch.restype = ctypes.c_char_p
    for name in ("static_begin", "static_end"):
        getattr(loaded, name).restype = ctypes.c_void_p
    return loaded


def _with_lines(message: str, library: Path) -> str:
    """The message with places of the source in place of addresses, ``@{1f3a}``."""

    @functools.cache
    def place(address: str) -> str:
        words = ["addr2line", "-i", "-e", str(library), address]
        lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
        places = [re.sub(r" \(.*\)", "", line.rpartition("/")[2]) for line in lines]
        of_kernel = [one for one in places if not one.startswith(MACHINE)]
        return "at " + ", called at ".join(of_kernel or places)

    return re.sub(r"@\{(\w+)\}", lambda found: place(found[1]), message)


def _encoded(name: str, one: TensorMap) -> bytes:
    """128 bytes, ``Map`` of machine.h, of what the driver would accept."""
    size, rank = one.base.element_size(), len(one.shape)
    if not one.base.numel():
        return bytes(128)
    strides = [int(s) * size for s in one.strides]
    problems = [
        (one.base.data_ptr() % ALIGNMENT != 0, "its address is not aligned"),
        (not 1 <= rank <= 5 or len(one.strides) != rank or len(one.box) != rank, "it has another rank"),
        (strides[-1] != size, "its last stride is not 1"),
        (any(s % ALIGNMENT or not 0 < s < MAX_STRIDE for s in strides[:-1]), f"its strides are {strides} bytes"),
        (any(not 0 < b <= MAX_BOX for b in one.box), f"its box is {one.box}"),
        (any(not 0 < n < 1 << 32 for n in one.shape), f"its shape is {one.shape}"),
        (one.swizzle and one.box[-1] * size > one.swizzle, "its box is wider than the swizzle"),
        (one.box[-1] * size % ALIGNMENT != 0, "rows of its box are no multiples of 16 bytes"),
    ]
    if wrong := [text for is_wrong, text in problems if is_wrong]:
        raise HostError(f"the driver refuses the tensor map {name}: {'; '.join(wrong)}")
    padding = [0] * (5 - rank)
    shape, box = (([*map(int, reversed(x)), *padding]) for x in (one.shape, one.box))
    return struct.pack("Q5q5i5i2i", one.base.data_ptr(), *reversed(strides), *padding, *shape, *box, rank, one.swizzle)


def _regions(one: Specialization, arguments: dict[str, Any]) -> list[_Region]:
    """The storages of the arguments, each once; the first parameter that is a written one names it."""
    found: dict[int, _Region] = {}
    order = sorted(arguments.items(), key=lambda item: item[0] not in one.kernel.writes)
    for name, value in order:
        t = value.base if isinstance(value, TensorMap) else value
        if not isinstance(t, Tensor) or not t.numel():
            continue
        storage = t.untyped_storage()
        granule = t.element_size() if name in one.kernel.writes else 0
        found.setdefault(
            storage.data_ptr(),
            _Region(name.encode(), storage.data_ptr(), storage.nbytes(), granule, int(name in PLAN)),
        )
    return list(found.values())


class Host:
    """Launches kernels on the host.

    sms      of the GPU: persistent kernels have this many CTAs
    seed     of the order in which threads run and loads land; 0 is first in, first out
    faults   are compiled into the source
    planted  the number of the fault that is there, from 1 on, or 0
    """

    def __init__(self, sms: int = 3, seed: int = 0, faults: Sequence[Fault] = (), planted: int = 0) -> None:
        self.sms, self.seed, self.faults, self.planted = sms, seed, tuple(faults), planted
        self.launched: list[str] = []

    def launch(self, specialization: Specialization, grid: Sequence[Any], /, **arguments: Any) -> None:
        """:func:`attn_ops.kernels.cuda.launch.launch` on tensors of the CPU.

        Raises:
            HostError: the machine found something wrong.
        """
        kernel = specialization.kernel
        values = dict(zip(kernel.parameters, kernel.in_order(arguments), strict=True))
        library = library_of(specialization, self.faults)
        loaded = _load(library)
        ctypes.c_int.in_dll(loaded, "planted").value = self.planted
        kept: list[Any] = []  # what the pointers below point to
        for (name, kind), value in zip(kernel.parameters.items(), values.values(), strict=True):
            if kind == "map":
                memory = ctypes.create_string_buffer(128 + 64)
                at = -ctypes.addressof(memory) % 64
                encoded = _encoded(name, value)
                ctypes.memmove(ctypes.addressof(memory) + at, encoded, len(encoded))
                kept.append((memory, ctypes.addressof(memory) + at))
            else:
                if kind == "pointer" and value is not None and name in kernel.aligned:
                    assert value.data_ptr() % ALIGNMENT == 0, name
                number: Any = value
                if kind == "pointer":
                    number = None if value is None or not value.numel() else value.data_ptr()
                number = C_TYPES[kind](number)
                kept.append((number, ctypes.addressof(number)))
        regions = _regions(specialization, values)
        one = _Launch(
            ctypes.cast(getattr(loaded, f"call_{kernel.function}"), ctypes.c_void_p),
            (ctypes.c_void_p * len(kept))(*(address for _, address in kept)),
            (ctypes.c_int32 * 3)(*[*map(int, grid), 1, 1][:3]),
            specialization.cluster[0],
            specialization.threads,
            specialization.shared_bytes,
            (_Region * len(regions))(*regions),
            len(regions),
            self.seed,
        )
        self.launched.append(specialization.name)
        if not all(one.grid):
            return
        static = ctypes.c_void_p(loaded.static_begin()), ctypes.c_void_p(loaded.static_end())
        message = loaded.host_launch(ctypes.byref(one), *static, ctypes.byref(_stacks))
        if message is not None:
            raise HostError(_with_lines(message.decode(), library))

    @contextlib.contextmanager
    def installed(self) -> Iterator[Host]:
        """The ops of the CUDA kernels' modules launch here, and partial results are combined by the oracle."""
        cuda, prefill_call = "attn_ops.kernels.cuda", "attn_ops.kernels.triton.prefill_call"
        with pytest.MonkeyPatch.context() as patch:
            for name in MODULES:
                patch.setattr(importlib.import_module(f"{cuda}.{name}"), "launch", self.launch)
            for module in (f"{cuda}.kernel", f"{cuda}.mla", f"{cuda}.single_decode", "attn_ops.ops.cuda_kernels"):
                patch.setattr(importlib.import_module(module), "num_sms", lambda device: self.sms)
            for module in (prefill_call, f"{cuda}.mla"):
                patch.setattr(importlib.import_module(module), "combine_split_tiles", combine_split_tiles)
            patch.setattr(importlib.import_module(prefill_call), "combine_split_requests", combine_split_requests)
            patch.setattr(importlib.import_module(f"{cuda}.decode"), "combine_split_rows", combine_split_rows)
            yield self


def combine_split_tiles(
    out: Tensor,
    lse: Tensor,
    workspace: Tensor,
    sinks: Tensor | None,
    plan: Any,
    *,
    scaled: bool = False,
    launch_early: bool = False,
) -> None:
    """The output of split tiles, from their partial results by the definition of a merge."""
    problem, slots = PlanProblem.of(plan.problem), num_partials(plan)
    heads, dim = out.shape[1:]
    values = slots * problem.tile_rows * heads * dim
    partial = workspace.flatten()[:values]
    if scaled:  # float16 in the first half, scales of 128 columns in the second
        scales = partial[values // 2 :][: values // 128].view(-1, 1)
        partial = partial[: values // 2].view(torch.float16).view(-1, 128).float() * scales
    partial = partial.view(slots, problem.tile_rows, heads, dim)
    sums = workspace.flatten()[values:][: values // dim].view(slots, problem.tile_rows, heads)
    for row, rows, first, splits in plan.split_tiles.tolist():
        if not splits:
            continue
        rows = min(rows, problem.tile_rows, out.shape[0] - row)
        v, s = (t[first : first + splits, :rows].transpose(0, 1) for t in (partial, sums))
        _store_merged(v, s, sinks, out, lse, row)


def combine_split_requests(out: Tensor, lse: Tensor, workspace: Tensor, sinks: Tensor | None, requests: Any) -> None:
    """The output of requests of equal lengths that are split, by the definition of a merge."""
    heads, dim = out.shape[1:]
    sizes = requests.batch_size, requests.splits, requests.rows, heads
    values = math.prod(sizes) * dim
    partial, sums = workspace[:values].view(*sizes, dim), workspace[values:].view(sizes)
    for request in range(requests.batch_size):
        v, s = (t[request].transpose(0, 1) for t in (partial, sums))
        _store_merged(v, s, sinks, out, lse, request * requests.rows)


def combine_split_rows(
    out: Tensor,
    lse: Tensor,
    workspace: Tensor,
    sinks: Tensor | None,
    plan: Any,
    return_lse: bool,
    *,
    launch_early: bool = False,
) -> None:
    """The output of decode rows that are split, by the definition of a merge, and of those without tokens."""
    slots, heads, dim = num_slots(plan), *out.shape[1:]
    values = slots * heads * dim
    partial = workspace.flatten()[:values].view(slots, heads, dim)
    sums = workspace.flatten()[values:][: values // dim].view(slots, heads)
    splits = plan.merge_indptr.clamp(0, slots).tolist()
    for row, kv_len in enumerate(plan.kv_len[: out.shape[0]].tolist()):
        begin, end = splits[row : row + 2]
        if end <= begin and kv_len > 0:
            continue
        v, s = (t[begin:end].unsqueeze(0) for t in (partial, sums))
        if end <= begin:  # a part of no weight
            v, s = torch.zeros(1, 1, heads, dim), torch.full((1, 1, heads), -torch.inf)
        _store_merged(v, s, sinks, out, lse, row)


def _store_merged(v: Tensor, s: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, row: int) -> None:
    """Merge ``v [rows, parts, heads, dim]`` and the sinks, and store from ``row`` on."""
    if sinks is not None:
        v = torch.cat((v, torch.zeros_like(v[:, :1])), 1)
        s = torch.cat((s, (sinks / torch.log(torch.tensor(2.0))).expand(s.shape[0], 1, s.shape[2])), 1)
    merged, of_rows = merge(v, s)
    limit = torch.finfo(out.dtype).max
    out[row : row + v.shape[0]] = merged.clamp(-limit, limit).to(out.dtype)
    if lse.dim() > 1:
        lse[row : row + v.shape[0]] = of_rows.float()
