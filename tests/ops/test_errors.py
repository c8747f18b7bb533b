"""Wrong calls of ops: a typed error, the same message eager, fake and compiled, and nothing is written."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.bad_calls import BAD, Bad
from helpers.calls import arguments, observed, written
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from attn_ops.errors import AttnOpsError
from attn_ops.ops.schemas import SCHEMAS

each_bad = pytest.mark.parametrize("bad", BAD, ids=str)


def _message(bad: Bad) -> str:
    with pytest.raises(AttnOpsError) as raised:
        getattr(torch.ops.attn, bad.op)(**bad.arguments())
    return str(raised.value)


@each_bad
def test_eager_error_is_typed_and_nothing_is_written(bad: Bad) -> None:
    kwargs = bad.arguments()
    targets = [t for t in written(bad.op, kwargs) if not t.is_meta]
    before = [t.detach().clone() for t in targets]
    what, expected = re.escape(bad.what), re.escape(bad.expected)
    message = rf"^{bad.op}: {what}[^;]*; expected {expected}[^;]*; \w[^;]+$"
    with pytest.raises(bad.error, match=message) as raised:
        getattr(torch.ops.attn, bad.op)(**kwargs)
    assert type(raised.value) is bad.error
    for t, old in zip(targets, before, strict=True):
        torch.testing.assert_close(t.detach(), old, rtol=0, atol=0, equal_nan=True)


@each_bad
def test_fake_error_has_the_same_message(bad: Bad) -> None:
    kwargs = bad.arguments()
    with FakeTensorMode() as mode:
        fake = pytree.tree_map_only(Tensor, mode.from_tensor, kwargs)
        with pytest.raises(bad.error) as traced:
            getattr(torch.ops.attn, bad.op)(**fake)
    assert str(traced.value) == _message(bad)


COMPILED = {(bad.op, bad.error, bad.what.split()[0]): bad for bad in BAD}
"""One of each op, error and argument. A graph makes the error in the same code as the fake tensors of the test above,
and passes it on by its type."""


@pytest.mark.parametrize("bad", COMPILED.values(), ids=str)
def test_compiled_error_has_the_same_message(bad: Bad) -> None:
    torch._dynamo.reset()
    kwargs, op = bad.arguments(), getattr(torch.ops.attn, bad.op)
    names = [name for name, value in kwargs.items() if isinstance(value, Tensor | tuple | list)]
    constants = {name: value for name, value in kwargs.items() if name not in names}

    def call(inputs: dict[str, Any]) -> object:
        return op(**inputs, **constants)

    with pytest.raises(Exception, match=re.escape(_message(bad))):
        torch.compile(call, fullgraph=True, backend="eager")({name: kwargs[name] for name in names})


@pytest.mark.parametrize("op", SCHEMAS)
def test_the_calls_that_the_table_changes_are_valid(op: str) -> None:
    kwargs = arguments(op)
    results = observed(op, kwargs, getattr(torch.ops.attn, op)(**kwargs))
    assert results
    assert not any(t.isnan().any() for t in results)
