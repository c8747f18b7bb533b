"""Tables and plots of stored results: the share of the roofline of each row, and its speed relative to peers."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RED, ORANGE, WINE, PINK, GREEN, LEAF, PURPLE, PLUM = (
    "#d1495b",
    "#f0943e",
    "#7b2d43",
    "#e59aa5",
    "#3f7d3a",
    "#8cbf6a",
    "#8d6a9f",
    "#c3a6d1",
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
    "flash_attn": (PINK, "P"),
}
OTHER = ("#555555", "o")
OURS, LINE, MUTED = "#2e6f9e", "#222222", "#9aa5b1"
PARTS = {"attention": OURS, "append": "#7fb2d6", "rest": MUTED, "gaps": RED}
MIN_SHARE_OF_INNER_LABEL = 0.2
"""A longer bar has its label inside."""

MAX_SPEEDUP_SHOWN = 4.0
"""The axis of speedups ends here. Larger ones are written at its end."""


PLOTS = ("decode", "prefill", "mla", "workload", "model")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder of the JSON, tables and plots")


def compare(data: dict[str, Any]) -> Figure:
    """Bars of the shares of the roofline, if rows have them, and markers for the speedup over each peer."""
    from matplotlib import pyplot

    rows, columns = data["rows"], report.Columns(**data["columns"])
    has_shares = "share" in rows[0]
    panels = 2 if has_shares else 1
    figure, axes = pyplot.subplots(
        1,
        panels,
        figsize=(5.6 * panels + 1.2, 0.34 * len(rows) + 2.3),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    left, right = axes[0, 0], axes[0, -1]
    left.set_yticks(range(len(rows)), [row["row"] for row in rows])
    left.set_ylim(len(rows) - 0.4, -0.6)
    if has_shares:
        _draw_shares(left, rows)
    _draw_speedups(right, rows, columns)
    _set_title(figure, data)
    return figure


def _set_title(figure: Figure, data: dict[str, Any]) -> None:
    """Title, device and headline, which names the fastest peers."""
    width = int(12.5 * figure.get_figwidth())
    lines = [f"{data['title']}, {data['environment']['gpu']}", *textwrap.wrap(data["headline"], width)]
    figure.suptitle("\n".join(lines), fontsize=9.5)


def _draw_shares(axes: Axes, rows: list[report.Row]) -> None:
    shares = [row.get("of roofline", row.get("share")) or 0.0 for row in rows]
    axes.barh(range(len(rows)), shares, height=0.62, color=OURS)
    for y, share in enumerate(shares):
        inside = share >= MIN_SHARE_OF_INNER_LABEL
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
    peaks = report.PEAK_BYTES_PER_US / 1e6, report.PEAK_FLOPS_PER_US / 1e6
    axes.set_xlabel("Share of the roofline: {:.2f} TB/s, {:.0f} TFLOP/s".format(*peaks))
    _style(axes)


def _draw_speedups(axes: Axes, rows: list[report.Row], columns: report.Columns) -> None:
    """A marker for each peer. That of the fastest peer, the leftmost of its row, has a black edge."""
    seen: set[str] = set()
    for y, row in enumerate(rows):
        found = report.speedups(row, columns)
        fastest = min(found, key=found.__getitem__, default=None)
        for name, speedup in found.items():
            color, marker = STYLES.get(name, OTHER)
            x, label = min(speedup, MAX_SPEEDUP_SHOWN), None if name in seen else name
            axes.plot(x, y, marker, color=color, markersize=5.5, alpha=0.85, label=label, clip_on=False)
            if name == fastest:
                axes.plot(x, y, marker, color="none", markeredgecolor="black", markersize=6.5, clip_on=False)
            seen.add(name)
        beyond = ", ".join(f"{speedup:.1f}x" for speedup in sorted(found.values()) if speedup > MAX_SPEEDUP_SHOWN)
        axes.annotate(beyond, (MAX_SPEEDUP_SHOWN, y), (7, 0), textcoords="offset points", va="center", fontsize=7.5)
    axes.axvline(1.0, color=LINE, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.6, MAX_SPEEDUP_SHOWN)
    axes.set_xticks([0.75, 1, 1.5, 2, 3, 4], ["0.75x", "1x", "1.5x", "2x", "3x", f"{MAX_SPEEDUP_SHOWN:.0f}x"])
    axes.minorticks_off()
    axes.set_xlabel("Time of the peer / time of attn_ops (black edge: fastest peer)")
    _style(axes)
    if seen:
        axes.legend(loc="upper left", bbox_to_anchor=(1.12, 1.0), fontsize=8, frameon=False)


def _style(axes: Axes) -> None:
    axes.grid(axis="x", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", length=0, labelsize=8.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def breakdown(data: dict[str, Any]) -> Figure:
    """The time of a model's decode step by part, a bar for each batch size."""
    from matplotlib import pyplot

    rows = data["rows"]
    figure, axes = pyplot.subplots(figsize=(8.2, 0.55 * len(rows) + 2.1), layout="constrained")
    starts = [0.0] * len(rows)
    for part, color in PARTS.items():
        widths = [max(0.0, row.get(part) or 0.0) for row in rows]
        axes.barh(range(len(rows)), widths, left=starts, height=0.6, color=color, label=part)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    for y, (end, row) in enumerate(zip(starts, rows, strict=True)):
        text = f"{row['step']:.2f} ms, {row['tokens/s']:,.0f} tokens/s"
        axes.annotate(text, (end, y), (4, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(rows)), [f"batch {row['batch']}" for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.4 * max(starts))
    axes.set_xlabel("Milliseconds per decode step")
    axes.legend(ncols=len(PARTS), loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8.5, frameon=False)
    _style(axes)
    _set_title(figure, data)
    return figure


def run(args: argparse.Namespace) -> None:
    """Write the tables of all stored results, and the plots."""
    for source in sorted(args.results.glob("*.json")):
        data = json.loads(source.read_text(encoding="utf-8"))
        source.with_suffix(".md").write_text(report.markdown(data), encoding="utf-8")
        print(source.with_suffix(".md"))
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plot needs matplotlib: pip install 'attn-ops[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name in PLOTS:
        source = args.results / f"{name}.json"
        if not source.exists():
            continue
        data = json.loads(source.read_text(encoding="utf-8"))
        figure = compare(data) if "columns" in data else breakdown(data)
        figure.savefig(args.results / f"{name}.png", dpi=140)
        pyplot.close(figure)
        print(args.results / f"{name}.png")
