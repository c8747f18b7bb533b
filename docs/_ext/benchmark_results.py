"""The tables that ``python -m benchmarks`` wrote, where there are any."""

from __future__ import annotations

from markdown import DOCS, Page

RESULTS = DOCS.parent / "benchmarks" / "results"


def results() -> Page:
    files = sorted(RESULTS.glob("*.md"))
    if not files:
        return Page("No result is stored in `benchmarks/results/` of this version.")
    return Page("\n\n".join(file.read_text(encoding="utf-8") for file in files))
