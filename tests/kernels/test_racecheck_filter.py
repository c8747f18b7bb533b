"""Which of racecheck's reports count."""

from __future__ import annotations

from helpers.racecheck import hand_over, messages, races

REPORT = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at hopper_prefill_kernel+0x100 in hopper_prefill.py:{}
=========     and Write access at hopper_prefill_kernel+0xa1d0 in hopper_prefill.py:{} [108 hazards]
=========     and Write access at hopper_prefill_kernel+0x11e40 in {} [67 hazards]
=========
35 calls done
========= RACECHECK SUMMARY: 1 hazards displayed (1 errors, 0 warnings)
"""


def lines() -> list[int]:
    """Of the kernel of prefill, and of where it gives roles."""
    return sorted(int(line) for file, line in hand_over() if file == "hopper_prefill.py")


def test_the_hand_over_to_warpgroups_is_known() -> None:
    first, second = lines()
    assert not races(REPORT.format(first, first, f"hopper_prefill.py:{second}"))


def test_messages_between_warpgroups_are_known() -> None:
    file = {file for file, _ in messages()}
    numbers = sorted(int(line) for _, line in messages())
    assert file == {"hopper_common.py"}
    assert not races(REPORT.format(*lines(), f"hopper_common.py:{numbers[0]}"))
    assert len(races(REPORT.format(*lines(), f"hopper_common.py:{numbers[0] - 2}"))) == 1


def test_another_place_is_a_race() -> None:
    first, second = lines()
    for other in ("hopper_prefill.py:1", f"prefill.py:{second}", "standard.py:293"):
        (report,) = races(
            REPORT.format(first, second, other) + REPORT.format(first, second, f"hopper_prefill.py:{first}")
        )
        assert other in report
    assert not races("35 calls done")
