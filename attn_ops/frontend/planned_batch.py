"""Batches of wrappers: what plan() is called for, and what it stores as the plan source of the calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.argument_checks import flags
from attn_ops.eager.prepared_call import PreparedCalls, new_caches
from attn_ops.errors import DTypeError, ShapeError, dtype_name, fail
from attn_ops.frontend.arguments import DTypes, computed_dtype, positive
from attn_ops.frontend.call import AttentionCall, Planned
from attn_ops.frontend.call_plans import with_rows, with_workspace, without_window
from attn_ops.frontend.kv_cache import paged_sizes
from attn_ops.ops.options import DENSE_DIMS, AttentionOptions
from attn_ops.ops.unsupported import is_plain_prefill
from attn_ops.plan.page_table import PageTable
from attn_ops.plan.plan_checks import check_groups
from attn_ops.plan.spec import PlanSpec
from attn_ops.plan.state import DecodePlan, PrefillPlan
from attn_ops.symbolic_sizes import holds

TENSOR_NAMES = {
    "batch_mla": ("q_nope", "ckv_cache", "kpe_cache"),
    "ragged_prefill": ("q", "k", "v"),
    "block_sparse_prefill": ("q", "k", "v"),
}
"""By op, the names in messages of the first and the last two tensors: the query, and keys and values."""

PAGED_TENSOR_NAMES = "q", "the KV cache", "the KV cache"
"""These names for all other ops."""


class Batch(NamedTuple):
    """A batch that plan() is called for: the op of its calls, its page table, plan spec and options.

    dtypes  dtypes of query, KV and output; None if they follow the tensors of run()
    """

    op: str
    table: PageTable
    spec: PlanSpec
    options: AttentionOptions = AttentionOptions()
    dtypes: DTypes | None = None

    def check(self, where: str) -> None:
        spec = self.spec
        sizes = ("page_size", "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo")
        positive(where, **{size: getattr(spec, size) for size in sizes})
        check_groups(where, spec.num_qo_heads, spec.num_kv_heads)
        flags(where, causal=self.options.causal)  # with a mask no other check reads it

    def is_plain(self, masked: bool) -> bool:
        """:attr:`PlanSpec.plain`; with dtypes that follow the tensors of run(), as if they were of 16 bits."""
        q, kv = (torch.float16, torch.float16) if self.dtypes is None else (self.dtypes.q, self.dtypes.kv)
        return is_plain_prefill(computed_dtype(q, kv), kv, self.options.pos_encoding, masked)


@dataclass
class PlannedBatch:
    """What plan() stores for run(): the op, its plan, its options. It is the plan source of the wrapper's calls.

    dtypes  dtypes of query, KV and output; None if they follow the tensors of run()
    rows    ``[n, 0]``: the planned number of query rows as a size, so that a compiled run() need not specialize on it
    exact   whether the query has exactly that many rows; otherwise more rows may follow, as padding
    keys    ``[n, 0]``: the planned number of ragged keys; more may follow
    state   attributes of the wrapper that belong to the plan
    """

    op: str
    plan: DecodePlan | PrefillPlan
    workspace: Tensor
    spec: PlanSpec
    options: AttentionOptions
    dtypes: DTypes | None
    rows: Tensor
    exact: bool
    keys: Tensor | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    prepared: tuple[PreparedCalls, int] | None = field(default=None, init=False)
    """The prepared calls of run(), on the CPU its bound calls, and an integer of the planned numbers of rows and ragged
    keys. None without the extension module, and on other devices."""

    def __post_init__(self) -> None:
        rows, keys = self.rows.shape[0], self.keys
        number = rows if keys is None else rows << 32 | keys.shape[0]
        self.prepared = new_caches(self.workspace.device, number, on_cpu=True)

    def keep_prepared(self, earlier: PlannedBatch | None) -> None:
        """Take the prepared calls of an earlier batch whose calls differ only in the number of rows and keys."""
        if earlier is None or earlier.prepared is None or self.prepared is None:
            return
        if self._identity() == earlier._identity():
            self.prepared = earlier.prepared[0], self.prepared[1]

    def _identity(self) -> tuple[Any, ...]:
        """All that run() depends on, apart from the numbers of rows and keys; tensors by identity."""
        options = (id(x) if isinstance(x, Tensor) else x for x in self.options)
        tensors = id(self.plan), id(self.workspace)
        return self.op, *tensors, self.spec, self.dtypes, self.exact, dict(self.state), *options

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.spec.head_dims

    def check(self, call: AttentionCall) -> None:
        where, q, kv = call.where, call.tensors[0], call.tensors[-1]
        self.check_tensors(call)
        rows, planned = q.shape[0], self.rows.shape[0]
        if not holds(rows == planned if self.exact else rows >= planned):
            fail(
                ShapeError,
                where,
                f"{TENSOR_NAMES.get(call.op, PAGED_TENSOR_NAMES)[0]} has {int(rows)} rows",
                f"{int(planned)} as planned{_rows_of_a_request(self.spec.rows)}{'' if self.exact else ', or more'}",
                "call plan() for this batch first",
            )
        if self.keys is not None and kv.dim() == 3:
            keys, planned = kv.shape[DENSE_DIMS[call.kv_layout].token], self.keys.shape[0]
            if not holds(keys >= planned):
                expected = f"{int(planned)} as planned by kv_indptr, or more"
                fix = "pass the keys of all requests, or call plan() for this batch first"
                fail(ShapeError, where, f"k and v have {int(keys)} rows", expected, fix)

    def check_query_dtypes(self, where: str, **tensors: Tensor) -> None:
        """Raise unless the parts of an MLA query have the planned dtype."""
        if self.dtypes is not None:
            for name, t in tensors.items():
                _check_dtype(where, name, t, self.dtypes.q)

    def check_tensors(self, call: AttentionCall) -> None:
        """Raise unless dtypes and layout of the call's tensors are as planned.

        An MLA query has passed :meth:`check_query_dtypes`, since scales may convert it afterwards.
        """
        where, (q, *_, k, v) = call.where, call.tensors
        if self.dtypes is not None:
            q_dtype = q.dtype if call.op == "batch_mla" else self.dtypes.q
            dtypes = q_dtype, self.dtypes.kv, self.dtypes.kv
            for name, t, dtype in zip(TENSOR_NAMES.get(call.op, PAGED_TENSOR_NAMES), (q, k, v), dtypes, strict=True):
                _check_dtype(where, name, t, dtype)
        if self.spec.paged and v.dim() == 4:
            self._check_layout(where, v, call.kv_layout)

    def _check_layout(self, where: str, kv: Tensor, kv_layout: str) -> None:
        """Raise if the cache has the other layout, which the op would report as a wrong number of heads or tokens."""
        planned = self.spec.page_size, self.spec.num_kv_heads
        page_size, heads = paged_sizes(where, kv, kv_layout)
        if (page_size, heads) != planned == (heads, page_size):
            other = "HND" if kv_layout == "NHD" else "NHD"
            fail(
                ShapeError,
                where,
                f"in layout {kv_layout} the KV cache has pages of {int(page_size)} tokens and {int(heads)} heads",
                f"{planned[0]} tokens and {planned[1]} heads as planned",
                f"name kv_layout={other!r}, or pass a cache in {kv_layout}",
            )

    def resolve(self, options: AttentionOptions) -> tuple[Planned, AttentionOptions]:
        plan = self.plan
        if self.spec.window_left >= 0 and not 0 <= options.window_left <= self.spec.window_left:
            plan = without_window(plan)
        return Planned(plan, self.workspace), options


class RowsOfCall(NamedTuple):
    """The plan source of a call with ``rows`` query rows per request, over a batch planned with one row per request.

    The rows are the last tokens of their request. With ``causal`` they are causal among themselves. The call plans.
    """

    planned: PlannedBatch
    rows: int
    causal: bool

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.planned.head_dims

    @property
    def batch(self) -> int:
        return self.planned.rows.shape[0]

    def check(self, call: AttentionCall) -> None:
        self.planned.check_tensors(call)
        rows, needed = call.tensors[0].shape[0], self.batch * self.rows
        if rows != needed:
            expected = f"{int(needed)}{_rows_of_a_request(self.rows)}"
            fail(ShapeError, call.where, f"q has {int(rows)} rows", expected, "correct q or q_len_per_req")

    def resolve(self, options: AttentionOptions) -> tuple[Planned, AttentionOptions]:
        plan, spec = self.planned.plan, self.planned.spec
        assert isinstance(plan, DecodePlan)
        spec = spec._replace(decode=False, causal=self.causal, window_left=options.window_left, rows=self.rows)
        return with_workspace(with_rows(plan, spec, self.batch, self.rows)), options._replace(causal=self.causal)


def _check_dtype(where: str, name: str, t: Tensor, planned: torch.dtype) -> None:
    if t.dtype != planned:
        fail(
            DTypeError,
            where,
            f"{name} dtype is {dtype_name(t.dtype)}",
            f"{dtype_name(planned)} as planned",
            "name it in plan(), as q_data_type and kv_data_type, or convert the tensor",
        )


def _rows_of_a_request(rows: int | None) -> str:
    return "" if rows is None or rows == 1 else f", q_len_per_req {int(rows)} of each request"
