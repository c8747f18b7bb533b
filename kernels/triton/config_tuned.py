"""Tiles from the tuning table of the GPU, in place of those that the pure functions choose."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from attn_ops.errors import OptionError
from attn_ops.ops import tuning_table

Tile = TypeVar("Tile", bound=Any)
"""A NamedTuple with a field ``options`` of launch options."""

Entry = dict[str, int]
"""Fields of a tile and of its launch options, by name."""

FIELDS = {"decode": ("kv", "num_warps", "num_stages"), "prefill": ("rows", "kv", "num_warps", "num_stages")}
"""The fields that an entry of each kernel has."""

_overrides: dict[str, Entry] = {}
"""The tile of the active :func:`override_tile` block of each kernel, which removes it at its end."""


def tuned(default: Tile, kernel: str, device: torch.device, *problem: torch.dtype | int) -> Tile:
    """``default`` with the fields that the tuning table of this GPU has for ``problem``, its dtypes and sizes."""
    entry = _overrides.get(kernel) or _entry(kernel, device, problem)
    if not entry:
        return default
    options = default.options._replace(**{k: v for k, v in entry.items() if k in default.options._fields})
    return default._replace(**{k: v for k, v in entry.items() if k in default._fields}, options=options)


def problem_key(*problem: torch.dtype | int) -> str:
    """The key of a problem in the tuning table, such as ``"bfloat16 bfloat16 128 128 4 16"``."""
    return " ".join(str(part).removeprefix("torch.") for part in problem)


@contextmanager
def override_tile(kernel: str, entry: Entry) -> Iterator[None]:
    """In this block, ``kernel`` is launched with the tile of ``entry``, whatever the problem and the table."""
    _overrides[kernel] = entry
    try:
        yield
    finally:
        del _overrides[kernel]


@functools.lru_cache(maxsize=1024)
def _entry(kernel: str, device: torch.device, problem: tuple[torch.dtype | int, ...]) -> Entry | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return table(torch.cuda.get_device_name(device))[kernel].get(problem_key(*problem))


@functools.cache  # one entry for each name of a GPU; the file is read once
def table(gpu: str) -> dict[str, dict[str, Entry]]:
    """The entries of a GPU by kernel and problem; empty without a tuning table.

    Raises:
        OptionError: the file cannot be read, or is not a tuning table.
    """
    path = tuning_table.file()
    if path is None:
        return {kernel: {} for kernel in FIELDS}
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get(gpu, {})
        return {
            kernel: {
                key: {field: int(entry[field]) for field in fields} for key, entry in found.get(kernel, {}).items()
            }
            for kernel, fields in FIELDS.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            f"tiles: {path} is not a table of tiles ({error!r}); expected what python -m benchmarks tune writes; "
            f"write it again, or leave {tuning_table.VARIABLE} unset"
        ) from error
