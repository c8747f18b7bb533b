"""What transformers may ask of an attention function and this library does not do."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from attn_ops.errors import ArgumentError, GradientError, dtype_name, fail, shape_of, unsupported
from attn_ops.integrations.transformers_masks import WHERE

REFUSED = {
    "dropout": "call model.eval(), or train with attn_implementation='sdpa'",
    "output_attentions": "probabilities are never stored; use 'eager'",
    "head_mask": "use 'eager'",
    "position_bias": "use 'sdpa'",
    "indices": "every key is seen; use 'eager', which computes the selection of the model",
    "block_indices": "every key is seen; use 'eager' or 'sdpa', which compute the selection of the model",
    "sinks": "s_aux is a sink of each head, not of each token; use 'eager'",
}
"""Arguments of a layer that would change the result, and what to do instead."""


def refuse(arguments: dict[str, Any], *tensors: Tensor) -> None:
    """Raise for arguments of a layer that would change the result."""
    for name, instead in REFUSED.items():
        given = arguments.get(name)
        if given is not None and (isinstance(given, Tensor) or given):
            shown = "given" if isinstance(given, Tensor) else f"{given!r}"
            unsupported(WHERE, f"{name} is {shown}", instead)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        fail(
            GradientError,
            WHERE,
            "the query, key or value requires grad",
            "inference, there is no backward",
            "call the model under torch.no_grad(), or train with attn_implementation='sdpa'",
        )


def refuse_mask(mask: Any) -> NoReturn:
    """Raise for a mask that is not of the registered mask function."""
    if mask is None:
        fail(
            ArgumentError,
            WHERE,
            "a causal layer has no attention mask",
            "the result of the registered mask function, without which padding would be attended to",
            "use the name that attn_ops.integrations.transformers.register() returns",
        )
    shown = (
        f"{shape_of(mask)}, {dtype_name(mask.dtype)}" if isinstance(mask, Tensor) else f"of type {type(mask).__name__}"
    )
    unsupported(
        WHERE,
        f"attention_mask is {shown}",
        "pass a mask [batch, tokens] of ones after zeros, or use attn_implementation='sdpa' for masks of other forms",
    )
