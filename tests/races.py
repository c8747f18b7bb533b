"""What compute-sanitizer's racecheck reports, less what it cannot follow."""

from __future__ import annotations

import re
from pathlib import Path

from attn_ops import kernels

FOLDER = Path(next(iter(kernels.__path__)), "triton")

REPORT = re.compile(r"Race reported between .*?(?=\n=+ *(?:\n|$)|\n(?!=)|\Z)", re.DOTALL)
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
PLACE = re.compile(r" in (\S+\.py):(\d+)")


def hand_over() -> set[tuple[str, str]]:
    """The file and line of kernels whose warpgroups have roles, and of where they are given them.

    Triton passes values to them in shared memory, around a barrier of all threads that is not number 0 and that they
    reach in different places (``BAR.SYNC 1`` in the assembly): racecheck does not see it.
    """
    places = set()
    for file in FOLDER.glob("*.py"):
        kernel = 0
        for number, line in enumerate(file.read_text().splitlines(), 1):
            kernel = number if line.startswith("def ") else kernel
            if "gl.warp_specialize(" in line:
                places |= {(file.name, str(kernel)), (file.name, str(number))}
    return places


def races(output: str) -> list[str]:
    """The reports of which any place is not one of the hand-over, among as many as the summaries count."""
    known, reports = hand_over(), REPORT.findall(output)
    assert sum(map(int, SUMMARY.findall(output))) == len(reports), output[-6000:]
    return [report for report in reports if not known.issuperset(PLACE.findall(report))]
