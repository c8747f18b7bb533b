"""Compile every kernel, for a wheel that includes cubins: ``python -m attn_ops.kernels.cuda.build``.

The cubins go into ``prebuilt/`` next to the sources. A wheel that is built afterwards includes this folder, and
:mod:`.compile` looks there first.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attn_ops.kernels.cuda import nvrtc, prebuilt
from attn_ops.kernels.cuda.compile import by_nvrtc, key_of, options
from attn_ops.kernels.cuda.kernel import Specialization

MODULES = ("decode", "merge_states", "mla", "plan", "prefill", "single_decode")
"""The modules with kernels. Each has ``SPECIALIZATIONS``: key, which a launch looks up -> specialization."""


def specializations() -> list[Specialization]:
    """Every kernel that an op may launch."""
    modules = (importlib.import_module(f"attn_ops.kernels.cuda.{name}") for name in MODULES)
    return [one for module in modules for one in module.SPECIALIZATIONS.values()]


def build(folder: Path, chosen: Iterable[Specialization] | None = None) -> int:
    """Compile ``chosen``, or all kernels, into ``folder``, several at a time. Returns the number of cubins.

    Kernels of one source with equal macros share a cubin.

    Raises:
        CompilerError: there is no nvrtc, or a kernel does not compile.
    """
    compiler, reason = nvrtc.find()
    if compiler is None:
        raise nvrtc.CompilerError(f"there is no nvrtc: {reason}; install nvidia-cuda-nvrtc")
    of_key = {key_of(one): one for one in (specializations() if chosen is None else chosen)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        cubins = pool.map(functools.partial(by_nvrtc, compiler), of_key.values())
        images = {
            key: (" ".join([one.kernel.source, *options(one)]), cubin)
            for (key, one), cubin in zip(of_key.items(), cubins, strict=True)
        }
    prebuilt.write(folder, compiler.version, images)
    return len(images)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=prebuilt.FOLDER, help="where the cubins go")
    into = parser.parse_args().folder
    print(f"{build(into)} cubins in {into}")
