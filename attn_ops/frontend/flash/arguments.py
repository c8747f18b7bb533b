"""Reading FlashAttention's arguments: windows, scales, options and refusals."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.argument_checks import check_has_dimensions, check_real, integers, optional_flags
from attn_ops.eager.interposition import is_traced
from attn_ops.errors import ArgumentError, ArgumentTypeError, OptionError, ShapeError, fail, shape_of
from attn_ops.frontend.arguments import as_sinks, renamed
from attn_ops.frontend.arguments import refuse as refuse_unsupported
from attn_ops.frontend.scales import Scale, ScaleFactors, positive_number
from attn_ops.ops.options import BOUNDS, FP8, AttentionOptions, bounded
from attn_ops.plan.page_table import offsets, seen
from attn_ops.plan.state import INT32_MAX
from attn_ops.policy import FLASH_ATTENTION
from attn_ops.symbolic_sizes import agree, any_zero, guard_or_false

WindowSize = tuple[int | None, int | None] | list[int | None] | Tensor

_BY_NAME = "pass arguments in FlashAttention 3's order by name: by position they are those of FlashAttention 2"


def refuse(where: str, **arguments: Any) -> None:
    """Raise for an argument that would change the result, and for a ``dropout_p`` of None."""
    if arguments.get("dropout_p", 0.0) is None:
        fail(ArgumentTypeError, where, "dropout_p is None", "0.0", _BY_NAME)
    refuse_unsupported(where, FLASH_ATTENTION, **arguments)


def chunk_of(where: str, attention_chunk: int) -> int:
    """Keys of a chunk, 0 for no chunks."""
    (attention_chunk,) = integers(where, attention_chunk=attention_chunk)
    if not 0 <= attention_chunk <= INT32_MAX:
        fail(OptionError, where, f"attention_chunk is {int(attention_chunk)}", f"0 to {INT32_MAX}", "change it")
    return attention_chunk


class Window(NamedTuple):
    """FlashAttention's window as options of the ops: a right side of 0 is ``causal``."""

    causal: bool
    window_left: int
    window_right: int


def window(where: str, window_size: WindowSize, causal: bool) -> Window:
    """``window_size (left, right)``, inclusive, -1 or None for no limit. ``causal`` limits the right side to 0.

    Outside traced code the pair may be a tensor of integers on the host.
    """
    optional_flags(where, causal=causal)
    if isinstance(window_size, Tensor) and _is_pair_on_host(window_size):
        window_size = window_size.tolist()
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        unread = isinstance(window_size, Tensor) and is_traced()
        shown = "a tensor of a traced call" if unread else f"{window_size!r}"
        fail(
            ArgumentError,
            where,
            f"window_size is {shown}",
            "a pair (left, right) of tokens, each -1 for no limit",
            "pass such a pair",
        )
    sides = [
        -1 if side is None else BOUNDS[name].checked(where, f"window_size[{i}]", side)
        for i, (side, name) in enumerate(zip(window_size, ("window_left", "window_right"), strict=True))
    ]
    causal = causal or sides[1] == 0
    return Window(causal, sides[0], -1 if causal else sides[1])


def _is_pair_on_host(window_size: Tensor) -> bool:
    """Whether ``window_size`` is a pair of integers that can be read: on the host, outside of traced code."""
    integers = window_size.dtype in (torch.int32, torch.int64)
    return integers and window_size.shape == (2,) and window_size.is_cpu and not is_traced()


def options(
    where: str,
    q: Tensor,
    *,
    qv: Tensor | None = None,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    s_aux: Tensor | None,
    learnable_sink: Tensor | None = None,
) -> AttentionOptions:
    """FlashAttention's options as those of the ops, checked. ``learnable_sink`` is another name of ``s_aux``.

    ``qv``: the latent query of MLA, whose width counts in the default scale.
    """
    if isinstance(softmax_scale, bool):
        fail(ArgumentError, where, f"softmax_scale is {softmax_scale}", "a number or None", _BY_NAME)
    sinks = renamed(where, "learnable_sink", learnable_sink, "s_aux", s_aux)
    if sinks is not None:
        sinks = as_sinks(where, sinks, q.device, "s_aux" if learnable_sink is None else "learnable_sink")
    if qv is not None and softmax_scale is None:
        check_has_dimensions(where, q=q, qv=qv)
        width = q.shape[-1] + qv.shape[-1]
        softmax_scale = width**-0.5 if width else None
    sides = window(where, window_size, causal)
    given = AttentionOptions(
        sm_scale=softmax_scale,
        logits_soft_cap=softcap,
        window_left=sides.window_left,
        sinks=sinks,
        causal=sides.causal,
        window_right=sides.window_right,
    )
    return bounded(where, given, sm_scale="softmax_scale", logits_soft_cap="softcap")


class Descales(NamedTuple):
    """Scales of FP8 tensors: a number, a tensor of one element, which may be expanded, or ``[batch, num_kv_heads]``.

    Scales of 16-bit and float32 tensors are ignored, as in FlashAttention 3.
    """

    q_descale: Scale
    k_descale: Scale
    v_descale: Scale

    def of_rows(
        self, where: str, q: Tensor, k: Tensor, requests: int, cu_seqlens_q: Tensor | None = None
    ) -> ScaleFactors:
        """Factors for ``q``. A scale per request and KV head becomes a scale per query row and query head.

        Args:
            q: ``[rows, num_heads, head_dim]``.
            k: ``[..., num_kv_heads, head_dim]``, of the dtype of the values.
            cu_seqlens_q: int ``[requests + 1]``; None if all requests have equal numbers of rows.
        """
        scales = [scale if t.dtype in FP8 else None for scale, t in zip(self, (q, k, k), strict=True)]
        if not any(scale is not None for scale in scales):
            return _NO_FACTORS
        (rows, num_heads, _), num_kv_heads = q.shape, k.shape[-2]
        factors: dict[str, Scale] = {}
        for name, scale in zip(self._fields, scales, strict=True):
            if isinstance(scale, Tensor) and _is_one_value(scale):
                scale = scale[(0,) * scale.dim()]
            elif isinstance(scale, Tensor) and not agree(scale.shape, (requests, num_kv_heads)):
                expected = f"one value, or {shape_of([requests, num_kv_heads])}: one per request and KV head"
                fail(ShapeError, where, f"{name} is {shape_of(scale)}", expected, "correct it")
            _check_positive(where, name, scale)
            factors[name] = scale
            if not isinstance(scale, Tensor) or scale.dim() == 0:
                continue
            by_head = scale.to(q.device, torch.float32).repeat_interleave(num_heads // max(1, num_kv_heads), 1)
            if by_head.shape[1] != num_heads:  # the op refuses these heads
                factors[name] = None
            elif cu_seqlens_q is None:
                factors[name] = by_head.repeat_interleave(rows // max(1, requests), 0)
            else:
                begins = offsets(where, "cu_seqlens_q", cu_seqlens_q, requests, "q", rows).to(q.device)
                row = torch.arange(rows, device=q.device)
                factors[name] = by_head[(torch.searchsorted(begins, row, right=True) - 1).clamp(0, requests - 1)]
        values = {"v_descale": factors.pop("v_descale")}
        return ScaleFactors(factors, values)


_NO_FACTORS = ScaleFactors()


def _check_positive(where: str, name: str, scale: Scale) -> None:
    """Raise unless the number, or contents that are :func:`~attn_ops.plan.page_table.seen`, are positive."""
    if isinstance(scale, Tensor):
        check_real(where, name, scale)
        numbers = scale.flatten().tolist() if seen(scale) else []
    else:
        numbers = [] if scale is None else [scale]
    for number in numbers:
        positive_number(where, name, number)


def _is_one_value(scale: Tensor) -> bool:
    sizes = zip(scale.shape, scale.stride(), strict=True)
    return not any_zero(*scale.shape) and all(stride == 0 or guard_or_false(size == 1) for size, stride in sizes)
