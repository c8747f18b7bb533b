"""Triton: the general GPU backend, and what Inductor inlines into CUDA graphs and packages."""

from .bits import packbits, segment_packbits
from .decode import batch_decode
from .launch import record
from .merge import merge_state, merge_state_in_place, merge_states, merge_states_varlen
from .mla import batch_mla
from .page import append_kv, append_mla_kv
from .page_table import batch_indices_positions, page_table, seq_lens
from .plan_pieces import plan_decode
from .plan_prefill import plan_prefill
from .prefill import batch_prefill, ragged_prefill, single_prefill

__all__ = [
    "append_kv",
    "append_mla_kv",
    "batch_decode",
    "batch_indices_positions",
    "batch_mla",
    "batch_prefill",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "merge_states_varlen",
    "packbits",
    "page_table",
    "plan_decode",
    "plan_prefill",
    "ragged_prefill",
    "record",
    "segment_packbits",
    "seq_lens",
    "single_prefill",
]
