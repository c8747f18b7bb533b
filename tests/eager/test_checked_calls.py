"""Calls of an op on the CPU: a repetition is not checked again, and any other call is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import fake_driver as f
from helpers.cases import DECODE_BASE, PREFILL_BASE
from helpers.harness import Setup
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from attn_ops.eager.checked_call import CHECKED_CALLS, CheckedCalls, call_op
from attn_ops.errors import AttnOpsError, GradientError

pytestmark = [f.needs_the_module, pytest.mark.usefixtures("poisoned_memory")]


class Op:
    """An op with checked calls, which counts the checks and returns its arguments."""

    def __init__(self) -> None:
        self.checks, self.calls = 0, CheckedCalls("op", self._check)

    def _check(self, *_: Any) -> Any:
        self.checks += 1
        return lambda *args, **kwargs: (args, kwargs)

    def is_checked(self, *args: Any, **kwargs: Any) -> bool:
        """Make the call; whether it was checked."""
        before = self.checks
        found, options = self.calls.op(*args, **kwargs)
        assert all(a is b for a, b in zip(found, args, strict=True))
        assert options == kwargs
        return self.checks > before


def test_what_a_check_reads_is_the_key() -> None:
    op, t = Op(), torch.zeros(4, 6)
    plan = [torch.zeros(3), torch.zeros(2)]
    assert op.is_checked(t, plan, causal=True)
    assert not op.is_checked(t, plan, causal=True)
    assert not op.is_checked(t.clone(), [x.clone() for x in plan], causal=True)
    for other in (t[:3], t[:, :5], t.T, t.double(), t.int(), t.bool(), torch.zeros(4, 6, 1), t.half(), t.bfloat16()):
        assert op.is_checked(other, plan, causal=True)
    for changed in ([plan[0]], plan[::-1], [plan[0], plan[1].int()], [plan[0], torch.zeros(4)[::2]], tuple(plan)):
        assert op.is_checked(t, changed, causal=True)
    for options in (
        {},
        {"other": True},
        {"causal": 1},
        {"causal": False},
        {"causal": True, "scale": 1.0},
        {"causal": None},
    ):
        assert op.is_checked(t, plan, **options)


def test_gradients_are_part_of_the_key_where_they_are_recorded() -> None:
    op, t = Op(), torch.zeros(4)
    needs = torch.zeros(4, requires_grad=True)
    assert op.is_checked(t)
    assert op.is_checked(needs)
    with torch.no_grad():
        assert op.is_checked(needs)
        assert not op.is_checked(t)
        assert op.is_checked([needs])
        assert not op.is_checked([t])


def test_calls_without_a_key_are_checked() -> None:
    op = Op()
    for x in (torch.zeros(2, device="meta"), torch.zeros(2).to_sparse()):
        for _ in range(2):
            assert op.is_checked(x)
    assert not op.calls._entries


def test_a_refused_call_is_refused_again() -> None:
    def refuse(*_: Any) -> Any:
        raise AttnOpsError("no")

    calls = CheckedCalls("op", refuse)
    for _ in range(2):
        with pytest.raises(AttnOpsError, match="no"):
            calls.op(torch.zeros(1))
    assert not calls._entries


def test_entries_are_bounded() -> None:
    op = Op()
    op.calls._entries.limit = 3
    for n in range(10):
        assert op.is_checked(torch.zeros(n))
        assert len(op.calls._entries) <= 3


@pytest.mark.parametrize("kind", ["decode", "prefill", "ragged"])
def test_errors_after_calls_that_passed(kind: str) -> None:
    """The message is that of a call that no other preceded."""
    setup = Setup(kind, DECODE_BASE if kind == "decode" else PREFILL_BASE)
    for _ in range(2):
        setup.check(*setup.run("auto"))
    arguments = setup.arguments
    k = "k" if kind == "ragged" else "k_cache"
    plan = list(arguments["plan"])
    bad: list[dict[str, Any]] = [
        {"q": arguments["q"].double()},
        {"q": arguments["q"][:, :, ::2]},
        {"q": arguments["q"][:, :3]},
        {"q": arguments["q"].clone().requires_grad_()},
        {k: arguments[k].double()},
        {k: arguments[k][..., :5]},
        {"kv_layout": "HDN"},
        {"sm_scale": -1.0},
        {"window_left": -2},
        {"sinks": torch.zeros(3)},
        {"workspace": arguments["workspace"].double()},
        {"plan": plan[:-1]},
        {"plan": [*plan[:3], plan[3].long(), *plan[4:]]},
        {"plan": [*plan[:1], plan[1][1:], *plan[2:]]},
        {"plan": plan[::-1]},
    ]
    op = {"decode": "batch_decode", "prefill": "batch_prefill", "ragged": "ragged_prefill"}[kind]
    for wrong in bad:
        errors = []
        for forget in (False, True):
            if forget:
                CHECKED_CALLS[op].clear()
            with pytest.raises(AttnOpsError) as raised:
                setup.run("auto", **wrong)
            errors.append((type(raised.value), str(raised.value)))
            setup.check(*setup.run("auto"))
        assert errors[0] == errors[1]


def test_a_query_that_requires_grad_after_a_call_without_grad_mode() -> None:
    setup = Setup("decode", DECODE_BASE)
    q = setup.q.clone().requires_grad_()
    with torch.no_grad():
        for _ in range(2):
            setup.check(*setup.run("auto", q=q))
    with torch.enable_grad(), pytest.raises(GradientError, match="q requires grad"):
        setup.run("auto", q=q)


def test_autocast_does_not_reach_into_a_checked_call() -> None:
    setup = Setup("prefill", PREFILL_BASE)
    expected = setup.run("auto")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(setup.run("auto"), expected, rtol=0, atol=0)
    torch.testing.assert_close(setup.run("auto"), expected, rtol=0, atol=0)


def _decode() -> tuple[Setup, tuple[Any, ...]]:
    setup = Setup("decode", DECODE_BASE)
    return setup, (setup.q, setup.k, setup.v, setup.planner.state, setup.planner.workspace)


def test_calls_of_the_frontend_pass_the_dispatcher_only_where_something_must_observe_the_op() -> None:
    setup, args = _decode()
    calls, seen = CHECKED_CALLS["batch_decode"], []

    class Observe(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(op)
            return op(*args, **(kwargs or {}))

    op = torch.ops.attn.batch_decode.default
    for _ in range(2):
        setup.check(*call_op("batch_decode", *args, return_lse=True))
    with Observe():
        setup.check(*call_op("batch_decode", *args, return_lse=True))
    assert op in seen
    assert calls._entries
    out, _ = make_fx(lambda q: call_op("batch_decode", q, *args[1:]))(args[0])(args[0])
    assert torch.equal(out, call_op("batch_decode", *args)[0])
    graph = make_fx(lambda q: call_op("batch_decode", q, *args[1:]))(args[0])
    assert op in [node.target for node in graph.graph.nodes]
    with torch.profiler.profile() as profile:
        call_op("batch_decode", *args)
    assert "attn::batch_decode" in [event.name for event in profile.events()]


def test_options_of_direct_calls_are_converted_as_the_dispatcher_does() -> None:
    _, args = _decode()
    for options in ({"sm_scale": 1}, {"sm_scale": True}, {"logits_soft_cap": 2}, {"window_left": True}):
        for _ in range(2):
            expected = torch.ops.attn.batch_decode(*args, **options)
            assert all(map(torch.equal, call_op("batch_decode", *args, **options), expected))
    with pytest.raises(RuntimeError, match="sm_scale"):
        call_op("batch_decode", *args, sm_scale="1")
    with pytest.raises(GradientError):
        call_op("batch_decode", args[0].requires_grad_(), *args[1:])
    with torch.no_grad():
        call_op("batch_decode", *args)
