"""Every public function, wrapper and op with every option, compiled by Inductor on the GPU, equals the eager call."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers.calls import arguments, observed
from helpers.surfaces import SURFACES
from helpers.surfaces.base import Raises, Surface
from torch import Tensor
from torch.utils import _pytree as pytree

from attn_ops.ops.schemas import SCHEMAS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cold")]


def cases() -> list[Any]:
    """Each surface as it is, and with each value of a parameter that has an effect."""
    return [
        pytest.param(surface, stage, name, id=".".join(filter(None, (surface.name, stage, name))))
        for surface in SURFACES
        for stage, name in [
            ("", ""),
            *(
                (stage, name)
                for stage, effects in surface.effects.items()
                for name, value in effects.items()
                if name not in ("args", "kwargs") and not isinstance(value, Raises)
            ),
        ]
    ]


def last_call(surface: Surface, stage: str, name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function or method that gives the result, and its arguments. What precedes it has run."""
    changes = {name: surface.effects[stage][name]} if name else {}
    stages = {key: deepcopy({**base, **(changes if key == stage else {})}) for key, base in surface.stages.items()}
    *before, (last, kwargs) = stages.items()
    if last == "call":
        return surface.make, kwargs
    wrapper = surface.make(**before[0][1])
    for key, given in before[1:]:
        getattr(wrapper, surface.methods.get(key, key))(**given)
    return getattr(wrapper, surface.methods.get(last, last)), kwargs


def results(function: Callable[..., Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """What a call returned, and the buffers that it filled."""
    returned = [t for t in pytree.tree_leaves(function(**kwargs)) if isinstance(t, Tensor)]
    return [*returned, *(kwargs[name] for name in ("out", "lse", "output") if isinstance(kwargs.get(name), Tensor))]


def compare_surface(surface: Surface, stage: str, name: str, backend: str) -> None:
    expected = results(*last_call(surface, stage, name))
    function, kwargs = last_call(surface, stage, name)
    actual = results(torch.compile(lambda **given: function(**given), fullgraph=True, backend=backend), kwargs)
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize(("surface", "stage", "name"), cases())
def test_compiled_equals_eager(surface: Surface, stage: str, name: str) -> None:
    compare_surface(surface, stage, name, "inductor")


ATTENTION = ("batch_decode", "batch_prefill", "ragged_prefill", "single_prefill", "batch_mla")
OPTIONS: dict[str, dict[str, Any]] = {
    "base": {},
    "window": {"causal": True, "window_left": 20},
    "soft cap": {"logits_soft_cap": 5.0},
    "sinks": {"sinks": 1.0},
    "rope": {"pos_encoding": "ROPE_LLAMA"},
    "alibi": {"pos_encoding": "ALIBI"},
    "mask": {"masked": 0.5},
    "fp8": {"kv_dtype": torch.float8_e4m3fn},
    "bf16": {"dtype": torch.bfloat16},
    "HND": {"kv_layout": "HND"},
}
WITHOUT = {
    "batch_decode": {"mask"},
    "batch_mla": {"rope", "alibi", "mask", "HND", "window"},
}
"""Options that an op does not have."""


def op_cases() -> list[Any]:
    return [
        pytest.param(op, changes, id=f"{op}, {option}")
        for op in SCHEMAS
        for option, changes in OPTIONS.items()
        if option == "base" or (op in ATTENTION and option not in WITHOUT.get(op, ()))
    ]


def compare_op(op: str, changes: dict[str, Any], kernels: str, device: str, backend: str) -> None:
    function = getattr(torch.ops.attn, op)
    given = {**arguments(op, **changes), "backend": kernels}

    def copy(t: Any) -> Any:
        """A copy on the device, with the same strides."""
        if not isinstance(t, Tensor):
            return t
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)

    eager, compiled = (pytree.tree_map(copy, given) for _ in range(2))
    expected = observed(op, eager, function(**eager))
    result = torch.compile(lambda **kwargs: function(**kwargs), fullgraph=True, backend=backend)(**compiled)
    for got, want in zip(observed(op, compiled, result), expected, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize(("op", "changes"), op_cases())
def test_compiled_op_equals_eager(op: str, changes: dict[str, Any], kernels: str) -> None:
    compare_op(op, changes, kernels, "cuda", "inductor")
