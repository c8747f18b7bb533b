"""Checks of the bit-packing ops."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.errors import OptionError
from attn_ops.ops.backends import Problem
from attn_ops.ops.checks.checker import OpChecker
from attn_ops.symbolic_sizes import guard_or_false


def _bits(op: OpChecker, x: Tensor, bitorder: str) -> None:
    op.tensor("x", x, "[bits]", (torch.bool, torch.uint8), None)
    if bitorder not in ("big", "little"):
        op.fail(OptionError, f"bitorder is {bitorder}", "big or little", "pass one of the two")


def packbits(x: Tensor, *, bitorder: str = "big", backend: str = "auto") -> Problem:
    op = OpChecker("packbits")
    _bits(op, x, bitorder)
    return Problem(op.name, x.device)


def segment_packbits(
    x: Tensor, indptr: Tensor, num_bytes: int, *, bitorder: str = "big", backend: str = "auto"
) -> Problem:
    op = OpChecker("segment_packbits")
    _bits(op, x, bitorder)
    op.indptr("indptr", indptr, "[segments + 1]", x)
    if guard_or_false(num_bytes < 0):
        op.fail(OptionError, f"num_bytes is {num_bytes}", "at least 0", "pass the packed size of all segments")
    return Problem(op.name, x.device)
