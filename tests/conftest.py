"""Settings and fixtures of every test."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterator

# The wrappers of packages are compiled once and run a few times. Inductor's default is O1 with line tables.
os.environ["AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"] = "O0"
os.environ["AOT_INDUCTOR_ENABLE_LINE_TABLES"] = "0"

import hypothesis
import pytest
import torch
import torch._inductor.config as inductor
from helpers import allocator, cpp_runner, package_headers
from helpers.backends import INTERPRETED, cpu_calls_on_each_backend, install_interpreter  # noqa: F401  a fixture
from helpers.cpu_time import (  # noqa: F401  hooks
    pytest_collection_finish,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)
from helpers.fake_driver import fake_driver, fake_driver_library  # noqa: F401  fixtures
from helpers.garbage import pytest_runtest_teardown, pytest_runtestloop  # noqa: F401  hooks
from helpers.hopper import on_hopper  # noqa: F401  a fixture

import attn_ops  # noqa: F401  registers the ops

# The tensors here are small: more threads would only wait for each other.
torch.set_num_threads(1)

# pytest adds its handlers to loggers that do not propagate, in every phase of a test. Then torch formats each graph
# that it compiles, for its structured trace.
for logger in logging.Logger.manager.loggerDict.values():
    if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == "torch":
        logger.propagate = True

# Inductor's code for the CPU compiles in a third of the time without vector instructions. Fixture vector_code.
inductor.cpp.simdlen = 1
inductor.cpp.vec_isa_ok = True  # no test is compiled of each instruction set that the CPU has
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"  # no vector instructions in processes that tests start

# For the architecture that export_package takes without vectors: all code has the same precompiled headers.
vectors: dict[str, None] = {"cpp.simdlen": None}
if hasattr(inductor.cpp, "march") and platform.machine() == "x86_64":
    vectors["cpp.march"] = None
    inductor.cpp.march = "x86-64"
    os.environ["TORCHINDUCTOR_CPP_MARCH"] = "x86-64"

allocator.install()
package_headers.install()

# Inductor's pool of processes, which import torch, compiles nothing for the CPU.
if not torch.cuda.is_available():
    inductor.compile_threads = 1
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

hypothesis.settings.register_profile("attn_ops", deadline=None, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.register_profile("long", deadline=None, print_blob=True, max_examples=5000)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") == "true" else "attn_ops")

if INTERPRETED:
    install_interpreter()

SKIPPED = {
    "gpu": (not torch.cuda.is_available(), "needs a CUDA device"),
    "interpreter": (not INTERPRETED, "runs in a process that kernels/test_interpreter.py starts"),
}
"""By marker: whether its tests are skipped here, and why."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, (skipped, reason) in SKIPPED.items():
            if skipped and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _folder_of_programs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One for all processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    cpp_runner.folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "programs"
    cpp_runner.folder.mkdir(exist_ok=True)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """``torch.empty`` returns NaN, so that an output element that is not written is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def no_grad() -> Iterator[None]:
    """No gradients are recorded."""
    with torch.no_grad():
        yield


@pytest.fixture
def cold(no_grad: None) -> None:
    """The compiler has compiled nothing in this process."""
    torch.compiler.reset()


@pytest.fixture
def vector_code() -> Iterator[None]:
    """Inductor's code has the vector instructions of this CPU, as it has outside of the tests."""
    with inductor.patch(vectors):
        yield
