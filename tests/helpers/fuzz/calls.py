"""The table of all random calls, by name: ops, public functions and wrappers."""

from __future__ import annotations

from collections.abc import Callable

from helpers.fuzz.draw import Call, Draw
from helpers.fuzz.fp8 import FP8_CALLS
from helpers.fuzz.functions import FUNCTIONS
from helpers.fuzz.masks import MASK_CALLS
from helpers.fuzz.ops import OPS
from helpers.fuzz.shards import SHARD_CALLS
from helpers.fuzz.sparse import SPARSE_WRAPPERS
from helpers.fuzz.wrappers import WRAPPERS

CALLS: dict[str, Callable[[Draw], Call]] = {
    **OPS,
    **WRAPPERS,
    **SPARSE_WRAPPERS,
    **FUNCTIONS,
    **FP8_CALLS,
    **MASK_CALLS,
    **SHARD_CALLS,
}
