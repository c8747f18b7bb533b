"""Lengths and tables of a KV cache that the batch does not have are typed errors, before any write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.flash_requests import DenseCache, check_dense, expected
from helpers.wrapper_requests import DEVICE, Requests
from torch import Tensor

from attn_ops import errors
from attn_ops.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache, get_scheduler_metadata

on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="lengths and tables on the host")


def query(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.float16)


# --------------------------------------------------------------------------------------------- lengths that are numbers


@pytest.mark.parametrize("number", [np.int64, np.uint8, int], ids=lambda x: x.__name__)
def test_integers_of_any_type_are_lengths(number: Any) -> None:
    c, q = DenseCache((40, 40)), query(2, 1, 4, 64)
    for n in (3, 9, None):
        out = flash_attn_with_kvcache(q, c.k, c.v, cache_seqlens=None if n is None else number(n))
        requests = [(a, k[:n], v[:n]) for a, k, v in zip(q, c.keys, c.values, strict=True)]
        check_dense(expected(requests), out)


@pytest.mark.parametrize("length", [3.0, np.float32(3), "3"], ids=repr)
def test_other_numbers_are_no_lengths(length: Any) -> None:
    c, q = DenseCache((40, 40)), query(2, 1, 4, 64)
    message = "cache_seqlens is .*expected a tensor, an integer or None"
    with pytest.raises(errors.ArgumentError, match=message):
        flash_attn_with_kvcache(q, c.k, c.v, cache_seqlens=length)
    with pytest.raises(errors.ArgumentError, match=message):
        get_scheduler_metadata(2, 1, 40, 4, 2, 64, length)
