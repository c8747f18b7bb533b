"""The table of random valid calls of ops, by name."""

from __future__ import annotations

from collections.abc import Callable

from helpers.fuzz.append import append_kv, append_mla_kv
from helpers.fuzz.attention import batch_decode, batch_mla, batch_prefill, ragged_prefill, single_prefill
from helpers.fuzz.draw import Call, Draw
from helpers.fuzz.merge import merge_op
from helpers.fuzz.sparse import SPARSE_OPS
from helpers.fuzz.tables import (
    batch_indices_positions,
    packbits,
    page_table,
    segment_packbits,
    seq_lens,
    shard_page_table,
)

ATTENTION: dict[str, Callable[[Draw], Call]] = {
    "batch_decode": batch_decode,
    "batch_prefill": batch_prefill,
    "ragged_prefill": ragged_prefill,
    "single_prefill": single_prefill,
    "batch_mla": batch_mla,
    "block_sparse_prefill": SPARSE_OPS["block_sparse_prefill"],
}
OTHERS: dict[str, Callable[[Draw], Call]] = {
    "append_kv": append_kv,
    "append_mla_kv": append_mla_kv,
    "batch_indices_positions": batch_indices_positions,
    "seq_lens": seq_lens,
    "page_table": page_table,
    "shard_page_table": shard_page_table,
    "block_sparse_table": SPARSE_OPS["block_sparse_table"],
    **{op: merge_op(op) for op in ("merge_state", "merge_states", "merge_state_in_place", "merge_states_varlen")},
    "packbits": packbits,
    "segment_packbits": segment_packbits,
}
OPS = ATTENTION | OTHERS
"""How a call of each op is drawn. ``plan_decode`` and ``plan_prefill`` are called by the planners of the others."""
