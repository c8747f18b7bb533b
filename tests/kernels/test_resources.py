"""No kernel takes more registers, stack or shared memory than ``resources.json`` lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from helpers.offline_compile import SHARED_MEMORY, compiling_for  # noqa: E402
from helpers.resources import AS_ON_HOPPER, CAPABILITIES, CASES, TARGETS, Resources, measure, read  # noqa: E402

REGISTERS = 8
"""How many more registers a kernel may take: small changes of the source move a few."""

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or triton.knobs.runtime.interpret, reason="compiles for a GPU that is not there"
)


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, Resources]]:
    return measure()


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_fit(capability: int, measured: dict[str, dict[str, Resources]]) -> None:
    most = SHARED_MEMORY[capability][0] << 10
    assert {name: row for name, row in measured[f"sm_{capability}"].items() if row.shared > most} == {}


@pytest.mark.slow
@pytest.mark.skipif(triton.__version__ not in read(), reason=f"resources.json has no Triton {triton.__version__}")
def test_no_kernel_takes_more_than_the_table_says(measured: dict[str, dict[str, Resources]]) -> None:
    table = read()[triton.__version__]
    worse = []
    for target, rows in measured.items():
        assert rows.keys() == table[target].keys(), "run (cd tests && python -m helpers.resources --write)"
        for name, now in rows.items():
            before = Resources(*table[target][name])
            if now.registers > before.registers + REGISTERS or now.stack > before.stack or now.shared > before.shared:
                worse.append(f"{target} {name}: {before} was, {now} is")
    assert not worse, "\n".join([*worse, "if it is meant: (cd tests && python -m helpers.resources --write)"])


def test_each_case_has_targets() -> None:
    assert TARGETS.keys() == CASES.keys()


@pytest.mark.parametrize("case", AS_ON_HOPPER)
def test_kernels_that_are_not_compiled_for_blackwell_are_those_for_hopper(case: str) -> None:
    launches: dict[int, list[Any]] = {90: [], 100: []}
    for capability, found in launches.items():

        def record(kernel: Any, arguments: dict[str, Any], options: dict[str, Any], found: list[Any] = found) -> bool:
            constants = {name: x.dtype if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
            found.append((kernel, constants, options))
            return False

        with compiling_for(capability, record):
            CASES[case]()
    assert launches[90]
    assert launches[90] == launches[100]
