"""Tiles that were measured to be the best on a GPU, in place of those that the pure functions choose."""

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
"""A NamedTuple with ``options``."""

Entry = dict[str, int]
"""Fields of a tile and of its options, those that differ."""

FIELDS = {"decode": ("kv", "num_warps", "num_stages"), "prefill": ("rows", "kv", "num_warps", "num_stages")}
_trial: dict[str, Entry] = {}


def tuned(default: Tile, kernel: str, device: torch.device, *problem: torch.dtype | int) -> Tile:
    """``default`` with what the tables say of this ``problem`` on this GPU; numbers and dtypes that say what it is."""
    entry = _trial.get(kernel) or _entry(kernel, device, problem)
    if not entry:
        return default
    options = default.options._replace(**{k: v for k, v in entry.items() if k in default.options._fields})
    return default._replace(**{k: v for k, v in entry.items() if k in default._fields}, options=options)


def key_of(*problem: torch.dtype | int) -> str:
    return " ".join(str(part).removeprefix("torch.") for part in problem)


@contextmanager
def trying(kernel: str, entry: Entry) -> Iterator[None]:
    """Launches of ``kernel`` in this block take the tile of ``entry``, whatever the problem."""
    _trial[kernel] = entry
    try:
        yield
    finally:
        del _trial[kernel]


@functools.cache
def _entry(kernel: str, device: torch.device, problem: tuple[torch.dtype | int, ...]) -> Entry | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return table(torch.cuda.get_device_name(device))[kernel].get(key_of(*problem))


@functools.cache
def table(gpu: str) -> dict[str, dict[str, Entry]]:
    """Of a GPU, by kernel and problem.

    Raises:
        OptionError: the file is not there, or not a table.
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
