"""Compiled kernels that a wheel includes: a cubin for each key, and a manifest.

A key (:func:`.compile.key_of`) is a hash of sources, macros and options. So a cubin of other sources is not found.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch

LOG = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "prebuilt"
MANIFEST = "manifest.json"


def write(folder: Path, cuda: tuple[int, int], images: dict[str, tuple[str, bytes]]) -> None:
    """Write ``images``, key -> (name, cubin), and the manifest to ``folder``, and remove other cubins.

    ``cuda`` is the version of CUDA that compiled them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.cubin"):
        path.unlink()
    rows = {}
    for key, (name, cubin) in sorted(images.items()):
        (folder / f"{key}.cubin").write_bytes(cubin)
        rows[key] = {"name": name, "sha256": hashlib.sha256(cubin).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps({"cuda": cuda, "images": rows}, indent=1) + "\n", encoding="utf-8")


@functools.cache  # one entry for each folder
def manifest(folder: Path) -> dict[str, Any]:
    """``{"cuda": [major, minor], "images": {key: {"name": ..., "sha256": ...}}}``.

    Empty if the manifest cannot be read, or PyTorch's CUDA is older than the CUDA that compiled the cubins.
    """
    try:
        read = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        major, _ = read["cuda"]
        newest = int(torch.version.cuda.split(".")[0]) if torch.version.cuda else major
        if not all(isinstance(row["sha256"], str) for row in read["images"].values()):
            raise TypeError("a digest is no text")
        return read if read["images"] and major <= newest else {}  # a driver loads cubins of its or older CUDA
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        LOG.warning("%s cannot be read (%s): kernels are compiled when they are first used", folder / MANIFEST, error)
        return {}


def load(key: str, folder: Path | None = None) -> bytes | None:
    """The cubin of ``key``; None if there is none, or its digest is not that of the manifest."""
    folder = folder or FOLDER
    row = manifest(folder).get("images", {}).get(key)
    if row is None:
        return None
    try:
        cubin = (folder / f"{key}.cubin").read_bytes()
    except OSError as error:
        LOG.warning("a prebuilt kernel cannot be read: %s; it is compiled", error)
        return None
    if hashlib.sha256(cubin).hexdigest() != row.get("sha256"):
        LOG.warning("%s is damaged: the kernel is compiled", folder / f"{key}.cubin")
        return None
    return cubin
