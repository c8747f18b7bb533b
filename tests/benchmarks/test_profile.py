"""The profile of a model: gaps, and kernels by part of a step."""

from __future__ import annotations

import pytest

from benchmarks.model import MODULES, Kernel, gaps, kernel_parts, part_times


def test_gaps_are_where_no_kernel_runs() -> None:
    kernels = [Kernel("a", 0, 2), Kernel("b", 1, 3), Kernel("c", 5, 6), Kernel("d", 5.5, 5.75), Kernel("e", 6, 7)]
    assert gaps(kernels) == 2


def test_kernels_are_distinguished_by_name() -> None:
    names = ("plan_decode_kernel", "append_kernel_0", "decode_kernel", "combine_kernel_3", "nvjet_tst_64x8", "decode")
    part_of = {"decode": "attention", "decode_kernel": "attention", "combine_kernel": "attention"}
    part_of |= {"plan_decode_kernel": "planning", "append_kernel": "append"}
    found = part_times([Kernel(name, i, i + 2**-i) for i, name in enumerate(names)], part_of)
    expected = {"planning": 1.0, "append": 0.5, "attention": 0.25 + 0.125 + 0.03125, "rest": 0.0625}
    assert {name: found[name] for name in expected} == expected


def test_every_module_has_kernels_that_a_profile_counts() -> None:
    pytest.importorskip("triton")
    found = kernel_parts()
    cuda = {"decode", "prefill", "mla", "mla_swap_ab"}
    cuda |= {"merge_states_kernel", "merge_state_kernel", "merge_state_in_place_kernel"}
    assert {"decode_kernel", "append_kernel", "plan_decode_kernel"} | cuda < set(found)
    assert len(found) >= len(MODULES) + len(cuda)
    assert set(found.values()) == {"attention", "append", "planning"}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("decode", "attention"),
        ("mla_swap_ab", "attention"),
        ("merge_states_kernel", "attention"),
        ("decode_kernel_0", "attention"),
        ("combine_decode_kernel_1", "attention"),
        ("append_kernel_2", "append"),
        ("plan_decode_kernel", "planning"),
        ("plan_decode_kernel_3", "planning"),
        ("triton_poi_fused_add_mul_0", "rest"),
    ],
)
def test_kernels_are_booked_under_their_part_of_a_step(name: str, part: str) -> None:
    pytest.importorskip("triton")
    found = part_times([Kernel(name, 0, 2)], kernel_parts())
    assert {key for key, microseconds in found.items() if microseconds == 2} == {part}
