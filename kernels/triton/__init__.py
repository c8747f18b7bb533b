"""Triton: the general GPU backend, and what Inductor inlines into CUDA graphs and packages."""

from attn_ops.kernels.triton.append import append_kv, append_mla_kv
from attn_ops.kernels.triton.decode_call import batch_decode
from attn_ops.kernels.triton.merge_states import merge_state, merge_state_in_place, merge_states, merge_states_varlen
from attn_ops.kernels.triton.mla import batch_mla
from attn_ops.kernels.triton.packbits import packbits, segment_packbits
from attn_ops.kernels.triton.page_table import batch_indices_positions, page_table, seq_lens
from attn_ops.kernels.triton.plan_decode_call import plan_decode
from attn_ops.kernels.triton.plan_prefill import plan_prefill
from attn_ops.kernels.triton.prefill import batch_prefill, block_sparse_prefill, ragged_prefill, single_prefill
from attn_ops.kernels.triton.shard_page_table import shard_page_table
