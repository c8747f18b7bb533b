"""Parts of Markdown, and the page that a generator makes of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).parents[1]


@dataclass
class Page:
    """``problems``: what keeps the text from being complete."""

    text: str
    problems: list[str] = field(default_factory=list)


def data(name: str) -> dict[str, Any]:
    """A data file of ``docs/``."""
    return tomllib.loads((DOCS / name).read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def linked(text: str) -> str:
    """Pages of ``docs/`` that a text names, as links."""
    return re.sub(r"\bdocs/([\w/]+)\.md\b", r"{doc}`/\1`", text)


def code(text: str) -> str:
    return f"`{text}`" if text else ""
