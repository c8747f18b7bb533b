"""Triton: the general GPU backend, and what Inductor inlines into CUDA graphs and packages."""

from .decode import batch_decode
from .launch import record
from .merge import merge_state, merge_states
from .mla import batch_mla
from .page import append_kv
from .plan_pieces import plan_decode
from .plan_prefill import plan_prefill
from .prefill import batch_prefill, ragged_prefill, single_prefill

__all__ = [
    "append_kv",
    "batch_decode",
    "batch_mla",
    "batch_prefill",
    "merge_state",
    "merge_states",
    "plan_decode",
    "plan_prefill",
    "ragged_prefill",
    "record",
    "single_prefill",
]
