"""The cubin of a specialization: prebuilt, from the disk cache, or compiled, in this order.

A kernel that cannot be compiled is an unsupported reason of its backend entry, and the next entry runs. The message of
the compiler is logged once.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from attn_ops.eager.bounded_cache import BoundedCache
from attn_ops.kernels.cuda import disk_cache, nvrtc, prebuilt
from attn_ops.kernels.cuda.kernel import Specialization
from attn_ops.kernels.cuda.nvrtc import CompilerError

LOG = logging.getLogger(__name__)

FOLDER = Path(__file__).parent

ARCHITECTURE, COMPUTE_CAPABILITY = "sm_90a", 90
"""The target of all kernels. Of all architectures, only ``sm_90a`` has ``wgmma``."""

OPTIONS = ("--std=c++20", f"--gpu-architecture={ARCHITECTURE}")

FORMAT = 1
"""The version of :func:`key_of`: a number to change when the parts of a key change."""

MAX_COMPILED = 1024
"""Most cubins in memory. An insertion beyond this limit first drops all cubins, which the disk cache still has."""

NVCC_SECONDS = 600


def sources(specialization: Specialization) -> tuple[bytes, dict[str, bytes]]:
    """The text of the kernel's source, and of all headers that it may include, by name."""
    source = (FOLDER / specialization.kernel.source).read_bytes()
    return source, {path.name: path.read_bytes() for path in sorted(FOLDER.glob("*.cuh"))}


def options(specialization: Specialization) -> tuple[str, ...]:
    return (*OPTIONS, *specialization.kernel.options, *specialization.definitions)


def key_of(specialization: Specialization, compiler: str = "") -> str:
    """A hash of everything that the cubin depends on. ``compiler`` is empty for prebuilt kernels."""
    source, headers = sources(specialization)
    files = [(name, hashlib.sha256(text).hexdigest()) for name, text in headers.items()]
    parts = FORMAT, specialization.kernel.source, hashlib.sha256(source).hexdigest(), files, options(specialization)
    return hashlib.sha256(repr((parts, compiler)).encode()).hexdigest()


Compile = Callable[[Specialization], bytes]


def by_nvrtc(compiler: nvrtc.Nvrtc, specialization: Specialization) -> bytes:
    source, headers = sources(specialization)
    return compiler.compile(specialization.kernel.source, source, headers, options(specialization))


def _by_nvcc(path: str, specialization: Specialization) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernel.cubin"
        words = [path, "-cubin", *options(specialization), str(FOLDER / specialization.kernel.source)]
        try:
            done = subprocess.run(
                [*words, "-o", str(target)], capture_output=True, text=True, check=False, timeout=NVCC_SECONDS
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise CompilerError(str(error)) from error
        if done.returncode:
            raise CompilerError(done.stderr.strip() or f"nvcc ended with status {done.returncode}")
        return target.read_bytes()


@functools.cache  # one for the life of the process
def compiler() -> tuple[str, Compile | None]:
    """The name and version of the compiler, and a function that compiles; or why there is no compiler, and None."""
    found, reason = nvrtc.find()
    if found is not None:
        return f"nvrtc {found.version[0]}.{found.version[1]}", functools.partial(by_nvrtc, found)
    path = shutil.which("nvcc")
    if path is None:
        return f"there is no nvrtc ({reason}) and no nvcc on the PATH", None
    try:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"there is no nvrtc ({reason}), and nvcc does not run ({error})", None
    return f"nvcc {hashlib.sha256(shown.encode()).hexdigest()[:16]}", functools.partial(_by_nvcc, path)


_compiled: BoundedCache[tuple[str, tuple[str, ...]], bytes | CompilerError] = BoundedCache(MAX_COMPILED)
"""(source, options) -> the cubin, or the error if there is none."""


def cubin_of(specialization: Specialization) -> bytes:
    """The compiled kernel.

    Raises:
        CompilerError: the kernel cannot be compiled. A later call raises this error without another attempt.
    """
    at = specialization.kernel.source, options(specialization)
    found = _compiled.get(at)
    if found is None:
        with _compiled.lock:  # one thread compiles at a time
            found = _compiled.get(at) or _compiled.insert(at, _get(specialization))
    if isinstance(found, CompilerError):
        raise CompilerError(str(found))  # a copy: an exception keeps the frames of every raise
    return found


def _get(specialization: Specialization) -> bytes | CompilerError:
    try:
        shipped = prebuilt.load(key_of(specialization))
        if shipped is not None:
            return shipped
        name, compile_source = compiler()
        if compile_source is None:
            return CompilerError(name)
        key = key_of(specialization, name)
        kept = disk_cache.load(key)
        if kept is not None:
            return kept
        made = compile_source(specialization)
        disk_cache.store(key, made)
        LOG.debug("%s: compiled by %s, %d bytes", specialization.name, name, len(made))
        return made
    except CompilerError as error:
        LOG.warning("%s does not compile, and other kernels run in its place:\n%s", specialization.name, error)
        return error
    except OSError as error:  # the package's files cannot be read
        LOG.warning("%s cannot be compiled, and other kernels run in its place: %s", specialization.name, error)
        return CompilerError(str(error))


def unavailable_reason(*specializations: Specialization) -> str:
    """Why one of these kernels cannot be compiled; empty if all have cubins. Compiles kernels without a cubin."""
    for one in specializations:
        try:
            cubin_of(one)
        except CompilerError as error:
            first = (str(error).splitlines() or ["no message"])[0]
            return f"the CUDA kernel cannot be compiled: {first[:200]}; the log has the compiler's message"
    return ""
