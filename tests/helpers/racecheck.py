"""The reports of compute-sanitizer's racecheck without known false ones, at synchronization that it does not model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from attn_ops import kernels

FOLDER = Path(next(iter(kernels.__path__)), "triton")

REPORT = re.compile(r"Race reported between .*?(?=\n=+ *(?:\n|$)|\n(?!=)|\Z)", re.DOTALL)
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
PLACE = re.compile(r" in (\S+\.py):(\d+)")
EXCHANGE = re.compile(r"def (store_shared|load_shared)\(")


Place = tuple[str, str]
"""A file and a line of it."""


def _lines(file: Path) -> Iterator[tuple[str, str, str]]:
    """``(number, text, number of the function)`` of each line."""
    function = ""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        function = str(number) if line.startswith("def ") else function
        yield str(number), line, function


def warp_specialization() -> set[Place]:
    """The ``def`` lines of warp-specialized kernels, and their ``gl.warp_specialize`` calls.

    Triton passes values to the warpgroups in shared memory, around ``BAR.SYNC 1``: a barrier of all threads, which
    they reach at different instructions. Racecheck does not model it.
    """
    places = set()
    for file in FOLDER.glob("*.py"):
        for number, line, function in _lines(file):
            if "gl.warp_specialize(" in line:
                places |= {(file.name, function), (file.name, number)}
    return places


def shared_exchanges() -> set[Place]:
    """The lines of ``store_shared`` and ``load_shared``, by which one warpgroup passes values to another.

    After a barrier of the storing warpgroup, one of its threads arrives on the mbarrier for all. Racecheck treats the
    writes of the other threads as unordered.
    """
    file = FOLDER / "hopper_common.py"
    lines = list(_lines(file))
    bodies = {function for number, line, function in lines if number == function and EXCHANGE.match(line)}
    return {(file.name, number) for number, _, function in lines if function in bodies}


def races(output: str) -> list[str]:
    """The reports that name another place. There must be as many reports as the summaries count."""
    known, reports = warp_specialization() | shared_exchanges(), REPORT.findall(output)
    assert sum(map(int, SUMMARY.findall(output))) == len(reports), output[-6000:]
    return [report for report in reports if not known.issuperset(PLACE.findall(report))]
