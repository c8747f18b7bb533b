"""Where tables of tuned tiles lie: one with the library, and one of the user's, named by ``ATTN_OPS_TILES``.

A table is JSON, written by ``python -m benchmarks tune``::

    {"NVIDIA H200": {"decode": {"bfloat16 bfloat16 128 128 4 16": {"kv": 64, "num_warps": 4, "num_stages": 3}}}}

GPU name, kernel, problem, tile. Both are read once, when a kernel is first launched or compiled; entries of the
user's table go before the library's.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "ATTN_OPS_TILES"
SHIPPED = Path(__file__).with_name("tuned.json")


def files() -> list[Path]:
    """The tables there are, the library's first."""
    named = os.environ.get(VARIABLE)
    return [path for path in (SHIPPED, *([Path(named)] if named else [])) if path.is_file()]
