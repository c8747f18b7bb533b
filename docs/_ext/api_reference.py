"""The Python API: autodoc of the modules that ``docs/api.toml`` lists, and of FlashInfer's names."""

from __future__ import annotations

from flashinfer_names import exported, kind
from markdown import Page, data

from attn_ops.exports import EXPORTS


def modules() -> Page:
    parts = []
    for section in data("api.toml")["section"]:
        parts.append(f"## {section['title']}\n\n{section['text']}\n")
        parts += [_automodule(**entry) for entry in section["modules"]]
    return Page("\n".join(parts))


def _automodule(name: str, members: list[str] | None = None) -> str:
    chosen = "" if members is None else " " + ", ".join(members)
    return f"### {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:{chosen}\n```\n"


def exports() -> Page:
    """Under the names by which ``attn_ops`` itself gives them."""
    parts = []
    for module, names in EXPORTS.items():
        parts.append(f"## {module}\n")
        for name in names:
            options = "\n   :members:\n   :inherited-members:" if kind(exported(module, name)) == "class" else ""
            parts.append(f"```{{eval-rst}}\n.. auto{kind(exported(module, name))}:: attn_ops.{name}{options}\n```\n")
    return Page("\n".join(parts))
