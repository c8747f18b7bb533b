"""The tuning table: tile sizes of kernels measured on a GPU, in the file that ``ATTN_OPS_TILES`` names, if any.

A table is JSON, written by ``python -m benchmarks tune``::

    {"NVIDIA H200": {"decode": {"bfloat16 bfloat16 128 128 4 16": {"kv": 64, "num_warps": 4, "num_stages": 3}}}}

By GPU name, kernel and problem: the tile. It is read once, when a kernel is first launched or compiled.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "ATTN_OPS_TILES"
"""The environment variable with the path of the file."""


def file() -> Path | None:
    """The path in the environment variable, whether or not the file exists; None if it is not set."""
    path = os.environ.get(VARIABLE)
    return Path(path) if path else None
