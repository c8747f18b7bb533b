"""Whether a thread traces code."""

from __future__ import annotations

import torch
from torch._guards import TracingContext
from torch.compiler import is_dynamo_compiling


def is_compiling() -> bool:
    """Whether this thread traces code, under ``torch.compile`` or ``torch.export``.

    The flag of PyTorch is of the process: since 2.13 it is also set while another thread compiles.
    """
    return torch.compiler.is_compiling() and (is_dynamo_compiling() or TracingContext.try_get() is not None)
