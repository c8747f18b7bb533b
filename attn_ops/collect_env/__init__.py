"""What a bug report needs: versions, GPUs, backends and caches, as this process sees them.

``python -m attn_ops.collect_env`` prints it. On a GPU that runs CUDA kernels, the kernels of :data:`OPS` are compiled
unless they are cached: whether they compile is part of the report.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
from dataclasses import dataclass
from typing import Any

import torch

from attn_ops.eager.extension import unavailable_reason
from attn_ops.eager.op_cache import OP_CACHES
from attn_ops.native import package
from attn_ops.native.images import LIBCUDA
from attn_ops.ops import backends, tuning_table
from attn_ops.ops.inductor import sources_tag
from attn_ops.version import __version__

__all__ = ["Environment", "collect_env"]

OPS = ("plan_decode", "plan_prefill", "append_kv", "batch_decode", "batch_prefill", "batch_mla", "merge_state")
"""The ops whose backends are listed."""

VARIABLES = (
    tuning_table.VARIABLE,
    "TORCH_LOGS",
    "ATTN_OPS_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_VISIBLE_DEVICES",
    "CXX",
)
"""Environment variables that affect this library or its compilers."""


@dataclass(frozen=True)
class Environment:
    """The result of :func:`collect_env`. ``str()`` gives the text that the command prints.

    Attributes:
        versions: versions by name: ``attn_ops``, ``python``, ``platform``, ``torch``, ``triton``, ``CUDA of torch``,
            ``CUDA driver``.
        gpus: one line for each visible CUDA device: name, compute capability, SMs, memory.
        backends: by op, the lines of :func:`attn_ops.explain`: which backend and kernel runs the op, and why each other
            backend does not. The lines are for bfloat16, 32 query heads, 8 KV heads, head_dim 128 and page size 16
            (``batch_mla``: latents of 512 and 64, one KV head, page size 64), on GPU 0 if there is one, else on the
            CPU.
        prepared_calls: by op, the number of prepared calls. Ops without prepared calls are left out.
        launcher: whether eager calls on CUDA are prepared, or why not.
        images: whether packages that are made here contain images of compiled kernels, or why not.
        cuda_compiler: the compiler of CUDA kernels, or why there is none.
        cuda_kernels: where compiled CUDA kernels come from: the number that the installation carries for this CUDA, and
            the cache on disk.
        tuning_table: the table that ``ATTN_OPS_TILES`` names, and its number of entries for these GPUs.
        variables: the environment variables of :data:`VARIABLES` that are set.
    """

    versions: dict[str, str]
    gpus: tuple[str, ...]
    backends: dict[str, tuple[str, ...]]
    prepared_calls: dict[str, int]
    launcher: str
    images: str
    cuda_compiler: str
    cuda_kernels: str
    tuning_table: str
    variables: dict[str, str]

    def __str__(self) -> str:
        width = max(map(len, self.versions))
        calls = ", ".join(f"{op} {count}" for op, count in self.prepared_calls.items())
        sections = {
            "Versions": [f"{name:{width}}  {version}" for name, version in self.versions.items()],
            "GPUs": list(self.gpus) or ["none: torch sees no CUDA device"],
            "Backends": [f"{op}: {line}" for op, lines in self.backends.items() for line in lines],
            "Caches": [
                f"eager calls: {self.launcher}",
                f"images in packages: {self.images}",
                f"compiler of CUDA kernels: {self.cuda_compiler}",
                f"CUDA kernels: {self.cuda_kernels}",
                f"prepared calls: {calls or 'none'}",
                f"tuning table: {self.tuning_table}",
            ],
            "Environment variables": [f"{name}={value}" for name, value in self.variables.items()] or ["none set"],
        }
        return "\n\n".join("\n  ".join([title, *lines]) for title, lines in sections.items())


def collect_env() -> Environment:
    """Collect versions, GPUs, backends and caches of this process.

    Print the result, or add it to a bug report::

        print(attn_ops.collect_env())

    ``python -m attn_ops.collect_env`` does that in a new process, whose caches are empty.
    """
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    return Environment(
        versions={
            "attn_ops": f"{__version__}, sources {sources_tag().removeprefix('attn_ops-')}",
            "python": platform.python_version(),
            "platform": platform.platform(),
            "torch": torch.__version__,
            "triton": _installed_version("triton"),
            "CUDA of torch": torch.version.cuda or "none: this torch is built without CUDA",
            "CUDA driver": _driver_version(),
        },
        gpus=tuple(f"{i}: {_describe(torch.cuda.get_device_properties(i))}" for i in gpus),
        backends={op: _verdicts(op, torch.device("cuda", 0) if gpus else torch.device("cpu")) for op in OPS},
        prepared_calls={op: count for op, cache in OP_CACHES.items() if (count := cache.num_entries)},
        launcher=_launcher(),
        images=_images([torch.device("cuda", i) for i in gpus]),
        cuda_compiler=_cuda_compiler(),
        cuda_kernels=_cuda_kernels(),
        tuning_table=_tuning_table([torch.cuda.get_device_name(i) for i in gpus]),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def _launcher() -> str:
    if not unavailable_reason:
        return "prepared calls"
    return f"not prepared, eager calls take more host time: {unavailable_reason}; install with a C++ compiler"


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _driver_version() -> str:
    """The newest version of CUDA that the installed driver supports."""
    try:
        driver = ctypes.CDLL(LIBCUDA)
    except OSError:
        return f"none: {LIBCUDA} is not found"
    version = ctypes.c_int()
    status = driver.cuDriverGetVersion(ctypes.byref(version))
    return f"unknown: status {status}" if status else f"{version.value // 1000}.{version.value % 1000 // 10}"


def _describe(gpu: Any) -> str:
    return (
        f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} SMs, "
        f"{gpu.total_memory / 2**30:.1f} GiB"
    )


def _verdicts(op: str, device: torch.device) -> tuple[str, ...]:
    mla = op == "batch_mla"
    problem = backends.Problem(
        op,
        device,
        torch.bfloat16,
        torch.bfloat16,
        num_qo_heads=32,
        num_kv_heads=1 if mla else 8,
        head_dim_qk=576 if mla else 128,
        head_dim_vo=512 if mla else 128,
        page_size=64 if mla else 16,
    )
    return tuple(backends.explain(problem).splitlines())


def _images(gpus: list[torch.device]) -> str:
    """Whether packages for each GPU that are made here have images; one verdict if all have the same."""
    devices, compiler = gpus or [torch.device("cuda")], os.environ.get("CXX", "g++")
    reasons = {device: package.triton_reason() or package.machine_reason(device, compiler) for device in devices}
    verdicts = {
        device: f"none: {reason}" if reason else "where the package allows them" for device, reason in reasons.items()
    }
    if len(set(verdicts.values())) == 1:
        return next(iter(verdicts.values()))
    return "; ".join(f"{device.index}: {verdict}" for device, verdict in verdicts.items())


def _cuda_compiler() -> str:
    name, compile_source = importlib.import_module("attn_ops.kernels.cuda.compile").compiler()
    found, _ = importlib.import_module("attn_ops.kernels.cuda.nvrtc").find()
    if compile_source is None:
        return f"none: {name}"
    return f"{name}, {found.path}" if found is not None else name


def _cuda_kernels() -> str:
    prebuilt, cache = (importlib.import_module(f"attn_ops.kernels.cuda.{name}") for name in ("prebuilt", "disk_cache"))
    number = len(prebuilt.manifest(prebuilt.FOLDER).get("images", ()))
    reason = cache.unusable_reason()
    kept = f"none are kept on disk: {reason}" if reason else f"kept in {cache.folder()}"
    return f"{number or 'none'} prebuilt; {kept}"


def _tuning_table(gpus: list[str]) -> str:
    path = tuning_table.file()
    if path is None:
        return f"none: {tuning_table.VARIABLE} is not set"
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        counts = {gpu: sum(map(len, table.get(gpu, {}).values())) for gpu in dict.fromkeys(gpus)}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return f"{path} cannot be read ({error}); write it again, or leave {tuning_table.VARIABLE} unset"
    return f"{path}, " + (", ".join(f"{n} entries for {gpu}" for gpu, n in counts.items()) or "not used without a GPU")
