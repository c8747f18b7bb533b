"""The checks of every op's arguments, the same with the same messages for real and fake calls.

``CHECKS[op](*args, **kwargs)`` takes the op's arguments, raises a typed error before anything is written, and returns
the :class:`~attn_ops.ops.backends.Problem` from which a backend is chosen. Checks read shapes, strides, dtypes and
devices. They never read contents, which ``plan(validate=True)`` checks (:mod:`attn_ops.plan.page_table_checks`).
"""

from __future__ import annotations

from collections.abc import Callable

from attn_ops.ops.backends import Problem
from attn_ops.ops.checks import attention, merge_states, packbits, paging, planning

CHECKS: dict[str, Callable[..., Problem]] = {
    check.__name__: check
    for check in (
        planning.plan_decode,
        planning.plan_prefill,
        attention.batch_decode,
        attention.batch_prefill,
        attention.ragged_prefill,
        attention.single_prefill,
        attention.block_sparse_prefill,
        attention.batch_mla,
        paging.append_kv,
        paging.append_mla_kv,
        paging.batch_indices_positions,
        paging.seq_lens,
        paging.page_table,
        paging.block_sparse_table,
        paging.shard_page_table,
        merge_states.merge_state,
        merge_states.merge_states,
        merge_states.merge_state_in_place,
        merge_states.merge_states_varlen,
        packbits.packbits,
        packbits.segment_packbits,
    )
}
