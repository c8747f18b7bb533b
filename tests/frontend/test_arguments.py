"""No argument is silently ignored: each changes the result, is refused, or is listed as one without effect."""

from __future__ import annotations

import inspect
import operator
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.surfaces import ELSEWHERE, SURFACES
from helpers.surfaces.base import Raises, Surface
from helpers.wrapper_requests import DEVICE

import attn_ops
from attn_ops import errors, exports
from attn_ops.policy import FLASHINFER

NEEDED_IN_GRAPH_MODE = {
    "paged_kv_indptr_buffer",
    "paged_kv_indices_buffer",
    "paged_kv_last_page_len_buffer",
    "qo_indptr_buf",
    "paged_kv_indptr_buf",
    "paged_kv_indices_buf",
    "paged_kv_last_page_len_buf",
    "kv_indptr_buf",
    "qo_indptr",
    "kv_indptr",
    "kv_indices",
    "kv_len_arr",
}
"""Without CUDA-graph mode they have no effect, as documented. In CUDA-graph mode a missing one is an error."""

IN_OTHER_TESTS = {
    "args": "by position: test_prefill, test_decode, test_cascade",
    "kwargs": "those of the base class",
    "qo_indptr_buf_arr": "test_cascade.test_cascade",
    "paged_kv_indptr_buf_arr": "test_cascade.test_cascade",
    "paged_kv_indices_buf_arr": "test_cascade.test_cascade",
    "paged_kv_last_page_len_buf_arr": "test_cascade.test_cascade",
    "custom_mask_buf": "test_prefill.test_cuda_graph_mode",
    "qk_indptr_buf": "another name of mask_indptr_buf: test_wrapper_errors.CASES",
    "return_lse_base_on_e": "test_mla.test_lse_and_buffers",
    "kv_len": "test_mla.test_without_a_plan",
    "token_pos_in_items_len": "test_prefill.test_multi_item_mask",
    "seq_lens": "test_mla.test_plan_from_block_tables",
    "enable_dcp": "test_context_arguments.test_mla",
}


SCRATCH = {
    "float_workspace_buffer": "test_split_kv.test_workspace_size_counts_partial_results",
    "device": "the device of the planner: test_cuda_graph_replays",
}
"""Inputs of the base calls that are memory, not values, and the tests that show their use."""


def inputs() -> list[Any]:
    """The arguments of the base calls, except those that are parameters with an effect."""
    return [
        pytest.param(surface, stage, name, id=f"{surface.name}.{stage}.{name}")
        for surface in SURFACES
        for stage, base in surface.stages.items()
        for name in base
        if name not in surface.effects.get(stage, {}) and name not in SCRATCH
    ]


def another(value: Any) -> Any:
    """A value of the same kind."""
    if isinstance(value, list | tuple):
        return type(value)(map(another, value))
    if isinstance(value, torch.Tensor):
        return value * 0.5 if value.is_floating_point() else value.roll(1, 0)
    if isinstance(value, str):
        return "NONE"
    return object() if value is None else value + 1


def parameters() -> list[Any]:
    cases = []
    seen = set()
    for surface in SURFACES:
        for stage in surface.stages:
            function = surface.function(stage)
            for name in inspect.signature(function).parameters:
                if name == "self" or (name in surface.stages[stage] and name not in surface.effects.get(stage, {})):
                    continue
                if name not in surface.effects.get(stage, {}) and (function, name) in seen:
                    continue
                seen.add((function, name))
                cases.append(pytest.param(surface, stage, name, id=f"{surface.name}.{stage}.{name}"))
    return cases


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    return {}


def of(base: dict[str, Any], surface: Surface) -> Any:
    if surface.name not in base:
        base[surface.name] = surface.outcome()
    return base[surface.name]


TEST = re.compile(r"\b(test_\w+)(?:\.(test_\w+))?")
"""A test that a table names."""

ROUNDING = {"disable_split_kv"}
"""Arguments that change the order of sums."""

FLAGS = {"is_causal", "causal_d"}
"""Arguments that are flags also where they have no effect."""


def same(a: Any, b: Any, rounding: bool = False) -> bool:
    if isinstance(a, tuple) or isinstance(b, tuple):
        both = isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b)
        return both and all(same(*pair, rounding) for pair in zip(a, b, strict=True))
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not rounding:
        return torch.equal(a, b)
    tolerance = 8 * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("surface", "stage", "name"), parameters())
def test_a_parameter_has_an_effect_or_is_listed(surface: Surface, stage: str, name: str, base: dict[str, Any]) -> None:
    effect = surface.effects.get(stage, {}).get(name)
    if effect is not None:
        if isinstance(effect, Raises):
            with pytest.raises(errors.AttnOpsError):
                surface.outcome(stage, **{name: effect.value})
            return
        result = surface.outcome(stage, **{name: effect})
        if isinstance(effect, torch.Tensor) and name in ("out", "lse", "output"):
            assert effect.abs().sum() > 0, f"{name} is not filled"
        else:
            assert not same(result, of(base, surface)), f"{name} changes nothing"
    elif surface.has_no_effect(stage, name) or name in FLASHINFER.no_effect:
        result = surface.outcome(stage, **{name: True if name in FLAGS else object()})
        assert same(result, of(base, surface), name in ROUNDING), f"{name} is not ignored"
    elif name in FLASHINFER.unsupported:
        with pytest.raises(errors.UnsupportedError, match=name):
            surface.outcome(stage, **{name: torch.ones(1, device=DEVICE)})
    elif name in NEEDED_IN_GRAPH_MODE:
        with pytest.raises(errors.ArgumentError, match="is missing; expected a buffer"):
            surface.outcome(stage, use_cuda_graph=True)
    else:
        assert name in IN_OTHER_TESTS, f"{name} has no entry: does it change the result, or is it refused or ignored?"


@pytest.mark.parametrize(("surface", "stage", "name"), inputs())
def test_an_input_has_an_effect(surface: Surface, stage: str, name: str, base: dict[str, Any]) -> None:
    try:
        result = surface.outcome(stage, **{name: another(surface.stages[stage][name])})
    except errors.AttnOpsError:
        return
    assert name in FLASHINFER.no_effect or not same(result, of(base, surface)), f"{name} changes nothing"


def test_every_public_name_is_tested() -> None:
    assert {surface.make.__name__ for surface in SURFACES} | set(ELSEWHERE) == set(exports.HOMES)


def test_the_tests_that_tables_name_exist() -> None:
    """``test_file`` or ``test_file.test_function``, of this folder."""
    folder = Path(__file__).parent
    named = [
        name
        for text in (*IN_OTHER_TESTS.values(), *SCRATCH.values(), *ELSEWHERE.values())
        for name in TEST.findall(text)
    ]
    assert len(named) > 20
    for file, function in named:
        assert (f"def {function}(" if function else "def test_") in (folder / f"{file}.py").read_text(
            encoding="utf-8"
        ), (file, function)


def test_tables_do_not_overlap() -> None:
    assert not FLASHINFER.no_effect.keys() & FLASHINFER.unsupported.keys()
    assert all(reason for reason in FLASHINFER.no_effect.values())
    assert all(reason for reasons in FLASHINFER.no_effect_in.values() for reason in reasons.values())
    assert all(reason for _, reason in FLASHINFER.unsupported.values())


@pytest.mark.parametrize("function", FLASHINFER.no_effect_in)
def test_arguments_without_effect_in_one_function_are_its_parameters(function: str) -> None:
    parameters_of = inspect.signature(operator.attrgetter(function)(attn_ops)).parameters
    assert FLASHINFER.no_effect_in[function].keys() <= parameters_of.keys()
