"""Draws ``docs/images/plan.svg``: plan, work list, CTAs and combine of one decode batch.

    python docs/_ext/plan_figure.py

The work list is that of a real plan. The figure has its own background, so it reads the same on light and dark pages.
"""

from __future__ import annotations

from pathlib import Path

import torch

import attn_ops
from attn_ops.plan.state import KV_BLOCK, WORK_FIELDS

FILE = Path(__file__).parents[1] / "images" / "plan.svg"

TOKENS = (768, 128, 384)
NUM_CTAS, PAGE_SIZE = 4, 16
COLORS = ("#3b6fb6", "#c9792b", "#3f8f5f")
INK, FAINT, PAPER = "#24292f", "#57606a", "#ffffff"
WIDTH, HEIGHT = 1060, 400
CELL = 15
"""Side of the square that stands for a KV block."""


def work_list() -> tuple[list[dict[str, int]], list[int]]:
    """The work items of the batch, and ``cta_indptr``."""
    pages = torch.tensor([-(-tokens // PAGE_SIZE) for tokens in TOKENS])
    last = torch.tensor([(tokens - 1) % PAGE_SIZE + 1 for tokens in TOKENS])
    total = int(pages.sum())
    planner = attn_ops.DecodePlanner(
        len(TOKENS),
        total,
        page_size=PAGE_SIZE,
        num_qo_heads=4,
        num_kv_heads=1,
        head_dim=64,
        num_ctas=NUM_CTAS,
        device="cpu",
    )
    plan = planner.plan(torch.cat((pages.new_zeros(1), pages.cumsum(0))), torch.arange(total), last)
    indptr = plan.cta_indptr.tolist()
    return [dict(zip(WORK_FIELDS, item, strict=True)) for item in plan.work[: indptr[-1]].tolist()], indptr


def text(
    x: float, y: float, label: str, *, size: int = 13, color: str = INK, anchor: str = "start", **more: str
) -> str:
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{attributes}>{label}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = PAPER) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="2" fill="{fill}" stroke="{stroke}"/>'


def blocks(x: float, y: float, count: int, color: str) -> str:
    return "".join(box(x + CELL * i, y, CELL, CELL, color) for i in range(count))


def arrow(x1: float, y1: float, x2: float, y2: float, color: str = FAINT) -> str:
    middle = (x1 + x2) / 2
    path = f"M{x1},{y1} C{middle},{y1} {middle},{y2} {x2},{y2}"
    return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="1.5" marker-end="url(#head)"/>'


def heading(x: float, title: str, label: str) -> str:
    return text(x, 44, title, size=16, font_weight="600") + text(x, 64, label, color=FAINT)


def span(x: float, width: float, title: str, label: str) -> str:
    """What a part of the figure is called, below it."""
    line = f'<path d="M{x},330 v6 h{width} v-6" fill="none" stroke="{FAINT}"/>'
    return (
        line
        + text(x + width / 2, 356, title, anchor="middle", font_weight="600", font_family="monospace")
        + text(x + width / 2, 376, label, anchor="middle", color=FAINT)
    )


def draw() -> str:
    items, indptr = work_list()
    parts = [
        heading(24, "batch", "KV blocks of 64 tokens"),
        heading(262, "work list", "request, KV range, slot (-1: not split)"),
        heading(556, "CTAs", "equal work per CTA"),
        heading(734, "workspace", "partial results"),
        heading(920, "output", "a row per request"),
    ]

    # The batch: a line of KV blocks per request.
    middles = [126 + 76 * request for request in range(len(TOKENS))]
    for request, tokens in enumerate(TOKENS):
        parts.append(text(24, middles[request] - 16, f"request {request}: {tokens} tokens"))
        parts.append(blocks(24, middles[request] - 8, tokens // KV_BLOCK, COLORS[request]))
    parts.append(arrow(214, 202, 250, 202))

    # The work list: a line per work item, and the CTA that runs it.
    rows = [106 + 33 * i for i in range(len(items))]
    for y, item in zip(rows, items, strict=True):
        parts.append(box(262, y - 13, 216, 26, "#f3f5f7", "#d0d7de"))
        parts.append(box(262, y - 13, 6, 26, COLORS[item["request"]]))
        parts.append(text(278, y + 4, str(item["request"]), font_family="monospace"))
        parts.append(text(372, y + 4, f"{item['kv_begin']}:{item['kv_end']}", anchor="middle", font_family="monospace"))
        parts.append(text(468, y + 4, str(item["slot"]), anchor="end", font_family="monospace"))

    # The CTAs: what each runs, one item after another.
    ctas = [118 + 54 * c for c in range(NUM_CTAS)]
    ends: dict[int, tuple[float, float]] = {}  # of a work item: where its arrow starts
    outputs: dict[int, float] = {}
    for cta, y in enumerate(ctas):
        x = 556.0
        parts.append(text(x, y - 13, f"CTA {cta}"))
        for i in range(indptr[cta], indptr[cta + 1]):
            count = (items[i]["kv_end"] - items[i]["kv_begin"]) // KV_BLOCK
            parts.append(blocks(x, y - 8, count, COLORS[items[i]["request"]]))
            parts.append(arrow(482, rows[i], 548, y))
            x += CELL * count + 4
        for i in range(indptr[cta], indptr[cta + 1]):
            ends[i] = x + 2, y

    # Slots of the workspace, and the rows of the output. A request that was not split needs no slot.
    targets: dict[int, list[float]] = {}
    for i, item in enumerate(items):
        request, slot, (x, y) = item["request"], item["slot"], ends[i]
        color = COLORS[request]
        if slot < 0:
            parts.append(arrow(x, y, 912, y, color))
            parts.append(text(771, y - 6, "not split", anchor="middle", color=color))
            outputs[request] = y
            continue
        at = 108 + 42 * slot + 20 * (slot > 2)
        targets.setdefault(request, []).append(at)
        parts.append(box(740, at - 10, 62, 20, PAPER, color))
        parts.append(text(771, at + 4, f"slot {slot}", anchor="middle", color=color))
        parts.append(arrow(x, y, 732, at, color))
    for request, at in targets.items():
        outputs[request] = sum(at) / len(at)
        parts += [arrow(806, y, 912, outputs[request], COLORS[request]) for y in at]
        parts.append(text(876, min(at) - 6, "combine", anchor="middle", font_weight="600"))
    for request, y in outputs.items():
        parts.append(box(922, y - 11, 100, 22, COLORS[request]))
        parts.append(text(972, y + 4, f"row {request}", anchor="middle", color=PAPER))

    parts.append(span(24, 454, "planner.plan()", "once per step, one kernel on the device, into the same tensors"))
    parts.append(
        span(556, 466, "torch.ops.attn.batch_decode()", "in every layer: one op, its grid does not depend on the batch")
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            'font-family="Helvetica, Arial, sans-serif" role="img">',
            "<title>A plan divides a batch of three requests into work items of equal work per CTA; "
            "partial results are combined</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
            'orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{FAINT}"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{PAPER}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(draw(), encoding="utf-8")
