"""What compute-sanitizer's racecheck reports, less what it cannot follow."""

from __future__ import annotations

import re
from pathlib import Path

from attn_ops import kernels

ROLES = Path(next(iter(kernels.__path__)), "triton", "prefill_hopper.py")

HAND_OVER = ("def prefill_hopper_kernel(", "gl.warp_specialize(")
"""Where Triton passes values to warpgroups with roles, in shared memory, around a barrier of all threads that is not
number 0 and that they reach in different places (``BAR.SYNC 1`` in the assembly): racecheck does not see it."""

REPORT = re.compile(r"Race reported between .*?(?=\n=+ *(?:\n|$)|\n(?!=)|\Z)", re.DOTALL)
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
PLACE = re.compile(r" in (\S+\.py):(\d+)")


def hand_over() -> set[tuple[str, str]]:
    lines = enumerate(ROLES.read_text().splitlines(), 1)
    return {(ROLES.name, str(number)) for number, line in lines if any(word in line for word in HAND_OVER)}


def races(output: str) -> list[str]:
    """The reports of which any place is not one of the hand-over, among as many as the summaries count."""
    known, reports = hand_over(), REPORT.findall(output)
    assert sum(map(int, SUMMARY.findall(output))) == len(reports), output[-6000:]
    return [report for report in reports if not known.issuperset(PLACE.findall(report))]
