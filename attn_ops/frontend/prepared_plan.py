"""plan() of every wrapper: a batch is prepared, which checks it and changes nothing, and then committed.

If the size of a plan depends only on shapes, a plan() that differs from the last one only in the contents of tensors
writes the plan without preparing it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_leaves

from attn_ops.eager.interposition import is_traced
from attn_ops.errors import PlanError, fail
from attn_ops.plan.page_table import BatchSize, PageTable, seen
from attn_ops.plan.resizable import SizedPlanner
from attn_ops.tracing import is_compiling
from attn_ops.typed import typed

if TYPE_CHECKING:
    from attn_ops.frontend.base import Wrapper
    from attn_ops.frontend.planned_batch import Batch, PlannedBatch

P = ParamSpec("P")

_SCALARS = (int, float, str, type(None), torch.dtype)
"""Arguments of plan() that are compared by value. bool is an int."""


class PreparedPlan(NamedTuple):
    """A batch that has passed every check of plan(); :meth:`commit` makes it the wrapper's plan.

    state   attributes of the wrapper that belong to the plan
    others  plans that are committed before this one
    """

    wrapper: Wrapper
    batch: Batch
    size: BatchSize
    sized: SizedPlanner
    workspace: Tensor
    mask: Tensor | None
    state: Mapping[str, Any] = {}
    others: tuple[PreparedPlan, ...] = ()

    @property
    def rows(self) -> int:
        """Query rows of the batch."""
        return self.size.rows

    def with_state(self, *others: PreparedPlan, **state: Any) -> PreparedPlan:
        return self._replace(state=state, others=others)

    def commit(self) -> None:
        for prepared in (*self.others, self):
            prepared.wrapper._commit(prepared)


class RepeatablePlan(NamedTuple):
    """A plan() whose checks, size and result depend on the shapes of its page table, not on its contents.

    signature  the arguments, with tensors as their shapes, strides, dtypes and devices
    places     positions or names of the arguments ``kv_indptr``, ``kv_indices`` and ``kv_last_page_len``
    """

    signature: tuple[Any, ...]
    places: tuple[int | str, ...]
    sized: SizedPlanner
    state: Mapping[str, Any]
    planned: PlannedBatch

    @classmethod
    def of(
        cls,
        signature: tuple[Any, ...] | None,
        prepared: PreparedPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> RepeatablePlan | None:
        """None if another batch of the same shapes could need another plan."""
        planned = prepared.wrapper._planned
        size_was_read = prepared.size.kv_len is not None or prepared.mask is not None
        if signature is None or planned is None or size_was_read or prepared.others:
            return None
        *tables, qo_indptr = prepared.batch.table
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        places = [[place for place, value in named if value is t] for t in tables]
        # If a tensor is passed twice, it is not known from which argument a later call's table comes.
        if any(len(found) != 1 for found in places) or qo_indptr is not None:
            return None
        if any(seen(t) for t in tables if t is not None):
            return None
        return cls(signature, tuple(found[0] for found in places), prepared.sized, prepared.state, planned)

    def repeat(
        self, wrapper: Wrapper, signature: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Write the plan of these arguments. Returns False, without writing, if they need another plan."""
        if wrapper._resizable.held is not self.sized or signature != self.signature:
            return False
        table = PageTable(*(args[p] if isinstance(p, int) else kwargs[p] for p in self.places))
        wrapper._write(self.sized, table, self.state)
        wrapper._planned = self.planned
        return True


def _signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Inference mode and the arguments, except the contents of tensors; None with arguments of other kinds."""
    parts: list[Any] = [torch.is_inference_mode_enabled(), *kwargs]
    for x in (*args, *kwargs.values()):
        if type(x) is Tensor:
            parts.append((x.shape, x.stride(), x.dtype, x.device))
        elif isinstance(x, _SCALARS):
            parts.append(x)
        else:
            return None
    return tuple(parts)


def refuse_tracing(where: str, arguments: Any) -> None:
    """Raise if contents of tensors are not known: in export, ``make_fx``, ``jit.trace`` and ``FakeTensorMode``."""
    recorded = is_compiling() or torch.jit.is_tracing() or get_proxy_mode() is not None
    if recorded or detect_fake_mode(tree_leaves(arguments)) is not None:
        fail(
            PlanError,
            where,
            "it is traced, and a traced page table has no contents",
            "an eager call",
            "call it before the traced code; in a graph use a planner's plan() and the ops",
        )


def plan_batch(wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``wrapper.prepare_plan(*args, **kwargs).commit()``, or a repetition of the last plan()."""
    signature, last = _signature(args, kwargs), wrapper._repeatable
    if signature is None or is_traced():
        refuse_tracing(f"{wrapper._name}.plan", (args, kwargs))
    if last is not None and signature is not None and last.repeat(wrapper, signature, args, kwargs):
        return
    prepared = wrapper.prepare_plan(*args, **kwargs)
    prepared.commit()
    wrapper._repeatable = RepeatablePlan.of(signature, prepared, args, kwargs)


_plan_eagerly = torch.compiler.disable(
    plan_batch, reason="plan() of a wrapper is eager: call it before the compiled function, or use a planner's plan()"
)


def committing(prepare_plan: Callable[P, PreparedPlan]) -> Callable[P, None]:
    """``plan()``, with the arguments of ``prepare_plan()``: prepare and commit."""

    @functools.wraps(prepare_plan)
    def plan(self: Any, *args: Any, **kwargs: Any) -> None:
        planned_by = _plan_eagerly if is_compiling() else plan_batch
        planned_by(self, args, kwargs)

    plan.__name__, plan.__qualname__ = "plan", prepare_plan.__qualname__.replace("prepare_plan", "plan")
    plan.__annotations__ = {**prepare_plan.__annotations__, "return": "None"}
    return typed(plan)  # type: ignore[arg-type]
