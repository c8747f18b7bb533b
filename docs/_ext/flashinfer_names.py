"""FlashInfer's public names and what differs here: names from the code, text from ``docs/flashinfer.toml``."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from markdown import Page, code, data, table

from attn_ops.exports import EXPORTS, HOMES
from attn_ops.policy import FLASHINFER


def names() -> Page:
    """A table per module. Every public name needs an entry, and every entry a name."""
    words = data("flashinfer.toml")["modules"]
    page = Page("")
    parts = []
    for module, public in EXPORTS.items():
        entries = words.get(module, {})
        page.problems += [
            f"docs/flashinfer.toml: {module}.{name} has no entry" for name in public if name not in entries
        ]
        page.problems += [f"docs/flashinfer.toml: {module} has no {name}" for name in entries if name not in public]
        rows = [
            [f"{{py:obj}}`~attn_ops.{name}`", kind(exported(module, name)), entries.get(name) or "nothing"]
            for name in public
        ]
        parts.append(f"### {module}\n\n" + table(["name", "is a", "what differs"], rows))
    page.problems += [f"docs/flashinfer.toml: there is no module {module}" for module in words if module not in EXPORTS]
    page.text = "\n\n".join(parts)
    return page


def absent() -> Page:
    """Names that FlashInfer has and this library does not."""
    entries = data("flashinfer.toml")["absent"]
    problems = [f"docs/flashinfer.toml: {name} is not absent" for name in entries if name in HOMES]
    return Page(table(["name", "instead, or why"], [[code(name), text] for name, text in entries.items()]), problems)


def exported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"attn_ops.{module}"), name)


def kind(value: Any) -> str:
    return "class" if inspect.isclass(value) else "function"


def ignored() -> Page:
    """Arguments that are accepted and change no result."""
    entries = [(name, "", reason) for name, reason in FLASHINFER.no_effect.items()]
    entries += [
        (name, function, reason)
        for function, reasons in FLASHINFER.no_effect_in.items()
        for name, reason in reasons.items()
    ]
    rows = [[code(name), code(function) if function else "", reason] for name, function, reason in sorted(entries)]
    return Page(table(["argument", "only in", "why it has no effect"], rows))


def refused() -> Page:
    """Arguments that raise, since honoring them would change the result."""
    rows = [
        [code(name), ", ".join(code(repr(value)) for value in (None, *neutral)), reason]
        for name, (neutral, reason) in sorted(FLASHINFER.unsupported.items())
    ]
    return Page(table(["argument", "accepted values", "why others are refused"], rows))
