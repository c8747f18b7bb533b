"""The tables that ``python -m benchmarks`` wrote, where there are any: those of an H200, then those of other GPUs."""

from __future__ import annotations

import re
from pathlib import Path

from markdown import DOCS, Page

HEADING = re.compile(r"# (.+)\n")
REASONS = re.compile(r"^Not measured:\n\n((?:^\* .*\n?)+)", re.MULTILINE)
TABLE = re.compile(r"((?:^\|.*\n?)+)", re.MULTILINE)
RESULTS = DOCS.parent / "benchmarks" / "results"


def results() -> Page:
    files = [*sorted(RESULTS.glob("*.md")), *sorted(RESULTS.glob("*/*.md"))]
    if not files:
        return Page("No result is stored in `benchmarks/results/` of this version.")
    return Page("\n\n".join(_section(file.read_text(encoding="utf-8"), file) for file in files))


def _section(text: str, file: Path) -> str:
    """A result as a section named with its GPU. Its table has the class that makes it narrow; the reasons unfold."""
    gpu = "" if file.parent == RESULTS else file.parent.name.upper()
    title, rest = HEADING.match(text)[1].removesuffix(f", {gpu}"), HEADING.sub("", text, count=1)
    table = TABLE.sub(r'<div class="results">\n\n\1\n</div>\n', rest)
    table = REASONS.sub(r"<details><summary>Not measured</summary>\n\n\1\n</details>\n", table)
    return "### " + ", ".join(filter(None, (title, gpu))) + "\n" + table
