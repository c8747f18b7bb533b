"""Markdown that is made from the code at build time.

A line ``<!-- generated: NAME -->`` in a page is replaced by the result of ``PAGES[NAME]``. A problem with the data,
such as an op's argument without a description, is a warning, so ``-W`` fails on it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import api_reference
import benchmark_results
import docstrings
import flashinfer_names
import op_reference
from markdown import Page
from sphinx.util import logging

from attn_ops.exports import EXPORTS

log = logging.getLogger(__name__)

PAGES: dict[str, Callable[[], Page]] = {
    "ops": op_reference.ops,
    "op summary": op_reference.summary,
    "flashinfer names": flashinfer_names.names,
    "absent names": flashinfer_names.absent,
    "ignored arguments": flashinfer_names.ignored,
    "refused arguments": flashinfer_names.refused,
    "api": api_reference.modules,
    "flashinfer pages": api_reference.export_pages,
    **{f"flashinfer api {module}": functools.partial(api_reference.exports, module) for module in EXPORTS},
    "benchmarks": benchmark_results.results,
}
MARKER = re.compile(r"^<!-- generated: (.+) -->$", re.MULTILINE)


def replace_markers(app: Any, docname: str, source: list[str]) -> None:
    def replacement(match: re.Match[str]) -> str:
        page = PAGES[match[1]]()
        for problem in page.problems:
            log.warning(problem, location=docname)
        app.env.note_reread()  # Sphinx does not watch what the text is made from
        return page.text

    source[0] = MARKER.sub(replacement, source[0])


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", replace_markers)
    app.connect("autodoc-process-docstring", docstrings.columns_to_lists, priority=100)
    app.connect("autodoc-skip-member", docstrings.skip_documented_elsewhere)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
