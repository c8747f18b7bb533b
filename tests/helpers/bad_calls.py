"""The table of wrong calls of ops: what is wrong with each, and what the error must say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attn_ops import DecodePlan, DecodePlanner, PrefillPlan, PrefillPlanner
from attn_ops.errors import (
    AttnOpsError,
    CapacityError,
    DeviceError,
    DTypeError,
    GradientError,
    OptionError,
    PlanError,
    ShapeError,
)
from helpers.calls import Arguments, arguments

ALL = torch.full((999,), 255, dtype=torch.uint8)
SIZES: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64}


@dataclass(frozen=True)
class Bad:
    """A valid call of ``op`` with ``changes``: each a value, or a function of the value that it replaces.

    The message must read ``op: <what>; expected <expected>; <how to fix it>``. ``what`` and ``expected`` are the
    beginnings of these parts.
    """

    op: str
    changes: Arguments
    error: type[AttnOpsError]
    what: str
    expected: str

    def arguments(self) -> Arguments:
        kwargs = dict(_valid(self.op))
        for name, change in self.changes.items():
            kwargs[name] = change(kwargs[name]) if callable(change) else change
        return kwargs

    def __str__(self) -> str:
        return f"{self.op}: {self.what}"


@cache
def _valid(op: str) -> Arguments:
    """Shared by all wrong calls, since none may write."""
    return arguments(op)


def meta(t: Tensor) -> Tensor:
    return t.to("meta")


def leaf(t: Tensor) -> Tensor:
    return t.clone().requires_grad_()


def to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: t.to(dtype)


def every_other(t: Tensor) -> Tensor:
    """The same sizes, but a last stride of 2."""
    return torch.stack((t, t), -1).flatten(-2)[..., ::2]


def dims(*index: Any) -> Callable[[Tensor], Tensor]:
    return lambda t: t[index]


def but_last(plan: Any) -> list[Tensor]:
    return list(plan)[:-1]


def shared(t: Tensor) -> Tensor:
    """As many rows, all in the memory of the first."""
    return t[:1].clone().expand(t.shape)


def overlapping(t: Tensor) -> Tensor:
    """Rows that begin one element before the end of the row before them."""
    strides = list(t.stride())
    strides[-2] = t.shape[-1] - 1
    return t.new_zeros(t.numel()).as_strided(t.shape, strides)


def twice(t: Tensor) -> Tensor:
    return torch.cat((t, t))


def replan(**changes: Any) -> Callable[[Any], Any]:
    """A plan of the same kind for another problem."""

    def planner(plan: Any) -> Any:
        max_batch, max_pages = plan.kv_len.shape[0], plan.kv_indices.shape[0]
        sizes = {"page_size": 16 if max_pages else 1, "max_kv_len": 999, **SIZES, **changes}
        if type(plan).__name__ == "DecodePlan":
            return DecodePlanner(sizes.pop("max_batch", max_batch), max_pages, **sizes).state
        return PrefillPlanner(max_batch, 44, sizes.pop("max_pages", max_pages), **sizes).state

    return planner


def field(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    return lambda plan: plan._replace(**{name: change(getattr(plan, name))})


def _rows() -> list[Bad]:
    """Rank, dtype, device and stride of every tensor argument."""
    bad = []
    fp8 = " or float8_e4m3fn or float8_e5m2"
    floats, int32 = "float16 or bfloat16 or float32", "int32"
    attention = {"q": (3, floats), "workspace": (1, "float32")}
    paged = {"k_cache": (4, floats + fp8), "v_cache": (4, floats + fp8)}
    dense = {"k": (3, floats + fp8), "v": (3, floats + fp8)}
    table = {"kv_indptr": (1, int32), "kv_indices": (1, int32), "kv_last_page_len": (1, int32)}
    places = dict.fromkeys(("batch_indices", "positions", "kv_indices", "kv_indptr"), (1, int32))
    state = {"v": (3, floats), "s": (2, "float32")}
    tensors: dict[str, dict[str, tuple[int, str]]] = {
        "plan_decode": table,
        "plan_prefill": {"qo_indptr": (1, int32), **table},
        "batch_decode": attention | paged,
        "batch_prefill": attention | paged,
        "ragged_prefill": attention | dense,
        "single_prefill": {"q": (3, floats), **dense},
        "block_sparse_prefill": attention | dense,
        "block_sparse_table": {"block_mask": (3, "bool"), "row_indptr": (2, int32), "col_indptr": (2, int32)},
        "batch_mla": {"q_nope": (3, floats), "ckv_cache": (3, floats + fp8), "kpe_cache": (3, floats + fp8)},
        "append_kv": {**dense, **paged, **places},
        "append_mla_kv": {"ckv": (2, floats + fp8), "kpe": (2, floats + fp8), **places},
        "batch_indices_positions": {"append_indptr": (1, int32), "seq_lens": (1, int32)},
        "seq_lens": {"kv_indptr": (1, int32), "kv_last_page_len": (1, int32)},
        "page_table": {"block_tables": (2, int32), "seq_lens": (1, int32)},
        "merge_state": {"v_a": (3, floats), "s_a": (2, "float32"), "v_b": (3, floats), "s_b": (2, "float32")},
        "merge_states": {"v": (4, floats), "s": (3, "float32")},
        "merge_state_in_place": {**state, "v_other": (3, floats), "s_other": (2, "float32")},
        "merge_states_varlen": {**state, "indptr": (1, int32)},
        "packbits": {"x": (1, "bool or uint8")},
        "segment_packbits": {"x": (1, "bool or uint8"), "indptr": (1, int32)},
    }
    for op, named in tensors.items():
        first = next(iter(named))
        for name, (rank, dtypes) in named.items():
            bad += [
                Bad(op, {name: dims(None)}, ShapeError, f"{name} has rank {rank + 1}", f"{rank}, ["),
                Bad(op, {name: to(torch.float64)}, DTypeError, f"{name} is float64", dtypes),
            ]
            if name != "workspace":
                what = f"{name} has stride 2 in its last dimension"
                bad.append(Bad(op, {name: every_other}, ShapeError, what, "1"))
            if name != first or op.startswith("plan"):
                bad.append(Bad(op, {name: meta}, DeviceError, f"{name} is on meta", "cpu, where the other tensors are"))
    return bad


def _options() -> list[Bad]:
    """Arguments that all attention ops have."""
    bad = []
    for op in ("batch_decode", "batch_prefill", "ragged_prefill", "single_prefill"):
        key = "k_cache" if op.startswith("batch") else "k"
        value = key.replace("k", "v", 1)
        bad += [
            Bad(op, {"sm_scale": -1.0}, OptionError, "sm_scale is -1.0", "a positive number"),
            Bad(op, {"sm_scale": 0.0}, OptionError, "sm_scale is 0.0", "a positive number"),
            Bad(op, {"sm_scale": 2.0**-127}, OptionError, "sm_scale is 5.877", "a positive number"),
            Bad(op, {"sm_scale": math.nan}, OptionError, "sm_scale is nan", "a positive number"),
            Bad(op, {"logits_soft_cap": -2.0}, OptionError, "logits_soft_cap is -2.0", "a positive number, or 0"),
            Bad(op, {"sm_scale": math.inf}, OptionError, "sm_scale is inf", "a positive number"),
            Bad(op, {"logits_soft_cap": math.inf}, OptionError, "logits_soft_cap is inf", "a positive number, or 0"),
            Bad(op, {"window_left": -2}, OptionError, "window_left is -2", "0 or more tokens"),
            Bad(
                op,
                {"window_left": 1 << 30},
                OptionError,
                "window_left is 1073741824",
                "0 or more tokens, at most 1073741823",
            ),
            *(
                Bad(
                    op, {"window_right": w}, OptionError, f"window_right is {w}", "0 or more tokens, at most 1073741823"
                )
                for w in (-2, 1 << 30)
                if op != "batch_decode"
            ),
            Bad(op, {"rope_scale": 0.0}, OptionError, "rope_scale is 0.0", "a positive number"),
            Bad(op, {"rope_theta": -1.0}, OptionError, "rope_theta is -1.0", "a positive number"),
            Bad(op, {"pos_encoding": "ROPE"}, OptionError, "pos_encoding is ROPE", "NONE, ROPE_LLAMA, ALIBI"),
            Bad(op, {"kv_layout": "NDH"}, OptionError, "kv_layout is NDH", "NHD or HND"),
            Bad(op, {"backend": "fa3"}, OptionError, "backend is fa3", "auto or one of cuda, triton, cpu, reference"),
            Bad(op, {"sinks": torch.zeros(3)}, ShapeError, "sinks has length 3", "4 as in the query heads"),
            Bad(op, {"sinks": torch.zeros(4).half()}, DTypeError, "sinks is float16", "float32"),
            Bad(op, {"sinks": torch.zeros(4, 1)}, ShapeError, "sinks has rank 2", "1, [num_qo_heads]"),
            Bad(op, {"sinks": meta(torch.zeros(4))}, DeviceError, "sinks is on meta", "cpu"),
            Bad(op, {"kv_scale": torch.ones(2).requires_grad_()}, GradientError, "kv_scale requires grad", "inference"),
            Bad(op, {"kv_scale": torch.zeros(1)}, ShapeError, "kv_scale has length 1", "2 as in the scales"),
            Bad(op, {"q": dims(slice(None), slice(3))}, ShapeError, "3 query heads do not share 2 KV heads", "a query"),
            Bad(op, {"q": dims(slice(None), slice(0))}, ShapeError, "0 query heads do not share 2 KV heads", "a query"),
            Bad(op, {"q": dims(..., slice(32))}, ShapeError, "k has head_dim 64", "32 as in q"),
            Bad(op, dict.fromkeys(("q", key, value), dims(..., slice(0))), ShapeError, "q has head_dim 0", "at least"),
            Bad(op, {"q": to(torch.float16)}, DTypeError, "the keys are float32 and q float16", "the dtype of q"),
            Bad(op, {value: to(torch.bfloat16)}, DTypeError, "the keys are float32 and the values bfl", "one dtype"),
            Bad(op, {value: dims(slice(1, None))}, ShapeError, f"{value} has ", ""),
            Bad(op, {value: dims(slice(None), slice(1))}, ShapeError, f"{value} has dimension 1 1", ""),
            Bad(
                op, {key: to(torch.float16), value: to(torch.float16)}, DTypeError, "the keys are float16 and q", "the"
            ),
            Bad(op, {"sinks": leaf(torch.zeros(4))}, GradientError, "sinks requires grad", "inference"),
            Bad(
                op,
                {"q": dims(..., slice(63)), key: dims(..., slice(63)), "pos_encoding": "ROPE_LLAMA"},
                ShapeError,
                "q has head_dim 63",
                "an even one for ROPE_LLAMA",
            ),
            *(Bad(op, {name: leaf}, GradientError, f"{n} requires grad", "inf") for name, n in _names(key, value)),
        ]
        if op.startswith("batch"):
            one_head = {value: dims(slice(None), slice(None), slice(1))}
            bad.append(Bad(op, one_head, ShapeError, "v_cache has dimension 2 1", "2 as in k_cache"))
        if op != "batch_decode":
            bad.append(Bad(op, {"q": longer(0, ROWS)}, CapacityError, f"q has {ROWS} query rows", "at most 268435456"))
            mask = torch.zeros(1, dtype=torch.uint8)
            if not op.startswith("batch"):
                long = {key: longer(0, TOKENS), value: longer(0, TOKENS)}
                bad.append(Bad(op, long, CapacityError, f"k has {TOKENS} tokens", "at most 2146435072"))
            bad += [
                Bad(op, {"mask": mask.bool()}, DTypeError, "mask is bool", "uint8"),
                Bad(op, {"mask": mask[None]}, ShapeError, "mask has rank 2", "1, [bytes]"),
            ]
    return bad


ROWS, TOKENS = (1 << 28) + 1, (1 << 31) - (1 << 20) + 1


def longer(dim: int, size: int) -> Callable[[Tensor], Tensor]:
    """A tensor without memory for so many rows: the first of ``dim``, expanded."""
    return lambda t: t.narrow(dim, 0, 1).expand(*(size if i == dim else n for i, n in enumerate(t.shape)))


def _names(key: str, value: str) -> list[tuple[str, str]]:
    return [("q", "q"), (key, "k"), (value, "v")]


def _fields() -> list[Bad]:
    """Plans with a field that is longer or shorter than its problem and its other fields say."""
    decode = ("kv_indptr", "kv_len", "work", "cta_indptr", "merge_indptr", "split_counters")
    prefill = ("qo_indptr", "kv_indptr", "kv_len", "queue")
    bad = []
    for op in ("plan_decode", "batch_decode", "plan_prefill", "batch_prefill", "ragged_prefill", "batch_mla"):
        plan = _valid(op)["plan"]
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
        Bad("plan_decode", {"plan": field("problem", sized(1, 0))}, PlanError, "plan.problem is ", "sizes of 1 or"),
        Bad("plan_prefill", {"plan": field("problem", sized(7, 0))}, PlanError, "plan.problem is ", "sizes of 1 or"),
        Bad("plan_decode", {"plan": field("problem", sized(10, 63))}, PlanError, "plan.problem is ", "sizes of 1 or"),
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


def resized(length: int) -> Callable[[Tensor], Tensor]:
    """A tensor of that length: the first entries, or all and zeros."""
    return lambda t: torch.cat((t, t.new_zeros(length, *t.shape[1:])))[:length]


def sized(dim: int, size: int) -> Callable[[Tensor], Tensor]:
    """A tensor with another size of one dimension, of those that are 1 in memory."""
    return lambda t: t.new_empty((0, *[1] * (t.dim() - 1))).expand(
        *(size if i == dim else n for i, n in enumerate(t.shape))
    )


def empty_batch(plan: DecodePlan) -> DecodePlan:
    cut = {"kv_indptr": 1, "kv_len": 0, "merge_indptr": 1, "work": 1}
    return plan._replace(**{name: getattr(plan, name)[:length].clone() for name, length in cut.items()})


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


def _empty_offsets() -> list[Bad]:
    """Cumulative lengths without their first 0."""
    named = [
        *(("plan_decode", "kv_indptr"), ("plan_prefill", "qo_indptr"), ("plan_prefill", "kv_indptr")),
        *(("batch_indices_positions", "append_indptr"), ("seq_lens", "kv_indptr")),
        *(("merge_states_varlen", "indptr"), ("segment_packbits", "indptr")),
    ]
    return [Bad(op, {name: dims(slice(0))}, ShapeError, f"{name} is [0]", "[") for op, name in named]


def _others() -> list[Bad]:
    one, one_column = dims(slice(1)), dims(slice(None), slice(1))
    bad = [
        # capacity: the error names the number that is needed
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
        # append
        Bad("append_kv", {"kv_layout": "nhd"}, OptionError, "kv_layout is nhd", "NHD or HND"),
        Bad("append_kv", {"k": to(torch.float16)}, DTypeError, "k is float16 and k_cache float32", "one dtype"),
        Bad("append_kv", {"v": to(torch.bfloat16)}, DTypeError, "v is bfloat16 and v_cache float32", "one dtype"),
        Bad("append_kv", {"v": one}, ShapeError, "v has tokens 1", "3 as in k"),
        Bad("append_kv", {"k": dims(slice(None), slice(1))}, ShapeError, "k has KV heads 1", "2 as in the cache"),
        Bad("append_kv", {"v": dims(..., slice(8))}, ShapeError, "v has head_dim 8", "64 as in v_cache"),
        Bad("append_kv", {"v_cache": one}, ShapeError, "v_cache has pages 1", ""),
        Bad("append_kv", {"positions": one}, ShapeError, "positions has tokens 1", "3 as in the appended rows"),
        Bad(
            "append_kv",
            {"k_cache": shared},
            ShapeError,
            "k_cache is written and its rows overlap, with stride 0",
            "a stride of at least 64",
        ),
        Bad(
            "append_kv",
            {"v_cache": shared},
            ShapeError,
            "v_cache is written and its rows overlap, with stride 0",
            "a stride of at least 64",
        ),
        Bad(
            "append_kv", {"v_cache": overlapping}, ShapeError, "v_cache is written and its rows overlap, with stri", "a"
        ),
        Bad(
            "append_mla_kv",
            {"ckv_cache": shared},
            ShapeError,
            "ckv_cache is written and its rows overlap",
            "a stride of at least 32",
        ),
        Bad(
            "merge_state_in_place",
            {"v": shared},
            ShapeError,
            "v is written and its rows overlap",
            "a stride of at least 64",
        ),
        Bad(
            "merge_state_in_place",
            {"s": shared},
            ShapeError,
            "s is written and its rows overlap",
            "a stride of at least 4",
        ),
        Bad("append_kv", {"k": leaf}, GradientError, "k requires grad", "inference"),
        Bad("append_kv", {"v_cache": leaf}, GradientError, "v_cache requires grad", "inference"),
        Bad("append_mla_kv", {"kpe": one}, ShapeError, "kpe has tokens 1", "3 as in ckv"),
        Bad("append_mla_kv", {"ckv": to(torch.float16)}, DTypeError, "ckv is float16 and ckv_cache", "one dtype"),
        Bad("append_mla_kv", {"kpe": dims(..., slice(4))}, ShapeError, "kpe has head_dim 4", "8 as in kpe_cache"),
        # latent attention
        Bad("batch_mla", {"q_pe": to(torch.float16)}, DTypeError, "q_pe is float16", "float32"),
        Bad("batch_mla", {"q_pe": dims(..., slice(4))}, ShapeError, "kpe_cache has head_dim 8", "4 as in q_pe"),
        Bad("batch_mla", {"kpe_cache": one}, ShapeError, "kpe_cache has dimension 0 1", ""),
        Bad("batch_mla", {"kpe_cache": dims(slice(None), slice(1))}, ShapeError, "kpe_cache has dimension 1 1", "16"),
        Bad("batch_mla", {"ckv_cache": dims(..., slice(16))}, ShapeError, "ckv_cache has head_dim 16", "32 as in q_n"),
        Bad("batch_mla", {"sm_scale": None}, OptionError, "sm_scale is None with head_dim 32 + 8", "a number"),
        Bad("batch_mla", {"plan": arguments("batch_prefill")["plan"]}, PlanError, "the plan was made for num_qo", "a"),
        Bad("batch_mla", {"plan": arguments("batch_decode")["plan"]}, PlanError, "plan", ""),
        Bad(
            "batch_mla",
            {"q_nope": longer(0, ROWS), "q_pe": longer(0, ROWS)},
            CapacityError,
            f"q_nope has {ROWS} query rows",
            "at most 268435456",
        ),
        Bad("batch_mla", {"q_nope": leaf}, GradientError, "q_nope requires grad", "inference"),
        # blocks
        *(
            Bad("block_sparse_prefill", {name: value}, OptionError, f"{name} is {value}", expected)
            for name, value, expected in (
                ("sm_scale", -1.0, "a positive number"),
                ("logits_soft_cap", -2.0, "a positive number, or 0"),
                ("kv_layout", "NDH", "NHD or HND"),
                ("backend", "fa3", "auto or one of cuda, triton, cpu, reference"),
            )
        ),
        Bad("block_sparse_prefill", {"sinks": torch.zeros(3)}, ShapeError, "sinks has length 3", "4 as in the query"),
        Bad("block_sparse_prefill", {"mask": torch.ones(1)}, DTypeError, "mask is float32", "uint8"),
        Bad("block_sparse_prefill", {"q": dims(..., slice(32))}, ShapeError, "k has head_dim 64", "32 as in q"),
        Bad(
            "block_sparse_prefill", {"k": dims(slice(90)), "v": dims(slice(90))}, ShapeError, "k has 90 tokens", "whole"
        ),
        Bad("block_sparse_prefill", {"v": dims(slice(80))}, ShapeError, "v has dimension 0 80", "96 as in k"),
        Bad("block_sparse_prefill", {"k": to(torch.bfloat16)}, DTypeError, "the keys are bfloat16 and the val", "one"),
        Bad("block_sparse_prefill", {"q": leaf}, GradientError, "q requires grad", "inference"),
        Bad("block_sparse_prefill", {"plan": but_last}, PlanError, "plan has 7 tensors", "the 8 of PrefillPlan"),
        Bad(
            "block_sparse_prefill", {"plan": replan(num_kv_heads=1)}, PlanError, "the plan was made for num_kv_he", "a"
        ),
        Bad(
            "block_sparse_prefill",
            {"plan": replan(max_pages=0, page_size=1)},
            PlanError,
            "the plan is for ragged KV",
            "one with a page for each block column",
        ),
        Bad(
            "block_sparse_prefill",
            {"plan": replan(causal=True)},
            PlanError,
            "the plan was made for causal attention and causal is False",
            "causal=True",
        ),
        Bad("block_sparse_prefill", {"q": longer(0, ROWS)}, CapacityError, f"q has {ROWS} query rows", "at most 26843"),
        Bad(
            "block_sparse_prefill",
            {"k": longer(0, TOKENS), "v": longer(0, TOKENS)},
            CapacityError,
            f"k has {TOKENS} tokens",
            "at most 2146435072",
        ),
        Bad(
            "block_sparse_table", {"row_indptr": one_column}, ShapeError, "row_indptr has entries 1", "3 as in block_m"
        ),
        Bad(
            "block_sparse_table", {"col_indptr": one_column}, ShapeError, "col_indptr has entries 1", "4 as in block_m"
        ),
        Bad("block_sparse_table", {"col_indptr": twice}, ShapeError, "col_indptr has maps 2", "1 as in block_mask"),
        Bad("block_sparse_table", {"page_size": 0}, OptionError, "page_size is 0", "at least 1"),
        Bad("block_sparse_table", {"max_pages": -1}, OptionError, "max_pages is -1", "at least 0"),
        # merging
        Bad("merge_state", {"v_b": dims(..., slice(8))}, ShapeError, "v_b is [5, 4, 8] float32", "[5, 4, 64] float32"),
        Bad("merge_state", {"v_b": to(torch.float16)}, ShapeError, "v_b is [5, 4, 64] float16", "[5, 4, 64] float32"),
        Bad("merge_state", {"s_a": one}, ShapeError, "s_a is [1, 4]", "[5, 4], the shape of v_a less head_dim"),
        Bad("merge_state", {"v_a": leaf}, GradientError, "v_a requires grad", "inference"),
        Bad("merge_state", {"s_b": leaf}, GradientError, "s_b requires grad", "inference"),
        Bad("merge_states", {"s": dims(slice(None), slice(2))}, ShapeError, "s is [5, 2, 4]", "[5, 3, 4]"),
        Bad("merge_states", {"v": leaf}, GradientError, "v requires grad", "inference"),
        Bad("merge_states", {"s": leaf}, GradientError, "s requires grad", "inference"),
        Bad("merge_state_in_place", {"s": to(torch.float16)}, DTypeError, "s is float16", "float32"),
        Bad(
            "merge_state_in_place",
            {"mask": torch.ones(3, dtype=torch.bool)},
            ShapeError,
            "mask has rows 3",
            "5 as in v",
        ),
        Bad("merge_state_in_place", {"mask": torch.ones(5)}, DTypeError, "mask is float32", "bool or uint8"),
        Bad("merge_state_in_place", {"v": leaf}, GradientError, "v requires grad", "inference"),
        Bad("merge_state_in_place", {"s_other": leaf}, GradientError, "s_other requires grad", "inference"),
        Bad("merge_states_varlen", {"v": leaf}, GradientError, "v requires grad", "inference"),
        Bad("merge_states_varlen", {"s": leaf}, GradientError, "s requires grad", "inference"),
        # page tables and bits
        Bad("batch_indices_positions", {"nnz": -1}, OptionError, "nnz is -1", "at least 0"),
        Bad("batch_indices_positions", {"seq_lens": one}, ShapeError, "seq_lens has length 1", "3 as in append_indptr"),
        Bad("seq_lens", {"page_size": 0}, OptionError, "page_size is 0", "at least 1"),
        Bad("seq_lens", {"kv_last_page_len": one}, ShapeError, "kv_last_page_len has length 1", "2 as in kv_indptr"),
        Bad("page_table", {"page_size": 0}, OptionError, "page_size is 0", "at least 1"),
        Bad("page_table", {"page_size": 2**30}, OptionError, "a request of 2 pages of page_size 1073741824", "at most"),
        Bad("page_table", {"page_size": 2**62}, OptionError, f"page_size is {2**62}", "at most 2147483647"),
        Bad("seq_lens", {"page_size": 2**32 + 16}, OptionError, f"page_size is {2**32 + 16}", "at most 2147483647"),
        Bad("batch_indices_positions", {"nnz": 2**40}, OptionError, f"nnz is {2**40}", "at most 2147483647"),
        Bad("page_table", {"seq_lens": one}, ShapeError, "seq_lens has length 1", "2 as in block_tables"),
        Bad("packbits", {"bitorder": "huge"}, OptionError, "bitorder is huge", "big or little"),
        Bad("segment_packbits", {"num_bytes": -1}, OptionError, "num_bytes is -1", "at least 0"),
    ]
    return bad


BAD = [*_rows(), *_options(), *_plans(), *_fields(), *_empty_offsets(), *_others()]
