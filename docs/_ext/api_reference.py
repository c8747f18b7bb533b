"""The Python API: autodoc of the modules that ``docs/api.toml`` lists."""

from __future__ import annotations

import importlib.util

from markdown import Page, data


def modules() -> Page:
    """A listed module that does not exist is left out."""
    listed = data("api.toml")
    parts = []
    for section in listed["section"]:
        found = [entry for entry in section["modules"] if importlib.util.find_spec(entry["name"])]
        if not found:
            continue
        parts.append(f"## {section['title']}\n\n{section['text']}\n")
        parts += [_automodule(**entry) for entry in found]
    return Page("\n".join(parts))


def _automodule(name: str, members: list[str] | None = None) -> str:
    chosen = "" if members is None else " " + ", ".join(members)
    return f"### {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:{chosen}\n```\n"
