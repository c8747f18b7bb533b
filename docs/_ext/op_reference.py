"""The op reference: schemas, backends and FLOP formulas from the code, the text from ``docs/ops.toml``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from markdown import Page, code, data, linked, table
from torch.utils.flop_counter import flop_registry

import attn_ops.flops  # noqa: F401  registers the formulas
from attn_ops.ops import backends, schemas, unsupported
from attn_ops.ops.backends import Backend, Problem

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

FP8_QUERIES = {"dtype": torch.float8_e4m3fn, "kv_dtype": torch.float8_e4m3fn}

CAPABILITIES = [(8, 0), (9, 0), (10, 0)]
"""GPUs that the reference distinguishes."""


class OpText:
    """The text of ``ops.toml`` on an op, and what is missing there."""

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


def op_texts() -> tuple[dict[str, OpText], Page]:
    """The text on every op of the schema table, and a page with the problems found."""
    words = data("ops.toml")
    ops = {op: OpText(words, op) for op in schemas.SCHEMAS}
    problems = [problem for op in ops.values() for problem in op.problems]
    problems += [f"docs/ops.toml: there is no op {op}" for op in words["ops"] if op not in ops]
    used = {argument.name for op in ops.values() for argument in op.schema.arguments}
    problems += [f"docs/ops.toml: no op has an argument {name}" for name in words["arguments"] if name not in used]
    return ops, Page("", problems)


def summary() -> Page:
    ops, page = op_texts()
    rows = [
        [f"[`{op}`](#{_anchor(op)})", words.own.get("text", ""), *(_verdict(name, op) for name in _names())]
        for op, words in ops.items()
    ]
    page.text = table(["op", "what it does", *_names()], rows)
    page.problems = []  # ops() reports them
    return page


def ops() -> Page:
    ops, page = op_texts()
    page.text = "\n\n".join(_section(op) for op in ops.values())
    return page


def _anchor(op: str) -> str:
    return f"op-{op.replace('_', '-')}"


def _section(op: OpText) -> str:
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


def _wrapped(op: OpText) -> str:
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


def _argument_row(op: OpText, argument: Any) -> list[str]:
    entry = op.arguments.get(argument.name, {})
    kind = str(argument.real_type)
    if argument.has_default_value():
        kind += f" = {argument.default_value!r}"
    shape = entry.get("shape", "")
    shape = code(shape) if shape.startswith("[") else shape
    both = "; ".join(part for part in (shape, entry.get("dtype", "")) if part)
    written = " Written." if argument.is_write and "written" not in entry.get("text", "") else ""
    return [code(argument.name), code(kind), both, linked(entry.get("text", "")) + written]


def _reasons(entry: Backend, problem: Problem, capability: tuple[int, int] = (9, 0)) -> list[str]:
    """Unsupported reasons on a machine that has Triton, a CUDA compiler and a GPU of this compute capability."""
    with (
        mock.patch.object(unsupported, "triton_installed", return_value=True),
        mock.patch.object(unsupported, "kernel_unavailable", return_value=""),
        mock.patch.object(unsupported, "compute_capability", return_value=capability),
    ):
        return entry.unsupported_reasons(problem)


def _ordinary(op: str, device: str) -> Problem:
    # MLA: the keys are wider than the values by the rotary part.
    sizes = {"num_kv_heads": 1, "head_dim_qk": 576, "head_dim_vo": 512, "page_size": 64} if op == "batch_mla" else {}
    return Problem(op=op, device=torch.device(device), **{**ORDINARY, **sizes})


def _machines(entry: Backend, op: str, **fields: Any) -> list[str]:
    """Where the entry runs an ordinary call, or one with other ``fields``."""
    cpu, cuda = (replace(_ordinary(op, device), **fields) for device in ("cpu", "cuda"))
    found = [] if _reasons(entry, cpu) else ["CPU"]
    capabilities = [c for c in CAPABILITIES if not _reasons(entry, cuda, c)]
    if capabilities == CAPABILITIES:
        found.append("CUDA")
    elif capabilities:
        found.append(f"CUDA (compute capability {', '.join(f'{major}.{minor}' for major, minor in capabilities)})")
    return found


def _names() -> list[str]:
    return list(dict.fromkeys(entry.name for entry in backends.BACKENDS))


def _verdict(name: str, op: str) -> str:
    """The machines on which a backend runs an ordinary call of the op, and its kernels."""
    machines, kernels = [], []
    for entry in backends.BACKENDS:
        if entry.name == name and entry.has(op) and (found := _machines(entry, op)):
            machines += found
            kernels += [] if entry.kernels is None else [code(entry.kernels[op])]
    devices = [device for device in ("CPU", "CUDA") if any(machine.startswith(device) for machine in machines)]
    return (": ".join(part for part in (", ".join(devices), ", ".join(kernels)) if part)) or "no"


def _backends(op: OpText) -> list[str]:
    """A line per entry of the backend table: where it runs the op, and which of ``problems`` it refuses."""
    words = data("ops.toml")
    names = {argument.name for argument in op.schema.arguments}
    tried = {
        p["text"]: {k: getattr(torch, v) if k.endswith("dtype") else v for k, v in p["fields"].items()}
        for p in words["problems"]
        if names & set(p["argument"].split(", "))
    }
    lines = []
    for entry in backends.BACKENDS:
        if not entry.has(op.name):
            continue
        machines, label = _machines(entry, op.name), code(entry.label(op.name))
        if not machines:
            # Other entries get FP8 queries converted, so only one that takes them as they are is asked.
            special = {**tried, "queries, keys and values of e4m3": FP8_QUERIES} if entry.fp8_queries else tried
            of_some = {
                text: found for text, fields in special.items() if (found := _machines(entry, op.name, **fields))
            }
            if of_some:
                some = ", ".join(dict.fromkeys(machine for found in of_some.values() for machine in found))
                lines.append(f"{label}: on {some}, only for {', '.join(of_some)}")
            else:
                reasons = _reasons(entry, _ordinary(op.name, "cuda"))
                lines.append(f"{label}: does not run it ({', '.join(reasons)})")
            continue
        device = "cpu" if machines == ["CPU"] else "cuda"
        problems = {text: replace(_ordinary(op.name, device), **fields) for text, fields in tried.items()}
        refused = [text for text, problem in problems.items() if _reasons(entry, problem)]
        lines.append(f"{label}: on {', '.join(machines)}" + (f", but not {', '.join(refused)}" if refused else ""))
    return lines
