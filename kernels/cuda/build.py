"""Compile every kernel for a wheel to carry: ``python -m attn_ops.kernels.cuda.build``.

The cubins go into ``prebuilt/`` beside the sources, where a wheel that is built afterwards picks them up, and where
:mod:`.compile` looks first.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable
from pathlib import Path

from attn_ops.kernels.cuda import nvrtc, prebuilt
from attn_ops.kernels.cuda.compile import key_of, options, sources
from attn_ops.kernels.cuda.kernel import Specialization

MODULES = ("decode", "merge_states", "mla", "prefill")
"""The modules with kernels. Each has ``SPECIALIZATIONS``, by what chooses one."""


def specializations() -> list[Specialization]:
    """Every kernel that an op may launch."""
    modules = (importlib.import_module(f"attn_ops.kernels.cuda.{name}") for name in MODULES)
    return [one for module in modules for one in module.SPECIALIZATIONS.values()]


def build(folder: Path, chosen: Iterable[Specialization] | None = None) -> int:
    """Compile into ``folder``; the number of cubins. Kernels of one file and the same macros share one.

    Raises:
        CompilerError: there is no nvrtc, or a kernel does not compile.
    """
    compiler, reason = nvrtc.find()
    if compiler is None:
        raise nvrtc.CompilerError(f"there is no nvrtc: {reason}; install nvidia-cuda-nvrtc")
    images: dict[str, tuple[str, bytes]] = {}
    for one in specializations() if chosen is None else chosen:
        key = key_of(one)
        if key not in images:
            source, headers = sources(one)
            cubin = compiler.compile(one.kernel.source, source, headers, options(one))
            images[key] = " ".join([one.kernel.source, *options(one)]), cubin
    prebuilt.write(folder, compiler.version, images)
    return len(images)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=prebuilt.FOLDER, help="where the cubins go")
    into = parser.parse_args().folder
    print(f"{build(into)} cubins in {into}")
