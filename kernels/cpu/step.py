"""Steps: kernel calls with the views by which they read their query, keys and values, and return their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.eager.captured_call import View
from attn_ops.kernels.cpu.readers import Reader, Take
from attn_ops.kernels.cpu.schedule import KernelCall
from attn_ops.kernels.reference.cache_views import bits


class Layout:
    """The views by which the kernel takes the query rows of a kernel call and returns their outputs.

    The kernel's tensors are ``[requests, heads, rows, dim]``. If all rows of a request see the same keys, the query
    heads of a KV head become rows: the keys are read once.
    """

    def __init__(self, call: KernelCall, query: View, num_kv_heads: int) -> None:
        (_, heads, dim), (row, head, element) = query.size, query.strides
        requests, rows, group = call.requests, call.rows // call.requests, heads // num_kv_heads
        self.heads, self.rows_of_kv_head = heads, rows * group
        self.split = (requests, num_kv_heads, rows, group)
        self.heads_are_rows = not call.causal and call.window is None and (rows == 1 or group > 1)
        size: tuple[int, ...] = requests, heads, rows, dim
        strides: tuple[int, ...] = rows * row, head, row, element
        self.merges = self.heads_are_rows and rows > 1
        if self.merges:
            size, strides = (*self.split, dim), (rows * row, group * head, row, head, element)
        elif self.heads_are_rows:
            size, strides = (requests, num_kv_heads, rows * group, dim), (rows * row, group * head, head, element)
        take = View(size, strides, query.ahead + call.first * row).taker()
        self.query = (lambda base: take(base).flatten(2, 3)) if self.merges else take

    def rows(self, out: Tensor, shape: Sequence[int]) -> Tensor:
        """The kernel's output as ``[rows, num_qo_heads, dim]``, reshaped to ``shape``."""
        if not self.heads_are_rows:
            out = out.transpose(1, 2)
        elif self.merges:
            out = out.view(*self.split, -1).transpose(1, 2)
        return out.reshape(shape)

    def lse_rows(self, lse: Tensor) -> Tensor:
        """The kernel's LSE as ``[rows, num_qo_heads]``."""
        return (lse.view(self.split) if self.heads_are_rows else lse).transpose(1, 2).reshape(-1, self.heads)


Inputs = tuple[Tensor, Any, Tensor | None]
"""The query, the cache of keys and the cache of values; for MLA the query, both caches and None: values are keys."""


class Step(NamedTuple):
    """A kernel call, and how its query, keys and values are read from :data:`Inputs`.

    layout  views of the query and the outputs
    keys    reads the keys from their cache
    values  reads the values from their cache; None if the keys are the values
    rows    number of rows if no mask is needed, else 0
    """

    call: KernelCall
    layout: Layout
    keys: Callable[[Any], Tensor]
    values: Take | None
    rows: int

    @classmethod
    def of(cls, query: View, readers: Sequence[Reader], call: KernelCall) -> Step:
        keys, values = (read(call) for read in readers)
        return cls(call, Layout(call, query, readers[0].heads), keys, values, 0 if call.window else call.rows)

    @classmethod
    def of_latents(cls, query: View, readers: Sequence[Reader], call: KernelCall) -> Step:
        """:meth:`of` for MLA: the keys ``[ckv, kpe]``, joined in each call, are the values too."""
        reads = [read(call) for read in readers]

        def keys(caches: tuple[Tensor, Tensor]) -> Tensor:
            parts = [bits(read(cache)) for read, cache in zip(reads, caches, strict=True)]
            return torch.cat(parts, -1).view(caches[0].dtype)

        return cls(call, Layout(call, query, readers[0].heads), keys, None, 0 if call.window else call.rows)

    def take(self, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """The query, keys and values of the kernel, ``[requests, heads, rows, dim]``."""
        _, layout, keys, values, _ = self
        q, of_keys, of_values = x
        k = keys(of_keys)
        return layout.query(q), k, k if values is None else values(of_values)  # type: ignore[arg-type]
