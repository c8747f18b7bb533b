"""Which dimension of each argument of each op can be sharded: by heads, and for merges also by rows.

:data:`SHARDED_DIMS` lists the arguments with such a dimension. All other tensors of an op are the same on every rank.
An op without axes takes and returns only replicated tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from attn_ops.ops.options import DENSE_DIMS, PAGED_DIMS
from attn_ops.ops.schemas import SCHEMAS

_PAGED = {layout: dims.head for layout, dims in PAGED_DIMS.items()}
_RAGGED = {layout: dims.head for layout, dims in DENSE_DIMS.items()}

Dims = Mapping[str, "int | dict[str, int]"]
"""The sharded dimension of each argument, by ``kv_layout`` if it depends on that."""


class Axis(NamedTuple):
    """A way to shard an op over one mesh dimension.

    name    what the ranks share: ``heads`` or ``rows``
    dims    the sharded dimension of each argument. The first argument decides whether the op is sharded in this way.
    output  the sharded dimension of every output
    """

    name: str
    dims: Dims
    output: int

    def of_layout(self, kv_layout: str) -> dict[str, int]:
        """The sharded dimension of each argument that has one."""
        return {name: dim[kv_layout] if isinstance(dim, dict) else dim for name, dim in self.dims.items()}


def _heads(**dims: int | dict[str, int]) -> tuple[Axis, ...]:
    return (Axis("heads", dims, output=1),)


def _heads_or_rows(heads: int, *states: str, **rows: int) -> tuple[Axis, ...]:
    """States ``[rows, ..., heads, head_dim]`` and their LSEs."""
    return (
        Axis("heads", dict.fromkeys(states, heads), output=1),
        Axis("rows", dict.fromkeys(states, 0) | rows, output=0),
    )


_PAGED_ATTENTION = _heads(q=1, k_cache=_PAGED, v_cache=_PAGED, sinks=0)
_DENSE_ATTENTION = _heads(q=1, k=_RAGGED, v=_RAGGED, sinks=0)

SHARDED_DIMS: dict[str, tuple[Axis, ...]] = dict.fromkeys(SCHEMAS, ()) | {
    "batch_decode": _PAGED_ATTENTION,
    "batch_prefill": _PAGED_ATTENTION,
    "ragged_prefill": _DENSE_ATTENTION,
    "block_sparse_prefill": _DENSE_ATTENTION,
    "single_prefill": _DENSE_ATTENTION,
    "batch_mla": _heads(q_nope=1, q_pe=1, sinks=0),
    "append_kv": _heads(k=1, v=1, k_cache=_PAGED, v_cache=_PAGED),
    "merge_state": _heads_or_rows(1, "v_a", "s_a", "v_b", "s_b"),
    "merge_states": _heads_or_rows(2, "v", "s"),
    "merge_state_in_place": _heads_or_rows(1, "v", "s", "v_other", "s_other", mask=0),
    "merge_states_varlen": _heads(v=1, s=1),
}
"""The axes of each op of :data:`~attn_ops.ops.schemas.SCHEMAS`."""

KV_ARGUMENTS = {
    op: axes[0].dims.keys() - {"q", "sinks"} for op, axes in SHARDED_DIMS.items() if axes and "q" in axes[0].dims
}
"""The arguments with KV heads, of ops that have query heads too. A single KV head is replicated."""
