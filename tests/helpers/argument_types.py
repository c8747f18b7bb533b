"""Values of wrong Python types for every argument of every public callable."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import attn_ops as flashinfer
from attn_ops.policy import NO_EFFECT
from helpers.surfaces import SURFACES, sparse
from helpers.surfaces.base import D, P, Surface
from helpers.wrapper_requests import DEVICE, workspace


def _states(*leading: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(*leading, 4, 64, device=DEVICE), torch.zeros(*leading, 4, device=DEVICE)


PLACES = {
    "batch_indices": torch.zeros(1, dtype=torch.int32, device=DEVICE),
    "positions": torch.zeros(1, dtype=torch.int32, device=DEVICE),
    "kv_indices": D.table[1],
    "kv_indptr": D.table[0],
    "kv_last_page_len": D.table[2],
}
PLANNER = {"page_size": 16, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64, "device": DEVICE}
DECODE_TABLE = dict(zip(("kv_indptr", "kv_indices", "kv_last_page_len"), D.table, strict=True))
PREFILL_TABLE = {
    "qo_indptr": P.qo_indptr,
    **dict(zip(("kv_indptr", "kv_indices", "kv_last_page_len"), P.table, strict=True)),
}
WRAPPED = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace())
DECODE_PLAN = dict(zip(("indptr", "indices", "last_page_len"), D.table, strict=True)) | {
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "page_size": 16,
}

OTHERS = [
    Surface(
        "cuda graph decode",
        flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
        {
            "init": {
                "workspace_buffer": workspace(),
                "indptr_buffer": torch.zeros(5, dtype=torch.int32, device=DEVICE),
                "indices_buffer": torch.zeros(40, dtype=torch.int32, device=DEVICE),
                "last_page_len_buffer": torch.zeros(4, dtype=torch.int32, device=DEVICE),
            },
            "plan": DECODE_PLAN,
        },
    ),
    Surface("fast_decode_plan", flashinfer.fast_decode_plan, {"call": {"self": WRAPPED, **DECODE_PLAN}}),
    Surface(
        "append_paged_kv_cache",
        flashinfer.append_paged_kv_cache,
        {
            "call": {
                "append_key": P.ragged()[0][:1],
                "append_value": P.ragged()[1][:1],
                "paged_kv_cache": D.cache(),
                **PLACES,
            }
        },
    ),
    Surface(
        "append_paged_mla_kv_cache",
        flashinfer.append_paged_mla_kv_cache,
        {
            "call": {
                "append_ckv": torch.zeros(1, 48, device=DEVICE),
                "append_kpe": torch.zeros(1, 16, device=DEVICE),
                "ckv_cache": torch.zeros(40, 16, 48, device=DEVICE),
                "kpe_cache": torch.zeros(40, 16, 16, device=DEVICE),
                **PLACES,
            }
        },
    ),
    Surface(
        "get_batch_indices_positions",
        flashinfer.get_batch_indices_positions,
        {"call": {"append_indptr": P.qo_indptr, "seq_lens": P.seq_lens, "nnz": 46}},
    ),
    Surface(
        "get_seq_lens",
        flashinfer.get_seq_lens,
        {"call": {"kv_indptr": D.table[0], "kv_last_page_len": D.table[2], "page_size": 16}},
    ),
    Surface(
        "merge_state",
        flashinfer.merge_state,
        {"call": dict(zip(("v_a", "s_a", "v_b", "s_b"), (*_states(3), *_states(3)), strict=True))},
    ),
    Surface(
        "merge_state_in_place",
        flashinfer.merge_state_in_place,
        {"call": dict(zip(("v", "s", "v_other", "s_other"), (*_states(3), *_states(3)), strict=True))},
    ),
    Surface("merge_states", flashinfer.merge_states, {"call": dict(zip("vs", _states(3, 2), strict=True))}),
    Surface(
        "variable_length_merge_states",
        flashinfer.variable_length_merge_states,
        {"call": dict(zip("vs", _states(3), strict=True)) | {"indptr": torch.tensor([0, 1, 3], device=DEVICE)}},
    ),
    Surface(
        "convert_bsr_mask_layout",
        flashinfer.convert_bsr_mask_layout,
        {"call": {"mask": D.mask[:12].view(3, 2, 2), "indptr": torch.tensor([0, 2, 3], device=DEVICE)}},
    ),
    Surface("packbits", flashinfer.packbits, {"call": {"x": D.mask}}),
    Surface(
        "segment_packbits",
        flashinfer.segment_packbits,
        {"call": {"x": D.mask, "indptr": torch.tensor([0, 5, 100], device=DEVICE)}},
    ),
    Surface(
        "DecodePlanner",
        flashinfer.DecodePlanner,
        {"init": {"max_batch": 4, "max_pages": 40, **PLANNER}, "check": DECODE_TABLE, "plan": DECODE_TABLE},
    ),
    Surface(
        "PrefillPlanner",
        flashinfer.PrefillPlanner,
        {
            "init": {"max_batch": 4, "max_tokens": 64, "max_pages": 40, **PLANNER},
            "check": PREFILL_TABLE,
            "plan": PREFILL_TABLE,
        },
    ),
    Surface(
        "BlockSparsePlanner",
        flashinfer.BlockSparsePlanner,
        {"init": sparse.MATRIX, "plan": {name: sparse.PLAN[name] for name in ("indptr", "indices")}},
    ),
    Surface(
        "VariableBlockSparsePlanner",
        flashinfer.VariableBlockSparsePlanner,
        {"init": sparse.BLOCKS, "plan": {name: t for name, t in sparse.MAPS.items() if name.startswith("block_")}},
    ),
]
"""Public callables whose arguments are all inputs."""


@dataclass(frozen=True)
class WrongArgument:
    """One argument of a valid call, replaced by a value of a wrong type."""

    surface: Surface
    stage: str
    name: str
    value: Any

    def __str__(self) -> str:
        kind = "meta" if isinstance(self.value, Tensor) and self.value.is_meta else type(self.value).__name__
        return f"{self.surface.name}.{self.stage}.{self.name}={kind}"

    def call(self) -> Any:
        return self.surface.outcome(self.stage, **{self.name: self.value})


TENSORS = (
    None,
    [1, 2],
    (3,),
    np.zeros(3, np.int32),
    "text",
    7,
    2.5,
    object(),
    torch.tensor(1.0, device=DEVICE),
    torch.zeros(3, device=DEVICE),
    torch.zeros(5, dtype=torch.bool, device=DEVICE),
)
NUMBERS = (None, "text", [1], object(), np.zeros(2), torch.zeros(2, device=DEVICE), 1j, float)
STRINGS: tuple[Any, ...] = (None, 7, [], object(), torch.zeros(2, device=DEVICE))
FLAGS = (torch.zeros(2, device=DEVICE), np.zeros(2))


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation names, those of elements too."""
    args = typing.get_args(annotation)
    return {annotation}.union(*map(_kinds, args)) if args else {annotation}


def _wrong(annotation: Any, base: Any) -> Iterator[Any]:
    kinds = _kinds(annotation)
    candidates: tuple[Any, ...] = ()
    if Tensor in kinds:
        candidates = TENSORS
        if isinstance(base, Tensor):
            candidates = (*candidates, base.to("meta"), base.tolist(), base.cpu().numpy(), base[None], base[..., 0])
        if isinstance(base, tuple | list):
            candidates = (*candidates, (base[0],), (base[0], None), (base[0].to("meta"), base[1].to("meta")))
    elif kinds & {int, float}:
        candidates = NUMBERS
    elif str in kinds and torch.device not in kinds:
        candidates = STRINGS
    elif bool in kinds:
        candidates = FLAGS
    for value in candidates:
        fits_number = float in kinds and isinstance(value, int | float | Tensor)
        if not fits_number and not (value is None and type(None) in kinds):
            yield value


def is_listed(surface: Surface, stage: str, name: str) -> bool:
    """Whether an argument is among those without effect, although it may have one in this call."""
    return name in NO_EFFECT or surface.has_no_effect(stage, name)


def parameters(surface: Surface) -> Iterator[tuple[str, str, Any]]:
    """``(stage, name, annotation)`` of the annotated arguments."""
    for stage in surface.stages:
        function: Callable[..., Any] = surface.function(stage)
        if inspect.isclass(function):
            function = function.__init__
        hints = typing.get_type_hints(function)
        for name in inspect.signature(function).parameters:
            if name in hints:
                yield stage, name, hints[name]


def wrong_arguments(surface: Surface) -> Iterator[WrongArgument]:
    for stage, name, annotation in parameters(surface):
        for value in _wrong(annotation, surface.stages[stage].get(name)):
            yield WrongArgument(surface, stage, name, value)


def scalar_arguments(surface: Surface, values: tuple[float, ...]) -> Iterator[WrongArgument]:
    """Each argument that takes a float, replaced by each of ``values``."""
    for stage, name, annotation in parameters(surface):
        if float in _kinds(annotation) and not is_listed(surface, stage, name):
            for value in values:
                yield WrongArgument(surface, stage, name, value)


def whole_numbers(surface: Surface) -> Iterator[tuple[str, str, int]]:
    """``(stage, name, value)`` of the arguments that take an integer and no float, with that of the base call."""
    for stage, name, annotation in parameters(surface):
        kinds = _kinds(annotation)
        alias = name == "head_dim" and "head_dim_qk" in surface.stages[stage]
        if int in kinds and float not in kinds and not alias and not is_listed(surface, stage, name):
            function: Callable[..., Any] = surface.function(stage)
            default = inspect.signature(function).parameters[name].default
            value = surface.stages[stage].get(name, default)
            yield stage, name, value if isinstance(value, int) else 1


def _unlike(surfaces: list[Surface]) -> list[Surface]:
    """The surfaces that have a stage which no earlier surface of the same callable has."""
    seen: set[tuple[Any, str]] = set()
    kept = []
    for surface in surfaces:
        stages = {(surface.make, stage) for stage in surface.stages}
        if not stages <= seen:
            kept.append(surface)
        seen |= stages
    return kept


ALL = _unlike([*SURFACES, *OTHERS])
