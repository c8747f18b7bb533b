"""Compiled kernels as Triton's copies of NVIDIA's tools report them, without a GPU."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile


def tool(name: str, *words: str, file: bytes) -> str:
    """The output of one of the tools, such as ``"nvdisasm"``, for a file."""
    import triton

    with tempfile.NamedTemporaryFile() as named:
        named.write(file)
        named.flush()
        command = [getattr(triton.knobs.nvidia, name).path, *words, named.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def resource_usage(cubin: bytes, function: str) -> tuple[int, int, int]:
    """Registers of a thread, bytes of its stack, and static shared memory of a CTA in bytes."""
    report = tool("cuobjdump", "--dump-resource-usage", file=cubin).split(f"Function {function}:")[1]
    found = re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", report.split("Function")[0])
    used = {name: int(value) for name, value in found}
    return used["REG"], used["STACK"] + used["LOCAL"], used["SHARED"]


def instructions_of(cubin: bytes, function: str) -> bytes:
    """The encoded instructions of a kernel: a section of the cubin, which is an ELF file of 64 bits."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + i * size) for i in range(count)]
    names = sections[of_names][4]
    for name, _, _, _, offset, length in sections:
        if cubin.startswith(f".text.{function}\0".encode(), names + name):
            return cubin[offset : offset + length]
    raise ValueError(f"the cubin has no function {function}")
