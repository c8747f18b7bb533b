"""No CUDA kernel takes more registers, stack or shared memory than ``resources_cuda.json`` lists."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")  # for its disassembler

from helpers.cuda_kernels import Usage, compiler_version, disassembly, measure, needs_nvrtc, read, usage_of

from attn_ops.kernels.cuda.build import specializations
from attn_ops.kernels.cuda.kernel import Specialization

pytestmark = needs_nvrtc

REGISTERS = 2
"""How many more registers a kernel may take: small changes of the source move a few."""

SPILLED_AGAIN = 8
"""How many more bytes of a thread may be spilled: nvrtc spills 8 more of the same sources in some processes."""

SHARED_MEMORY, REGISTER_FILE = 228 << 10, 255
"""Of a CTA, in bytes, with the KiB that the system reserves; and of a thread."""


@pytest.fixture(scope="module")
def measured() -> dict[str, Usage]:
    return measure()


def test_kernels_fit(measured: dict[str, Usage]) -> None:
    """What attention kernels may spill is in their tests. The others spill nothing."""
    for name, row in measured.items():
        assert row.shared <= SHARED_MEMORY, name
        assert row.registers <= REGISTER_FILE, name
        assert row.stack == 0 or not name.startswith("merge_state"), name


KEEPING = ("decode", "mla_swap_ab", "plan_prefill_kernel")
"""With swapped operands consumers need no more registers than the launch gives each warp. Planning has no roles."""

REALLOCATING = [s for s in specializations() if s.threads >= 384 and s.kernel.function not in KEEPING]


@pytest.mark.parametrize("one", REALLOCATING, ids=lambda one: one.name)
def test_warpgroups_take_the_registers_of_the_launch(one: Specialization) -> None:
    """Two or three of consumers, which have most, one or two of converters, and one of producers: ``setmaxnreg`` waits
    for ever for more than the CTA has.
    """
    *others, most = sorted({int(n, 16) for n in re.findall(r"USETMAXREG\S* .*?0x([0-9a-f]+)", disassembly(one))})
    assert all(n % 8 == 0 for n in (*others, most))
    warpgroups, consumers = one.threads // 128, dict(one.macros).get("CONSUMERS", 2)
    second = [max(others)] * (warpgroups - consumers - len(others))  # of converters
    assert len(second) <= 1
    assert sum([*others, *second]) + consumers * most <= warpgroups * usage_of(one).registers


@pytest.mark.skipif(compiler_version() not in read(), reason=f"resources_cuda.json has no {compiler_version()}")
def test_no_kernel_takes_more_than_the_table_says(measured: dict[str, Usage]) -> None:
    table = read()[compiler_version()]
    assert measured.keys() == table.keys(), "run (cd tests && python -m helpers.cuda_kernels --write)"
    worse = []
    for name, now in measured.items():
        before = Usage(*table[name])
        grows = (
            now.registers > before.registers + REGISTERS
            or now.stack > before.stack + SPILLED_AGAIN
            or now.shared > before.shared
        )
        if grows or now.hgmma != before.hgmma:
            worse.append(f"{name}: {before} was, {now} is")
    assert not worse, "\n".join([*worse, "if it is meant: (cd tests && python -m helpers.cuda_kernels --write)"])
