"""Results as files: JSON with the versions they belong to, and the same as a Markdown table."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import attn_ops
from attn_ops.ops.inductor import sources_tag

from .contest import Refusal

RESULTS = Path(__file__).with_name("results")
READ_RATE = 4.45e6
"""Bytes per microsecond: the largest read rate seen in an attention kernel on an H200."""
MATRIX_RATE = 790e6
"""Operations per microsecond: the fastest bf16 product of two 8192 x 8192 matrices seen on an H200."""

Row = dict[str, Any]


def of_roofline(flops: float, num_bytes: float, microseconds: float) -> float:
    """The least time for so many operations and bytes over the time that they took."""
    return max(flops / MATRIX_RATE, num_bytes / READ_RATE) / microseconds


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"


def environment() -> dict[str, str]:
    import triton

    found = {
        "gpu": torch.cuda.get_device_name(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "attn_ops": f"{attn_ops.__version__}, sources {sources_tag().removeprefix('attn_ops-')}",
    }
    try:
        import flashinfer

        found["flashinfer"] = flashinfer.__version__
    except ImportError:
        found["flashinfer"] = "not installed"
    return found


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return "-" if value is None else str(value)


def _reasons(refusals: Sequence[Refusal], number: int) -> list[str]:
    """A line for each reason, with the rows it held for, of ``number`` rows."""
    rows: dict[tuple[str, str], list[str]] = {}
    for refusal in refusals:
        rows.setdefault((refusal.peer, refusal.reason), []).append(refusal.row)
    where = {key: "every row" if len(of) == number else "; ".join(of) for key, of in rows.items()}
    return [f"* {peer}: {reason} ({where[peer, reason]})" for peer, reason in rows]


def table(rows: Sequence[Row]) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(_cell(row.get(name)) for name in columns) + " |" for row in rows]


def markdown(
    title: str, note: str, versions: dict[str, str], rows: Sequence[Row], refusals: Sequence[Refusal] = ()
) -> str:
    lines = [f"# {title}", "", note, "", ", ".join(f"{name} {value}" for name, value in versions.items()), ""]
    lines += table(rows)
    if refusals:
        lines += ["", "Not measured:", "", *_reasons(refusals, len(rows))]
    return "\n".join(lines) + "\n"


def title_of(name: str) -> str:
    """``"Decode, fp8"`` of ``"decode_fp8"``."""
    return name.replace("_", ", ").capitalize()


def save(
    name: str,
    title: str,
    note: str,
    rows: Sequence[Row],
    folder: Path,
    refusals: Sequence[Refusal] = (),
) -> None:
    """Write ``NAME.json`` and ``NAME.md`` to ``folder`` and print the table."""
    versions = environment()
    folder.mkdir(parents=True, exist_ok=True)
    data = {"title": title, "note": note, "environment": versions, "rows": list(rows)}
    data["not measured"] = [refusal._asdict() for refusal in refusals]
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    text = markdown(title, note, versions, rows, refusals)
    (folder / f"{name}.md").write_text(text)
    print(text, flush=True)
