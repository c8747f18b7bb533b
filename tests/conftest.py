"""Fixtures and settings for every test."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch
from helpers.fake_driver import built, fake_driver, loads  # noqa: F401  fixtures

import attn_ops  # noqa: F401  registers the ops

# The tensors here are small: threads would only wait for each other.
torch.set_num_threads(1)

hypothesis.settings.register_profile("attn_ops", deadline=None, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, print_blob=True, max_examples=5000)
hypothesis.settings.load_profile("attn_ops")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """``torch.empty`` returns NaN, so that an output element which nobody wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
