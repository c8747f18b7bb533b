"""One call path: every public function and wrapper builds an :class:`AttentionCall` and executes it.

    check -> fold scales -> plan -> op -> finalize

Nothing is written before every check has passed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from attn_ops.eager.checked_call import CHECKED_CALLS, call_op
from attn_ops.eager.op_call import Lookup, OpCall
from attn_ops.frontend.arguments import computed_dtype
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.scales import Heads, ScaleFactors, fold
from attn_ops.ops.checks import CHECKS
from attn_ops.ops.fp8_queries import FP8_QUERY_OPS, QUERY
from attn_ops.ops.options import DENSE_DIMS, FP8, PAGED_DIMS, AttentionOptions
from attn_ops.plan.state import DecodePlan, PrefillPlan
from attn_ops.tracing import is_compiling


class PlanSource(Protocol):
    """Where the plan of a call comes from: an earlier plan(), or lengths that are planned inside the call."""

    @property
    def head_dims(self) -> tuple[int, int]:
        """Head dimensions of the query, both parts of an MLA query together, and of the output."""

    def check(self, call: AttentionCall) -> None:
        """Raise unless the call's tensors are those that the plan is for."""

    def resolve(self, options: AttentionOptions) -> tuple[Planned | tuple[int], AttentionOptions]:
        """The op's arguments after its tensors, and the options of the call, which may depend on the plan."""


class Planned(NamedTuple):
    """A plan and its workspace, as the ops with a plan take them."""

    plan: DecodePlan | PrefillPlan
    workspace: Tensor


class Unplanned(NamedTuple):
    """The plan source of an op that needs no plan: requests of equal lengths."""

    head_dims: tuple[int, int]
    batch_size: int = 1

    def check(self, call: AttentionCall) -> None:
        return None

    def resolve(self, options: AttentionOptions) -> tuple[tuple[int], AttentionOptions]:
        return (self.batch_size,), options


class AttentionCall(NamedTuple):
    """One call of an attention op.

    where      name of the public function, with which error messages begin
    op         name in ``torch.ops.attn``
    tensors    the query and the keys and values, as the op takes them
    plan       where the plan comes from
    options    options of the op, without ``kv_scale`` and ``out_dtype``, which follow from ``scales`` and ``output``
    output     the form of the result
    scales     factors of the logits and of the output
    kv_layout  order of tokens and heads in k and v
    backend    name of a backend, or auto
    views      pairs ``(view, base)``: tensors that begin where ``base``, an argument of the caller, does
    append     the call of an op that writes to the cache after all checks and before this op
    lookup     makes the lookup of the plan by later calls, on the CPU or not; None if the plan is not looked up
    """

    where: str
    op: str
    tensors: tuple[Tensor, ...]
    plan: PlanSource
    options: AttentionOptions
    output: OutputSpec
    scales: ScaleFactors = ScaleFactors()
    kv_layout: str = "NHD"
    backend: str = "auto"
    views: tuple[tuple[Tensor, Tensor], ...] = ()
    append: OpCall | None = None
    lookup: Callable[[bool], Lookup | None] | None = None

    def execute(self) -> Any:
        """Check, plan and run the op; the result has the form that ``output`` says."""
        args, keywords, dtype, scale = self._resolve()
        append = self.append
        if append is not None:
            if not is_compiling():  # a graph is checked as a whole when it is traced
                check = CHECKED_CALLS[self.op].passes if args[0].is_cpu else CHECKS[self.op]
                check(*args, **keywords)
            call_op(append.op, *append.args, **append.kwargs)
        out, lse = call_op(self.op, *args, **keywords)
        return self.output.finalize(out, lse, dtype, scale)

    def op_call(self) -> OpCall:
        """The call of the op, checked and planned, for :func:`~attn_ops.eager.prepared_call.prepared`."""
        args, keywords, dtype, scale = self._resolve()
        same_dtype = dtype == (keywords.get("out_dtype") or args[0].dtype)
        destinations = (
            self.output.destinations() if same_dtype and not isinstance(scale, Tensor) and scale == 1 else None
        )
        rows, (_, dim_vo), lookup = self.output.rows_shape, self.plan.head_dims, self.lookup
        return OpCall(
            self.op,
            args,
            keywords,
            finalize=functools.partial(self.output.finalize, dtype=dtype, scale=scale),
            destinations=destinations,
            unpack=not self.output.return_lse,
            shape=None if rows is None else (*rows, *args[0].shape[1:-1], dim_vo),
            scratch=() if lookup is None else args[-1:],  # the workspace, which the call has allocated
            views=self.views,
            before=() if self.append is None else (self.append,),
            lookup=None if lookup is None else lookup(not args[0].is_cuda),
            repeatable=self.output.has_no_buffer and not isinstance(scale, Tensor),
        )

    def _resolve(self) -> tuple[tuple[Any, ...], dict[str, Any], torch.dtype, float | Tensor]:
        """Check and plan: the op's arguments, and the dtype and factor of the output."""
        q, tensors = self.tensors[0], self.tensors
        self.plan.check(self)
        dim_qk, dim_vo = self.plan.head_dims
        self.output.check(self.where, q, dim_vo)
        dtype, fp8_query = self.output.dtype_for(q.dtype), q.dtype in FP8
        scales = fold(
            self.where,
            self.options.sm_scale,
            dim_qk,
            q.device,
            self.scales,
            self._heads() if fp8_query else None,
            scale_in_float32=fp8_query or dtype in FP8,
        )
        if fp8_query or scales.query is not None:
            tensors = self._convert_query(scales.query)
        plan, options = self.plan.resolve(self.options)
        if scales.kv_scale is not None or scales.sm_scale is not options.sm_scale:
            options = options._replace(sm_scale=scales.sm_scale, kv_scale=scales.kv_scale)
        rounded_after = scales.scales_output and (dtype != tensors[0].dtype or dtype in FP8)
        if rounded_after or dtype != tensors[0].dtype:  # rounded once: by the op, or after the scale
            options = options._replace(out_dtype=torch.float32 if rounded_after else dtype)
        keywords = options.keywords(self.op)
        if self.kv_layout != "NHD" and self.op != "batch_mla":
            keywords["kv_layout"] = self.kv_layout
        if self.output.needs_lse:
            keywords["return_lse"] = True
        if self.backend != "auto":
            keywords["backend"] = self.backend
        return (*tensors, *plan), keywords, dtype, scales.output

    def _heads(self) -> Heads:
        q, k = self.tensors[:2]
        if self.op == "batch_mla":
            return Heads(q.shape[1], 1)
        dims = PAGED_DIMS if k.dim() == 4 else DENSE_DIMS
        return Heads(q.shape[1], k.shape[dims[self.kv_layout].head])

    def _convert_query(self, factor: Tensor | None) -> tuple[Tensor, ...]:
        """The tensors with the query times ``factor``, in the dtype that the op computes in."""
        if factor is None and self.op in FP8_QUERY_OPS and {t.dtype for t in self.tensors} == {QUERY}:
            return self.tensors
        parts = 2 if self.op == "batch_mla" else 1
        dtype = computed_dtype(self.tensors[0].dtype, self.tensors[-1].dtype)
        queries = (q.to(dtype) if factor is None else (q.float() * factor).to(dtype) for q in self.tensors[:parts])
        return (*queries, *self.tensors[parts:])
