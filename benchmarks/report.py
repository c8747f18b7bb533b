"""Results as JSON, with the versions that they hold for, and as Markdown tables that name the fastest peer."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import statistics
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import attn_ops
from attn_ops.ops.inductor import sources_tag
from benchmarks.comparison import ALL, Comparison, NotMeasured, Prepare, R, chosen, selected

RESULTS = Path(__file__).with_name("results")
PEAK_BYTES_PER_US = 4.45e6
"""The highest read rate measured in an attention kernel on an H200."""

PEAK_FLOPS_PER_US = 790e6
"""The rate of the fastest bf16 product of two 8192 x 8192 matrices measured on an H200."""

PEAK_BANDWIDTH, PEAK_COMPUTE = f"{PEAK_BYTES_PER_US / 1e6:g} TB/s", f"{PEAK_FLOPS_PER_US / 1e6:g} TFLOP/s"
"""The peaks as text, for the notes of tables."""

FASTEST, SPEEDUP = "fastest peer", "vs fastest peer"

Row = dict[str, Any]


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--output``."""
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")


class Columns(NamedTuple):
    """The columns of a table that are compared: implementations of this library, of which the best counts, and peers.

    Values are times, or rates if ``higher_is_better``.
    """

    ours: tuple[str, ...]
    peers: tuple[str, ...]
    higher_is_better: bool = False


def speedups(row: Row, columns: Columns) -> dict[str, float]:
    """The time of each peer that was measured, divided by ours. Above 1, this library is faster."""
    ours = [row[name] for name in columns.ours if row.get(name)]
    peers = {name: row[name] for name in columns.peers if row.get(name)}
    if not ours:
        return {}
    if columns.higher_is_better:
        return {name: max(ours) / value for name, value in peers.items()}
    return {name: value / min(ours) for name, value in peers.items()}


def fastest_peer(row: Row, columns: Columns) -> tuple[str, float] | None:
    """Name and speedup of the fastest peer of a row, None if no peer was measured."""
    found = speedups(row, columns)
    return min(found.items(), key=lambda item: item[1]) if found else None


def with_fastest_peer(row: Row, columns: Columns) -> Row:
    """The row with its fastest peer, and our speed relative to it, after the name of the row."""
    (first, name), *others = row.items()
    peer, speedup = fastest_peer(row, columns) or (None, None)
    return {first: name, FASTEST: peer, SPEEDUP: speedup, **dict(others)}


def headline(rows: Sequence[Row], columns: Columns, not_measured: Sequence[NotMeasured] = ()) -> str:
    """The comparison with the fastest peer of each row. Peers that were measured in no row are named."""
    found = [peer for row in rows if (peer := fastest_peer(row, columns))]
    if not found:
        return "No peer was measured."
    values = [speedup for _, speedup in found]
    names = dict.fromkeys(e.peer for e in not_measured if e.peer != ALL)
    absent = [peer for peer in names if not any(row.get(peer) for row in rows)]
    fastest = ", ".join(f"{name} ({count})" for name, count in Counter(name for name, _ in found).most_common())
    return (
        f"Speed relative to the fastest peer of each row: {statistics.geometric_mean(values):.2f}x (geometric mean), "
        f"{min(values):.2f}x to {max(values):.2f}x; faster in {sum(v > 1 for v in values)} of {len(values)} rows. "
        f"Fastest peers, by number of rows: {fastest}."
        + (f" In no row measured: {', '.join(absent)}." if absent else "")
    )


def of_roofline(flops: float, num_bytes: float, microseconds: float) -> float:
    """The shortest time for these operations and bytes at peak rates, divided by the measured time."""
    return max(flops / PEAK_FLOPS_PER_US, num_bytes / PEAK_BYTES_PER_US) / microseconds


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"


def version_of(module: str) -> str:
    """The version of an optional library. A folder of its name is not one."""
    try:
        return str(importlib.import_module(module).__version__)
    except (ImportError, AttributeError):
        return "not installed"


def environment() -> dict[str, str]:
    """Device and versions that a result holds for."""
    device = {"cpu": torch.backends.cpu.get_cpu_capability()}
    if torch.cuda.is_available():
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        device = {"gpu": torch.cuda.get_device_name(), "driver": driver}
    found = {
        **device,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "python": platform.python_version(),
        "attn_ops": f"{attn_ops.__version__}, sources {sources_tag().removeprefix('attn_ops-')}",
        "flashinfer": version_of("flashinfer"),
    }
    return found


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return "-" if value is None else str(value)


def _reasons(entries: Sequence[NotMeasured], num_rows: int) -> list[str]:
    """A line for each peer and reason, with its rows."""
    rows: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        rows.setdefault((entry.peer, entry.reason), []).append(entry.row)
    where = {key: "every row" if len(names) == num_rows else "; ".join(names) for key, names in rows.items()}
    return [f"* {peer}: {reason} ({where[peer, reason]})" for peer, reason in rows]


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of a Markdown table, with every column that a row has."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(_cell(row.get(name)) for name in columns) + " |" for row in rows]


def markdown(data: dict[str, Any]) -> str:
    """Stored results as a page: headline, note, versions, table, and what was not measured."""
    versions = ", ".join(f"{name} {value}" for name, value in data["environment"].items())
    lines = [f"# {data['title']}", "", f"**{data['headline']}**", "", data["note"], "", versions, ""]
    lines += table(data["rows"])
    entries = [NotMeasured(**entry) for entry in data["not measured"]]
    if entries:
        lines += ["", "Not measured:", "", *_reasons(entries, len(data["rows"]))]
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
    columns: Columns | str,
    not_measured: Sequence[NotMeasured] = (),
    libraries: Sequence[str] = (),
) -> None:
    """Write ``NAME.json`` and ``NAME.md`` to ``folder``, and print the table.

    ``columns`` says what the headline compares; a table without peers in its columns gives the headline itself.
    ``libraries`` are further modules whose versions the result holds for.
    """
    versions = {**environment(), **{name: version_of(name) for name in libraries}}
    data: dict[str, Any] = {"title": title, "headline": columns, "note": note, "environment": versions}
    if isinstance(columns, Columns):
        data |= {"headline": headline(rows, columns, not_measured), "columns": columns._asdict()}
        rows = [with_fastest_peer(row, columns) for row in rows]
    data |= {"rows": list(rows), "not measured": [entry._asdict() for entry in not_measured]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    text = markdown(data)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(text, flush=True)


def compare(
    args: argparse.Namespace,
    name: str,
    note: str,
    rows: Sequence[R],
    ours: Mapping[str, Prepare],
    peers: Mapping[str, Prepare],
    measure: Callable[[R, Comparison], Row],
    *,
    title: str | None = None,
    higher_is_better: bool = False,
    libraries: Sequence[str] = (),
) -> None:
    """Measure the rows that ``--rows`` selects, with the peers that ``--peers`` selects, and :func:`save` them.

    ``title`` is by default :func:`title_of` the name.
    """
    comparison = Comparison(ours, selected(peers, args), peers)
    results = comparison.rows(chosen(rows, args), lambda row: measure(row, comparison))
    columns = Columns(tuple(ours), tuple(comparison.peers), higher_is_better)
    save(name, title or title_of(name), note, results, args.output, columns, comparison.not_measured, libraries)
