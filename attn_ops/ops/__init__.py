"""The ops of ``torch.ops.attn`` as typed functions, which call them and trace to them::

    out, lse = attn_ops.ops.batch_decode(q, k_cache, v_cache, plan, workspace)

The modules are internal: schemas, options, checks, backends, registration and Inductor lowering.
"""

from attn_ops.ops.functions import (
    append_kv,
    append_mla_kv,
    batch_decode,
    batch_indices_positions,
    batch_mla,
    batch_prefill,
    block_sparse_prefill,
    block_sparse_table,
    merge_state,
    merge_state_in_place,
    merge_states,
    merge_states_varlen,
    packbits,
    page_table,
    plan_decode,
    plan_prefill,
    ragged_prefill,
    segment_packbits,
    seq_lens,
    shard_page_table,
    single_prefill,
)

__all__ = [
    "append_kv",
    "append_mla_kv",
    "batch_decode",
    "batch_indices_positions",
    "batch_mla",
    "batch_prefill",
    "block_sparse_prefill",
    "block_sparse_table",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "merge_states_varlen",
    "packbits",
    "page_table",
    "plan_decode",
    "plan_prefill",
    "ragged_prefill",
    "segment_packbits",
    "seq_lens",
    "shard_page_table",
    "single_prefill",
]
