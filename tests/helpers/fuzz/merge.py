"""Random valid calls of the merging ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from helpers.fuzz.draw import Call, Draw
from helpers.fuzz.oracle import merge

ops = torch.ops.attn


def states(d: Draw, *leading: int) -> tuple[Tensor, Tensor]:
    """``v [*leading, H, D]`` and ``s [*leading, H]``; states without keys have any value in ``v``."""
    shape = (*leading, d.integer(1, 5), d.pick(8, 16, 64, 72, 128))
    return d.normal(*shape).to(d.pick(torch.float16, torch.bfloat16, torch.float32)), d.normal(*shape[:-1]) * d.pick(
        1, 5, 100
    )


def _some_empty(d: Draw, s: Tensor) -> Tensor:
    if d.chance(0.5):
        s[torch.rand(s.shape, generator=d.generator) < 0.3] = -math.inf
    return s


def close(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Merged values are convex combinations: the error is a few eps of the largest."""
    v, s = got
    eps = torch.finfo(v.dtype).eps
    torch.testing.assert_close(v.double().cpu(), expected[0], rtol=4 * eps, atol=16 * eps)
    torch.testing.assert_close(s.double().cpu(), expected[1], rtol=1e-6, atol=1e-5)


def merge_call(d: Draw, op: str, call: Callable[..., Any]) -> Call:
    """``call`` takes the tensors of ``op`` by position."""
    rows = d.pick(0, 1, 2, 5, 40)
    if op in ("merge_state", "merge_state_in_place"):
        v, s = states(d, rows, 2)
    elif op == "merge_states":
        v, s = states(d, rows, d.pick(0, 1, 2, 5, 33))
    else:
        v, s = states(d, rows)
    s = _some_empty(d, s)
    mask, written = None, list[Tensor]()
    if op == "merge_states_varlen":
        cuts = sorted(d.integer(0, rows) for _ in range(d.pick(0, 1, 4)))
        indptr = torch.tensor([0, *cuts, rows])
        parts = [
            merge(v[None, a:b], s[None, a:b]) for a, b in zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)
        ]
        expected = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
        tensors = [d.place(v, 1), d.place(s, 0), indptr.to(d.device, torch.int32)]
    elif op == "merge_states":
        expected = merge(v, s)
        tensors = [d.place(v, 1), d.place(s, 0)]
    else:
        expected = merge(v, s)
        tensors = [d.place(t, 1) for t in (v[:, 0], s[:, 0], v[:, 1], s[:, 1])]
        if op == "merge_state_in_place":
            written = tensors[:2]
            if d.chance(0.5):
                mask = torch.rand(rows, generator=d.generator) < 0.5
                expected = v[:, 0].double().clone(), s[:, 0].double().clone()
                for old, new in zip(expected, merge(v[mask], s[mask]), strict=True):
                    old[mask] = new
                mask = mask.to(d.device)
    before = [t.clone() for t in written]

    def run() -> Any:
        for t, old in zip(written, before, strict=True):
            t.copy_(old)
        result = call(*tensors, *([] if mask is None else [mask]))
        return tuple(t.clone() for t in written) if written else result

    reads = [*tensors, *([] if mask is None else [mask])]
    text = f"rows={rows}, v={list(v.shape)} {v.dtype}, masked={mask is not None}"
    return Call(op, text, run, lambda got: close(got, expected), reads, written)


def merge_op(op: str) -> Callable[[Draw], Call]:
    def draw(d: Draw) -> Call:
        return merge_call(d, op, lambda *tensors: getattr(ops, op)(*tensors, backend=d.backend))

    return draw
