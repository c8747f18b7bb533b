"""Images: compiled kernels with the table of their parameters, and the object file that holds them for the linker.

The table is what ``launcher.h`` reads. :mod:`attn_ops.kernels.triton.image` makes images of Triton kernels,
:mod:`attn_ops.kernels.cuda.launch` of CUDA kernels, :mod:`attn_ops.native.package` links them into packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attn_ops.eager.extension import extension
from attn_ops.errors import BackendError, fail

FOLDER = Path(__file__).parent
LAUNCHER = (FOLDER / "launcher.h", FOLDER / "launcher.cpp", FOLDER / "driver.h")
PACKAGE_SHIM = FOLDER / "package_shim.cpp"

LIBCUDA = "libcuda.so.1"
"""The library of the CUDA driver, which the launcher loads at its first call."""

SCALAR_TYPES = {
    torch.uint8: 0,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.bool: 11,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
}
"""The number of a dtype in PyTorch's C ABI."""

MAP_TYPES = {
    torch.uint8: 0,
    torch.float8_e4m3fn: 0,
    torch.float8_e5m2: 0,
    torch.float16: 6,
    torch.float32: 7,
    torch.bfloat16: 9,
}
"""Element types of a tensor map: the values of ``CUtensorMapDataType``, which has none for FP8."""

OBJECT_PREFIX = "attn_ops_images_"
"""Prefix of the names of object files with images."""

MAX_LOADED = 4096
"""Kernels that a backend keeps ready for eager launches. An insertion beyond it first drops all of them."""


class NoImageError(Exception):
    """A kernel that cannot be an image, and why. The package has the general kernels of its op then."""


class TensorSpec(NamedTuple):
    """A tensor of a call. The call gives its sizes and strides."""

    name: str
    dtype: torch.dtype
    rank: int
    alignment: int
    """Bytes that the address is a multiple of: kernels are compiled for it."""


class MapSpec(NamedTuple):
    """A tensor map. ``type`` is a ``CUtensorMapDataType``, ``box`` is outermost first."""

    tensor: int
    type: int
    swizzle: int
    element_bytes: int
    box: tuple[int, ...]


class Parameter(NamedTuple):
    """A parameter of the kernel. ``kind`` is a ``Kind`` of launcher.h, ``slot`` its ``index``."""

    kind: str
    slot: int = 0
    name: str = ""


KINDS = ("pointer", "i32", "i64", "fp32", "map", "null")
"""``Kind`` of launcher.h, in its order."""


class Image(NamedTuple):
    """A compiled kernel. The fields are those of ``Image`` in launcher.h."""

    function: str
    cubin: bytes
    compute_capability: int
    threads: int
    shared_bytes: int
    pdl: bool
    tensors: tuple[TensorSpec, ...]
    maps: tuple[MapSpec, ...]
    parameters: tuple[Parameter, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)

    @property
    def name(self) -> str:
        """The kernel's name and a hash of everything else."""
        return f"{self.function}_{hashlib.sha256(repr(self).encode()).hexdigest()[:16]}"


def load(image: Image, device: int) -> Any:
    """The image of an eager kernel in the extension module, loaded on a GPU."""
    maps = tuple((m.tensor, m.type, m.swizzle, m.element_bytes, m.box) for m in image.maps)
    parameters = tuple((KINDS.index(p.kind), p.slot, p.name) for p in image.parameters)
    settings = image.compute_capability, image.threads, image.shared_bytes, image.pdl, image.cluster
    loaded = extension.Image(image.function, image.function, image.cubin, *settings, maps, parameters)
    loaded.load(device)
    return loaded


class ImageSet:
    """The images of one package."""

    def __init__(self) -> None:
        self.images: dict[str, Image] = {}

    def add(self, image: Image) -> str:
        """The name by which a call launches ``image``."""
        name = image.name
        self.images[name] = image
        return name

    def source(self, folder: Path, entry: Path = PACKAGE_SHIM) -> str:
        """The launcher, ``entry`` and the table as one unit of C++. Cubins are read from ``folder`` by their name."""
        lines = [f"#include {json.dumps(str(path))}" for path in (LAUNCHER[1], entry)]
        lines += ["namespace attn_ops {", "namespace {"]
        for i, (name, image) in enumerate(self.images.items()):
            lines += _declarations(i, image, folder / f"{name}.cubin")
        rows = [_row(i, name, image) for i, (name, image) in enumerate(self.images.items())]
        lines += ["}  // namespace", f"const Image package_images[] = {{{', '.join(rows)}}};"]
        return "\n".join([*lines, f"const size_t num_package_images = {len(rows)};", "}  // namespace attn_ops", ""])

    def build(self, folder: Path, options: Sequence[str], compiler: str = "g++", entry: Path = PACKAGE_SHIM) -> Path:
        """Compile the images, the launcher and what calls it to an object file in ``folder``, unless it is there.

        ``options`` are those of the compiler that ``entry`` needs: include folders, definitions.
        """
        command = [compiler, "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", f'-DATTN_OPS_LIBCUDA="{LIBCUDA}"']
        command += options
        digest = hashlib.sha256(repr((command, sorted(self.images))).encode())
        for path in (*LAUNCHER, entry):
            digest.update(path.read_bytes())
        target = folder / f"{OBJECT_PREFIX}{digest.hexdigest()[:24]}.o"
        if target.exists():
            return target
        folder.mkdir(parents=True, exist_ok=True)
        for name, image in self.images.items():
            _write(folder / f"{name}.cubin", image.cubin)
        unit = target.with_suffix(".cpp")
        _write(unit, self.source(folder, entry).encode())
        partial = target.with_suffix(f".{os.getpid()}.o")
        words = [*command, "-c", str(unit), "-o", str(partial)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            what = f"{compiler} could not compile the launcher of a package:\n{done.stderr[-2000:]}\n"
            fail(BackendError, "launch_image", what, "a compiler for C++17", "set CXX to one that Inductor can use")
        partial.replace(target)
        return target


def _write(path: Path, content: bytes) -> None:
    """Write a file whole: another process may read it at the same time."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    partial.replace(path)


def _declarations(i: int, image: Image, cubin: Path) -> Iterator[str]:
    label = f"attn_ops_image_{i}"
    yield f'extern "C" const unsigned char {label}[] __attribute__((visibility("hidden")));'
    path = json.dumps(str(cubin)).replace('"', '\\"')
    yield (
        f'asm(".pushsection .rodata\\n.balign 64\\n.hidden {label}\\n.globl {label}\\n'
        f'{label}: .incbin {path}\\n.popsection");'
    )
    yield f"LoadedFunctions loaded_{i};"
    tensors = [f"{{{json.dumps(t.name)}, {SCALAR_TYPES[t.dtype]}, {t.rank}, {t.alignment}}}" for t in image.tensors]
    yield f"const TensorSpec tensors_{i}[] = {{{', '.join(tensors) or '{}'}}};"
    maps = [
        f"{{{m.tensor}, {m.type}, {m.swizzle}, {len(m.box)}, {m.element_bytes}, {{{', '.join(map(str, m.box))}}}}}"
        for m in image.maps
    ]
    yield f"const MapSpec maps_{i}[] = {{{', '.join(maps) or '{}'}}};"
    parameters = [f"{{Kind({KINDS.index(p.kind)}), {p.slot}, {json.dumps(p.name)}}}" for p in image.parameters]
    yield f"const Parameter parameters_{i}[] = {{{', '.join(parameters) or '{}'}}};"


def _row(i: int, name: str, image: Image) -> str:
    fields = [json.dumps(name), json.dumps(image.function), f"attn_ops_image_{i}", f"&loaded_{i}"]
    fields += [str(image.compute_capability), str(image.threads), str(image.shared_bytes)]
    fields += [f"{{{', '.join(map(str, image.cluster))}}}", str(image.pdl).lower()]
    for field, values in (("tensors", image.tensors), ("maps", image.maps), ("parameters", image.parameters)):
        fields += [f"{field}_{i}", str(len(values))]
    return f"{{{', '.join(fields)}}}"


_collecting: ContextVar[ImageSet | None] = ContextVar("attn_ops_images", default=None)


def collecting() -> ImageSet | None:
    """Where launches of the op that is being lowered put their images; None: they are not compiled to images."""
    return _collecting.get()


@contextmanager
def collect(images: ImageSet | None) -> Iterator[None]:
    """In this block, launches on fake tensors put their images into ``images``."""
    token = _collecting.set(images)
    try:
        yield
    finally:
        _collecting.reset(token)
