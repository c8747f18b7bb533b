"""The filter of racecheck's reports: those of Triton kernels are kept, those of CUDA kernels are not."""

from __future__ import annotations

import pytest
from helpers.racecheck import races

REPORT = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at kernel+0x100{}
=========     and Write access at kernel+0xa1d0{} [108 hazards]
=========     and Write access at kernel+0x11e40{} [67 hazards]
=========
35 calls done
========= RACECHECK SUMMARY: {} hazards displayed (1 errors, 0 warnings)
"""


def test_reports_of_triton_kernels_are_kept() -> None:
    first, second = REPORT.format("", "", " in prefill.py:12", 1), REPORT.format(*[" in decode.py:7"] * 3, 1)
    found = races(first + second)
    assert [name in one for name, one in zip(("prefill.py:12", "decode.py:7"), found, strict=True)] == [True, True]


def test_reports_of_cuda_kernels_are_removed() -> None:
    assert not races(REPORT.format("", "", "", 1))
    assert not races("35 calls done")


def test_every_report_is_counted() -> None:
    with pytest.raises(AssertionError, match="2 hazards displayed"):
        races(REPORT.format("", "", "", 2))
