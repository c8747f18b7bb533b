"""What random calls of public functions and wrappers share: buffers, options under their names, the check."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from helpers.fuzz.batch import Batch, Shape, tolerance
from helpers.fuzz.draw import Call, Draw, tensors_of
from helpers.fuzz.oracle import Options
from helpers.oracle import Expected

Arguments = dict[str, Any]


def draw_workspace(d: Draw, *, fixed_split: bool = False) -> Tensor:
    offset, size = d.pick(0, 0, 1), 1 << 20
    if d.device == "cuda":
        size = 1 << 27
    elif fixed_split:
        size = 1 << 25
    return torch.full((size + offset,), 255, dtype=torch.uint8, device=d.device)[offset:]


def draw_cache(d: Draw, batch: Batch, kv_layout: str | None = None) -> Any:
    """A tuple, a list, or one tensor of 5 dimensions."""
    form = d.pick("tuple", "list", "stacked")
    if form == "stacked" and batch.shape.dims[0] == batch.shape.dims[1]:
        return batch.stacked(kv_layout)
    return batch.caches(kv_layout) if form == "tuple" else list(batch.caches(kv_layout))


def common_options(o: Options) -> Arguments:
    """Options under the names of the wrappers and single functions."""
    given: Arguments = {"pos_encoding_mode": o.pos_encoding, "window_left": o.window_left, "sm_scale": o.sm_scale}
    given["logits_soft_cap"] = o.soft_cap or None
    if o.pos_encoding == "ROPE_LLAMA":
        given |= {"rope_scale": o.rope_scale, "rope_theta": o.rope_theta}
    if o.window_right >= 0:  # only prefill has it
        given["window_right"] = o.window_right
    return given


def draw_scales(d: Draw, shape: Shape, *names: str) -> Arguments:
    if d.chance(0.7) and not shape.is_fp8:
        return {}
    return {name: d.pick(0.5, 1.0, 2.0) for name in names}


def draw_mask(d: Draw, batch: Batch) -> Arguments:
    if d.chance(0.7):
        return {}
    flat = batch.draw_masks()
    return {"custom_mask": flat} if d.chance(0.5) else {"packed_custom_mask": batch.packed_masks()}


def public_call(
    d: Draw,
    name: str,
    shape: Shape,
    o: Options,
    expected: Callable[[], Expected],
    run: Callable[[], Any],
    arguments: Any,
    text: str,
    *,
    lse: bool,
    outputs: tuple[Tensor, ...] = (),
    returns: bool = True,
    natural: bool = False,
    dtype: torch.dtype | None = None,
    prepare: Callable[[], Any] | None = None,
    workspace: Tensor | None = None,
    traceable: bool = True,
    rounded: int = 1,
) -> Call:
    """``outputs`` are the caller's buffers; ``rounded`` counts how often the output is rounded to its dtype."""
    tolerated, exact = tolerance(d, shape, o), expected()
    exact.spread *= rounded

    def check(result: Any) -> None:
        out, sums = result if lse else (result, None)
        if not returns:
            assert out is None
            (out,) = outputs
        for buffer, got in zip(outputs, (out, sums), strict=False):
            if returns and not torch.compiler.is_compiling():
                assert got.data_ptr() == buffer.data_ptr() or not buffer.numel()
        assert out.dtype == (dtype or shape.dtype)
        flat = out.reshape(exact.out.shape)
        base_2 = None if sums is None else (sums / math.log(2) if natural else sums).reshape(exact.lse.shape)
        exact.check(flat, base_2, **tolerated)

    writes = [*outputs, *tensors_of(workspace)]
    return Call(name, text, run, check, tensors_of(arguments), writes, prepare, traceable)
