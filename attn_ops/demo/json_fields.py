"""JSON files of a checkpoint, with the type and the bounds of every field checked."""

from __future__ import annotations

import json
import reprlib
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from attn_ops.demo.errors import DemoError

MAX_FILE_BYTES = 64 << 20
"""The index of a checkpoint of a thousand layers has less than 2 MiB."""

FIX = "correct the file or download it again"

T = TypeVar("T")


class Fields:
    """A JSON object with typed getters. ``source`` names it in error messages.

    A field that is absent or null has the getter's ``default``; without a default it is required.

    Raises:
        DemoError: a field has another type or value than its getter accepts, or is required and absent.
    """

    def __init__(self, values: object, source: str) -> None:
        if not isinstance(values, dict):
            raise DemoError(f"{source} is {reprlib.repr(values)}; expected a JSON object; {FIX}")
        self.values: Mapping[str, Any] = values
        self.source = source

    def require(self, *keys: str) -> None:
        missing = [key for key in keys if key not in self.values]
        if missing:
            raise DemoError(f"{self.source} lacks {', '.join(missing)}; is the checkpoint complete?")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An int in ``[low, high]``. ``true`` and ``3.0`` are not ints."""
        return self._get(key, lambda x: type(x) is int and low <= x <= high, f"an integer, {low} to {high}", default)

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A float in ``[low, high]``. NaN is in no interval."""
        expected = f"a number, {low:g} to {high:g}"
        return float(self._get(key, lambda x: type(x) in (int, float) and low <= x <= high, expected, default))

    def boolean(self, key: str, default: bool) -> bool:
        return self._get(key, lambda x: isinstance(x, bool), "true or false", default)

    def child(self, key: str) -> Fields:
        """A JSON object, empty if the field is absent."""
        value = self.values.get(key)
        return Fields({} if value is None else value, f"{key} of {self.source}")

    def wrong(self, key: str, expected: str) -> DemoError:
        """The error for a value that is not ``expected``."""
        value = reprlib.repr(self.values.get(key))
        return DemoError(f"{key} of {self.source} is {value}; expected {expected}; {FIX}")

    def _get(self, key: str, accepts: Callable[[Any], bool], expected: str, default: T | None) -> T:
        value: Any = self.values.get(key)
        if value is None and default is not None:
            return default
        self.require(key)
        if not accepts(value):
            raise self.wrong(key, expected)
        return value


def read(path: Path, what: str) -> Fields:
    """The JSON object in a file. ``what`` describes it in error messages."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise DemoError(f"{path} is not a regular file; the demo needs {what}; {FIX}")
        if found.st_size > MAX_FILE_BYTES:
            raise DemoError(f"{path} has {found.st_size} bytes; expected {what}, at most {MAX_FILE_BYTES} bytes; {FIX}")
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DemoError(f"{path} does not exist; the demo needs {what}; is the download complete?") from error
    except OSError as error:
        raise DemoError(f"{path} cannot be read ({error.strerror}); the demo needs {what}") from error
    except (ValueError, RecursionError) as error:
        # It is not UTF-8 or not JSON, has an integer of thousands of digits, or is nested too deeply.
        raise DemoError(f"{path} is not JSON ({error}); the demo needs {what}; {FIX}") from error
    return Fields(values, path.name)
