"""Hyphens that stand for other characters: those of Sphinx behind a parameter, and arrows of text."""

from __future__ import annotations

from typing import Any

from docutils import nodes

AS_TYPED = (nodes.literal, nodes.literal_block, nodes.raw, nodes.comment)


def replace(app: Any, doctree: nodes.document) -> None:
    for text in list(doctree.findall(nodes.Text)):
        if isinstance(text.parent, AS_TYPED):
            continue
        changed = text.replace("->", "→")
        if changed.startswith(" -- "):
            changed = ": " + changed[4:]
        if changed != text:
            text.parent.replace(text, nodes.Text(changed))


def setup(app: Any) -> dict[str, Any]:
    app.connect("doctree-read", replace)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
