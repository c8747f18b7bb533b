"""The op reference: schemas, backends and FLOP formulas from the code, the words from ``docs/ops.toml``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from markdown import Page, code, data, table
from torch.utils.flop_counter import flop_registry

import attn_ops.flops  # noqa: F401  registers the formulas
from attn_ops.ops import backends, schemas, unsupported
from attn_ops.ops.backends import Problem

# An ordinary call: a model of the Llama family in bfloat16.
ORDINARY = {
    "dtype": torch.bfloat16,
    "kv_dtype": torch.bfloat16,
    "num_qo_heads": 32,
    "num_kv_heads": 8,
    "head_dim_qk": 128,
    "head_dim_vo": 128,
    "page_size": 16,
}


class OpWords:
    """What ``ops.toml`` says of an op, and what it fails to say."""

    def __init__(self, words: dict[str, Any], op: str) -> None:
        self.name = op
        self.packet = getattr(torch.ops.attn, op)
        self.schema = self.packet.default._schema
        self.own = words["ops"].get(op, {})
        self.arguments = {**words["arguments"], **self.own.get("arguments", {})}
        self.problems: list[str] = []
        self._compare()

    def _compare(self) -> None:
        if not self.own.get("text"):
            self._problem("has no text")
        names = [argument.name for argument in self.schema.arguments]
        for argument in self.schema.arguments:
            entry = self.arguments.get(argument.name, {})
            wanted = ("text", "shape", "dtype") if "Tensor" in str(argument.type) else ("text",)
            for part in wanted:
                if not entry.get(part):
                    self._problem(f"argument {argument.name} has no {part}")
        for name in self.own.get("arguments", {}):
            if name not in names:
                self._problem(f"has no argument {name}")
        if len(self.own.get("outputs", [])) != len(self.schema.returns):
            self._problem(
                f"returns {len(self.schema.returns)} tensors and {len(self.own.get('outputs', []))} are named"
            )
        if ("flops" in self.own) != (self.packet in flop_registry):
            self._problem("FLOP formula is described and not registered, or registered and not described")

    def _problem(self, text: str) -> None:
        self.problems.append(f"docs/ops.toml: op {self.name}: {text}")


def _words() -> tuple[dict[str, OpWords], Page]:
    """The words of every op of the schema table, and a page with the problems found."""
    words = data("ops.toml")
    ops = {op: OpWords(words, op) for op in schemas.SCHEMAS}
    problems = [problem for op in ops.values() for problem in op.problems]
    problems += [f"docs/ops.toml: there is no op {op}" for op in words["ops"] if op not in ops]
    used = {argument.name for op in ops.values() for argument in op.schema.arguments}
    problems += [f"docs/ops.toml: no op has an argument {name}" for name in words["arguments"] if name not in used]
    return ops, Page("", problems)


def summary() -> Page:
    ops, page = _words()
    rows = [[f"[`{name}`](#{_anchor(name)})", op.own.get("text", ""), *_verdicts(name)] for name, op in ops.items()]
    page.text = table(["op", "what it does", *(b.name for b in backends.BACKENDS)], rows)
    page.problems = []  # told once, by ops()
    return page


def ops() -> Page:
    ops, page = _words()
    page.text = "\n\n".join(_section(op) for op in ops.values())
    return page


def _anchor(op: str) -> str:
    return f"op-{op.replace('_', '-')}"


def _section(op: OpWords) -> str:
    parts = [f"({_anchor(op.name)})=\n## {op.name}", op.own.get("text", "")]
    parts.append(f"```text\n{_wrapped(op)}\n```")
    rows = [_argument_row(op, argument) for argument in op.schema.arguments]
    parts.append(table(["argument", "type", "shape and dtype", "meaning"], rows))
    if op.schema.returns:
        rows = [[code(name), shape, text] for name, shape, text in op.own.get("outputs", [])]
        parts.append(table(["output", "shape and dtype", "meaning"], rows))
    else:
        written = [code(a.name) for a in op.schema.arguments if a.is_write]
        parts.append(f"Returns nothing; writes {' and '.join(written)}.")
    parts.append("**Backends.**\n\n" + "\n".join(f"- {line}" for line in _backends(op)))
    flops = op.own.get("flops")
    parts.append(f"**FLOPs.** {flops}." if flops else "**FLOPs.** No formula is registered, so none are counted.")
    return "\n\n".join(parts)


def _wrapped(op: OpWords) -> str:
    """The schema with an argument a line."""
    schema = str(op.schema)
    head, _, tail = schema.partition("(")
    arguments, _, returns = tail.rpartition(") -> ")
    depth, start, lines = 0, 0, []
    for i, character in enumerate(arguments):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            lines.append(arguments[start : i + 1].strip())
            start = i + 1
    lines.append(arguments[start:].strip())
    return head + "(\n    " + "\n    ".join(lines) + f"\n) -> {returns}"


def _argument_row(op: OpWords, argument: Any) -> list[str]:
    entry = op.arguments.get(argument.name, {})
    kind = str(argument.real_type)
    if argument.has_default_value():
        kind += f" = {argument.default_value!r}"
    shape = entry.get("shape", "")
    shape = code(shape) if shape.startswith("[") else shape
    both = "; ".join(part for part in (shape, entry.get("dtype", "")) if part)
    written = " Written." if argument.is_write and "written" not in entry.get("text", "") else ""
    return [code(argument.name), code(kind), both, entry.get("text", "") + written]


def _objections(backend: backends.Backend, problem: Problem) -> list[str]:
    """On a machine that has what the backend needs."""
    with (
        mock.patch.object(unsupported, "triton_installed", return_value=True),
        mock.patch.object(unsupported, "compute_capability", return_value=(9, 0)),
    ):
        return backend.unsupported_reasons(problem)


def _ordinary(op: str, device: str) -> Problem:
    # MLA: the keys are wider than the values by the rotated part.
    sizes = {"num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512} if op == "batch_mla" else {}
    return Problem(op=op, device=torch.device(device), **{**ORDINARY, **sizes})


def _devices(backend: backends.Backend, op: str) -> list[str]:
    return [device for device in ("cpu", "cuda") if not _objections(backend, _ordinary(op, device))]


def _verdicts(op: str) -> list[str]:
    names = {"cpu": "CPU", "cuda": "CUDA"}
    return [", ".join(names[device] for device in _devices(backend, op)) or "no" for backend in backends.BACKENDS]


def _backends(op: OpWords) -> list[str]:
    """A line a backend: where it runs the op, and which of ``problems`` it refuses."""
    words = data("ops.toml")
    names = {argument.name for argument in op.schema.arguments}
    tried = [p for p in words["problems"] if names & set(p["argument"].split(", "))]
    lines = []
    for backend, verdict in zip(backends.BACKENDS, _verdicts(op.name), strict=True):
        devices = _devices(backend, op.name)
        if not devices:
            reasons = _objections(backend, _ordinary(op.name, "cuda"))
            lines.append(f"`{backend.name}`: does not run it ({', '.join(reasons)})")
            continue
        refused = []
        for problem in tried:
            fields = {k: getattr(torch, v) if k.endswith("dtype") else v for k, v in problem["fields"].items()}
            if _objections(backend, replace(_ordinary(op.name, devices[-1]), **fields)):
                refused.append(problem["text"])
        lines.append(f"`{backend.name}`: on {verdict}" + (f", but not {', '.join(refused)}" if refused else ""))
    return lines
