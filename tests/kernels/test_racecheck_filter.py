"""The filter of racecheck's reports: known false reports are removed, all others are kept."""

from __future__ import annotations

from helpers.racecheck import races, shared_exchanges, warp_specialization

REPORT = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at hopper_mla_kernel+0x100 in hopper_mla.py:{}
=========     and Write access at hopper_mla_kernel+0xa1d0 in hopper_mla.py:{} [108 hazards]
=========     and Write access at hopper_mla_kernel+0x11e40 in {} [67 hazards]
=========
35 calls done
========= RACECHECK SUMMARY: 1 hazards displayed (1 errors, 0 warnings)
"""


def lines() -> list[int]:
    """The line of the MLA kernel's ``def``, and that of its ``gl.warp_specialize``."""
    return sorted(int(line) for file, line in warp_specialization() if file == "hopper_mla.py")


def test_reports_at_warp_specialization_are_removed() -> None:
    first, second = lines()
    assert not races(REPORT.format(first, first, f"hopper_mla.py:{second}"))


def test_reports_at_exchanges_between_warpgroups_are_removed() -> None:
    file = {file for file, _ in shared_exchanges()}
    numbers = sorted(int(line) for _, line in shared_exchanges())
    assert file == {"hopper_common.py"}
    assert not races(REPORT.format(*lines(), f"hopper_common.py:{numbers[0]}"))
    assert len(races(REPORT.format(*lines(), f"hopper_common.py:{numbers[0] - 2}"))) == 1


def test_reports_of_other_places_are_kept() -> None:
    first, second = lines()
    for other in ("hopper_mla.py:1", f"prefill.py:{second}", "standard.py:293"):
        (report,) = races(REPORT.format(first, second, other) + REPORT.format(first, second, f"hopper_mla.py:{first}"))
        assert other in report
    assert not races("35 calls done")
