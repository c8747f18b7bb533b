"""The way of a query from a public function to the op is short, and goes down alone."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from helpers.page_tables import int32

import attn_ops
from attn_ops.frontend.call import AttentionCall

MAX_STOPS = 12
PACKAGE = Path(attn_ops.__file__).parent


class Stop(NamedTuple):
    """A function of the library that is called with the query, or with the call that has it."""

    module: str
    function: str


def _stops(query: torch.Tensor, call: Any) -> tuple[list[Stop], list[str]]:
    """The stops before the op is called, and the functions that it is called from, outermost first."""
    stops: list[Stop] = []
    callers: list[str] = []

    def has_query(value: Any) -> bool:
        if isinstance(value, AttentionCall):
            value = value.tensors
        return value is query or (isinstance(value, tuple) and any(part is query for part in value))

    def enter(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if event != "call" or callers or PACKAGE not in path.parents:
            return
        module = str(path.relative_to(PACKAGE))
        if module == "ops/register.py":  # the implementation of an op; those that plan do not take the query
            if not any(map(has_query, frame.f_locals.values())):
                return
            outer: FrameType | None = frame.f_back
            while outer is not None:
                if PACKAGE in Path(outer.f_code.co_filename).parents:
                    callers.insert(0, outer.f_code.co_name)
                outer = outer.f_back
            return
        variadic = sum(bool(code.co_flags & flag) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS))
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + variadic]
        if any(has_query(frame.f_locals.get(name)) for name in arguments):
            stops.append(Stop(module, code.co_name))

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return stops, callers


def test_from_the_cudnn_function_to_the_op() -> None:
    cache, q = torch.randn(8, 2, 4, 16), torch.randn(6, 4, 16)
    lengths = {"actual_seq_lens_q": int32([3, 3]), "actual_seq_lens_kv": int32([5, 8])}
    sizes = {"max_token_per_sequence": 3, "max_sequence_kv": 8, "block_tables": int32([[0, 1], [2, 3]])}

    def attend() -> None:
        function, workspace = attn_ops.cudnn_batch_prefill_with_kv_cache, torch.zeros(8, dtype=torch.uint8)
        function(q, cache, cache, 0.25, workspace, **lengths, **sizes, causal=True, return_lse=True)

    attend()  # imports what is imported at the first call
    stops, callers = _stops(q, attend)
    function = "cudnn_batch_prefill_with_kv_cache"
    assert callers == [function, function, "execute", "call_op"]  # the first checks types
    assert len(stops) <= MAX_STOPS, stops
    path = ["cudnn_batch_prefill_with_kv_cache", "block_table_call", "execute", "_resolve"]
    assert [stop.function for stop in stops if stop.function in path and stop.module != "typed.py"] == path
