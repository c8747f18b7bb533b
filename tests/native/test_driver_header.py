"""``driver.h`` and ``dlpack.h`` declare what ``cuda.h`` and torch's ``dlpack.h`` do: sizes, offsets, values."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from helpers.native_launcher import needs_a_compiler

from attn_ops.native import images

pytest.importorskip("triton")
from triton.backends.nvidia.driver import include_dirs

pytestmark = needs_a_compiler

LAYOUTS = [
    "sizeof(CUtensorMap)",
    "alignof(CUtensorMap)",
    "sizeof(CUlaunchAttribute)",
    "offsetof(CUlaunchAttribute,value)",
    "sizeof(CUlaunchConfig)",
    "offsetof(CUlaunchConfig,sharedMemBytes)",
    "offsetof(CUlaunchConfig,hStream)",
    "offsetof(CUlaunchConfig,attrs)",
    "offsetof(CUlaunchConfig,numAttrs)",
    "sizeof(CUresult)",
    "sizeof(CUdevice)",
    "sizeof(CUstreamCaptureMode)",
    "sizeof(CUtensorMapSwizzle)",
]

NAMED = {"CUstreamCaptureMode": "int", "CUtensorMapSwizzle": "int"}
"""Types of cuda.h that driver.h has no name for."""


def _values(folder: Path, header: str, expressions: list[str], includes: list[str]) -> list[int]:
    lines = [f'std::printf("%lld\\n", (long long)({x}));' for x in expressions]
    source = folder / "values.cpp"
    source.write_text(f"#include <cstddef>\n#include <cstdio>\n#include {header}\nint main() {{ {' '.join(lines)} }}\n")
    options = [f"-I{path}" for path in includes]
    subprocess.run(["g++", "-std=c++17", str(source), "-o", str(folder / "values"), *options], check=True)
    done = subprocess.run([str(folder / "values")], check=True, capture_output=True, text=True)
    return list(map(int, done.stdout.split()))


def test_the_driver_is_declared_as_in_cuda_h(tmp_path: Path) -> None:
    text = (images.FOLDER / "driver.h").read_text()
    constants = re.findall(r"\b(CU[A-Z]*_[A-Z0-9_]+) =", text)
    assert len(constants) >= 12
    theirs = _values(tmp_path, "<cuda.h>", [*constants, *LAYOUTS], include_dirs)
    ours = list(LAYOUTS)
    for name, type_name in NAMED.items():
        ours = [x.replace(name, type_name) for x in ours]
    assert _values(tmp_path, '"driver.h"', [*constants, *ours], [str(images.FOLDER)]) == theirs


def test_the_driver_functions_are_those_of_cuda_h(tmp_path: Path) -> None:
    """cuda.h compiles after driver.h's functions only if it names them too."""
    text = (images.FOLDER / "driver.h").read_text()
    functions = re.findall(r"^CUresult (\w+)\(", text, re.M)
    assert len(functions) >= 16
    source = tmp_path / "functions.cpp"
    uses = " ".join(f"(void)&{name};" for name in functions)
    source.write_text(f"#include <cuda.h>\nvoid use() {{ {uses} }}\n")
    options = [f"-I{path}" for path in include_dirs]
    subprocess.run(["g++", "-c", str(source), "-o", str(tmp_path / "functions.o"), *options], check=True)


def test_tensors_are_laid_out_as_torch_does(tmp_path: Path) -> None:
    include = str(Path(torch.__file__).parent / "include")
    fields = ("data", "device", "ndim", "dtype", "shape", "strides", "byte_offset")
    tensor = [f"offsetof(DLTensor,{name})" for name in fields] + ["sizeof(DLTensor)", "sizeof(DLTensor::dtype)"]
    theirs = ("DLPackExchangeAPI", "dltensor_from_py_object_no_sync", "current_work_stream")
    ours = ("DLPackExchange", "view", "current_stream")
    api, own = ([f"offsetof({x[0]},{name})" for name in x[1:]] + [f"sizeof({x[0]})"] for x in (theirs, ours))
    expected = _values(tmp_path, "<ATen/dlpack.h>", [*tensor, *api, "DLPACK_MAJOR_VERSION", "kDLCUDA"], [include])
    values = [*tensor, *own, "kDLPackMajor", "kDLCUDA"]
    assert _values(tmp_path, '"dlpack.h"', values, [str(images.FOLDER / "extension")]) == expected
