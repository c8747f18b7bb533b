"""Absorbed MLA: a model that caches latents attends to them as they are while it decodes.

DeepSeek-V3 caches the latents and the rotary parts of keys. Its method ``expand_kv`` computes keys and values of all
cached tokens from them in every step. Here that method returns what the cache has, and the attention function decides:
with one query row per request the weights of the expansion are absorbed, into the query and after attention, and with
more rows the model's own method expands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def keep_latents(attention: Any, implementation: str) -> None:
    """Let the modules of the class ``attention`` pass ``(rotary parts, latents)`` to this ``implementation``.

    Without the method, in another version of transformers, they go on to pass keys and values of all heads.
    """
    if not hasattr(attention, "expand_kv"):
        return
    original = attention.attn_ops_expand_kv = attention.expand_kv

    def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        expansion = self.kv_b_proj
        if self.config._attn_implementation != implementation or not _is_plain(expansion, kv_nope):
            expanded: tuple[Tensor, Tensor] = original(self, kv_nope, k_rot)
            return expanded
        return k_rot, kv_nope

    attention.expand_kv = expand_kv


def _is_plain(expansion: Any, latents: Tensor) -> bool:
    """Whether the weight itself can be absorbed: it is not quantized, adapted, sharded or offloaded."""
    if type(expansion) is not nn.Linear or expansion.bias is not None or type(expansion.weight) is not nn.Parameter:
        return False
    return expansion.weight.dtype == latents.dtype and expansion.weight.device == latents.device


def has_latents(module: Any, query: Tensor, key: Tensor) -> bool:
    """Whether a layer was passed rotary parts and latents."""
    return query.shape[-1] != key.shape[-1] and hasattr(module, "attn_ops_expand_kv")


def expand(module: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all heads from rotary parts and latents."""
    expanded: tuple[Tensor, Tensor] = module.attn_ops_expand_kv(value, key)
    return expanded


def absorb(module: Any, query: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary part ``[batch, num_heads, rows, rotary]`` and latent ``[batch, rows, num_heads, rank]`` of a query."""
    nope, rotary = query.split((module.qk_nope_head_dim, query.shape[-1] - module.qk_nope_head_dim), -1)
    keys = _weight(module)[:, : module.qk_nope_head_dim]
    return rotary, (nope @ keys).transpose(1, 2)


def project(module: Any, out: Tensor) -> Tensor:
    """The heads' outputs ``[batch, rows, num_heads, v_head_dim]`` from sums of latents ``[..., num_heads, rank]``."""
    values = _weight(module)[:, module.qk_nope_head_dim :]
    return (out.transpose(1, 2) @ values.mT).transpose(1, 2)


def _weight(module: Any) -> Tensor:
    """``[num_heads, qk_nope_head_dim + v_head_dim, rank]``"""
    weight: Tensor = module.kv_b_proj.weight
    return torch.unflatten(weight, 0, (-1, module.qk_nope_head_dim + module.v_head_dim))
