"""What releases of PyTorch cannot do."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.exc import InductorError

BROKEN_GATHER = pytest.mark.xfail(
    torch.__version__ < "2.12",
    raises=InductorError,
    reason="Inductor's C++ for AVX-512 uses the index of a transposed gather before it declares it",
)
