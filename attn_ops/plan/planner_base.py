"""The base of both planners: checks of their arguments, the plan and the workspace that they own, checks of a batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attn_ops.argument_checks import integers
from attn_ops.eager.interposition import is_traced
from attn_ops.eager.op_call import OpCall
from attn_ops.eager.prepared_call import PreparedCalls, new_caches
from attn_ops.errors import (
    ArgumentError,
    ArgumentTypeError,
    CapacityError,
    DeviceError,
    DTypeError,
    OptionError,
    ShapeError,
    dtype_name,
    fail,
)
from attn_ops.ops.inductor import mark_static, mark_static_size
from attn_ops.ops.options import BOUNDS
from attn_ops.plan.context import ContextShard
from attn_ops.plan.page_table import real, seen
from attn_ops.plan.page_table_checks import check_indptr, check_pages, check_table
from attn_ops.plan.plan_checks import MAX_SIZE, check_groups, check_head_shards
from attn_ops.plan.sizing import power_of_two_from
from attn_ops.plan.state import DecodePlan, PlanProblem, PrefillPlan, workspace_size
from attn_ops.symbolic_sizes import guard_or_false

MAX_WORKSPACE = 1 << 40
"""float32 elements of the largest workspace, 4 TiB: more than any device has."""

WORKSPACE = "workspace"
"""Key of the workspace in ``storage``, beside the plan's fields."""


def in_range(name: str, value: int | None, least: int = 1, most: int = MAX_SIZE) -> None:
    """Check an argument of a planner; None stands for its default."""
    if value is None:
        return
    integers("planner", **{name: value})
    if value < least:
        fail(OptionError, "planner", f"{name} is {value}", f"at least {least}", "make it larger")
    if value > most:
        fail(OptionError, "planner", f"{name} is {value}", f"at most {most}", "make it smaller")


def planner_problem(
    *,
    fixed_split_size: int | None,
    window_left: int,
    causal: bool = False,
    window_right: int = -1,
    context: ContextShard | None,
    **sizes: int,
) -> PlanProblem:
    """Check the arguments of a planner. Returns the problem."""
    in_range("fixed_split_size", fixed_split_size)
    for name, value in sizes.items():
        in_range(name, value)
    for name, value in (("window_left", window_left), ("window_right", window_right)):
        BOUNDS[name].checked("planner", name, value)
    problem = PlanProblem.of_options(
        window_left=int(window_left),
        causal=causal,
        window_right=int(window_right),
        fixed_split_size=None if fixed_split_size is None else int(fixed_split_size),
        **{name: int(size) for name, size in sizes.items()},  # NumPy's integers lack methods of Python's
    )
    if context is not None:
        context.check_page_size("planner", problem.page_size)
        if context.world > 1:
            problem = problem._replace(rank=context.rank, world=context.world, interleave=context.interleave)
    check_groups("planner", problem.num_qo_heads, problem.num_kv_heads)
    return problem


def rank_problem(problem: PlanProblem, head_shards: int) -> PlanProblem:
    """Check ``head_shards``. Returns the problem of one of so many ranks."""
    in_range("head_shards", head_shards)
    check_head_shards("planner", problem.sharded_heads(), head_shards)
    return problem.shard(head_shards)


def default_max_kv_len(max_pages: int, page_size: int) -> int:
    """The tokens in ``max_pages`` pages, rounded up to a power of two.

    ``max_kv_len`` is part of a plan's shape: by the rounding, plans of similar capacity share a compiled graph.
    """
    return min(MAX_SIZE, power_of_two_from(max(max_pages, 1) * page_size))


def check_storage(
    storage: Mapping[str, Tensor], shapes: dict[str, tuple[int, ...]], device: torch.device
) -> dict[str, Tensor]:
    """Check ``storage`` against the ``shapes`` of the plan's fields. Returns it without the workspace."""
    for name, t in storage.items():
        where, dtype = f"planner: storage[{name!r}]", torch.float32 if name == WORKSPACE else torch.int32
        if name not in shapes and name != WORKSPACE:
            fail(ArgumentError, where, "there is no such field", ", ".join([*shapes, WORKSPACE]), "correct the name")
        if not isinstance(t, Tensor):
            fail(ArgumentTypeError, where, f"it is of type {type(t).__name__}", "a tensor", "pass a tensor")
        if t.dtype != dtype:
            fail(DTypeError, where, f"it is {dtype_name(t.dtype)}", dtype_name(dtype), "allocate it in that dtype")
        if t.device != device:
            fail(DeviceError, where, f"it is on {t.device}", f"{device}, where the plan is", "allocate it there")
        if not t.is_contiguous() or (name == WORKSPACE and t.dim() != 1):
            fail(
                ShapeError,
                where,
                f"it is {list(t.shape)} with strides {list(t.stride())}",
                "a contiguous vector" if name == WORKSPACE else "a contiguous tensor",
                "allocate it as a contiguous tensor",
            )
        if name != WORKSPACE and t.shape != shapes[name]:
            fail(ShapeError, where, f"it is {list(t.shape)}", f"{list(shapes[name])}", "allocate it in that shape")
    _check_apart(storage)
    return {name: t for name, t in storage.items() if name != WORKSPACE}


def _check_apart(storage: Mapping[str, Tensor]) -> None:
    """Raise if tensors of ``storage``, which are contiguous, share memory."""
    held = [(t.data_ptr(), t.numel() * t.itemsize, name) for name, t in storage.items() if real(t) and not t.is_meta]
    end, before = 0, ""
    for begin, size, name in sorted(item for item in held if item[1]):
        if begin < end:
            where, what = f"planner: storage[{name!r}]", f"it shares memory with storage[{before!r}]"
            fail(ArgumentError, where, what, "memory of its own", "allocate both, or pass slices that do not overlap")
        end, before = begin + size, name


def _is_shifted(t: Tensor, field: Tensor) -> bool:
    """Whether the vector ``t`` overlaps ``field``, with elements at other addresses than those of the field."""
    if type(t) is not Tensor:
        return False
    offset = t.data_ptr() - field.data_ptr()
    if offset >= field.nbytes or t.dim() != 1:  # true of most tensors
        return False
    stride = t.stride(0)
    if offset == 0 and stride == 1 and t.dtype == field.dtype:
        return False
    return -(t.nbytes * stride) < offset


def validates(validate: bool | None, *tensors: Tensor) -> bool:
    """Whether to check the contents of these tensors: on request, or by default if all are on the host."""
    if validate and not all(map(real, tensors)):
        fail(
            OptionError,
            "plan",
            "validate is True for a page table that is traced or fake",
            "None or False, since it has no contents yet",
            "validate the page table of each batch with check() of the planner, outside of the graph",
        )
    return bool(validate) or (validate is None and all(map(seen, tensors)))


class PlannerBase:
    """A plan and its workspace, and the checks that both planners share."""

    problem: PlanProblem
    max_pages: int
    cache_pages: int | None
    context: ContextShard | None
    device: torch.device
    state: DecodePlan | PrefillPlan
    workspace: Tensor
    _prepared: tuple[PreparedCalls, int] | None

    def __copy__(self) -> PlannerBase:
        """A planner with a plan and a workspace of its own."""
        other = object.__new__(type(self))
        vars(other).update(copy.deepcopy(vars(self), {id(self.context): self.context}))
        return other

    def _own(self, plan: DecodePlan | PrefillPlan, workspace: Tensor | None, of_rank: PlanProblem) -> None:
        """Set the plan and the workspace: ``workspace``, or a new one. It is for the heads of ``of_rank``."""
        needed = workspace_size(plan) // self.problem.num_qo_heads * of_rank.num_qo_heads
        if needed > MAX_WORKSPACE:
            fail(
                OptionError,
                "planner",
                f"the workspace would have {needed} elements",
                f"at most {MAX_WORKSPACE}",
                "make num_ctas, tile_rows or the capacities smaller",
            )
        if workspace is None:
            workspace = torch.zeros(needed, dtype=torch.float32, device=self.device)
        elif 0 < workspace.shape[0] < needed:
            fail(
                CapacityError,
                f"planner: storage[{WORKSPACE!r}]",
                f"it has {workspace.shape[0]} elements",
                f"at least {needed} for this plan, or none if every call is passed another workspace",
                "allocate that many",
            )
        self.state, self.workspace = plan, workspace
        self._prepared = new_caches(self.device) if self.context is None else None
        mark_static(*plan, workspace)
        if isinstance(plan, PrefillPlan):
            # Dynamo gives equal sizes one symbol: a dynamic batch of as many requests would become constant with it.
            mark_static_size(plan.queue)

    def _prepared_calls(self) -> tuple[PreparedCalls, int] | None:
        return self._prepared

    def _constants(self) -> Sequence[Tensor]:
        return self.state

    def _apart(self, kv_indices: Tensor) -> Tensor:
        """``kv_indices``, or a copy of them if planning would write to them while it reads them.

        A traced call needs no copy: its graph functionalizes the write.
        """
        return kv_indices.clone() if not is_traced() and _is_shifted(kv_indices, self.state.kv_indices) else kv_indices

    def _planning(self, op: str, validate: bool | None, *table: Tensor) -> OpCall:
        """The call that writes the plan. With ``validate`` it is not prepared: every call checks contents."""
        *indptrs, indices, last = table
        if guard_or_false(indices.shape[0] > self.max_pages) and validates(validate, *table):
            indices = indices[: int(indptrs[-1][-1])]  # later entries need no capacity
            table = (*indptrs, indices, last)
        inputs = [t.to(self.device, torch.int32, non_blocking=True).contiguous() for t in table]
        lengths: dict[str, Tensor] = {}
        if self.context is not None:
            inputs[-3:], lengths = self.context.planned(self.problem.page_size, *inputs[-3:])
        return OpCall(op, (*inputs, self.state), lengths, destinations=None if validate else ())

    def _check(
        self,
        validate: bool | None,
        indptrs: dict[str, Tensor],
        indices: Tensor,
        last: Tensor,
    ) -> None:
        """Check the dtypes and shapes of a page table, and its contents if ``validate`` or if None and all on the host.

        With a group the ranks compare their batches after all checks.
        """
        contents = validates(validate, *indptrs.values(), indices, last)

        def check() -> None:
            check_table(indptrs, indices, last)
            self._check_rows(validate, indptrs)
            if contents:
                self._check_contents(indptrs, indices, last)
            self._check_splits(validate, indptrs, last)

        context = self.context
        if validate and context is not None and context.group is not None:
            from attn_ops.plan.context_checks import check_same_batch  # imports torch.distributed

            check_same_batch(context, context.group, self.state, (*indptrs.values(), last), check)
        else:
            check()

    def _check_rows(self, validate: bool | None, indptrs: dict[str, Tensor]) -> None:
        """Check the query rows of a batch, which decode plans do not have."""

    def _check_splits(self, validate: bool | None, indptrs: dict[str, Tensor], last: Tensor) -> None:
        """Check that the plan has capacity for splits of a fixed size, which decode plans always have."""

    def _check_contents(self, indptrs: dict[str, Tensor], indices: Tensor, last: Tensor) -> None:
        """Check the page table; with a context, the page table of all ranks and the page numbers of this rank."""
        for name, indptr in indptrs.items():
            check_indptr(name, indptr)
        kv_indptr = indptrs["kv_indptr"]
        if self.context is not None:  # the page numbers of other ranks are of their caches
            numbers, indices = indices.cpu(), torch.zeros_like(indices, device="cpu")
            listed = torch.arange(numbers.shape[0], dtype=torch.int32, device="cpu")
            table = kv_indptr.to("cpu", torch.int32), listed, last.to("cpu", torch.int32)
            own_indptr, own, _ = self.context.page_table(self.problem.page_size, *table)
            own = own[: int(own_indptr[-1])].long()
            indices[own] = numbers[own]
        check_pages(self.problem, kv_indptr, indices, last, self.max_pages, self.cache_pages)
