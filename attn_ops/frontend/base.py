"""The base of every wrapper: a caller's workspace, a resizable plan, and one call of one op."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attn_ops.eager.prepared_call import PreparedCalls
from attn_ops.eager.startup import prepare
from attn_ops.errors import ArgumentError, CapacityError, DeviceError, PlanError, ShapeError, UnsupportedError, fail
from attn_ops.frontend import masks
from attn_ops.frontend.arguments import (
    as_sinks,
    attention_options,
    computed_dtype,
    layout,
    own_backend,
    positional,
    refuse,
)
from attn_ops.frontend.call import AttentionCall, PlanSource
from attn_ops.frontend.call_plans import problem_of
from attn_ops.frontend.cuda_graph import GraphBuffers
from attn_ops.frontend.engine_attributes import EngineAttributes
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.planned_batch import Batch, PlannedBatch, RowsOfCall
from attn_ops.frontend.prepared_plan import PreparedPlan, RepeatablePlan
from attn_ops.frontend.scales import ScaleFactors
from attn_ops.ops import backends
from attn_ops.ops.inductor import mark_dynamic_rows, mark_static
from attn_ops.ops.options import FP8, bounded
from attn_ops.plan.page_table import BatchSize, PageTable
from attn_ops.plan.query_tiles import count_splits
from attn_ops.plan.resizable import ResizablePlan, SizedPlanner
from attn_ops.plan.sizing import power_of_two_from
from attn_ops.plan.spec import PlanSpec
from attn_ops.plan.state import DecodePlan, PrefillPlan, workspace_size
from attn_ops.typed import typed

SCALES_BY_POSITION = ("q_scale", "k_scale", "v_scale")
SINK_BY_POSITION = ("sinks", "sm_scale")
"""Arguments of run() that may follow the cache by position: of an FP8 query, and with the variant AttentionSink."""

_SINK_VARIANT = [["sink"], ["sm_scale"], "AttentionSink"]
"""Entries 7, 9 and 11 of ``jit_args`` for that variant: names of its tensors, names of its scalars, its own name."""

_workspaces: WeakValueDictionary[tuple[torch.device, int, int], Tensor] = WeakValueDictionary()
"""Workspaces in use, by device, address and elements. An entry lives as long as a plan that uses it.

Wrappers that share a workspace share one tensor: ``torch.compile(dynamic=True)`` refuses two tensors at one address.
"""


def positional_arguments(where: str, jit_args: Any) -> tuple[str, ...]:
    """The arguments of run() that may follow the cache by position."""
    if jit_args is not None and list(jit_args[7:12:2]) == _SINK_VARIANT:
        return SINK_BY_POSITION
    refuse(where, jit_args=jit_args)
    return SCALES_BY_POSITION


_PLAN = ("_resizable", "_planned", "_repeatable", "_mask")
"""Attributes of a wrapper that plan() writes in place."""


class Wrapper(EngineAttributes):
    """Base class of the wrappers, which hold a plan between calls.

    ``float_workspace_buffer`` of any dtype is the op's scratch memory, and its device is the wrapper's. A wrapper
    serves calls that run one after another.
    """

    _causal_rows = True
    """Whether query rows of a request are causal among themselves, in calls with more rows per request than planned."""

    def __init__(
        self,
        float_workspace_buffer: Tensor | None,
        kv_layout: str = "NHD",
        *,
        backend: str = "auto",
        jit_args: Any = None,
        device: str | torch.device | None = None,
        buffers: dict[str, tuple[str, Tensor]] | None = None,
    ) -> None:
        self._name = type(self).__name__
        self._kv_layout = layout(self._name, kv_layout)
        self._workspace = float_workspace_buffer
        self.device = (
            torch.empty(0, device=device).device if float_workspace_buffer is None else float_workspace_buffer.device
        )
        prepare(self.device)
        self._backend = backend
        self._by_position = positional_arguments(self._name, jit_args)
        self._graph = None if buffers is None else GraphBuffers(self._name, self.device, buffers)
        storage = None if self._graph is None else self._graph.storage
        self._resizable = ResizablePlan(self.device, own_workspace=self._workspace is None, storage=storage)
        self._planned: PlannedBatch | None = None
        self._repeatable: RepeatablePlan | None = None
        self._mask: Tensor | None = None
        self._int_workspace_buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        """Not used, as plans own their integers. Engines share FlashInfer's between wrappers, or pass it to
        :meth:`reset_workspace_buffer`."""

    def __copy__(self) -> Wrapper:
        """A wrapper of the caller's workspace with a plan of its own."""
        if self._graph is not None:
            expected, fix = "one wrapper for its buffers", "make another wrapper, with buffers of its own"
            fail(UnsupportedError, self._name, "a copy in CUDA-graph mode is not supported", expected, fix)
        shared = () if self._workspace is None else (self._workspace, self._planned and self._planned.workspace)
        own = {name: x for name, x in vars(self).items() if name in _PLAN or isinstance(x, Wrapper)}
        return _with_attributes(self, copy.deepcopy(own, {id(t): t for t in shared}))

    def __getstate__(self) -> dict[str, Any]:
        """The state without the view of the caller's buffer: ``torch.save`` takes a storage in only one dtype."""
        state = {**vars(self), "_repeatable": None}
        if self._planned is not None and self._workspace is not None:
            state["_planned"] = replace(self._planned, workspace=torch.empty(0, device=self.device))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._planned is not None and self._workspace is not None:
            self._planned = self._with_workspace(self._name, self._workspace)

    @property
    def _backend(self) -> str:
        """A backend of this library, or ``"auto"``, which is also what a backend of FlashInfer becomes."""
        return self._own_backend

    @_backend.setter
    def _backend(self, name: str) -> None:
        self._own_backend = own_backend(name)

    @property
    def resolved_backend(self) -> str:
        """The backend named to the constructor, or ``"auto"``, which chooses one for each call."""
        return self._backend

    @typed
    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Any = None) -> None:
        """Use another workspace, on the same device. The plan stays; plans own their integers."""
        reset_workspaces(f"{self._name}.reset_workspace_buffer", float_workspace_buffer, self)

    def dtypes_follow_query(self) -> None:
        """Let run() take any dtype that its op takes, whatever the dtypes of plan()."""
        if self._planned is not None:
            self._planned = replace(self._planned, dtypes=None)

    # ------------------------------------------------------------------------------------------- prepared eager calls

    def _prepared_calls(self) -> tuple[PreparedCalls, int] | None:
        return None if self._planned is None else self._planned.prepared

    def _constants(self) -> list[Tensor]:
        p = self._planned
        return [] if p is None else [*p.plan, p.workspace, *(x for x in p.options if isinstance(x, Tensor))]

    # ------------------------------------------------------------------------------------------------------- planning

    def _workspace_for(self, where: str, plan: DecodePlan | PrefillPlan, buffer: Tensor) -> Tensor:
        """The caller's workspace as float32, all of it, so that its shape does not depend on the plan."""
        needed = workspace_size(plan)
        if not buffer.is_contiguous():
            fail(ShapeError, where, "the workspace is not contiguous", "a contiguous buffer", "pass a new buffer")
        with torch.inference_mode(False):  # the views are also written outside of it
            memory = buffer.view(-1).view(torch.uint8)
            start = -memory.data_ptr() % 4
            workspace = memory[start : start + (memory.shape[0] - start) // 4 * 4].view(torch.float32)
        if memory.shape[0] < start + 4 * needed:
            fail(
                CapacityError,
                where,
                f"the float workspace has {memory.shape[0]} bytes",
                f"at least {start + 4 * needed} bytes for this plan",
                "pass a larger float_workspace_buffer",
            )
        key = workspace.device, workspace.data_ptr(), workspace.shape[0]
        workspace = _workspaces.setdefault(key, workspace)
        mark_static(workspace)
        return workspace

    def _with_workspace(self, where: str, buffer: Tensor) -> PlannedBatch | None:
        """The planned batch with another workspace, which is checked."""
        if buffer.device != self.device:
            fail(DeviceError, where, f"the buffer is on {buffer.device}", f"{self.device}", "move it")
        p = self._planned
        return None if p is None else replace(p, workspace=self._workspace_for(where, p.plan, buffer))

    def _prepare(
        self,
        where: str,
        batch: Batch,
        *,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
    ) -> PreparedPlan:
        """Check a batch and allocate its plan. Nothing of the wrapper changes before the commit."""
        batch.check(where)
        mask = None
        if custom_mask is not None or packed_custom_mask is not None:
            lengths = batch.table.lengths(batch.spec.page_size)
            exact = self._graph is None  # engines capture several batch sizes with one mask
            mask = masks.packed_mask(where, custom_mask, packed_custom_mask, *lengths, self.device, exact)
            batch = batch._replace(spec=batch.spec._replace(causal=False))
        batch = batch._replace(spec=batch.spec._replace(plain=batch.is_plain(mask is not None)))
        batch, size, fixed = self._size(batch)
        if self._graph is not None and fixed is not None:
            self._graph.check(where, size, fixed, mask)
        sized = self._resizable.prepare(batch.spec, size, batch.table, fixed)
        workspace = sized.planner.workspace
        if self._workspace is not None:
            workspace = self._workspace_for(where, sized.planner.state, self._workspace)
        return PreparedPlan(self, batch, size, sized, workspace, mask)

    def _prepare_prefill(
        self,
        where: str,
        batch: Batch,
        custom_masks: tuple[Tensor | None, Tensor | None],
        items: tuple[Tensor | None, Tensor | None, int],
        **options: Any,
    ) -> PreparedPlan:
        """:meth:`_prepare` of a prefill with masks and options as plan() takes them.

        ``batch`` is without options, ``custom_masks`` are the custom mask and the packed one, ``items`` the first
        arguments of :func:`masks.multi_item_mask`, and ``options`` those of :func:`attention_options`.
        """
        custom_mask, packed_custom_mask = custom_masks
        if any(t is not None for t in items[:2]):
            if any(mask is not None for mask in custom_masks):
                fail(ArgumentError, where, "items and a mask are both given", "one of them", "drop one")
            custom_mask = masks.multi_item_mask(where, *items, batch.table, batch.spec.page_size, self.device)
        batch = batch._replace(options=attention_options(where, **options)._replace(causal=batch.spec.causal))
        return self._prepare(where, batch, custom_mask=custom_mask, packed_custom_mask=packed_custom_mask)

    def _commit(self, prepared: PreparedPlan) -> None:
        batch, spec, size = prepared.batch, prepared.sized.spec, prepared.size
        mask = None if prepared.mask is None else self._hold_mask(prepared.mask)
        self._write(prepared.sized, batch.table, prepared.state)
        earlier = self._planned
        self._planned = PlannedBatch(
            op=batch.op,
            plan=prepared.sized.planner.state,
            workspace=prepared.workspace,
            spec=spec,
            options=batch.options._replace(mask=mask),
            dtypes=batch.dtypes,
            rows=mark_dynamic_rows(torch.empty(size.rows, 0, device=self.device)),
            exact=self._graph is None,
            keys=None if spec.paged else mark_dynamic_rows(torch.empty(size.keys, 0, device=self.device)),
            state=prepared.state,
        )
        self._planned.keep_prepared(earlier)

    def _write(self, sized: SizedPlanner, table: PageTable, state: Mapping[str, Any]) -> None:
        """Write the plan of a batch and the attributes that belong to it."""
        self._resizable.commit(sized, table)
        if self._graph is not None:
            self._graph.copy(table)
        for name, value in state.items():
            setattr(self, name, value)

    def _size(self, batch: Batch) -> tuple[Batch, BatchSize, BatchSize | None]:
        """The batch, its size, and the capacity of its plan where the buffers of a CUDA graph fix it.

        Its table is on the device of the lengths that were read.
        """
        by_shapes = self._sized_by_shapes(batch)
        table, size = batch.table.bounded() if by_shapes else measured(batch.table, batch.spec)
        batch = batch._replace(table=table)
        if self._graph is None:
            return batch, size, None
        held = self._resizable.held
        return batch, size, self._graph.capacity(batch.spec.page_size, size if held is None else held.capacity)

    def _sized_by_shapes(self, batch: Batch) -> bool:
        """Whether the size of the plan depends only on shapes: for decode on CUDA, if unused capacity costs no work."""
        op, table, spec, options, dtypes = batch
        if not spec.decode or not table.kv_indptr.is_cuda or dtypes is None:
            return False
        problem = backends.Problem(
            op=op,
            device=table.kv_indptr.device,
            dtype=computed_dtype(dtypes.q, dtypes.kv),
            kv_dtype=dtypes.kv,
            out_dtype=dtypes.o,
            num_qo_heads=spec.num_qo_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim_qk=spec.head_dim_qk,
            head_dim_vo=spec.head_dim_vo,
            page_size=spec.page_size,
            options=options.given(),
            pos_encoding=options.pos_encoding,
        )
        return not backends.choose(problem, self._backend).capacity_bound

    def _hold_mask(self, mask: Tensor) -> Tensor:
        """``mask`` in a buffer whose address and size the next batch keeps."""
        if self._graph is not None:
            return self._graph.hold_mask(mask)
        size = max(64, power_of_two_from(max(mask.shape[0], 1)))
        if self._mask is None or self._mask.shape[0] < size:
            with torch.inference_mode(False):  # the next plan may be made outside of it
                self._mask = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self._mask[: mask.shape[0]] = mask
        return self._mask

    # ------------------------------------------------------------------------------------------------------ attention

    def _run_positional(self, where: str, args: tuple[Any, ...], q: Tensor, **given: Any) -> dict[str, Any]:
        """``given``, the arguments of run() by name, and those that follow the cache by position."""
        names = self._by_position
        if names == SCALES_BY_POSITION:
            args = self._scales_by_position(q, args)
        given = {"sm_scale": None, **given}
        values = positional(where, names, args, [given[name] for name in names])
        return {**given, **dict(zip(names, values, strict=True))}

    def _scales_by_position(self, q: Tensor, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Those of ``args``, which follow the cache, that are scales. The others have no effect, as in FlashInfer."""
        return args[: len(SCALES_BY_POSITION)] if q.dtype in FP8 and len(args) >= len(SCALES_BY_POSITION) else ()

    def _call(
        self,
        where: str,
        tensors: tuple[Tensor, ...],
        output: OutputSpec,
        scales: ScaleFactors,
        *,
        sinks: Any = None,
        kv_layout: str | None = None,
        q_len_per_req: int | None = None,
        **changes: Any,
    ) -> AttentionCall:
        """The call of ``tensors``, the query and the keys and values, as planned.

        ``q_len_per_req``: query rows of each request, if the plan has one row per request. ``changes`` are options of
        this call; an option that is None stays as planned.
        """
        p = self._planned
        if p is None:
            fail(PlanError, where, "there is no plan", "plan() before run()", "call plan() for this batch")
        if p.dtypes is not None and output.dtype is None:
            output = output._replace(dtype=p.dtypes.o)
        options = p.options._replace(sinks=as_sinks(where, sinks, tensors[0].device))
        changes = {name: value for name, value in changes.items() if value is not None}
        if changes:
            options = bounded(where, options._replace(**changes), pos_encoding="pos_encoding_mode")
        op: str = p.op
        source: PlanSource = p
        if q_len_per_req is not None:
            op, source = "batch_prefill", RowsOfCall(p, q_len_per_req, self._causal_rows)
        return AttentionCall(
            where, op, tensors, source, options, output, scales, kv_layout or self._kv_layout, self._backend
        )


T = TypeVar("T")


def _with_attributes(owner: T, changed: Mapping[str, Any]) -> T:
    """A shallow copy of ``owner`` with some other attributes."""
    other = object.__new__(type(owner))
    vars(other).update({**vars(owner), **changed})
    return other


class WrapperGroup:
    """Base class of wrappers that consist of other wrappers, their attributes. A copy has copies of these."""

    def __copy__(self) -> WrapperGroup:
        attributes = vars(self).items()
        own = {name: copy.copy(x) for name, x in attributes if isinstance(x, Wrapper)}
        return _with_attributes(self, own | {n: list(map(copy.copy, x)) for n, x in attributes if isinstance(x, list)})

    def end_forward(self) -> None:
        """Nothing to do: a plan needs no end. Kept for callers of FlashInfer's 0.1 interface."""


def reset_workspaces(where: str, buffer: Tensor, *wrappers: Wrapper) -> None:
    """Let ``wrappers`` use ``buffer`` in place of their workspace, once all of them have checked it."""
    planned = [wrapper._with_workspace(where, buffer) for wrapper in wrappers]
    for wrapper, batch in zip(wrappers, planned, strict=True):
        wrapper._workspace, wrapper._planned, wrapper._repeatable = buffer, batch, None


def measured(table: PageTable, spec: PlanSpec) -> tuple[PageTable, BatchSize]:
    """:meth:`PageTable.measured`, with the number of fixed-size splits of a prefill's query tiles."""
    trimmed, size = table.measured(spec.page_size)
    if spec.fixed_split_size is None or spec.decode:
        return trimmed, size
    problem = problem_of(spec, table.kv_indptr.device, size.kv_len or 1)
    return trimmed, size._replace(splits=count_splits(problem, *table.lengths(spec.page_size)))


def graph_buffers(use_cuda_graph: bool, **buffers: tuple[str, Any]) -> dict[str, tuple[str, Any]] | None:
    """The buffers of a wrapper in CUDA-graph mode, without a ``mask`` that is None; otherwise None.

    :class:`GraphBuffers` refuses other buffers that are None.
    """
    if not use_cuda_graph:
        return None
    return {key: named for key, named in buffers.items() if key != "mask" or named[1] is not None}
