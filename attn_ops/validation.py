"""One contract for real and fake: every op's arguments are checked here, with the same words.

``CHECKS[op](*args, **kwargs)`` takes the op's arguments, raises a typed error before anything is
written, and returns the :class:`~attn_ops.registry.Problem` from which a backend is chosen. Only
shapes, strides, dtypes and devices are looked at, never contents: that is the validating planner's
work (:mod:`attn_ops.planner`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .errors import (
    AttnOpsError,
    CapacityError,
    DeviceError,
    DTypeError,
    GradientError,
    OptionError,
    PlanError,
    ShapeError,
)
from .plan import WORK_FIELDS, DecodePlan, PlanProblem, PrefillPlan, workspace_size
from .registry import Problem

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
POS_ENCODINGS = ("NONE", "ROPE_LLAMA", "ALIBI")
LAYOUTS = {
    "NHD": "[pages, page_size, num_kv_heads, head_dim]",
    "HND": "[pages, num_kv_heads, page_size, head_dim]",
}


class Options(NamedTuple):
    """The options of an attention op, for their checks."""

    sm_scale: float | None
    logits_soft_cap: float
    window_left: int
    sinks: Tensor | None
    kv_scale: Tensor | None
    pos_encoding: str
    rope_scale: float
    rope_theta: float
    causal: bool = True
    mask: Tensor | None = None


class Op:
    """The checks of one call, each naming the op in its message."""

    def __init__(self, name: str) -> None:
        self.name = name

    def fail(self, error: type[AttnOpsError], what: str, expected: str, fix: str) -> NoReturn:
        raise error(f"{self.name}: {what}; expected {expected}; {fix}")

    def tensor(self, name: str, t: Tensor, dims: str, dtypes: Sequence[torch.dtype], like: Tensor | None) -> None:
        """Rank (counted from ``dims``, such as ``"[batch, heads, head_dim]"``), dtype, device and last stride."""
        rank = dims.count(",") + 1
        if t.dim() != rank:
            self.fail(ShapeError, f"{name} has rank {t.dim()}", f"{rank}, {dims}", f"reshape {name}")
        if t.dtype not in dtypes:
            names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            self.fail(DTypeError, f"{name} is {_dtype(t)}", names, f"convert it with {name}.to(...)")
        if like is not None and t.device != like.device:
            self.fail(
                DeviceError,
                f"{name} is on {t.device}",
                f"{like.device}, where the other tensors are",
                "move it",
            )
        if t.dim() and t.stride(-1) != 1 and t.shape[-1] > 1 and t.numel():
            self.fail(
                ShapeError,
                f"{name} has stride {t.stride(-1)} in its last dimension",
                "1",
                f"use {name}.contiguous()",
            )

    def size(self, name: str, dim: str, actual: Any, expected: Any, source: str) -> None:
        if actual != expected:
            self.fail(ShapeError, f"{name} has {dim} {actual}", f"{expected} as in {source}", "make the two agree")

    def no_grad(self, **tensors: Tensor | None) -> None:
        if torch.is_grad_enabled():
            for name, t in tensors.items():
                if t is not None and t.requires_grad:
                    self.fail(
                        GradientError,
                        f"{name} requires grad",
                        "inference, these ops have no backward",
                        f"call under torch.no_grad() or detach {name}",
                    )

    def layout(self, kv_layout: str) -> None:
        if kv_layout not in LAYOUTS:
            self.fail(OptionError, f"kv_layout is {kv_layout}", "NHD or HND", "pass one of the two")

    def heads(self, num_qo_heads: int, num_kv_heads: int) -> None:
        if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
            self.fail(
                ShapeError,
                f"{num_qo_heads} query heads do not share {num_kv_heads} KV heads evenly",
                "a query head count that is a multiple of the KV head count",
                "repeat or regroup the heads",
            )

    def options(self, q: Tensor, o: Options) -> None:
        for what, value, ok, expected in (
            (
                "sm_scale",
                o.sm_scale,
                o.sm_scale is None or o.sm_scale > 0,
                "a positive number, or None for the default",
            ),
            ("logits_soft_cap", o.logits_soft_cap, o.logits_soft_cap >= 0, "a positive number, or 0 for none"),
            ("window_left", o.window_left, o.window_left >= -1, "0 or more tokens, or -1 for no window"),
            ("pos_encoding", o.pos_encoding, o.pos_encoding in POS_ENCODINGS, ", ".join(POS_ENCODINGS)),
            ("rope_scale", o.rope_scale, o.rope_scale > 0, "a positive number"),
            ("rope_theta", o.rope_theta, o.rope_theta > 0, "a positive number"),
        ):
            if not ok:
                self.fail(OptionError, f"{what} is {value}", expected, "change it")
        if o.sinks is not None:
            self.tensor("sinks", o.sinks, "[num_qo_heads]", (torch.float32,), q)
            self.size("sinks", "length", o.sinks.shape[0], q.shape[-2], "the query heads of q")
        if o.kv_scale is not None:
            self.tensor("kv_scale", o.kv_scale, "[2]", (torch.float32,), q)
            self.size("kv_scale", "length", o.kv_scale.shape[0], 2, "the scales of K and V")
        if o.mask is not None:
            self.tensor("mask", o.mask, "[bytes]", (torch.uint8,), q)

    def kv_dtype(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        if k.dtype != v.dtype:
            self.fail(DTypeError, f"the keys are {_dtype(k)} and the values {_dtype(v)}", "one dtype", "convert one")
        if k.dtype not in (q.dtype, *FP8):
            self.fail(
                DTypeError,
                f"the keys are {_dtype(k)} and q {_dtype(q)}",
                "the dtype of q, or float8_e4m3fn or float8_e5m2",
                "convert q or the cache",
            )

    def plan(self, plan: Sequence[Tensor], kind: type[DecodePlan] | type[PrefillPlan], like: Tensor | None) -> Any:
        """The plan as its NamedTuple, its fields checked for number, rank, dtype and device."""
        if len(plan) != len(kind._fields):
            self.fail(
                PlanError,
                f"plan has {len(plan)} tensors",
                f"the {len(kind._fields)} of {kind.__name__} ({', '.join(kind._fields)})",
                f"pass what {kind.__name__.removesuffix('Plan')}Planner.plan() returned",
            )
        typed = kind(*plan)
        ranks = {"problem": len(PlanProblem._fields) + 1, "work": 2}
        for field, t in zip(kind._fields, typed, strict=True):
            if t.dtype != torch.int32 or t.dim() != ranks.get(field, 1) or not t.is_contiguous():
                self.fail(
                    PlanError,
                    f"plan.{field} is {_dtype(t)} of rank {t.dim()}",
                    f"contiguous int32 of rank {ranks.get(field, 1)}",
                    "pass the plan as the planner made it",
                )
            if like is not None and t.device != like.device:
                self.fail(
                    DeviceError,
                    f"plan.{field} is on {t.device}",
                    f"{like.device}, where the other tensors are",
                    "make the planner with that device",
                )
        if typed.work.shape[1] != len(WORK_FIELDS):
            self.fail(
                PlanError,
                f"plan.work has {typed.work.shape[1]} columns",
                f"{len(WORK_FIELDS)}",
                "pass the plan as the planner made it",
            )
        return typed

    def planned_for(self, plan: DecodePlan | PrefillPlan, **actual: int) -> None:
        planned = PlanProblem.of(plan.problem)
        for field, value in actual.items():
            if getattr(planned, field) != value:
                self.fail(
                    PlanError,
                    f"the plan was made for {field} {getattr(planned, field)}",
                    f"a plan for {field} {value}, which the tensors have",
                    "make a planner for this problem",
                )

    def covered(self, plan: DecodePlan | PrefillPlan, window_left: int, causal: bool) -> None:
        """The plan leaves out no key that the call may see."""
        planned = PlanProblem.of(plan.problem)
        if planned.window and not 0 <= window_left < planned.window:
            self.fail(
                PlanError,
                f"window_left is {window_left} and the plan was made for window_left {planned.window - 1}",
                "a window no wider than the planned one",
                "make a planner for the widest window, or without one",
            )
        if planned.causal and not causal:
            self.fail(
                PlanError,
                "the plan was made for causal attention and causal is False",
                "causal=True",
                "make the planner with causal=False",
            )

    def workspace(self, workspace: Tensor, needed: int, like: Tensor) -> None:
        self.tensor("workspace", workspace, "[elements]", (torch.float32,), like)
        if workspace.shape[0] < needed:
            self.fail(
                CapacityError,
                f"workspace has {workspace.shape[0]} elements",
                f"at least {needed} for this plan",
                "pass the workspace of the planner that made it",
            )


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _caches(op: Op, q: Tensor, k: Tensor, v: Tensor, kv_layout: str) -> tuple[int, int]:
    """``(page_size, num_kv_heads)`` of a checked pair of paged caches."""
    op.layout(kv_layout)
    for name, cache in (("k_cache", k), ("v_cache", v)):
        op.tensor(name, cache, LAYOUTS[kv_layout], FLOATS + FP8, q)
        op.size(name, "pages", cache.shape[0], k.shape[0], "k_cache")
        op.size(name, "dimension 1", cache.shape[1], k.shape[1], "k_cache")
        op.size(name, "dimension 2", cache.shape[2], k.shape[2], "k_cache")
    page_size, heads = (k.shape[1], k.shape[2]) if kv_layout == "NHD" else (k.shape[2], k.shape[1])
    return int(page_size), int(heads)


def _attention(op: Op, q: Tensor, k: Tensor, v: Tensor, page_size: int, num_kv_heads: int, options: Options) -> Problem:
    """What every attention op checks once its KV is known to be well formed."""
    op.heads(int(q.shape[1]), num_kv_heads)
    op.size("k", "head_dim", int(k.shape[-1]), int(q.shape[2]), "q")
    op.kv_dtype(q, k, v)
    op.options(q, options)
    if options.pos_encoding == "ROPE_LLAMA" and int(q.shape[2]) % 2:
        op.fail(ShapeError, f"q has head_dim {q.shape[2]}", "an even one for ROPE_LLAMA", "pad the heads")
    op.no_grad(q=q, k=k, v=v, sinks=options.sinks)
    return Problem(
        op=op.name,
        device=q.device.type,
        dtype=q.dtype,
        kv_dtype=k.dtype,
        num_qo_heads=int(q.shape[1]),
        num_kv_heads=num_kv_heads,
        head_dim_qk=int(q.shape[2]),
        head_dim_vo=int(v.shape[-1]),
        page_size=page_size,
        pos_encoding=options.pos_encoding,
        masked=options.mask is not None,
    )


def _planned(
    op: Op,
    kind: type[DecodePlan] | type[PrefillPlan],
    problem: Problem,
    q: Tensor,
    plan: Sequence[Tensor],
    workspace: Tensor,
    options: Options,
) -> Any:
    """The plan, which must be one for this problem, and its workspace large enough."""
    typed = op.plan(plan, kind, q)
    sizes = ("page_size", "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo")
    op.planned_for(typed, **{size: getattr(problem, size) for size in sizes})
    op.covered(typed, options.window_left, options.causal and options.mask is None)
    op.workspace(workspace, workspace_size(typed) if isinstance(typed, DecodePlan) else 0, q)
    return typed


def batch_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Sequence[Tensor],
    workspace: Tensor,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    pos_encoding: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    backend: str = "auto",
) -> Problem:
    op = Op("batch_decode")
    options = Options(sm_scale, logits_soft_cap, window_left, sinks, kv_scale, pos_encoding, rope_scale, rope_theta)
    op.tensor("q", q, "[batch, num_qo_heads, head_dim]", FLOATS, None)
    page_size, heads = _caches(op, q, k_cache, v_cache, kv_layout)
    problem = _attention(op, q, k_cache, v_cache, page_size, heads, options)
    typed = _planned(op, DecodePlan, problem, q, plan, workspace, options)
    capacity = typed.kv_len.shape[0]
    if q.shape[0] > capacity:
        op.fail(
            CapacityError,
            f"q has {q.shape[0]} rows and the plan room for {capacity} requests",
            f"max_batch of at least {q.shape[0]}",
            "make the planner with that max_batch",
        )
    return problem


def batch_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: Sequence[Tensor],
    workspace: Tensor,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    pos_encoding: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
    causal: bool = False,
    mask: Tensor | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    backend: str = "auto",
) -> Problem:
    op = Op("batch_prefill")
    options = Options(
        sm_scale, logits_soft_cap, window_left, sinks, kv_scale, pos_encoding, rope_scale, rope_theta, causal, mask
    )
    op.tensor("q", q, "[nnz_qo, num_qo_heads, head_dim]", FLOATS, None)
    page_size, heads = _caches(op, q, k_cache, v_cache, kv_layout)
    problem = _attention(op, q, k_cache, v_cache, page_size, heads, options)
    _planned(op, PrefillPlan, problem, q, plan, workspace, options)
    return problem


def _dense_kv(op: Op, q: Tensor, k: Tensor, v: Tensor, kv_layout: str) -> int:
    """The KV heads of checked keys and values that are not paged."""
    op.layout(kv_layout)
    dims = "[nnz_kv, num_kv_heads, head_dim]" if kv_layout == "NHD" else "[num_kv_heads, nnz_kv, head_dim]"
    op.tensor("q", q, "[nnz_qo, num_qo_heads, head_dim]", FLOATS, None)
    op.tensor("k", k, dims, FLOATS + FP8, q)
    op.tensor("v", v, dims, FLOATS + FP8, q)
    for dim in (0, 1):
        op.size("v", f"dimension {dim}", v.shape[dim], k.shape[dim], "k")
    return int(k.shape[1 if kv_layout == "NHD" else 0])


def ragged_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Sequence[Tensor],
    workspace: Tensor,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    pos_encoding: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
    causal: bool = False,
    mask: Tensor | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    backend: str = "auto",
) -> Problem:
    op = Op("ragged_prefill")
    options = Options(
        sm_scale, logits_soft_cap, window_left, sinks, kv_scale, pos_encoding, rope_scale, rope_theta, causal, mask
    )
    problem = _attention(op, q, k, v, 1, _dense_kv(op, q, k, v, kv_layout), options)
    typed = _planned(op, PrefillPlan, problem, q, plan, workspace, options)
    if typed.kv_indices.shape[0]:
        op.fail(PlanError, "the plan is for a paged cache", "one for ragged KV", "make the planner with max_pages=0")
    return problem


def single_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float | None = None,
    logits_soft_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    pos_encoding: str = "NONE",
    rope_scale: float = 1.0,
    rope_theta: float = 10000.0,
    causal: bool = False,
    mask: Tensor | None = None,
    kv_layout: str = "NHD",
    return_lse: bool = False,
    backend: str = "auto",
) -> Problem:
    op = Op("single_prefill")
    options = Options(
        sm_scale, logits_soft_cap, window_left, sinks, kv_scale, pos_encoding, rope_scale, rope_theta, causal, mask
    )
    problem = _attention(op, q, k, v, 1, _dense_kv(op, q, k, v, kv_layout), options)
    if mask is not None:
        bits = q.shape[0] * k.shape[0 if kv_layout == "NHD" else 1]
        op.size("mask", "bytes", mask.shape[0], (bits + 7) // 8, "one bit for every pair of query row and key")
    return problem


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    *,
    kv_layout: str = "NHD",
    backend: str = "auto",
) -> Problem:
    op = Op("append_kv")
    op.tensor("k", k, "[nnz, num_kv_heads, head_dim]", FLOATS + FP8, None)
    op.tensor("v", v, "[nnz, num_kv_heads, head_dim]", FLOATS + FP8, k)
    page_size, heads = _caches(op, k, k_cache, v_cache, kv_layout)
    for name, t, cache in (("k", k, k_cache), ("v", v, v_cache)):
        op.size(name, "tokens", t.shape[0], k.shape[0], "k")
        op.size(name, "KV heads", int(t.shape[1]), heads, "the cache")
        op.size(name, "head_dim", int(t.shape[2]), int(cache.shape[3]), f"{name}_cache")
        if t.dtype != cache.dtype:
            op.fail(
                DTypeError,
                f"{name} is {_dtype(t)} and {name}_cache {_dtype(cache)}",
                "one dtype",
                f"convert {name}",
            )
    for name, t in (("batch_indices", batch_indices), ("positions", positions)):
        op.tensor(name, t, "[nnz]", (torch.int32,), k)
        op.size(name, "tokens", t.shape[0], k.shape[0], "k")
    op.tensor("kv_indices", kv_indices, "[pages]", (torch.int32,), k)
    op.tensor("kv_indptr", kv_indptr, "[batch + 1]", (torch.int32,), k)
    op.no_grad(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    return Problem(
        "append_kv",
        k.device.type,
        k.dtype,
        k_cache.dtype,
        heads,
        heads,
        int(k.shape[2]),
        int(v.shape[2]),
        page_size,
    )


def _page_table(op: Op, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, plan: Any) -> None:
    device = plan.kv_len
    op.tensor("kv_indptr", kv_indptr, "[batch + 1]", (torch.int32,), device)
    op.tensor("kv_indices", kv_indices, "[pages]", (torch.int32,), device)
    op.tensor("kv_last_page_len", kv_last_page_len, "[batch]", (torch.int32,), device)
    op.size("kv_last_page_len", "length", kv_last_page_len.shape[0], kv_indptr.shape[0] - 1, "kv_indptr less 1")
    for what, needed, capacity, name in (
        ("requests", kv_indptr.shape[0] - 1, plan.kv_len.shape[0], "max_batch"),
        ("pages", kv_indices.shape[0], plan.kv_indices.shape[0], "max_pages"),
    ):
        if needed > capacity:
            op.fail(
                CapacityError,
                f"the batch has {needed} {what} and the plan room for {capacity}",
                f"{name} of at least {needed}",
                f"make the planner with that {name}",
            )


def plan_decode(
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    plan: Sequence[Tensor],
    *,
    backend: str = "auto",
) -> Problem:
    op = Op("plan_decode")
    typed = op.plan(plan, DecodePlan, plan[0] if plan else None)
    _page_table(op, kv_indptr, kv_indices, kv_last_page_len, typed)
    return Problem("plan_decode", typed.kv_len.device.type)


def plan_prefill(
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_last_page_len: Tensor,
    plan: Sequence[Tensor],
    *,
    backend: str = "auto",
) -> Problem:
    op = Op("plan_prefill")
    typed = op.plan(plan, PrefillPlan, plan[0] if plan else None)
    op.tensor("qo_indptr", qo_indptr, "[batch + 1]", (torch.int32,), typed.kv_len)
    op.size("qo_indptr", "length", qo_indptr.shape[0], kv_indptr.shape[0], "kv_indptr")
    _page_table(op, kv_indptr, kv_indices, kv_last_page_len, typed)
    return Problem("plan_prefill", typed.kv_len.device.type)


def _states(op: Op, v: Tensor, s: Tensor, dims: str, like: Tensor | None, suffix: str = "") -> None:
    op.tensor(f"v{suffix}", v, f"[{dims}, head_dim]", FLOATS, like)
    op.tensor(f"s{suffix}", s, f"[{dims}]", (torch.float32,), v)
    if s.shape != v.shape[:-1]:
        op.fail(
            ShapeError,
            f"s{suffix} is {list(s.shape)}",
            f"{list(v.shape[:-1])}, the shape of v{suffix} less head_dim",
            "make the two agree",
        )


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, *, backend: str = "auto") -> Problem:
    op = Op("merge_state")
    _states(op, v_a, s_a, "rows, heads", None, "_a")
    _states(op, v_b, s_b, "rows, heads", v_a, "_b")
    if v_a.shape != v_b.shape or v_a.dtype != v_b.dtype:
        op.fail(
            ShapeError,
            f"v_b is {list(v_b.shape)} {_dtype(v_b)}",
            f"{list(v_a.shape)} {_dtype(v_a)} as v_a",
            "make the two agree",
        )
    op.no_grad(v_a=v_a, v_b=v_b)
    return Problem("merge_state", v_a.device.type, v_a.dtype, v_a.dtype, head_dim_vo=int(v_a.shape[-1]))


def merge_states(v: Tensor, s: Tensor, *, backend: str = "auto") -> Problem:
    op = Op("merge_states")
    _states(op, v, s, "rows, states, heads", None)
    op.no_grad(v=v)
    return Problem("merge_states", v.device.type, v.dtype, v.dtype, head_dim_vo=int(v.shape[-1]))


CHECKS: dict[str, Callable[..., Problem]] = {
    check.__name__: check
    for check in (
        plan_decode,
        plan_prefill,
        batch_decode,
        batch_prefill,
        ragged_prefill,
        single_prefill,
        append_kv,
        merge_state,
        merge_states,
    )
}
