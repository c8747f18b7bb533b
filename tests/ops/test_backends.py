"""Which backend runs a call: explained, and never replaced when it was named."""

from __future__ import annotations

import pytest
import torch
from helpers.calls import arguments
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attn_ops
from attn_ops.errors import BackendError, OptionError
from attn_ops.ops import backends
from attn_ops.ops.backends import Backend, Problem
from attn_ops.ops.schemas import SCHEMAS

PROBLEM = Problem(op="batch_decode", device=torch.device("cpu"))


def _backend(name: str, *unsupported_reasons: str) -> Backend:
    return Backend(name, f"no.such.module.{name}", lambda _: list(unsupported_reasons))


@pytest.fixture
def backend_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that object, two that do not."""
    table = (_backend("a", "too small", "too old"), _backend("b"), _backend("c", "too wide"), _backend("d"))
    monkeypatch.setattr(backends, "BACKENDS", table)
    backends.choose.cache_clear()
    yield
    backends.choose.cache_clear()


@pytest.mark.usefixtures("backend_table")
def test_auto_takes_the_first_without_objections() -> None:
    assert backends.choose(PROBLEM).name == "b"


@pytest.mark.usefixtures("backend_table")
def test_a_named_backend_is_taken_or_refused() -> None:
    assert backends.choose(PROBLEM, "d").name == "d"
    with pytest.raises(BackendError, match=r"batch_decode: no backend runs this problem \(c: too wide\)"):
        backends.choose(PROBLEM, "c")


@pytest.mark.usefixtures("backend_table")
def test_explain_has_a_line_a_backend() -> None:
    assert backends.explain(PROBLEM).splitlines() == [
        "a: too small, too old",
        "b: runs it",
        "c: too wide",
        "d: can run it",
    ]


def test_all_objections_are_given_when_none_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "BACKENDS", (_backend("a", "too small"), _backend("c", "too wide")))
    backends.choose.cache_clear()
    with pytest.raises(BackendError, match=r"\(a: too small; c: too wide\)"):
        backends.choose(PROBLEM)
    backends.choose.cache_clear()


@pytest.mark.parametrize("op", SCHEMAS)
def test_explain_every_op(op: str) -> None:
    """On the CPU the reference runs everything, and says so; triton says why it does not."""
    *triton, reference = attn_ops.explain(op, **arguments(op)).splitlines()
    assert reference == "reference: runs it"
    assert triton[-1].startswith("triton: ")
    assert all("it runs on cuda, not cpu" in line for line in triton)


def test_explain_checks_the_call_and_does_not_run_it() -> None:
    kwargs = arguments("append_kv")
    before = kwargs["k_cache"].clone()
    attn_ops.explain("append_kv", **kwargs)
    assert torch.equal(kwargs["k_cache"], before)
    with pytest.raises(attn_ops.errors.ShapeError, match="append_kv: k has rank 2"):
        attn_ops.explain("append_kv", **kwargs | {"k": kwargs["k"][0]})


@pytest.mark.parametrize("op", SCHEMAS)
@pytest.mark.parametrize(
    ("backend", "error", "text"),
    [
        ("triton", BackendError, r"{op}: no backend runs this problem \(.*triton: .*it runs on cuda, not cpu.*\); .+"),
        ("flash", OptionError, r"{op}: backend is flash; expected auto or one of triton, reference; .+"),
    ],
)
def test_a_forced_backend_never_falls_back(op: str, backend: str, error: type[Exception], text: str) -> None:
    """Neither in eager mode nor in the fake implementation, with the same words."""
    real = arguments(op)
    with pytest.raises(error, match=text.format(op=op)) as eager:
        getattr(torch.ops.attn, op)(**real, backend=backend)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, real)
        with pytest.raises(error) as traced:
            getattr(torch.ops.attn, op)(**fake, backend=backend)
    assert str(traced.value) == str(eager.value)


@pytest.mark.parametrize("op", SCHEMAS)
def test_the_reference_can_be_forced(op: str) -> None:
    getattr(torch.ops.attn, op)(**arguments(op), backend="reference")
