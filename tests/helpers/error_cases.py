"""Tables of wrong calls of the public functions and wrappers, and the check of one entry."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_ops import errors
from helpers.wrapper_requests import DEVICE

Case = tuple[Callable[[], Any], type[Exception], str]
"""A call, the type of its error, and part of the message."""


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """A tensor whose contents do not matter."""
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def check_raises(case: Case) -> None:
    """The call raises its error, an AttnOpsError that is a ValueError, a TypeError or a GradientError."""
    call, error, message = case
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert isinstance(raised.value, ValueError | TypeError | errors.GradientError)
    assert isinstance(raised.value, errors.AttnOpsError)
