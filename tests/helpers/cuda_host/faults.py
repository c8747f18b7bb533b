"""Faults that are planted in CUDA kernels, and what notices them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

import pytest

from helpers.cuda_host import Fault, Host


class Planted(NamedTuple):
    """A fault, what the machine or the oracle says of it, and the case that shows it, of a table with several."""

    fault: Fault
    message: str
    case: str = ""


def host_with(table: Mapping[str, Planted], name: str, sms: int = 2) -> Host:
    """A host that runs the fault ``name``, or none if it is empty: all of a table are compiled at once."""
    faults = [one.fault for one in table.values()]
    return Host(sms=sms, faults=faults, planted=1 + list(table).index(name) if name else 0)


def noticed(table: Mapping[str, Planted], name: str) -> contextlib.AbstractContextManager[object]:
    """The block raises with the message of the fault ``name``; without a fault it does not."""
    return pytest.raises(AssertionError, match=table[name].message) if name else contextlib.nullcontext()


COPIED_CHUNK = """copy_chunk(to_row + block * BLOCK_BYTES, from_row + block * ROW_BYTES,
                       in_row && existing >> (row + j) & 1);"""

TOKEN_FAULTS = {
    "another place": Planted(
        Fault(COPIED_CHUNK, COPIED_CHUNK.replace("BLOCK_BYTES,", "BLOCK_BYTES ^ 16,")),
        "differs",
    ),
    "the address of another row": Planted(
        Fault(
            "addresses[j] = __shfl_sync(~0u, own, row + j, kChunks) + lane % kChunks * 16;",
            "addresses[j] = __shfl_sync(~0u, own, row + j) + lane % kChunks * 16;",
        ),
        "differs",
    ),
    "page numbers of the tile before": Planted(
        Fault("first += STEP;\n    load_pages(p);", "first += STEP;"), "differs"
    ),
}
"""Of KV tiles that are copied token by token."""

COPIED = "race|uninitialised|in flight"
"""What the machine says of copies that are not waited for."""

FEWER = "more arrivals|race|uninitialised|deadlock"
"""What it says of an mbarrier for fewer arrivals than there are."""
