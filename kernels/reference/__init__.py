"""The reference backend: plain PyTorch on any device, the executable specification of every op.

Each function is a few standard steps: gather, mask, softmax, scatter. It is what other backends are tested against, and
what Inductor compiles into CPU packages. Every function is traceable: no data-dependent shape, no ``.item()`` while
tracing, no loop over requests. The work is proportional to the capacity of a plan, not to the lengths in it.
"""

from attn_ops.kernels.reference.append import append_kv, append_mla_kv
from attn_ops.kernels.reference.attention import (
    batch_decode,
    batch_prefill,
    block_sparse_prefill,
    ragged_prefill,
    single_prefill,
)
from attn_ops.kernels.reference.block_sparse import block_sparse_table
from attn_ops.kernels.reference.merge_states import merge_state, merge_state_in_place, merge_states, merge_states_varlen
from attn_ops.kernels.reference.mla import batch_mla
from attn_ops.kernels.reference.packbits import packbits, segment_packbits
from attn_ops.kernels.reference.page_table import batch_indices_positions, page_table, seq_lens, shard_page_table
from attn_ops.kernels.reference.plan import plan_decode, plan_prefill
