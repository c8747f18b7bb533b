"""CUDA kernels as the compiler sees them, without a GPU: their parameters, and what they take of one.

``python -m helpers.cuda_kernels`` in ``tests/`` prints the latter. With ``--write`` it stores it in
``resources_cuda.json`` for the version of nvrtc that compiled them.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock

from attn_ops.kernels.cuda import nvrtc
from attn_ops.kernels.cuda.build import specializations
from attn_ops.kernels.cuda.compile import ARCHITECTURE, compiler, options, sources
from attn_ops.kernels.cuda.compile import cubin_of as compiled_or_kept
from attn_ops.kernels.cuda.kernel import Specialization
from helpers import cpp_runner
from helpers.cubins import instructions_of, resource_usage, tool

needs_nvrtc = pytest.mark.skipif(nvrtc.find()[0] is None, reason=f"there is no nvrtc: {nvrtc.find()[1]}")

PTX_TYPES = {"pointer": "u64", "map": "b8[128]", "i32": "u32", "i64": "u64", "fp32": "f32"}
"""Kinds of ``kernels/cuda/kernel.py`` -> types of parameters in PTX."""

C_TYPES = {
    **dict.fromkeys(("int", "int32", "uint32", "unsigned"), "i32"),
    **dict.fromkeys(("int64", "uint64"), "i64"),
    "float": "fp32",
    "const __grid_constant__ TensorMap": "map",
}
"""Types of parameters in C++, except pointers -> kinds."""


def virtual_options(one: Specialization) -> list[str]:
    """The options of a kernel for a virtual architecture: the compiler stops before the assembler."""
    return [word.replace(ARCHITECTURE, ARCHITECTURE.replace("sm", "compute")) for word in options(one)]


def check_syntax(one: Specialization, more: str) -> None:
    """Compile the source of a kernel and ``more`` in its namespace, as far as the compiler reports errors."""
    found_compiler, _ = nvrtc.find()
    assert found_compiler is not None
    source, headers = sources(one)
    text = source + f"\nnamespace attn_ops {{\n{more}}}\n".encode()
    words = [*virtual_options(one), "--fdevice-syntax-only"]
    found_compiler.compile(one.kernel.source, text, headers, words, "PTX")


SIGNATURE = """
template <class T> constexpr int kKind = -1;
template <class T> constexpr int kKind<T*> = 0;
template <> constexpr int kKind<TensorMap> = 1;
template <> constexpr int kKind<int> = 2;
template <> constexpr int kKind<unsigned> = 2;
template <> constexpr int kKind<int64> = 3;
template <> constexpr int kKind<uint64> = 3;
template <> constexpr int kKind<float> = 4;
template <class... P, class... I>
__device__ constexpr bool has_kinds(void (*)(P...), I... expected) {
  return ((kKind<P> == expected) && ...);
}
"""


def check_parameters(one: Specialization, kinds: Iterable[str]) -> None:
    """Compile an assertion of the kinds of the kernel's parameters, which takes less than to look at PTX."""
    expected = [str(list(PTX_TYPES).index(kind)) for kind in kinds]
    check_syntax(one, f"{SIGNATURE}static_assert(has_kinds({', '.join([one.kernel.function, *expected])}));\n")


def compiled_parameters(one: Specialization) -> list[str]:
    """The types of the kernel's parameters in the compiler's output, of :data:`PTX_TYPES`."""
    found_compiler, _ = nvrtc.find()
    assert found_compiler is not None
    source, headers = sources(one)
    words = [*virtual_options(one), "--device-debug"]  # without optimization, which takes most of the time
    ptx = found_compiler.compile(one.kernel.source, source, headers, words, "PTX").decode()
    found = re.search(rf"\.entry {one.kernel.function}\((.*?)\)", ptx, re.DOTALL)
    assert found is not None, f"{one.kernel.source} has no function {one.kernel.function}"
    types = re.findall(r"\.param(?: \.align \d+)? \.(\w+)[^,\[]*(\[\d+\])?", found[1])
    return [name + array for name, array in types]


def _holds(condition: str, macros: dict[str, int]) -> bool:
    """Whether a condition on macros with ``||`` or ``&&`` between them holds; macros may be negated."""
    parts = [
        not macros.get(part[1:]) if part[0] == "!" else macros.get(part) for part in re.findall(r"!?\w+", condition)
    ]
    return all(parts) if "&&" in condition else any(parts)


def declared_parameters(one: Specialization) -> dict[str, str]:
    """The names and kinds of the kernel's parameters in its source."""
    text = re.sub(r"//.*", "", sources(one)[0].decode())
    macros = dict(one.macros)
    # Parameters of some specializations: `#if` a condition, those, `#else`, the others, if there are, `#endif`.
    text = re.sub(
        r"#if (.+)\n((?:(?!#).*\n)*)(?:#else\n((?:(?!#).*\n)*))?#endif\n",
        lambda found: found[2] if _holds(found[1], macros) else found[3] or "",
        text,
    )
    found = re.search(rf"__global__[^;{{]*?\b{one.kernel.function}\((.*?)\)\s*{{", text, re.DOTALL)
    assert found is not None, f"{one.kernel.source} has no function {one.kernel.function}"
    kinds = {}
    for parameter in found[1].split(","):
        of, name = re.fullmatch(r"(.*?)(\w+)", " ".join(parameter.split())).groups()  # type: ignore[union-attr]
        kinds[name] = "pointer" if "*" in of else C_TYPES[of.strip()]
    return kinds


INSTRUCTION_BYTES = 16


class Usage(NamedTuple):
    """Resources of a GPU that a kernel takes."""

    registers: int  # of a thread
    stack: int  # bytes of a thread: what does not fit in registers
    shared: int  # bytes of a CTA
    hgmma: int  # matrix instructions of warpgroups


@functools.cache
def cubin_of(one: Specialization) -> bytes:
    """The compiled kernel. One process of a test run compiles it; the others find the result on disk."""
    name = hashlib.sha256(repr((one.kernel.source, options(one))).encode()).hexdigest()[:16]
    with FileLock(cpp_runner.folder / f"cubin-{name}.lock"):
        return compiled_or_kept(one)


_disassembled: dict[Specialization, str] = {}


def disassemble(several: Iterable[Specialization]) -> None:
    """Keep the text of several kernels for :func:`disassembly`, by one process: most of its time is its start."""
    codes = {one: instructions_of(cubin_of(one), one.kernel.function) for one in several if one not in _disassembled}
    if not codes:
        return
    machine = ARCHITECTURE.replace("sm_", "SM")
    lines = tool("nvdisasm", "--binary", machine, file=b"".join(codes.values())).splitlines()
    lines = [line for line in lines if re.match(r"\s*/\*[0-9a-f]+\*/", line)]
    assert len(lines) * INSTRUCTION_BYTES == sum(map(len, codes.values()))
    begin = 0
    for one, code in codes.items():
        end = begin + len(code) // INSTRUCTION_BYTES
        _disassembled[one] = "\n".join(lines[begin:end])
        begin = end


def disassembly(one: Specialization) -> str:
    """The instructions of a kernel, each a line."""
    disassemble([one])
    return _disassembled[one]


@functools.cache
def usage_of(one: Specialization) -> Usage:
    registers, stack, shared = resource_usage(cubin_of(one), one.kernel.function)
    return Usage(registers, stack, shared + one.shared_bytes, len(re.findall(r"\b[HQ]GMMA\b", disassembly(one))))


def measure() -> dict[str, Usage]:
    """The usage of every specialization, by its name."""
    for one in reversed(specializations()):  # another process may compile them in order: each finds what the other kept
        cubin_of(one)
    disassemble(specializations())
    return {one.name: usage_of(one) for one in specializations()}


TABLE = Path(__file__).parents[1] / "resources_cuda.json"


def compiler_version() -> str:
    return compiler()[0]


def read() -> dict[str, dict[str, list[int]]]:
    """The fields of :class:`Usage`, by compiler and kernel."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def write(found: dict[str, Usage]) -> None:
    text = json.dumps(read() | {compiler_version(): found}, indent=1)
    TABLE.write_text(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3, \4]", text) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    measured = measure()
    for name, row in measured.items():
        print(f"{name:45}", *(f"{field} {value:6}" for field, value in row._asdict().items()))
    if parser.parse_args().write:
        write(measured)
