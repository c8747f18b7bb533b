"""What compute-sanitizer's racecheck reports, less what it cannot follow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from attn_ops import kernels

FOLDER = Path(next(iter(kernels.__path__)), "triton")

REPORT = re.compile(r"Race reported between .*?(?=\n=+ *(?:\n|$)|\n(?!=)|\Z)", re.DOTALL)
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
PLACE = re.compile(r" in (\S+\.py):(\d+)")
MESSAGE = re.compile(r"def (store_shared|load_shared)\(")


Place = tuple[str, str]
"""A file and a line of it."""


def _lines(file: Path) -> Iterator[tuple[str, str, str]]:
    """``(number, text, number of the function)`` of each line."""
    function = ""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        function = str(number) if line.startswith("def ") else function
        yield str(number), line, function


def hand_over() -> set[Place]:
    """Kernels whose warpgroups have roles, and where they are given them.

    Triton passes values to them in shared memory, around a barrier of all threads that is not number 0 and that they
    reach in different places (``BAR.SYNC 1`` in the assembly): racecheck does not see it.
    """
    places = set()
    for file in FOLDER.glob("*.py"):
        for number, line, function in _lines(file):
            if "gl.warp_specialize(" in line:
                places |= {(file.name, function), (file.name, number)}
    return places


def messages() -> set[Place]:
    """Where a warpgroup leaves something for another, and where that takes it.

    One thread of the first arrives at an mbarrier for all, after a barrier of the warpgroup: racecheck holds the
    others' writes for unordered.
    """
    file = FOLDER / "hopper_common.py"
    lines = list(_lines(file))
    bodies = {function for number, line, function in lines if number == function and MESSAGE.match(line)}
    return {(file.name, number) for number, _, function in lines if function in bodies}


def races(output: str) -> list[str]:
    """The reports with a place that is neither of the hand-over nor a message, of as many as the summaries count."""
    known, reports = hand_over() | messages(), REPORT.findall(output)
    assert sum(map(int, SUMMARY.findall(output))) == len(reports), output[-6000:]
    return [report for report in reports if not known.issuperset(PLACE.findall(report))]
