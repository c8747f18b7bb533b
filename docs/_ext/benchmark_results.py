"""The tables that ``python -m benchmarks`` wrote, where there are any: those of an H200, then those of other GPUs."""

from __future__ import annotations

import re

from markdown import DOCS, Page

RESULTS = DOCS.parent / "benchmarks" / "results"


def results() -> Page:
    files = [*sorted(RESULTS.glob("*.md")), *sorted(RESULTS.glob("*/*.md"))]
    if not files:
        return Page("No result is stored in `benchmarks/results/` of this version.")
    return Page("\n\n".join(_demoted(file.read_text(encoding="utf-8")) for file in files))


def _demoted(text: str) -> str:
    """Headings below that of the page."""
    highest = min((len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)), default=2)
    return re.sub(r"^#", "#" * (3 - highest), text, flags=re.MULTILINE) if highest < 2 else text
