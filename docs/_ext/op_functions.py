"""Writes ``attn_ops/ops/functions.py``: a typed function for every op, from its schema and the text of ``ops.toml``.

Run ``python docs/_ext/op_functions.py`` after a change of either; a test compares.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from op_reference import OpText, op_texts

FILE = Path(__file__).parents[2] / "attn_ops/ops/functions.py"
WIDTH = 120

HEAD = '''\
"""The ops of ``torch.ops.attn`` as Python functions. Generated: see ``docs/_ext/op_functions.py``; do not edit.

Each takes the arguments of its op by the same names, calls it, and traces to the same node. An argument of a wrong type
raises :class:`~attn_ops.errors.ArgumentTypeError`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.typed import typed

Plan = list[Tensor] | tuple[Tensor, ...]
"""A :class:`~attn_ops.DecodePlan` or :class:`~attn_ops.PrefillPlan`, or their fields in order."""

'''

TYPES = {
    "Tensor": "Tensor",
    "Optional[Tensor]": "Tensor | None",
    "List[Tensor]": "Plan",
    "float": "float",
    "Optional[float]": "float | None",
    "int": "int",
    "SymInt": "int",
    "bool": "bool",
    "str": "str",
    "Optional[ScalarType]": "torch.dtype | None",
}
"""Types of schemas in Python."""


def _annotated(argument: Any) -> str:
    text = f"{argument.name}: {TYPES[str(argument.real_type)]}"
    if not argument.has_default_value():
        return text
    value = argument.default_value
    return f'{text} = "{value}"' if isinstance(value, str) else f"{text} = {value!r}"


def _returns(op: OpText) -> str:
    number = len(op.schema.returns)
    return "None" if not number else "Tensor" if number == 1 else f"tuple[{', '.join(['Tensor'] * number)}]"


def _literal(text: str) -> str:
    """Markdown's code as that of reStructuredText."""
    return re.sub(r"`([^`]+)`", r"``\1``", text)


def _entry(name: str, shape: str, dtype: str, text: str) -> str:
    """``name: shape; dtype. Text`` as an indented paragraph of a docstring."""
    shape = f"`{shape}`" if shape.startswith("[") else shape
    parts = ["; ".join(part for part in (shape, dtype) if part), text]
    words = _literal(f"{name}: {'. '.join(part for part in parts if part)}")
    return textwrap.fill(words, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)


def _docstring(op: OpText) -> str:
    lines = textwrap.wrap(f'    """{_literal(op.own["text"])}', WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    lines += ["", "    Args:"]
    for argument in op.schema.arguments:
        entry = op.arguments[argument.name]
        written = " Written." if argument.is_write and "written" not in entry["text"] else ""
        lines.append(_entry(argument.name, entry.get("shape", ""), entry.get("dtype", ""), entry["text"] + written))
    if op.own["outputs"]:
        lines += ["", "    Returns:"]
        lines += [_entry(name, "", shape, text) for name, shape, text in op.own["outputs"]]
    return "\n".join([*lines, '    """'])


def _call(op: OpText) -> str:
    """The op with its arguments, on one line if that fits."""
    given = [a.name if not a.kwarg_only else f"{a.name}={a.name}" for a in op.schema.arguments]
    line = f"    return torch.ops.attn.{op.name}({', '.join(given)})"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"    return torch.ops.attn.{op.name}(", *(f"        {text}," for text in given), "    )"])


def _function(op: OpText) -> str:
    arguments = op.schema.arguments
    lines = [f"    {_annotated(a)}," for a in arguments if not a.kwarg_only]
    lines += ["    *,", *(f"    {_annotated(a)}," for a in arguments if a.kwarg_only)]
    parts = ["@typed", f"def {op.name}(", *lines, f") -> {_returns(op)}:", _docstring(op), _call(op)]
    return "\n".join(parts)


def source() -> str:
    """The module."""
    ops, page = op_texts()
    assert not page.problems, "\n".join(page.problems)
    return "\n\n".join([HEAD.rstrip("\n"), *(f"\n{_function(op)}" for op in ops.values())]) + "\n"


if __name__ == "__main__":
    FILE.write_text(source(), encoding="utf-8")
