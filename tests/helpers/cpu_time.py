"""CPU seconds of the tests by folder, and their budget. Hooks of pytest, which ``tests/conftest.py`` imports."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

BUDGET = {
    "attention": 42,
    "benchmarks": 43,
    "demo": 130,
    "distributed": 84,
    "docs": 34,
    "eager": 10,
    "flash_attn": 121,
    "frontend": 125,
    "fuzz": 34,
    "integrations": 65,
    "kernels": 1800,
    "native": 36,
    "ops": 70,
    "paging": 5,
    "planning": 25,
    "tracing": 395,
}
"""Seconds of user and system time of a folder's tests without a GPU, with the processes that they start.

``docs/contributing/testing.md`` has the same numbers.
"""

KEY = "cpu_seconds"
SHOWN = 1  # second: a folder that takes less is not printed

_last = 0.0


def _seconds() -> float:
    """CPU time of this process, and of the processes that it started and that have ended."""
    return sum(os.times()[:4])


def pytest_collection_finish() -> None:
    global _last
    _last = _seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report what the phase took. Reports come to the terminal from all processes of pytest-xdist."""
    global _last
    report = yield
    last, _last = _last, _seconds()
    report.user_properties.append((KEY, _last - last))
    return report


def by_folder(terminal: pytest.TerminalReporter) -> Counter[str]:
    total: Counter[str] = Counter()
    for reports in terminal.stats.values():
        for report in reports:
            folders = Path(getattr(report, "nodeid", "").partition("::")[0]).parts[1:-1]
            total[folders[0] if folders else "."] += dict(getattr(report, "user_properties", ())).get(KEY, 0.0)
    return total


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    total = by_folder(terminalreporter)
    shown = [(folder, seconds) for folder, seconds in total.most_common() if seconds >= SHOWN]
    if not shown:
        return
    terminalreporter.section("CPU seconds by folder")
    for folder, seconds in [*shown, ("all", total.total())]:
        budget = BUDGET.get(folder, sum(BUDGET.values()))
        over = "  over its budget" if seconds > budget else ""
        terminalreporter.line(f"{seconds:6.0f} of {budget:4}  {folder}{over}")
