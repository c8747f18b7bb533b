"""One contract for real and fake: every op's arguments are checked here, with the same words.

``CHECKS[op](*args, **kwargs)`` takes the op's arguments, raises a typed error before anything is
written, and returns the :class:`~attn_ops.registry.Problem` from which a backend is chosen. Only
shapes, strides, dtypes and devices are looked at, never contents: that is the validating planner's
work (:mod:`attn_ops.page_table`).
"""

from __future__ import annotations

from collections.abc import Callable

from ..registry import Problem
from . import attention, bits, merging, pages, planning

CHECKS: dict[str, Callable[..., Problem]] = {
    check.__name__: check
    for check in (
        planning.plan_decode,
        planning.plan_prefill,
        attention.batch_decode,
        attention.batch_prefill,
        attention.ragged_prefill,
        attention.single_prefill,
        attention.batch_mla,
        pages.append_kv,
        pages.append_mla_kv,
        pages.batch_indices_positions,
        pages.seq_lens,
        pages.page_table,
        merging.merge_state,
        merging.merge_states,
        merging.merge_state_in_place,
        merging.merge_states_varlen,
        bits.packbits,
        bits.segment_packbits,
    )
}
