"""The typed functions over the ops: current, of the ops' signatures, results, errors and graph nodes."""

from __future__ import annotations

import inspect
import pydoc
import typing
from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers.calls import arguments, observed, schema
from helpers.tracing import GraphRecorder
from torch import Tensor, nn

import attn_ops
from attn_ops import errors
from attn_ops.ops import functions
from attn_ops.ops.schemas import SCHEMAS


def function(op: str) -> Any:
    return getattr(attn_ops.ops, op)


def test_the_module_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change: python docs/_ext/op_functions.py."""
    monkeypatch.syspath_prepend("docs/_ext")
    import op_functions

    assert op_functions.FILE.read_text(encoding="utf-8") == op_functions.source()


def test_every_op_has_a_function() -> None:
    assert sorted(attn_ops.ops.__all__) == sorted(SCHEMAS)
    assert all(function(op) is getattr(functions, op) for op in SCHEMAS)


PYTHON = {"Tensor": Tensor, "float": float, "int": int, "SymInt": int, "bool": bool, "str": str}


@pytest.mark.parametrize("op", SCHEMAS)
def test_signatures_are_those_of_the_schemas(op: str) -> None:
    parameters = inspect.signature(function(op)).parameters
    hints = typing.get_type_hints(function(op))
    assert list(parameters) == [a.name for a in schema(op).arguments]
    for argument, parameter in zip(schema(op).arguments, parameters.values(), strict=True):
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        assert parameter.kind == kinds[argument.kwarg_only]
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        assert parameter.default == default
        kind = str(argument.real_type)
        if kind in PYTHON:
            assert hints[argument.name] is PYTHON[kind]
        else:
            assert (type(None) in typing.get_args(hints[argument.name])) == kind.startswith("Optional")
    returned = {0: type(None), 1: Tensor}.get(len(schema(op).returns))
    assert hints["return"] == (returned or tuple[(Tensor,) * len(schema(op).returns)])


@pytest.mark.parametrize("op", SCHEMAS)
def test_help(op: str) -> None:
    shown = pydoc.plain(pydoc.render_doc(function(op)))
    for argument in schema(op).arguments:
        assert f"{argument.name}: " in shown
    assert getattr(torch.ops.attn, op).__doc__ == function(op).__doc__
    assert "Args:" in function(op).__doc__
    assert ("Returns:" in function(op).__doc__) == bool(schema(op).returns)


@pytest.mark.parametrize("op", SCHEMAS)
def test_results_are_those_of_the_op(op: str) -> None:
    given = arguments(op)
    same = deepcopy(given)
    results = observed(op, given, function(op)(**given)), observed(op, same, getattr(torch.ops.attn, op)(**same))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


WRONG: dict[str, tuple[Any, str]] = {
    "Tensor": ([1.0], "of type list; expected a tensor"),
    "Optional[Tensor]": ([1.0], "of type list; expected a tensor or None"),
    "List[Tensor]": (3, "3, of type int; expected a list of tensors"),
    "float": ("a", "'a', of type str; expected a number"),
    "Optional[float]": ("a", "'a', of type str; expected a number or None"),
    "int": ("a", "'a', of type str; expected an integer"),
    "SymInt": ("a", "'a', of type str; expected an integer"),
    "bool": ("a", "'a', of type str; expected True or False"),
    "str": (3, "3, of type int; expected a string"),
    "Optional[ScalarType]": ("half", "'half', of type str; expected a torch.dtype or None"),
}

ARGUMENTS = [(op, a.name, str(a.real_type)) for op in SCHEMAS for a in schema(op).arguments]


@pytest.mark.parametrize(("op", "name", "kind"), ARGUMENTS)
def test_wrong_types_name_the_argument(op: str, name: str, kind: str) -> None:
    value, message = WRONG[kind]
    with pytest.raises(errors.ArgumentError) as raised:
        function(op)(**{**arguments(op), name: value})
    assert str(raised.value).startswith(f"{op}: {name} is {message}")


def test_a_planner_is_not_a_plan() -> None:
    planner = attn_ops.DecodePlanner(1, 1, page_size=8, num_qo_heads=1, num_kv_heads=1, head_dim=16)
    q, cache = torch.zeros(1, 1, 16), torch.zeros(1, 8, 1, 16)
    with pytest.raises(errors.ArgumentError, match=r"plan is of type .*Planner; .*; pass what its plan\(\) returns"):
        attn_ops.ops.batch_decode(q, cache, cache, planner, planner.workspace)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", SCHEMAS)
def test_missing_arguments(op: str) -> None:
    with pytest.raises(TypeError, match="missing"):
        function(op)()


def test_values_are_checked_by_the_op() -> None:
    with pytest.raises(errors.OptionError, match="batch_decode: window_left is -7; expected 0 or more tokens"):
        attn_ops.ops.batch_decode(**{**arguments("batch_decode"), "window_left": -7})


class Call(nn.Module):
    def __init__(self, op: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.op, self.options = op, options

    def forward(self, tensors: dict[str, Any]) -> Any:
        return function(self.op)(**tensors, **self.options)


@pytest.mark.parametrize("op", SCHEMAS)
def test_graphs_contain_the_op(op: str) -> None:
    given = arguments(op)
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor | list | tuple)}
    call = Call(op, {name: x for name, x in given.items() if name not in tensors})
    recorder = GraphRecorder()
    with torch.no_grad():
        torch._dynamo.reset()
        torch.compile(call, fullgraph=True, backend=recorder)(tensors)
        assert recorder.ops == [op]
        for strict in (False, True):
            graph = torch.export.export(call, (tensors,), strict=strict).graph
            assert [str(n.target) for n in graph.nodes if str(n.target).startswith("attn.")] == [f"attn.{op}.default"]
