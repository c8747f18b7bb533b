"""Docstrings as autodoc gets them: columns of names and meanings become definition lists, pages of docs/ links."""

from __future__ import annotations

import inspect
import re
from typing import Any

COLUMNS = re.compile(r"^(\S.*?) {2,}(\S.*)$")
PAGE = re.compile(r"\bdocs/([\w/]+)\.md\b")
CONTINUED = re.compile(r"^ {2,}(\S.*)$")


def columns_to_lists(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrite paragraphs of ``name   meaning`` a line, where a line may go on below, indented."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line)
        else:
            paragraphs.append([])
    result: list[str] = []
    for paragraph in paragraphs:
        result += [*(_definitions(paragraph) or paragraph), ""]
    lines[:] = [PAGE.sub(r":doc:`/\1`", line) for line in result]


def _definitions(paragraph: list[str]) -> list[str] | None:
    """The paragraph as a definition list, None if it is something else."""
    result: list[str] = []
    for line in paragraph:
        if found := COLUMNS.match(line):
            term = found[1] if found[1].startswith("`") else f"``{found[1]}``"
            result += [term, f"    {found[2]}"]
        elif result and (found := CONTINUED.match(line)):
            result.append(f"    {found[1]}")
        else:
            return None
    return result


def skip_documented_elsewhere(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """A NamedTuple's fields are in its docstring; an alias of a method has the text of the method."""
    second_name = inspect.isfunction(obj) and obj.__name__ not in (name, "<lambda>")
    return True if type(obj).__name__ == "_tuplegetter" or second_name else None
