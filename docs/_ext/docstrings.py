"""Docstrings as autodoc gets them: columns of names and meanings become definition lists."""

from __future__ import annotations

import inspect
import re
from typing import Any

COLUMNS = re.compile(r"^(\S.*?) {2,}(\S.*)$")


def columns_to_lists(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Paragraphs all of whose lines are ``name   meaning`` are written that way to be read in the source."""
    result: list[str] = []
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line)
            continue
        found = [COLUMNS.match(text) for text in paragraph]
        if paragraph and all(found):
            for match in found:
                assert match is not None
                term = match[1] if match[1].startswith("`") else f"``{match[1]}``"
                result += [term, f"    {match[2]}"]
        else:
            result += paragraph
        result.append("")
        paragraph = []
    lines[:] = result[:-1] if lines and lines[-1].strip() else result


def skip_what_is_told_elsewhere(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """A NamedTuple's fields are described in its docstring; a second name of a method has the first one's words."""
    second_name = inspect.isfunction(obj) and obj.__name__ not in (name, "<lambda>")
    return True if type(obj).__name__ == "_tuplegetter" or second_name else None
