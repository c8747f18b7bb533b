"""FlashInfer's public names and what differs here: names from the modules, words from ``docs/flashinfer.toml``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from types import ModuleType
from typing import Any

from markdown import Page, code, data, table


def names() -> Page:
    """A table per module that exists. Every public name needs an entry, and every entry a name."""
    words = data("flashinfer.toml")
    page = Page("")
    parts = []
    for name, entries in words["modules"].items():
        if importlib.util.find_spec(name) is None:
            continue
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            page.problems.append(f"{name} cannot be imported: {error}")
            continue
        public = public_names(module)
        page.problems += [f"docs/flashinfer.toml: {name}.{n} has no entry" for n in public if n not in entries]
        page.problems += [f"docs/flashinfer.toml: {name} has no {n}" for n in entries if n not in public]
        rows = [[code(n), kind(getattr(module, n)), entries.get(n, "")] for n in public]
        parts.append(f"### {name}\n\n" + table(["name", "is a", "what differs, and why"], rows))
    page.text = "\n\n".join(parts)
    return page


def public_names(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = [n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return sorted(n for n in own if not n.startswith("_"))


def kind(value: Any) -> str:
    return "class" if inspect.isclass(value) else "function" if callable(value) else "constant"


def ignored() -> Page:
    """Arguments that are accepted and change no result."""
    if importlib.util.find_spec("attn_ops.compat.ignored") is None:
        return Page("No argument is accepted without effect.")
    module = importlib.import_module("attn_ops.compat.ignored")
    rows = [[code(name), reason] for name, reason in sorted(module.IGNORED.items())]
    return Page(table(["argument", "why it has no effect"], rows))


def refused() -> Page:
    """Arguments that raise, since honouring them would change the result."""
    if importlib.util.find_spec("attn_ops.compat.refused") is None:
        return Page("No argument is refused by name.")
    module = importlib.import_module("attn_ops.compat.refused")
    rows = [
        [code(name), ", ".join(code(repr(value)) for value in (None, *neutral)), reason]
        for name, (neutral, reason) in sorted(module.REFUSED.items())
    ]
    return Page(table(["argument", "accepted values", "why others are refused"], rows))
