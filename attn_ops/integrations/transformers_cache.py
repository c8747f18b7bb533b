"""A dynamic cache of transformers that grows in place.

``DynamicLayer`` concatenates: each step copies all keys and values of the layer, to memory of other sizes and strides.
The layer here writes new tokens behind the old ones, into a buffer of larger capacity, and its keys and values are
views of that buffer. Their strides stay the same while it is large enough, so that a step makes the calls of the step
before.
"""

from __future__ import annotations

import copy
import copyreg
import functools
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from attn_ops.eager.interposition import is_traced

CAPACITY_STEP = 128
"""Tokens that the size of a buffer is a multiple of."""


def grow_in_place(cache_class: Any, layer_class: Any, implementations: Container[str]) -> None:
    """Let ``cache_class``, ``DynamicCache``, made with the config of a model with one of these implementations, have
    layers that grow in place where it has a ``layer_class``, ``DynamicLayer``."""
    growing, original = _growing(layer_class), cache_class.__init__

    @functools.wraps(original)
    def init(self: Any, ddp_cache_data: Any = None, config: Any = None, *args: Any, **kwargs: Any) -> None:
        original(self, ddp_cache_data, config, *args, **kwargs)
        if getattr(config, "_attn_implementation", None) in implementations and not (is_traced() or self.offloading):
            for layer in self.layers:
                if type(layer) is layer_class:
                    layer.__class__ = growing

    cache_class.__init__ = init


class Buffer:
    """Memory ``[batch, num_kv_heads, capacity, head_dim]`` of a layer's keys or values.

    view  the tokens in use, as they were last returned
    """

    def __init__(self, held: Tensor, new: Tensor, length: int) -> None:
        """A buffer of the ``length`` tokens that are ``held``, with capacity for ``new`` ones and more."""
        batch, heads, rows, head_dim = new.shape
        least = length + rows + (length + rows) // 8  # in proportion, so that each token is copied a few times at most
        self.memory = new.new_empty((batch, heads, (least // CAPACITY_STEP + 1) * CAPACITY_STEP, head_dim))
        self.capacity, self.sizes, self.strides = self.memory.shape[2], (batch, heads, head_dim), self.memory.stride()
        if length:
            self.tokens(0, length).copy_(held)
        self.view = held

    def tokens(self, first: int, count: int) -> Tensor:
        """``memory[:, :, first : first + count]``, in less time."""
        batch, heads, head_dim = self.sizes
        return self.memory.as_strided((batch, heads, count, head_dim), self.strides, first * head_dim)

    def append(self, new: Tensor, length: int, rows: int) -> Tensor:
        """Write ``new`` tokens behind the first ``length``; returns all."""
        self.tokens(length, rows).copy_(new)
        self.view = self.tokens(0, length + rows)
        return self.view

    def holds(self, held: Tensor, new: Tensor) -> bool:
        """Whether ``held`` is a view of the first tokens, as after ``crop``, and ``new`` tokens have their form."""
        memory = self.memory
        same = held.data_ptr() == memory.data_ptr() and held.stride() == self.strides
        same = same and held.shape[:2] == memory.shape[:2] == new.shape[:2]
        return same and held.dtype == memory.dtype == new.dtype


def _growing(layer_class: Any) -> Any:
    class GrowingLayer(layer_class):
        """A cache layer that grows in place: its keys and values are views of ``buffers`` of larger capacity.

        Both are ``[batch, num_kv_heads, tokens, head_dim]``.
        """

        keys: Any
        values: Any
        buffers: tuple[Buffer, Buffer] | None = None

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_traced() or (torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad)):
                return super().update(key_states, value_states, *args, **kwargs)
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            length, rows = self.keys.shape[-2] if self.keys.dim() > 1 else 0, key_states.shape[-2]
            if self.buffers is None or not self._has_capacity(key_states, value_states, length + rows):
                k = Buffer(self.keys, key_states, length)
                self.buffers = k, Buffer(self.values, value_states, length)
            k, v = self.buffers
            self.keys, self.values = k.append(key_states, length, rows), v.append(value_states, length, rows)
            return self.keys, self.values

        def _has_capacity(self, key_states: Tensor, value_states: Tensor, tokens: int) -> bool:
            """Whether the buffers hold the keys and values, and have capacity for ``tokens`` tokens."""
            assert self.buffers is not None
            k, v = self.buffers
            if tokens > k.capacity or k.memory.is_inference() != torch.is_inference_mode_enabled():
                return False
            if self.keys is k.view and self.values is v.view:
                return True
            return k.holds(self.keys, key_states) and v.holds(self.values, value_states)

        def _state(self) -> dict[str, Any]:
            """The state without buffers: a copy that appended to them would overwrite tokens of this layer."""
            return {name: value for name, value in self.__dict__.items() if name != "buffers"}

        def __copy__(self) -> GrowingLayer:
            other = type(self).__new__(type(self))
            other.__dict__.update(self._state())
            return other

        def __deepcopy__(self, memo: dict[int, Any]) -> GrowingLayer:
            other = type(self).__new__(type(self))
            memo[id(self)] = other
            other.__dict__.update(copy.deepcopy(self._state(), memo))
            return other

        def __reduce__(self) -> tuple[Any, ...]:
            """Pickled as a layer of transformers, with only the tokens in use."""
            held = {name: x.clone() if isinstance(x, Tensor) else x for name, x in self._state().items()}
            return copyreg._reconstructor, (layer_class, object, None), held  # type: ignore[attr-defined]

    return GrowingLayer
