"""Wrong plans, workspaces and page tables of planning ops and of planned attention."""

from __future__ import annotations

import torch

from attn_ops import DecodePlan, PrefillPlan
from attn_ops.errors import (
    CapacityError,
    DeviceError,
    PlanError,
    ShapeError,
)
from helpers.bad_calls.base import (
    ALL,
    Bad,
    but_last,
    dims,
    empty_batch,
    field,
    meta,
    replan,
    resized,
    sized,
    to,
    twice,
    valid,
)
from helpers.calls import arguments


def _fields() -> list[Bad]:
    """Plans with a field that is longer or shorter than its problem and its other fields say."""
    decode = ("kv_indptr", "kv_len", "work", "cta_indptr", "merge_indptr", "split_counters")
    prefill = ("qo_indptr", "kv_indptr", "kv_len", "queue")
    bad = []
    for op in ("plan_decode", "batch_decode", "plan_prefill", "batch_prefill", "ragged_prefill", "batch_mla"):
        plan = valid(op)["plan"]
        capacities = "for max_batch 4, max_pages "
        for name in decode if isinstance(plan, DecodePlan) else prefill:
            shape = list(getattr(plan, name).shape)
            for length in {shape[0] - 1, shape[0] + 1} - {-1}:
                what, expected = f"plan.{name} is {[length, *shape[1:]]}", f"{shape} {capacities}"
                bad.append(Bad(op, {"plan": field(name, resized(length))}, PlanError, what, expected))
        if isinstance(plan, PrefillPlan):
            work = {"plan": field("work", resized(3))}
            bad.append(Bad(op, work, PlanError, "plan.work is [3, 8]", f"[4, 8] {capacities}"))
    bad += [
        Bad("plan_decode", {"plan": field("problem", sized(1, 0))}, PlanError, "plan.problem is ", "sizes of at"),
        Bad("plan_prefill", {"plan": field("problem", sized(7, 0))}, PlanError, "plan.problem is ", "sizes of at"),
        Bad("plan_decode", {"plan": field("problem", sized(10, 63))}, PlanError, "plan.problem is ", "sizes of at"),
        Bad(
            "plan_decode",
            {"plan": field("problem", sized(1, 1 << 29))},
            CapacityError,
            "max_pages is 18 with page_size 536870912",
            "at most 2146435072 tokens",
        ),
        Bad("plan_decode", {"plan": empty_batch}, PlanError, "plan.kv_indptr is [1]", "[2] for max_batch 1"),
    ]
    return bad


def _plans() -> list[Bad]:
    """Plans and workspaces of the planned attention ops."""
    bad = []
    for op, plan_type, other in (
        ("batch_decode", DecodePlan, "batch_prefill"),
        ("batch_prefill", PrefillPlan, "batch_decode"),
        ("ragged_prefill", PrefillPlan, "batch_decode"),
    ):
        fields = f"the {len(plan_type._fields)} of {plan_type.__name__}"
        foreign = arguments(other)["plan"]
        for name, made, asked in (
            ("num_kv_heads", 1, 2),
            ("num_qo_heads", 8, 4),
            ("head_dim", 32, 64),
            ("head_dim_vo", 32, 64),
            ("page_size", 32, 16),
        ):
            said = name.replace("head_dim", "head_dim_qk") if name == "head_dim" else name
            if op != "ragged_prefill" or name != "page_size":
                what, expected = f"the plan was made for {said} {made}", f"a plan for {said} {asked}"
                bad.append(Bad(op, {"plan": replan(**{name: made})}, PlanError, what, expected))
        narrow, wide = replan(window_left=9), {"window_left": 10}
        what = "and the plan was made for window_left 9"
        bad += [
            Bad(op, {"plan": but_last}, PlanError, "plan has ", fields),
            Bad(op, {"plan": []}, PlanError, "plan has 0 tensors", fields),
            Bad(op, {"plan": foreign}, PlanError, "plan", ""),
            Bad(op, {"plan": field("kv_len", to(torch.int64))}, PlanError, "plan.kv_len is int64 of rank 1", "contig"),
            Bad(op, {"plan": field("work", dims(0))}, PlanError, "plan.work is int32 of rank 1", "contiguous int32"),
            Bad(op, {"plan": field("work", lambda t: t.T)}, PlanError, "plan.work is int32 of rank 2", "contiguous"),
            Bad(op, {"plan": field("work", lambda t: t[:, :7].clone())}, PlanError, "plan.work is [", "["),
            Bad(op, {"plan": field("work", meta)}, DeviceError, "plan.work is on meta", "cpu"),
            Bad(op, {"plan": narrow, **wide}, PlanError, f"window_left is 10 {what}", "a window no wider"),
            Bad(op, {"plan": narrow, "window_left": -1}, PlanError, f"window_left is -1 {what}", "a window no wider"),
        ]
        if op != "batch_decode":
            planned, causal = "the plan was made for causal attention and", {"plan": replan(causal=True)}
            bad += [
                Bad(op, {**causal, "causal": False}, PlanError, f"{planned} causal is False", "causal=True"),
                Bad(op, {**causal, "causal": True, "mask": ALL}, PlanError, f"{planned} a mask takes its", "no mask"),
            ]
            near, what = {"plan": replan(window_right=9)}, "and the plan was made for window_right 9"
            bad += [
                Bad(op, {**near, "window_right": 10}, PlanError, f"window_right is 10 {what}", "a window no wider"),
                Bad(op, near, PlanError, f"window_right is -1 {what}", "a window no wider"),
                Bad(op, {**causal, "window_right": 1}, PlanError, f"{planned} causal is False", "causal=True"),
            ]
    small = {"plan": replan(num_ctas=5), "workspace": torch.zeros(2079)}
    bad += [
        Bad("batch_decode", {"workspace": torch.zeros(9)[::2]}, ShapeError, "workspace has stride 2", "1"),
        Bad("batch_decode", small, CapacityError, "workspace has 2079 elements", "at least 2080 for this plan"),
        Bad("batch_decode", {"q": twice}, CapacityError, "q has 8 rows", "max_batch of at least 8"),
        Bad("ragged_prefill", {"plan": replan(max_pages=7, page_size=1)}, PlanError, "the plan is for a paged", "one"),
        Bad("ragged_prefill", {"plan": replan(max_pages=1, page_size=1)}, PlanError, "the plan is for a paged", "one "),
    ]
    return bad


def _capacities() -> list[Bad]:
    """Batches beyond the capacity of a plan, and tables that do not agree."""
    one = dims(slice(1))
    return [
        Bad(
            "plan_decode",
            {"plan": replan(max_batch=3)},
            CapacityError,
            "the batch has 4 requests",
            "max_batch of at least 4",
        ),
        Bad(
            "plan_decode",
            {"plan": field("kv_indices", one)},
            CapacityError,
            "the batch has 15 pages",
            "max_pages of at",
        ),
        Bad(
            "plan_prefill",
            {"plan": field("kv_indices", one)},
            CapacityError,
            "the batch has 15 pages",
            "max_pages of at",
        ),
        Bad("plan_decode", {"kv_last_page_len": one}, ShapeError, "kv_last_page_len has length 1", "4 as in kv_indptr"),
        Bad("plan_prefill", {"qo_indptr": one}, ShapeError, "qo_indptr has length 1", "5 as in kv_indptr"),
        Bad("plan_decode", {"plan": []}, PlanError, "plan has 0 tensors", "the 8 of DecodePlan"),
        Bad("plan_prefill", {"plan": arguments("plan_decode")["plan"]}, PlanError, "plan", ""),
    ]


PLANS = [*_plans(), *_fields(), *_capacities()]
