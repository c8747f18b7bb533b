"""FP8 queries: which ops take them, and their conversion for kernels that do not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_ops.eager.checked_call import Bases
from attn_ops.eager.launches import record

FP8_QUERY_OPS = frozenset({"batch_prefill", "ragged_prefill", "single_prefill", "block_sparse_prefill"})
"""Ops that take FP8 queries, with keys and values of the same dtype."""

QUERY = torch.float8_e4m3fn
"""The dtype of FP8 queries."""

CONVERTED_DTYPE = torch.float16
"""The dtype that FP8 queries are converted to, for kernels that do not take them. The conversion is exact."""


@functools.cache
def converting(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of an op with FP8 queries converted first. Without ``out_dtype`` the output has the query's dtype.

    PyTorch converts, so a call with an FP8 query cannot be replayed as launches.
    """

    @functools.wraps(function)
    def call(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        if q.dtype != QUERY:
            return function(q, *args, **kwargs)
        record(None)
        if kwargs.get("out_dtype") is None:
            kwargs["out_dtype"] = q.dtype
        return function(q.to(CONVERTED_DTYPE), *args, **kwargs)

    for_key = getattr(function, "for_key", None)  # Backend.for_key

    def of_query(q: Tensor, *args: Any, bases: Bases | None = None, **kwargs: Any) -> Callable[..., Any] | None:
        if q.dtype == QUERY or for_key is None:
            return call if bases is None else None
        found: Callable[..., Any] = for_key(q, *args, bases=bases, **kwargs)
        return found

    call.for_key = of_query  # type: ignore[attr-defined]
    return call
