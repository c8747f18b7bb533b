"""Selection: which backend runs a call, what ``explain`` says, and that a named backend is never replaced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.calls import arguments, observed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import attn_ops
from attn_ops.eager.checked_call import CHECKED_CALLS
from attn_ops.errors import BackendError, OptionError
from attn_ops.ops import backends
from attn_ops.ops.backends import Backend, Problem
from attn_ops.ops.schemas import SCHEMAS

PROBLEM = Problem(op="batch_decode", device=torch.device("cpu"))


def _backend(name: str, *unsupported_reasons: str) -> Backend:
    return Backend(name, f"no.such.module.{name}", lambda _: list(unsupported_reasons))


@pytest.fixture
def backend_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two entries with unsupported reasons, two without."""
    table = (_backend("a", "too small", "too old"), _backend("b"), _backend("c", "too wide"), _backend("d"))
    monkeypatch.setattr(backends, "BACKENDS", table)
    backends.choose.cache_clear()
    yield
    backends.choose.cache_clear()


@pytest.mark.usefixtures("backend_table")
def test_auto_takes_the_first_without_unsupported_reasons() -> None:
    assert backends.choose(PROBLEM).name == "b"


@pytest.mark.usefixtures("backend_table")
def test_a_named_backend_is_taken_or_refused() -> None:
    assert backends.choose(PROBLEM, "d").name == "d"
    with pytest.raises(BackendError, match=r"batch_decode: no backend runs this problem \(c: too wide\)"):
        backends.choose(PROBLEM, "c")


@pytest.mark.usefixtures("backend_table")
def test_explain_has_a_line_per_backend() -> None:
    assert backends.explain(PROBLEM).splitlines() == [
        "a: too small, too old",
        "b: runs it",
        "c: too wide",
        "d: can run it",
    ]


def test_graphs_and_packages_take_what_they_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` keeps a backend for eager calls out of graphs; a package has images, if the backend has some."""
    eager = replace(_backend("eager"), eager_only=True, inductor_lowerable=False)
    image = replace(_backend("image"), has_images=True, inductor_lowerable=False)
    monkeypatch.setattr(backends, "BACKENDS", (eager, image, _backend("plain")))
    choose = backends.choose.__wrapped__
    assert choose(PROBLEM).name == choose(PROBLEM, "eager", traced=True).name == "eager"
    assert choose(PROBLEM, traced=True).name == choose(PROBLEM, lowerable=True, images=True).name == "image"
    assert choose(PROBLEM, lowerable=True).name == "plain"
    for images in (False, True):
        with pytest.raises(BackendError, match="eager: Inductor does not generate it"):
            choose(PROBLEM, "eager", lowerable=True, images=images)


def test_all_unsupported_reasons_are_given_when_none_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "BACKENDS", (_backend("a", "too small"), _backend("c", "too wide")))
    backends.choose.cache_clear()
    with pytest.raises(BackendError, match=r"\(a: too small; c: too wide\)"):
        backends.choose(PROBLEM)
    backends.choose.cache_clear()


@pytest.mark.parametrize("op", SCHEMAS)
def test_explain_every_op(op: str) -> None:
    """On the CPU the reference runs every op, but eager ones that have a kernel, and entries for GPUs have reasons."""
    *on_gpus, reference = attn_ops.explain(op, **arguments(op)).splitlines()
    if on_gpus[-1].startswith("cpu."):
        kernel = on_gpus[-1].partition(":")[0].removeprefix("cpu.")
        assert on_gpus.pop() == f"cpu.{kernel}: runs it in eager calls, kernel {kernel}; it reads lengths on the host"
        assert reference == "reference: runs it in compiled graphs and packages"
    else:
        assert reference == "reference: runs it"
    assert sum(line.startswith("triton: ") for line in on_gpus) == 1
    assert all("it runs on cuda, not cpu" in line for line in on_gpus)


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
        ("flash", OptionError, r"{op}: backend is flash; expected auto or one of cuda, triton, cpu, reference; .+"),
    ],
)
def test_a_named_backend_never_falls_back(op: str, backend: str, error: type[Exception], text: str) -> None:
    """Eager and fake calls raise the same message."""
    real = arguments(op)
    with pytest.raises(error, match=text.format(op=op)) as eager:
        getattr(torch.ops.attn, op)(**real, backend=backend)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, real)
        with pytest.raises(error) as traced:
            getattr(torch.ops.attn, op)(**fake, backend=backend)
    assert str(traced.value) == str(eager.value)


@pytest.mark.parametrize("op", SCHEMAS)
def test_a_named_backend_runs_instead_of_the_preferred_one(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` takes an entry here whose module does not exist."""

    def make() -> dict[str, Any]:
        torch.manual_seed(0)
        return arguments(op)

    def call(kwargs: dict[str, Any], **options: str) -> list[Tensor]:
        return observed(op, kwargs, getattr(torch.ops.attn, op)(**kwargs, **options))

    expected, preferred, named = call(make(), backend="reference"), make(), make()
    monkeypatch.setattr(backends, "BACKENDS", (_backend("missing"), *backends.BACKENDS))
    backends.choose.cache_clear()
    CHECKED_CALLS[op].clear()  # a call like an earlier one does not choose again
    try:
        with pytest.raises(ModuleNotFoundError, match="No module named 'no'"):
            call(preferred)
        actual = call(named, backend="reference")
    finally:
        backends.choose.cache_clear()
    assert expected
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
