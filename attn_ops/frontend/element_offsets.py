"""Offsets among the arguments of plan() that count elements, as cuDNN's do, or that repeat another argument."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_ops.errors import UnsupportedError, fail


def token_offsets(indptr: Tensor, seq_lens: Tensor | None, elements: int) -> Tensor:
    """``indptr`` of a plan() of ``backend="cudnn"`` in tokens.

    It is in units of ``elements`` per token where the lengths say so. Without lengths, and where it is neither in
    tokens nor in elements, it is returned as it is. Copies to the host.
    """
    if seq_lens is None:
        return indptr
    ends = seq_lens.flatten().cpu().long().cumsum(0)
    packed = torch.cat((ends.new_zeros(1), ends)) * elements
    return indptr // elements if torch.equal(indptr.cpu().long(), packed) else indptr


def check_repeated(where: str, name: str, tensor: Tensor | None, indptr_name: str, indptr: Tensor, step: int) -> None:
    """Raise unless ``tensor``, if given, equals ``indptr``, in tokens or in ``step`` elements per token."""
    if tensor is None:
        return
    given, packed = tensor.cpu().long(), indptr.cpu().long()
    if not torch.equal(given, packed) and not torch.equal(given, packed * step):
        fail(
            UnsupportedError,
            where,
            f"{name} differs from {indptr_name}",
            f"the tokens of {indptr_name}, or {step} elements for each of them",
            f"omit {name}",
        )
