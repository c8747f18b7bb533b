"""Hyphens that stand for other characters: those of Sphinx behind a parameter, arrows, and minus signs."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes

AS_TYPED = (nodes.literal, nodes.literal_block, nodes.raw, nodes.comment, addnodes.desc_signature)
MINUS = re.compile(r"(?<![\w-])-(?=\d|inf\b)")  # no line ends behind a minus sign


def typed(text: nodes.Text) -> bool:
    node = text.parent
    while node is not None and not isinstance(node, AS_TYPED):
        node = node.parent
    return node is not None


def replace(app: Any, doctree: nodes.document) -> None:
    for text in list(doctree.findall(nodes.Text)):
        if typed(text):
            continue
        changed = MINUS.sub("\N{MINUS SIGN}", text.replace("->", "→"))
        if changed.startswith(" -- "):
            changed = ": " + changed[4:]
        if changed != text:
            text.parent.replace(text, nodes.Text(changed))


def setup(app: Any) -> dict[str, Any]:
    app.connect("doctree-read", replace)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
