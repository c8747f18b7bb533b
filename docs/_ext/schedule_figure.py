"""Draws the schedules of the Hopper kernels: ``docs/images/cuda_prefill.svg`` and ``cuda_mla.svg``.

    python docs/_ext/schedule_figure.py

Lengths show order and overlap, not measured times. The figures have their own background, for light and dark pages.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

IMAGES = Path(__file__).parents[1] / "images"
LOAD, PRODUCT, SOFTMAX = "#6e7781", "#3b6fb6", "#c9792b"
FULL, EMPTY, OTHER = "#3f8f5f", "#b3404a", "#7b4fa3"
INK, FAINT, PAPER = "#24292f", "#57606a", "#ffffff"
LEFT, TOP, LANE, BAR, UNIT = 210, 64, 46, 28, 34


class Bar(NamedTuple):
    """A bar of a lane; ``begin`` and ``length`` are in units of time."""

    lane: int
    begin: float
    length: float
    label: str
    color: str


class Signal(NamedTuple):
    """A barrier that is arrived on at the end of bar ``source``, and awaited by the begin of bar ``target``."""

    source: int
    target: int
    color: str


class Figure(NamedTuple):
    """Lanes with bars, signals between bars, and a legend of labels and colors."""

    title: str
    lanes: tuple[str, ...]
    bars: tuple[Bar, ...]
    signals: tuple[Signal, ...]
    legend: tuple[tuple[str, str], ...]


def text(x: float, y: float, label: str, color: str = INK, anchor: str = "start", size: int = 13) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}">{label}</text>'


def draw(figure: Figure) -> str:
    ends = [bar.begin + bar.length for bar in figure.bars]
    width, bottom = LEFT + UNIT * max(ends) + 24, TOP + LANE * len(figure.lanes)
    parts = []
    for i, lane in enumerate(figure.lanes):
        y = TOP + LANE * i
        parts.append(f'<path d="M{LEFT},{y + LANE - 6} H{width - 24}" stroke="#d0d7de"/>')
        parts.append(text(20, y + 25, lane))
    for signal in figure.signals:
        source, target = figure.bars[signal.source], figure.bars[signal.target]
        down = target.lane > source.lane
        x1, x2 = LEFT + UNIT * (source.begin + source.length) - 4, LEFT + UNIT * target.begin + 4
        y1 = TOP + LANE * source.lane + 6 + BAR * down
        y2 = TOP + LANE * target.lane + 6 + BAR * (not down) + (-3 if down else 3)
        middle = (y1 + y2) / 2
        path = f"M{x1:g},{y1:g} C{x1:g},{middle:g} {x2:g},{middle:g} {x2:g},{y2:g}"
        parts.append(
            f'<path d="{path}" fill="none" stroke="{signal.color}" stroke-width="1.6" '
            f'marker-end="url(#head{signal.color[1:]})"/>'
        )
    for bar in figure.bars:
        x, y, length = LEFT + UNIT * bar.begin, TOP + LANE * bar.lane + 6, UNIT * bar.length
        parts.append(f'<rect x="{x:g}" y="{y}" width="{length - 2:g}" height="{BAR}" rx="2" fill="{bar.color}"/>')
        parts.append(text(x + length / 2 - 1, y + 18, bar.label, PAPER, "middle", 12))
    x = 20.0
    for label, color in figure.legend:
        parts.append(f'<rect x="{x:g}" y="{bottom + 22}" width="14" height="14" rx="2" fill="{color}"/>')
        parts.append(text(x + 20, bottom + 34, label, FAINT))
        x += 44 + 7.2 * len(label)
    parts.append(f'<path d="M{LEFT},52 h120" stroke="{FAINT}" marker-end="url(#head{FAINT[1:]})"/>')
    heads = [
        f'<marker id="head{color[1:]}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" '
        f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{color}"/></marker>'
        for color in (FULL, EMPTY, OTHER, FAINT)
    ]
    width, height = max(width, x), bottom + 56
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" '
            f'height="{height}" font-family="Helvetica, Arial, sans-serif" role="img">',
            f"<title>{figure.title}</title>",
            f"<defs>{''.join(heads)}</defs>",
            f'<rect width="{width:g}" height="{height}" rx="8" fill="{PAPER}"/>',
            text(20, 30, figure.title, size=16),
            text(LEFT - 8, 56, "time", FAINT, "end"),
            *parts,
            "</svg>",
            "",
        ]
    )


def prefill() -> Figure:
    """Two consumers half a period apart; two query buffers, a ring of two stages for keys and one for values."""
    bars: list[Bar] = []

    def add(*bar: object) -> int:
        bars.append(Bar(*bar))  # type: ignore[arg-type]
        return len(bars) - 1

    keys = [add(0, begin, 2, f"K{j}", LOAD) for j, begin in enumerate((0, 2, 8, 16))]
    values = [add(1, begin, 2, f"V{j}", LOAD) for j, begin in enumerate((2, 4, 21))]
    queries = [add(2, begin, 2, label, LOAD) for begin, label in ((0, "Q"), (2, "next Q"))]
    scores: dict[tuple[int, int], int] = {}
    products: dict[tuple[int, int], int] = {}
    softmax: dict[tuple[int, int], int] = {}
    for consumer in (0, 1):
        lane, start = 3 + 2 * consumer, 2 + 4 * consumer
        for j in range(3):
            at = start + 8 * j
            scores[consumer, j] = add(lane, at, 2, f"Q K{j}", PRODUCT)
            softmax[consumer, j] = add(lane + 1, at + 2, 5, f"softmax {j}", SOFTMAX)
            if j:
                products[consumer, j - 1] = add(lane, at + 2, 2, f"P{j - 1} V{j - 1}", PRODUCT)
    signals = (
        Signal(queries[0], scores[0, 0], FULL),
        Signal(keys[0], scores[0, 0], FULL),
        Signal(values[0], products[0, 0], FULL),
        Signal(scores[1, 0], keys[2], EMPTY),
        Signal(scores[1, 1], keys[3], EMPTY),
        Signal(softmax[1, 1], values[2], EMPTY),
    )
    return Figure(
        "Prefill on Hopper: mainloop",
        (
            "producer K, 1 warp",
            "producer V, 1 warp",
            "producer Q, 2 warps",
            "consumer 0, tensor cores",
            "consumer 0, softmax",
            "consumer 1, tensor cores",
            "consumer 1, softmax",
        ),
        tuple(bars),
        signals,
        (
            *(("load", LOAD), ("matrix product", PRODUCT), ("online softmax", SOFTMAX)),
            *(("full barrier", FULL), ("empty barrier", EMPTY)),
        ),
    )


def mla() -> Figure:
    """Consumers alternate in computing P; each multiplies the P of every tile by its half of the values."""
    tensor_cores, softmax = (1, 3), (2, 4)
    bars = (
        Bar(0, 0, 2, "tile 0", LOAD),
        Bar(0, 2, 2, "tile 1", LOAD),
        Bar(tensor_cores[0], 2, 2, "S0", PRODUCT),
        Bar(softmax[0], 4, 3, "softmax 0", SOFTMAX),
        Bar(tensor_cores[1], 4, 2, "S1", PRODUCT),
        Bar(tensor_cores[0], 7, 3, "P0 V0, half 0", PRODUCT),
        Bar(tensor_cores[1], 7, 3, "P0 V0, half 1", PRODUCT),
        Bar(softmax[1], 8, 3, "softmax 1", SOFTMAX),
        Bar(0, 10, 2, "tile 2", LOAD),
        Bar(tensor_cores[0], 11, 3, "P1 V1, half 0", PRODUCT),
        Bar(tensor_cores[1], 11, 3, "P1 V1, half 1", PRODUCT),
        Bar(tensor_cores[0], 14, 2, "S2", PRODUCT),
        Bar(0, 14, 2, "tile 3", LOAD),
        Bar(softmax[0], 16, 3, "softmax 2", SOFTMAX),
        Bar(tensor_cores[1], 16, 2, "S3", PRODUCT),
        Bar(tensor_cores[0], 19, 3, "P2 V2, half 0", PRODUCT),
        Bar(tensor_cores[1], 19, 3, "P2 V2, half 1", PRODUCT),
        Bar(softmax[1], 20, 3, "softmax 3", SOFTMAX),
    )
    signals = (
        Signal(0, 2, FULL),
        Signal(3, 6, OTHER),
        Signal(6, 8, EMPTY),
        Signal(7, 9, OTHER),
        Signal(8, 11, FULL),
        Signal(13, 16, OTHER),
    )
    return Figure(
        "MLA decode on Hopper: mainloop",
        (
            "producer KV, 1 warp",
            "consumer 0, tensor cores",
            "consumer 0, softmax",
            "consumer 1, tensor cores",
            "consumer 1, softmax",
        ),
        bars,
        signals,
        (
            *(("load", LOAD), ("matrix product", PRODUCT), ("online softmax", SOFTMAX)),
            *(("full barrier", FULL), ("empty barrier", EMPTY), ("P and row maximum for the peer", OTHER)),
        ),
    )


FIGURES = {IMAGES / "cuda_prefill.svg": prefill, IMAGES / "cuda_mla.svg": mla}

if __name__ == "__main__":
    for file, figure in FIGURES.items():
        file.write_text(draw(figure()), encoding="utf-8")
