"""What every wrapper is: a caller's workspace, a plan that grows, and one call of one op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attn_ops.eager.prepared_call import PreparedMethods, same
from attn_ops.eager.startup import prepare
from attn_ops.errors import ArgumentError, CapacityError, DeviceError, DTypeError, PlanError, ShapeError
from attn_ops.frontend import masks, plan_in_call
from attn_ops.frontend.arguments import DTypes, fail, layout, own_backend, positional, positive
from attn_ops.frontend.cuda_graph import GraphBuffers
from attn_ops.frontend.kv_cache import paged_sizes
from attn_ops.frontend.outputs import OutputSpec
from attn_ops.frontend.scales import Scale, fold
from attn_ops.frontend.variants import follow
from attn_ops.ops import backends
from attn_ops.ops.inductor import mark_dynamic_rows, mark_static
from attn_ops.plan.page_table import BatchSize, PageTable
from attn_ops.plan.resizable import CAPACITY_BOUND_BACKENDS, PlanSpec, ResizablePlan, SizedPlanner
from attn_ops.plan.sizing import count_splits
from attn_ops.plan.state import DecodePlan, PrefillPlan, workspace_size

REMEMBERING = frozenset({"_planned", "_held_back", "_prepared_methods", "_remembered", "_as_remembered"})
"""Attributes of a wrapper that are about its memory of calls, or compared by their parts."""

_scratches: WeakValueDictionary[tuple[torch.device, int, int], Tensor] = WeakValueDictionary()
"""The workspaces in use, by device, address and elements.

Wrappers that share one also share the tensor: ``torch.compile(dynamic=True)`` does not take two of one memory.
"""


@dataclass
class Planned:
    """What plan() leaves for run(): the op, its plan and its options.

    ``rows [n, 0]`` holds the planned number of query rows in its shape, which a compiled run() need not
    specialise on as it would on an int. ``exact``: the query has that many; otherwise it may have more, which are
    padding. ``dtypes`` None means those of the query. ``keys [n, 0]`` likewise holds the planned number of ragged keys;
    there may be more.
    """

    op: str
    plan: DecodePlan | PrefillPlan
    workspace: Tensor
    shape: PlanSpec
    options: dict[str, Any]
    dtypes: DTypes | None
    rows: Tensor
    exact: bool
    keys: Tensor | None = None

    def check(self, where: str, q: Tensor, kv: Tensor, kv_layout: str | None) -> None:
        if self.dtypes is not None:
            for name, t, dtype in (("q", q, self.dtypes.q), ("the KV cache", kv, self.dtypes.kv)):
                if t.dtype != dtype:
                    fail(
                        DTypeError,
                        where,
                        f"{name} is {str(t.dtype).removeprefix('torch.')}",
                        f"{str(dtype).removeprefix('torch.')} as planned",
                        "name its dtype in plan(), as q_data_type and kv_data_type, or convert it",
                    )
        rows, planned = q.shape[0], self.rows.shape[0]
        if rows != planned and (self.exact or rows < planned):
            fail(
                ShapeError,
                where,
                f"q has {rows} rows",
                f"{planned} as planned{'' if self.exact else ', or more'}",
                "call plan() for this batch first",
            )
        if self.shape.paged and kv.dim() == 4:
            self._check_layout(where, kv, kv_layout)
        if self.keys is not None and kv.dim() == 3:
            self._check_keys(where, kv.shape[0 if kv_layout == "NHD" else 1], self.keys.shape[0])

    def _check_layout(self, where: str, kv: Tensor, kv_layout: str | None) -> None:
        """The likeliest mistake, which the op would find in the numbers of heads or of places."""
        assert kv_layout is not None
        planned = self.shape.page_size, self.shape.num_kv_heads
        page_size, heads = paged_sizes(where, kv, kv_layout)
        if (page_size, heads) != planned == (heads, page_size):
            other = "HND" if kv_layout == "NHD" else "NHD"
            fail(
                ShapeError,
                where,
                f"in layout {kv_layout} the KV cache has pages of {page_size} tokens and {heads} heads",
                f"{planned[0]} tokens and {planned[1]} heads as planned",
                f"name kv_layout={other!r}, or pass a cache in {kv_layout}",
            )

    def _check_keys(self, where: str, keys: int, planned: int) -> None:
        if keys < planned:
            fail(
                ShapeError,
                where,
                f"k and v have {keys} rows",
                f"{planned} as planned by kv_indptr, or more",
                "pass the keys of all requests, or call plan() for this batch first",
            )


class HeldBack(NamedTuple):
    """A plan() that waits for others (:func:`together`): the query rows of its batch, and what is left to do."""

    rows: int
    settle: Callable[[], None]


def _told(name: str) -> Any:
    """An option as planned, under the name of FlashInfer's wrappers for it, by which engines check theirs."""

    def value(self: Wrapper) -> Any:
        p = self._planned
        options = {} if p is None else {"causal": p.shape.causal, **p.options}
        if name not in options:
            raise AttributeError(f"{self._name}: there is no plan that says {name}")
        return options[name]

    return property(value)


def buffer(key: str) -> Any:
    """A buffer of CUDA-graph mode, under the name of FlashInfer's wrappers for it, by which engines fill theirs."""

    def value(self: Wrapper) -> Tensor:
        if self._graph is None or key not in self._graph.buffers:
            raise AttributeError(f"{self._name}: there is no buffer for {key}; they are those of CUDA-graph mode")
        return self._graph.buffers[key][1]

    return property(value)


class Wrapper:
    """Holds a plan between calls.

    ``float_workspace_buffer`` of any dtype is the op's scratch memory, and its device is the wrapper's. A wrapper
    serves calls that run one after another.
    """

    _causal, _sm_scale = _told("causal"), _told("sm_scale")
    _window_left, _logits_soft_cap = _told("window_left"), _told("logits_soft_cap")
    _qo_indptr_buf = buffer("qo_indptr")

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
            torch.empty(0, device=device).device if float_workspace_buffer is None else (float_workspace_buffer.device)
        )
        prepare(self.device)
        self._backend = own_backend(backend)
        self._follow = follow(self._name, jit_args)
        self._graph = None if buffers is None else GraphBuffers(self._name, self.device, buffers)
        self._growing = ResizablePlan(
            self.device, self._workspace is None, storage=None if self._graph is None else self._graph.storage
        )
        self._planned: Planned | None = None
        self._mask: Tensor | None = None
        self._held_back: list[HeldBack] | None = None
        self._prepared_methods = PreparedMethods()
        self._remembered: Planned | None = None
        self._as_remembered: dict[str, Any] = {}

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._graph is not None

    @property
    def _fixed_batch_size(self) -> int:
        """Requests of every plan in CUDA-graph mode, 0 outside of it; an attribute of FlashInfer's wrappers."""
        return 0 if self._graph is None else self._graph.batch

    @property
    def resolved_backend(self) -> str:
        """The backend named to the constructor, or ``"auto"``: which one runs is decided per call."""
        return self._backend

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Any = None) -> None:
        """Use another workspace, on the same device. The plan stays; plans own their integers."""
        where = f"{self._name}.reset_workspace_buffer"
        if float_workspace_buffer.device != self.device:
            fail(DeviceError, where, f"the buffer is on {float_workspace_buffer.device}", f"{self.device}", "move it")
        workspace = self._workspace
        self._workspace = float_workspace_buffer
        if self._planned is not None:
            try:
                self._planned = replace(self._planned, workspace=self._scratch(where, self._planned.plan))
            except CapacityError:
                self._workspace = workspace
                raise

    def _cache_key(self) -> int | None:
        """The planned numbers of rows and ragged keys, in one.

        What is remembered is forgotten if this is not the wrapper of then.
        """
        planned = self._planned
        if planned is None or self.device.type != "cuda":
            return None
        if planned is not self._remembered:
            state = self._state()
            if state.keys() != self._as_remembered.keys() or not all(
                same(value, self._as_remembered[name]) for name, value in state.items()
            ):
                self._prepared_methods.clear()
            self._remembered, self._as_remembered = planned, state
        rows, keys = planned.rows.shape[0], planned.keys
        return rows if keys is None else rows << 32 | keys.shape[0]

    def _state(self) -> dict[str, Any]:
        """What a call depends on beside its arguments and the number of rows."""
        own = {name: value for name, value in vars(self).items() if name not in REMEMBERING}
        p = self._planned
        if p is None:
            return own
        scratch = (p.workspace.data_ptr(), p.workspace.shape[0])
        dtypes = None if p.dtypes is None else (p.dtypes.q, p.dtypes.kv, p.dtypes.o)
        return {**own, **p.options, "planned": (p.op, *p.plan, scratch, p.shape, dtypes, p.exact)}

    def _owned_tensors(self) -> list[Tensor]:
        p = self._planned
        return [] if p is None else [*p.plan, p.workspace, *(x for x in p.options.values() if isinstance(x, Tensor))]

    def dtypes_follow_query(self) -> None:
        """Let run() take any dtype that its op takes, whatever plan() was told."""
        if self._planned is not None:
            self._planned = replace(self._planned, dtypes=None)

    def end_forward(self) -> None:
        """Nothing to do: a plan needs no end. Kept for callers of the 0.1 interface."""

    def _scratch(self, where: str, plan: DecodePlan | PrefillPlan) -> Tensor:
        """The caller's workspace as float32, all of it, so that it looks alike whatever a plan needs."""
        needed = workspace_size(plan)
        assert self._workspace is not None
        if not self._workspace.is_contiguous():
            fail(ShapeError, where, "the workspace is not contiguous", "one piece of memory", "pass a new buffer")
        memory = self._workspace.view(-1).view(torch.uint8)
        start = -memory.data_ptr() % 4
        if memory.shape[0] < start + 4 * needed:
            fail(
                CapacityError,
                where,
                f"the float workspace has {memory.shape[0]} bytes",
                f"at least {start + 4 * needed} bytes for this plan",
                "pass a larger float_workspace_buffer",
            )
        scratch = memory[start : start + (memory.shape[0] - start) // 4 * 4].view(torch.float32)
        scratch = _scratches.setdefault((scratch.device, scratch.data_ptr(), scratch.shape[0]), scratch)
        mark_static(scratch)
        return scratch

    def _plan(
        self,
        where: str,
        op: str,
        tables: PageTable,
        shape: PlanSpec,
        options: dict[str, Any],
        dtypes: DTypes | None = None,
        *,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
    ) -> None:
        """Settle everything that run() needs. Nothing of the wrapper changes if this raises."""
        sizes = ("page_size", "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo")
        positive(where, **{size: getattr(shape, size) for size in sizes})
        if shape.num_qo_heads % shape.num_kv_heads:
            fail(
                ShapeError,
                where,
                f"{shape.num_qo_heads} query heads do not share {shape.num_kv_heads} KV heads evenly",
                "a multiple of num_kv_heads",
                "correct num_qo_heads or num_kv_heads",
            )
        mask = None
        if custom_mask is not None or packed_custom_mask is not None:
            lengths = tables.lengths(shape.page_size)
            exact = self._graph is None  # engines capture several sizes of batches with one mask
            mask = masks.packed(where, custom_mask, packed_custom_mask, *lengths, self.device, exact)
            shape = shape._replace(causal=False)
        tables, extent = self._extent(op, tables, shape, options, dtypes)
        fixed = None
        if self._graph is not None:
            held = self._growing.held
            fixed = self._graph.room(shape.page_size, extent if held is None else held.extent)
            self._graph.check(where, extent, fixed, mask)
        room = self._growing.fit(shape, extent, fixed)
        workspace = room.planner.workspace if self._workspace is None else self._scratch(where, room.planner.state)
        settle = partial(self._settle, op, tables, extent, room, workspace, options, dtypes, mask)
        if self._held_back is None:
            settle()
        else:
            self._growing.check(room, tables)
            self._held_back.append(HeldBack(extent.rows, settle))

    def _settle(
        self,
        op: str,
        tables: PageTable,
        extent: BatchSize,
        room: SizedPlanner,
        workspace: Tensor,
        options: dict[str, Any],
        dtypes: DTypes | None,
        mask: Tensor | None,
    ) -> None:
        shape = room.shape
        self._growing.fill(room, tables)
        if mask is not None:
            mask = self._hold_mask(mask)
        if self._graph is not None:
            self._graph.copy(tables)
        if not shape.decode and op != "batch_mla":
            options = {**options, "mask": mask}
        self._planned = Planned(
            op=op,
            plan=room.planner.state,
            workspace=workspace,
            shape=shape,
            options={**options, "backend": self._backend},
            dtypes=dtypes,
            rows=mark_dynamic_rows(torch.empty(extent.rows, 0, device=self.device)),
            exact=self._graph is None,
            keys=None if shape.paged else mark_dynamic_rows(torch.empty(extent.keys, 0, device=self.device)),
        )

    def _extent(
        self, op: str, tables: PageTable, shape: PlanSpec, options: dict[str, Any], dtypes: DTypes | None
    ) -> tuple[PageTable, BatchSize]:
        """What the batch needs; without waiting for a GPU where no more than its kernels' room depends on it."""
        if shape.decode and tables.kv_indptr.is_cuda and dtypes is not None:
            problem = backends.Problem(
                op=op,
                device=tables.kv_indptr.device,
                dtype=dtypes.q,
                kv_dtype=dtypes.kv,
                num_qo_heads=shape.num_qo_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim_qk=shape.head_dim_qk,
                head_dim_vo=shape.head_dim_vo,
                page_size=shape.page_size,
                pos_encoding=options["pos_encoding"],
            )
            if backends.choose(problem, self._backend).name not in CAPACITY_BOUND_BACKENDS:
                return tables.bounded()
        return measured(tables, shape)

    def _hold_mask(self, mask: Tensor) -> Tensor:
        """``mask`` at an address and of a size that the next batch's has too."""
        if self._graph is not None:
            return self._graph.hold_mask(mask)
        size = max(64, 1 << (max(mask.shape[0], 1) - 1).bit_length())
        if self._mask is None or self._mask.shape[0] < size:
            with torch.inference_mode(False):  # the next plan may be made outside of it
                self._mask = torch.zeros(size, dtype=torch.uint8, device=self.device)
        self._mask[: mask.shape[0]] = mask
        return self._mask

    def _positional(self, where: str, args: tuple[Any, ...], k_scale: Any, v_scale: Any, sinks: Any) -> tuple[Any, ...]:
        """``k_scale, v_scale, sinks, sm_scale`` of run(): those given by name, and what followed the caches."""
        given = {"k_scale": k_scale, "v_scale": v_scale, "sinks": sinks, "sm_scale": None}
        values = positional(where, self._follow, args, [given[name] for name in self._follow])
        given.update(zip(self._follow, values, strict=True))
        return tuple(given.values())

    def _run(
        self,
        where: str,
        tensors: tuple[Tensor, ...],
        output_spec: OutputSpec,
        *,
        logit_scales: dict[str, Scale],
        value_scales: dict[str, Scale],
        sinks: Any = None,
        **changes: Any,
    ) -> Any:
        """Attend as planned: ``tensors`` are the query and what it attends to, ``changes`` options of this call.

        A change that is None keeps what was planned.
        """
        p = self._planned
        if p is None:
            fail(PlanError, where, "there is no plan", "plan() before run()", "call plan() for this batch")
        q = tensors[0]
        p.check(where, q, tensors[-1], changes.get("kv_layout") or p.options.get("kv_layout"))
        if p.dtypes is not None and output_spec.dtype is None:
            output_spec = output_spec._replace(dtype=p.dtypes.o)
        output_spec.check(where, q, p.shape.head_dim_vo)
        options = dict(p.options)
        for name, value in changes.items():
            if value is not None:
                options[name] = value
        plan = p.plan
        if p.shape.window_left >= 0 and not 0 <= options["window_left"] <= p.shape.window_left:
            plan = plan_in_call.without_window(plan)
        scales = fold(where, options.pop("sm_scale"), p.shape.head_dim_qk, q.device, logit_scales, value_scales)
        out, lse = getattr(torch.ops.attn, p.op)(
            *tensors,
            plan,
            p.workspace,
            sm_scale=scales.sm_scale,
            kv_scale=scales.kv_scale,
            sinks=as_sinks(where, sinks, q.device),
            return_lse=output_spec.needs_lse,
            **options,
        )
        return output_spec.finalize(out, lse, scales.output)


@contextmanager
def together(wrappers: Sequence[Wrapper]) -> Iterator[list[HeldBack]]:
    """A block that calls plan() of several wrappers: none is planned unless all can be and the block does not raise."""
    plans: list[HeldBack] = []
    for wrapper in wrappers:
        wrapper._held_back = plans
    try:
        yield plans
    finally:
        for wrapper in wrappers:
            wrapper._held_back = None
    for plan in plans:
        plan.settle()


def measured(tables: PageTable, shape: PlanSpec) -> tuple[PageTable, BatchSize]:
    """:meth:`PageTable.measured`, and how many pieces of a fixed size the tiles of a prefill make."""
    trimmed, extent = tables.measured(shape.page_size)
    if shape.fixed_split_size is None or shape.decode:
        return trimmed, extent
    problem = plan_in_call.problem_of(shape, extent.kv_len or 1)
    return trimmed, extent._replace(pieces=count_splits(problem, *tables.lengths(shape.page_size)))


def as_sinks(where: str, sinks: Any, device: torch.device) -> Tensor | None:
    """float32 ``[num_qo_heads]`` on the query's device, of that shape, ``[num_kv_heads, group]``, or a list of one."""
    if sinks is None:
        return None
    if isinstance(sinks, list | tuple):
        if len(sinks) != 1:
            fail(ArgumentError, where, f"sinks has {len(sinks)} tensors", "one", "pass one float32 [num_qo_heads]")
        sinks = sinks[0]
    if not isinstance(sinks, Tensor):
        fail(ArgumentError, where, f"sinks is {sinks!r}", "a float32 tensor [num_qo_heads]", "pass such a tensor")
    if sinks.dim() == 2:
        sinks = sinks.flatten()
    return sinks.to(device, torch.float32).contiguous()


def graph_buffers(use_cuda_graph: bool, **buffers: tuple[str, Tensor | None]) -> Any:
    """The buffers of a wrapper in CUDA-graph mode, a missing ``mask`` left out; otherwise None."""
    if not use_cuda_graph:
        return None
    return {key: named for key, named in buffers.items() if key != "mask" or named[1] is not None}
