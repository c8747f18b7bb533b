"""The races between lines of Triton kernels in a report of compute-sanitizer's racecheck.

CUDA kernels have no line information. Threads that arrive on an mbarrier for their warp order its writes, which
racecheck does not model: ``tests/kernels/test_cuda_host_*.py`` find the races of those kernels.
"""

from __future__ import annotations

import re

REPORT = re.compile(r"Race reported between .*?(?=\n=+ *(?:\n|$)|\n(?!=)|\Z)", re.DOTALL)
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed")
PLACE = re.compile(r" in \S+\.py:\d+")


def races(output: str) -> list[str]:
    """The reports that name a line of Python. Their number must be that of the summaries."""
    reports = REPORT.findall(output)
    assert sum(map(int, SUMMARY.findall(output))) == len(reports), output[-6000:]
    return [report for report in reports if PLACE.search(report)]
