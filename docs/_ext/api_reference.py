"""The Python API: autodoc of the modules that ``docs/api.toml`` lists, and of FlashInfer's names."""

from __future__ import annotations

from flashinfer_names import exported, kind
from markdown import DOCS, Page, code, data

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


def export_pages() -> Page:
    """A link to the page of each module, with its names. Every module needs a page."""
    folder = DOCS / "reference" / "flashinfer"
    problems = [
        f"docs/reference/flashinfer/{m}.md does not exist" for m in EXPORTS if not (folder / f"{m}.md").exists()
    ]
    lines = [f"- [{m}](flashinfer/{m}.md): {', '.join(map(code, names))}" for m, names in EXPORTS.items()]
    return Page("\n".join(lines), problems)


def exports(module: str) -> Page:
    """Under the names by which ``attn_ops`` itself gives them."""
    parts = []
    for name in EXPORTS[module]:
        options = "\n   :members:\n   :inherited-members:" if kind(exported(module, name)) == "class" else ""
        parts.append(f"```{{eval-rst}}\n.. auto{kind(exported(module, name))}:: attn_ops.{name}{options}\n```\n")
    return Page("\n".join(parts))
