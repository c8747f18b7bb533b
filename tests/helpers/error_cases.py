"""Calls that are refused, and with what words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_ops import errors
from helpers.wrapper_requests import DEVICE

Case = tuple[Callable[[], Any], type[Exception], str]
"""A call, its error, and words of it."""


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def refused(case: Case) -> None:
    call, error, words = case
    with pytest.raises(error, match=re.escape(words)) as raised:
        call()
    assert isinstance(raised.value, ValueError | TypeError | errors.GradientError)
    assert isinstance(raised.value, errors.AttnOpsError)
