"""Registers, stack and shared memory of every Triton kernel, as the assembler reports them for GPUs that are absent.

``python -m helpers.resources`` in ``tests/`` prints them. With ``--write`` it stores them in ``resources.json`` for the
release of Triton that compiled them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from helpers.cubins import resource_usage
from helpers.offline_compile import compiling_for, decode, eager, mla, prefill, small_ops

TABLE = Path(__file__).parents[1] / "resources.json"
CAPABILITIES = (80, 90, 100)

CASES: dict[str, Callable[[], None]] = {
    "prefill causal": lambda: prefill(torch.bfloat16, (128, 128), (32, 8), causal=True),
    "prefill fp8 rope": lambda: prefill(
        torch.bfloat16,
        (128, 128),
        (32, 8),
        kv_dtype=torch.float8_e5m2,
        kv_scale=torch.ones(2),
        pos_encoding="ROPE_LLAMA",
    ),
    "ragged 192/128": lambda: prefill(torch.bfloat16, (192, 128), (16, 16), None, causal=True, return_lse=True),
    "mla": lambda: mla(torch.bfloat16, (512, 64), 128),
    "decode": lambda: decode(torch.bfloat16, (128, 128), (32, 8)),
    "decode eager": lambda: eager(decode, torch.bfloat16, (128, 128), (32, 8)),
    "decode eager wide": lambda: eager(decode, torch.bfloat16, (256, 256), (32, 2)),
    "decode wide": lambda: decode(torch.bfloat16, (256, 256), (16, 2), window_left=100, return_lse=True),
    "decode float32": lambda: decode(torch.float32, (64, 64), (8, 8), logits_soft_cap=30.0, sinks=torch.zeros(8)),
    "decode fp8 rope": lambda: decode(
        torch.bfloat16,
        (128, 128),
        (32, 8),
        kv_dtype=torch.float8_e5m2,
        kv_scale=torch.ones(2),
        pos_encoding="ROPE_LLAMA",
    ),
    "small ops": small_ops,
}

TARGETS: dict[str, tuple[int, ...]] = {
    "prefill causal": CAPABILITIES,
    "prefill fp8 rope": (80, 100),
    "ragged 192/128": (90, 100),
    "mla": (80, 100),
    "decode": CAPABILITIES,
    "decode eager": (80, 90),
    "decode eager wide": (80,),
    "decode wide": (90,),
    "decode float32": (80,),
    "decode fp8 rope": (90,),
    "small ops": (80, 90),
}
"""Compute capabilities for which a case is compiled: each kernel for all that have code of their own, each option once
with Ampere's code or Hopper's, and with Blackwell's where that differs."""

AS_ON_HOPPER = [case for case, capabilities in TARGETS.items() if 100 not in capabilities]
"""Cases whose kernels have the same source, constants and options on Blackwell."""


class Resources(NamedTuple):
    registers: int  # of a thread
    stack: int  # bytes of a thread: what does not fit in registers
    shared: int  # bytes of a CTA


def resources_of(kernel: Any) -> Resources:
    registers, stack, shared = resource_usage(kernel.asm["cubin"], kernel.metadata.name)
    return Resources(registers, stack, shared + kernel.metadata.shared)


def compile_case(case: str, capability: int) -> dict[str, Resources]:
    """Resources by ``"case: kernel"``. Later launches of the same kernel in a case are numbered."""
    found: dict[str, Resources] = {}
    with compiling_for(capability) as compiled:
        CASES[case]()
    for kernel, _ in compiled:
        name = f"{case}: {kernel.metadata.name}"
        found[f"{name} {sum(key.startswith(name) for key in found) + 1}" if name in found else name] = resources_of(
            kernel
        )
    return found


def measure() -> dict[str, dict[str, Resources]]:
    """Resources by target, such as ``"sm_90"``, and kernel."""
    found: dict[str, dict[str, Resources]] = {f"sm_{capability}": {} for capability in CAPABILITIES}
    for capability in CAPABILITIES:
        for case in (case for case in CASES if capability in TARGETS[case]):
            found[f"sm_{capability}"] |= compile_case(case, capability)
    return found


def read() -> dict[str, dict[str, dict[str, list[int]]]]:
    """The fields of :class:`Resources`, by release of Triton, target and kernel."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def write(found: dict[str, dict[str, Resources]]) -> None:
    table = read() | {triton.__version__: {target: dict(rows) for target, rows in found.items()}}
    text = json.dumps(table, indent=1)
    TABLE.write_text(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", text) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    options = parser.parse_args()
    measured = measure()
    for target, rows in measured.items():
        for name, row in rows.items():
            print(f"{target:7} {name:45} registers {row.registers:3}  stack {row.stack:4}  shared {row.shared:6}")
    if options.write:
        write(measured)
