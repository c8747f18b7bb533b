"""Differentiation through the ops is an error, by whichever of PyTorch's ways. What is detached may pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.wrapper_requests import DEVICE, Requests, workspace
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import attn_ops
from attn_ops.errors import GradientError
from attn_ops.flash_attn import flash_attn_func

Q = torch.randn(5, 4, 64, device=DEVICE)
K = torch.randn(9, 2, 64, device=DEVICE)
R = Requests(dtype=torch.float32)
WRAPPER = attn_ops.BatchDecodeWithPagedKVCacheWrapper(workspace())
WRAPPER.plan(*R.table, *R.sizes, q_data_type=torch.float32)

CALLS: dict[str, tuple[Tensor, str, Callable[[Tensor], Any]]] = {
    "op": (Q, "q", lambda q: torch.ops.attn.single_prefill(q, K, K)[0]),
    "overload": (Q, "q", lambda q: torch.ops.attn.single_prefill.default(q, K, K)[0]),
    "by name": (Q, "k", lambda k: torch.ops.attn.single_prefill(q=Q, k=k[:, :2], v=K[:5])[0]),
    "merge": (Q, "v_a", lambda v: torch.ops.attn.merge_state(v, Q[..., 0].contiguous(), Q, Q[..., 0].contiguous())[0]),
    "function": (Q, "q", lambda q: attn_ops.single_prefill_with_kv_cache(q, K, K)),
    "flash": (Q, "q", lambda q: flash_attn_func(q[None], K[None], K[None])),
    "wrapper": (R.q, "q", lambda q: WRAPPER.run(q, R.cache())),
}

each_call = pytest.mark.parametrize("call", CALLS)


def jvp(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.jvp(call, (x,), (torch.ones_like(x),))[1]


def grad(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: call(x).sum())(x)


def dual(call: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


BACKWARD: dict[str, Any] = {"grad": grad, "vjp": torch.func.vjp, "jacrev": lambda call, x: torch.func.jacrev(call)(x)}
FORWARD: dict[str, Any] = {"jvp": jvp, "jacfwd": lambda call, x: torch.func.jacfwd(call)(x), "dual": dual}


@each_call
@pytest.mark.parametrize("way", [*BACKWARD, *FORWARD])
def test_no_derivatives(call: str, way: str) -> None:
    x, name, function = CALLS[call]
    message = f"{name} requires grad; .* or" if way in BACKWARD else f"{name} has a tangent; .*;"
    for _ in range(2):
        with pytest.raises(GradientError, match=f"{message} detach {name}"):
            (BACKWARD | FORWARD)[way](function, x)
        function(x)  # a repetition of it is not taken for that of a call with gradients


@each_call
@pytest.mark.parametrize("way", [*BACKWARD, *FORWARD])
def test_detached_inputs_pass(call: str, way: str) -> None:
    x, _, function = CALLS[call]
    expected = function(x)

    def of_detached(x: Tensor) -> Tensor:
        out = function(x.detach())
        assert torch.equal(out.detach() - expected, torch.zeros_like(expected))
        return x.sum() + out.sum()

    (BACKWARD | FORWARD)[way](of_detached, x)


@each_call
def test_tangents_are_refused_without_grad_mode_and_gradients_are_not(call: str) -> None:
    x, name, function = CALLS[call]
    without_grad = torch.no_grad()(function)
    with pytest.raises(GradientError, match=f"{name} has a tangent"):
        dual(without_grad, x)
    assert torch.equal(grad(lambda x: x.sum() + without_grad(x), x), torch.full_like(x, without_grad(x).numel()))


@each_call
def test_other_inputs_in_a_transform_pass(call: str) -> None:
    """A constant of the function that is differentiated."""
    x, _, function = CALLS[call]
    expected = function(x)
    assert torch.equal(grad(lambda y: y * function(x), torch.ones_like(expected)), expected)
    with forward_ad.dual_level():
        assert torch.equal(function(x), expected)


@pytest.mark.parametrize("way", ["grad", "jvp"])
def test_no_derivatives_in_graphs(way: str) -> None:
    x, name, function = CALLS["op"]
    derivative = lambda x: (BACKWARD | FORWARD)[way](function, x)  # noqa: E731
    with pytest.raises(GradientError, match=f"{name} requires grad|{name} has a tangent"):
        make_fx(derivative)(x)
    with pytest.raises(Exception, match=f"{name} requires grad|{name} has a tangent"):
        torch.compile(derivative, backend="aot_eager", fullgraph=True)(x)


def test_a_tangent_of_an_output_buffer_is_refused() -> None:
    """The op would not update it."""
    out = torch.empty_like(R.q)
    with forward_ad.dual_level():
        dual_out = forward_ad.make_dual(out, torch.ones_like(out))
        with pytest.raises(GradientError, match=r"BatchDecodeWithPagedKVCacheWrapper\.run: out has a tangent"):
            WRAPPER.run(R.q, R.cache(), out=dual_out)
