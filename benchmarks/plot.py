"""Pictures of the results: the share of the ceiling that each row reaches, and its speed beside its peers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]

PEERS = ("flashinfer", "sdpa", "flex", "varlen")
"""What the names of peers begin with."""

RED, ORANGE, WINE, PINK, GREEN, LEAF, PURPLE, PLUM = (
    *("#d1495b", "#f0943e", "#7b2d43", "#e59aa5", "#3f7d3a", "#8cbf6a", "#8d6a9f", "#c3a6d1"),
)
STYLES = {
    "flashinfer": (RED, "o"),
    "flashinfer tensor cores": (ORANGE, "s"),
    "flashinfer persistent": (WINE, "^"),
    "flashinfer xqa": (PINK, "D"),
    "flashinfer fa3 paged": (RED, "o"),
    "flashinfer fa3 ragged": (RED, "s"),
    "flashinfer fa2 paged": (ORANGE, "o"),
    "flashinfer fa2 ragged": (ORANGE, "s"),
    "flashinfer tensor cores, fa2": (ORANGE, "s"),
    "flashinfer tensor cores, fa3": (PINK, "D"),
    "flashinfer fa3": (RED, "o"),
    "flashinfer fa2": (ORANGE, "o"),
    "sdpa cudnn": (GREEN, "v"),
    "sdpa flash": (LEAF, "<"),
    "flex": (PURPLE, "X"),
    "varlen": (PLUM, "h"),
}
OTHER = ("#555555", "o")
OURS, LINE, MUTED = "#2e6f9e", "#222222", "#9aa5b1"
PARTS = {"attention": OURS, "append": "#7fb2d6", "rest": MUTED, "gaps": RED}
INSIDE = 0.2
"""A bar of at least this share holds its label."""
MOST = 4.0
"""The axis of ratios ends here; what is beyond is written at its edge."""


class Chart(NamedTuple):
    """How a table becomes a picture. ``ours`` are its columns of this library, the best of which counts."""

    ours: tuple[str, ...]
    more_is_better: bool
    ceiling: bool = True


CHARTS = {
    "decode": Chart(("attn_ops",), False),
    "prefill": Chart(("paged", "ragged"), True),
    "mla": Chart(("attn_ops",), False),
    "workload": Chart(("attn_ops", "one launch"), False, ceiling=False),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder of the JSON, and of the pictures")


def ratios(row: Row, chart: Chart) -> dict[str, float]:
    """Of each peer that was measured: how many times as long as ours it takes."""
    mine = [row[name] for name in chart.ours if row.get(name)]
    peers = {name: value for name, value in row.items() if value and name.startswith(PEERS) and _is_time(name, row)}
    if chart.more_is_better:
        return {name: max(mine) / value for name, value in peers.items()}
    return {name: value / min(mine) for name, value in peers.items()}


def _is_time(name: str, row: Row) -> bool:
    return isinstance(row[name], (int, float)) and not name.endswith(" plan")


def compare(title: str, rows: list[Row], chart: Chart) -> Figure:
    """Bars of the shares of the ceiling, where there is one, and beside them a dot for each peer of each row."""
    from matplotlib import pyplot

    columns = 2 if chart.ceiling else 1
    figure, axes = pyplot.subplots(
        1,
        columns,
        figsize=(5.6 * columns + 1.2, 0.34 * len(rows) + 1.9),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    left, right = axes[0, 0], axes[0, -1]
    left.set_yticks(range(len(rows)), [row["row"] for row in rows])
    left.set_ylim(len(rows) - 0.4, -0.6)
    if chart.ceiling:
        _shares(left, rows)
    _peers(right, rows, chart)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure


def _shares(axes: Axes, rows: list[Row]) -> None:
    shares = [row.get("of roofline", row.get("share")) or 0.0 for row in rows]
    axes.barh(range(len(rows)), shares, height=0.62, color=OURS)
    for y, share in enumerate(shares):
        inside = share >= INSIDE
        axes.annotate(
            f"{share:.0%}",
            (share, y),
            (-4 if inside else 4, 0),
            textcoords="offset points",
            ha="right" if inside else "left",
            va="center",
            color="white" if inside else LINE,
            fontsize=8.5,
        )
    axes.axvline(1.0, color=LINE, linewidth=0.8)
    axes.set_xlim(0, 1.05)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25%", "50%", "75%", "100%"])
    axes.set_xlabel(f"Share of the roofline: {report.READ_RATE / 1e6:.2f} TB/s, {report.MATRIX_RATE / 1e6:.0f} TFLOP/s")
    _tidy(axes)


def _peers(axes: Axes, rows: list[Row], chart: Chart) -> None:
    seen: set[str] = set()
    for y, row in enumerate(rows):
        for name, ratio in ratios(row, chart).items():
            color, marker = STYLES.get(name, OTHER)
            label = None if name in seen else name
            axes.plot(min(ratio, MOST), y, marker, color=color, markersize=5.5, alpha=0.85, label=label, clip_on=False)
            seen.add(name)
        beyond = ", ".join(f"{ratio:.1f}x" for ratio in sorted(ratios(row, chart).values()) if ratio > MOST)
        axes.annotate(beyond, (MOST, y), (7, 0), textcoords="offset points", va="center", fontsize=7.5)
    axes.axvline(1.0, color=LINE, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.6, MOST)
    axes.set_xticks([0.75, 1, 1.5, 2, 3, 4], ["0.75x", "1x", "1.5x", "2x", "3x", f"{MOST:.0f}x"])
    axes.minorticks_off()
    axes.set_xlabel("Time of a peer over ours: right of the line, ours is faster")
    _tidy(axes)
    if seen:
        axes.legend(loc="upper left", bbox_to_anchor=(1.12, 1.0), fontsize=8, frameon=False)


def _tidy(axes: Axes) -> None:
    axes.grid(axis="x", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", length=0, labelsize=8.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def steps(title: str, rows: list[Row]) -> Figure:
    """Where the time of a model's step goes, a bar for each batch."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.2, 0.55 * len(rows) + 1.7), layout="constrained")
    begins = [0.0] * len(rows)
    for part, color in PARTS.items():
        widths = [max(0.0, row.get(part) or 0.0) for row in rows]
        axes.barh(range(len(rows)), widths, left=begins, height=0.6, color=color, label=part)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    for y, (end, row) in enumerate(zip(begins, rows, strict=True)):
        text = f"{row['step']:.2f} ms, {row['tokens/s']:,.0f} tokens/s"
        axes.annotate(text, (end, y), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(rows)), [f"batch {row['batch']}" for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.4 * max(begins))
    axes.set_xlabel("Milliseconds of a step")
    axes.legend(ncols=len(PARTS), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8.5, frameon=False)
    _tidy(axes)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure


def run(args: argparse.Namespace) -> None:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plot needs matplotlib: pip install 'attn-ops[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name in (*CHARTS, "model"):
        source = args.results / f"{name}.json"
        if not source.exists():
            continue
        data = json.loads(source.read_text(encoding="utf-8"))
        title = f"{data['title']}, {data['environment']['gpu']}"
        figure = steps(title, data["rows"]) if name == "model" else compare(title, data["rows"], CHARTS[name])
        figure.savefig(args.results / f"{name}.png", dpi=140)
        pyplot.close(figure)
        print(args.results / f"{name}.png")
