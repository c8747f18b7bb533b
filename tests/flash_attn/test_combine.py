"""Merging results over several sets of keys, under FlashAttention 3's name."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.flash_requests import check_dense, check_varlen, dense, expected
from helpers.wrapper_requests import DEVICE
from torch import Tensor

from attn_ops import errors
from attn_ops.flash_attn import flash_attn_combine, flash_attn_func

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def partial() -> tuple[Tensor, Tensor, list[tuple[Tensor, ...]]]:
    """Outputs and LSE over three sets of keys, and over none; and the requests with all keys."""
    q, k, v = dense(2, 5, 21, dtype=torch.float32)
    parts = [
        flash_attn_func(q, k[:, s], v[:, s], return_softmax_lse=True) for s in (slice(9), slice(9, 10), slice(10, 21))
    ]
    outs, lses = [out for out, _ in parts], [lse.transpose(1, 2) for _, lse in parts]
    outs, lses = [*outs, torch.zeros_like(outs[0])], [*lses, torch.full_like(lses[0], -math.inf)]
    return torch.stack(outs), torch.stack(lses), list(zip(q, k, v, strict=True))


def test_parts_of_the_keys() -> None:
    outs, lses, requests = partial()
    want = expected(requests)
    out, lse = flash_attn_combine(outs, lses)
    check_dense(want, out, lse.transpose(1, 2).contiguous())
    out, lse = flash_attn_combine(outs[:, 0], lses[:, 0])
    check_varlen(expected(requests[:1]), out, lse.t())
    spread = torch.full((4, 2, 4, 5, 64), math.nan, device=DEVICE)[..., :64].transpose(2, 3)
    spread.copy_(outs)
    out, lse = flash_attn_combine(spread, lses.transpose(0, 1).contiguous().transpose(0, 1))
    check_dense(want, out, lse.transpose(1, 2).contiguous())


def test_outputs_of_other_dtypes() -> None:
    outs, lses, requests = partial()
    buffer = torch.empty(outs.shape[1:], dtype=torch.float16, device=DEVICE)
    out, _ = flash_attn_combine(outs, lses, buffer)
    assert out is buffer
    check_dense(expected(requests), out)
    out, _ = flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    check_dense(expected(requests), out)


@pytest.mark.slow
def test_compiled() -> None:
    outs, lses, _ = partial()
    compiled = torch.compile(flash_attn_combine, fullgraph=True, backend="aot_eager", dynamic=True)
    for found, want in zip(compiled(outs, lses), flash_attn_combine(outs, lses), strict=True):
        torch.testing.assert_close(found, want)


def test_wrong_shapes_and_dtypes() -> None:
    outs, lses, _ = partial()
    with pytest.raises(errors.ShapeError, match=r"lse_partial is \[4, 2, 4, 5\]; expected \[4, 2, 5, 4\]"):
        flash_attn_combine(outs, lses.transpose(-1, -2))
    with pytest.raises(errors.DTypeError, match="lse_partial is complex64; expected a tensor of real numbers; convert"):
        flash_attn_combine(outs, lses.to(torch.complex64))
    with pytest.raises(errors.OptionError, match="sets is 0; expected at least 1"):
        flash_attn_combine(outs[:0], lses[:0])
    with pytest.raises(errors.ShapeError, match="out_partial is"):
        flash_attn_combine(outs[0, 0], lses[0, 0])
    with pytest.raises(errors.ShapeError, match="out is"):
        flash_attn_combine(outs, lses, outs)
    with pytest.raises(errors.DTypeError, match="out is float32; expected float16"):
        flash_attn_combine(outs, lses, outs[0], torch.float16)
    with pytest.raises(errors.UnsupportedError, match="out_dtype is int32"):
        flash_attn_combine(outs, lses, out_dtype=torch.int32)
