"""The table of tuned tiles that ``ATTN_OPS_TILES`` names, if any.

A table is JSON, written by ``python -m benchmarks tune``::

    {"NVIDIA H200": {"decode": {"bfloat16 bfloat16 128 128 4 16": {"kv": 64, "num_warps": 4, "num_stages": 3}}}}

GPU name, kernel, problem, tile. It is read once, when a kernel is first launched or compiled.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "ATTN_OPS_TILES"


def file() -> Path | None:
    """The table, which need not be there."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None
