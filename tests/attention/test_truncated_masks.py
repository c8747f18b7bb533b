"""A packed mask that ends too early hides the keys beyond its end, and the memory behind it is not read.

The ops cannot check the length of a mask: it depends on lengths that are on the device.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.backends import INTERPRETER, REFERENCE, TRITON
from helpers.cases import PREFILL_BASE
from helpers.harness import Setup
from helpers.masks import truncated

pytestmark = pytest.mark.usefixtures("poisoned_memory")

REFERENCE_ON_GPU = pytest.param("cuda", "reference", id="reference on cuda", marks=pytest.mark.gpu)

NUM_BYTES = (0, 1, 7, 60, 140)


@pytest.mark.parametrize(
    ("kind", "num_bytes", "device", "backend"),
    [
        pytest.param(kind, num_bytes, *target.values, id=f"{kind}-{num_bytes}-{target.id}", marks=target.marks)
        for target in (REFERENCE, TRITON, REFERENCE_ON_GPU, INTERPRETER)
        for kind in (("prefill",) if target is INTERPRETER else ("prefill", "ragged"))
        for num_bytes in (NUM_BYTES[::2] if target is INTERPRETER else NUM_BYTES)
    ],
)
def test_keys_beyond_the_end_of_a_mask_are_hidden(kind: str, num_bytes: int, device: str, backend: str) -> None:
    setup = Setup(kind, replace(PREFILL_BASE, name="short mask", kv_lens=(37, 0, 130, 9), masked=0.8), device)
    assert setup.packed_mask is not None
    memory = setup.packed_mask.clone()
    memory[num_bytes:] = 255  # would show every key
    assert num_bytes < memory.shape[0]
    setup.masks = truncated(setup.masks, num_bytes)
    setup.check(*setup.run(backend, mask=memory[:num_bytes]))
