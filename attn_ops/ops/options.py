"""The options of the attention ops: name, type, default and bounds of each, once.

The schemas, the checks, the kernels and the FlashInfer frontend all read this module. A new option is a field of
:class:`AttentionOptions`, an entry of :data:`OP_OPTIONS` for each op that has it, a bound, and its meaning in the
kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.argument_checks import flags, integers
from attn_ops.errors import OptionError, dtype_name, fail

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""dtypes that attention computes in."""

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
"""FP8 dtypes of keys, values and outputs."""


LOG2E = math.log2(math.e)
"""A factor that converts natural logits and LSEs to base 2."""


class AttentionOptions(NamedTuple):
    """Options under their names in the schemas.

    sm_scale         multiplies the logits; None for ``1 / sqrt(head_dim_qk)``
    logits_soft_cap  ``cap * tanh(logits / cap)``; 0 for no cap
    window_left      keys before the query's position that it sees, -1 for all
    sinks            float32 ``[num_qo_heads]``: a natural-log logit with value 0 in each row's denominator
    kv_scale         float32 ``[2]``: the scales of FP8 keys and values
    pos_encoding     one of :data:`POS_ENCODINGS`, applied to queries and keys as they are read
    rope_scale       divides positions
    rope_theta       the base of RoPE's frequencies
    causal           a row sees the keys up to its own position, bottom-right aligned
    window_right     keys after the query's position that it sees, -1 for all; no effect with ``causal``
    mask             uint8 ``[bytes]``: the packed custom mask of all requests, which replaces ``causal``
    out_dtype        dtype of the output, None for the query's; an FP8 output is saturated
    """

    sm_scale: float | None = None
    logits_soft_cap: float = 0.0
    window_left: int = -1
    sinks: Tensor | None = None
    kv_scale: Tensor | None = None
    pos_encoding: str = "NONE"
    rope_scale: float = 1.0
    rope_theta: float = 10000.0
    causal: bool = False
    window_right: int = -1
    mask: Tensor | None = None
    out_dtype: torch.dtype | None = None

    def given(self) -> tuple[str, ...]:
        """Names of the options that are not at their defaults."""
        return tuple(
            name
            for name, value, default in zip(self._fields, self, DEFAULTS, strict=True)
            if isinstance(value, Tensor) or value != default
        )

    def keywords(self, op: str) -> dict[str, Any]:
        """The options of ``op`` as its keyword arguments, without those at their defaults."""
        taken = OP_OPTIONS[op]
        return {
            name: value
            for name, value, default in zip(self._fields, self, DEFAULTS, strict=True)
            if value is not default and name in taken
        }


DEFAULTS = AttentionOptions()

POS_ENCODINGS = ("NONE", "ROPE_LLAMA", "ALIBI")

_SOFTMAX = ("sm_scale", "logits_soft_cap", "window_left", "sinks", "kv_scale")
_POSITIONS = ("pos_encoding", "rope_scale", "rope_theta")
_PREFILL = (*_SOFTMAX, *_POSITIONS, "causal", "window_right", "mask", "out_dtype")

OP_OPTIONS: dict[str, tuple[str, ...]] = {
    "batch_decode": (*_SOFTMAX, *_POSITIONS, "out_dtype"),
    "batch_prefill": _PREFILL,
    "ragged_prefill": _PREFILL,
    "single_prefill": _PREFILL,
    "block_sparse_prefill": ("sm_scale", "logits_soft_cap", "sinks", "kv_scale", "causal", "mask", "out_dtype"),
    "batch_mla": (*_SOFTMAX, "causal", "out_dtype"),
}
"""The options of each attention op, in the order of its schema."""

MAX_WINDOW = (1 << 30) - 1
"""The largest ``window_left`` and ``window_right``: positions are int32, and so are sums of a position and a window."""

MIN_SCALAR, MAX_SCALAR, _RANGE = 2.0**-126, 2.0**126, "2^-126 to 2^126"
"""Range of positive scalars: kernels compute with them, their inverses and their products with log2(e) in float32."""

MLA_DIMS, MLA_SCALE_DIM = (512, 64), 128 + 64
"""Widths of the latent and the rotary part of the MLA head that has a CUDA kernel and a default scale, and the width of
its keys before absorption, which gives the scale."""

MLA_HEAD_DIMS = (sum(MLA_DIMS), MLA_DIMS[0])
"""``(head_dim_qk, head_dim_vo)`` of the MLA head."""


def saturate(out: Tensor, dtype: torch.dtype) -> Tensor:
    """``out`` in another dtype. A number beyond the range of an FP8 dtype becomes the largest number of that dtype.

    PyTorch does not saturate every FP8 dtype: in float8_e5m2 such a number becomes infinite.
    """
    return out.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype) if dtype in FP8 else out.to(dtype)


def softmax_scale(sm_scale: float | None, head_dim: int) -> float:
    """The factor of the logits of queries and keys with ``head_dim`` elements: ``sm_scale``, or its default."""
    return 1 / math.sqrt(head_dim) if sm_scale is None else sm_scale


def mla_scale(sm_scale: float | None) -> float:
    """The factor of the logits of MLA: ``sm_scale``, or the default for keys before absorption."""
    return softmax_scale(sm_scale, MLA_SCALE_DIM)


class Bound(NamedTuple):
    """The values that a scalar option takes, and their description in error messages."""

    holds: Callable[[Any], bool]
    expected: str
    integer: bool = False

    def checked(self, where: str, name: str, value: Any) -> Any:
        """``value``, checked. An int of a float option becomes a float: the dispatcher converts only 64-bit ints."""
        if type(value) is int:
            value = value if self.integer else float(value)
        elif self.integer:
            (value,) = integers(where, **{name: value})
        if not self.holds(value):
            fail(OptionError, where, f"{name} is {self._shown(value)}", self.expected, "change it")
        return value

    def _shown(self, value: Any) -> str:
        """``value`` as messages show it: a symbol of a graph as its number."""
        if isinstance(value, torch.dtype):
            return dtype_name(value)
        if not isinstance(value, str):
            value = int(value) if self.integer else float(value)
        return f"{value!r}"


def _positive(value: float) -> bool:
    return MIN_SCALAR <= value <= MAX_SCALAR


_WINDOW = Bound(
    lambda value: -1 <= value <= MAX_WINDOW,
    f"0 or more tokens, at most {MAX_WINDOW}, or -1 for no window",
    integer=True,
)


BOUNDS: dict[str, Bound] = {
    "sm_scale": Bound(
        lambda value: value is None or _positive(value), f"a positive number, or None for the default ({_RANGE})"
    ),
    "logits_soft_cap": Bound(
        lambda value: value == 0 or _positive(value), f"a positive number, or 0 for no cap ({_RANGE})"
    ),
    "window_left": _WINDOW,
    "window_right": _WINDOW,
    "pos_encoding": Bound(lambda value: value in POS_ENCODINGS, ", ".join(POS_ENCODINGS)),
    "rope_scale": Bound(_positive, f"a positive number ({_RANGE})"),
    "rope_theta": Bound(_positive, f"a positive number ({_RANGE})"),
    "out_dtype": Bound(
        lambda value: value is None or value in (*FLOATS, *FP8),
        f"{', '.join(map(dtype_name, (*FLOATS, *FP8)))}, or None for that of q",
    ),
}
"""The bounds of the scalar options that do not take every value of their type."""


def bounded(where: str, options: AttentionOptions, suffix: str = "", **names: str) -> AttentionOptions:
    """``options``, each checked against its bound. ``names`` are the caller's names of options, without ``suffix``."""
    for name, value, default in zip(options._fields, options, DEFAULTS, strict=True):
        if value is default:
            continue
        if name == "causal":
            flags(where, **{names.get(name, name) + suffix: value})
        elif name in BOUNDS:
            checked = BOUNDS[name].checked(where, names.get(name, name) + suffix, value)
            if checked is not value:
                options = options._replace(**{name: checked})
    return options


_SCHEMA_OF_ANNOTATION = {
    "float | None": "float?", "float": "float", "int": "int", "str": "str", "bool": "bool", "Tensor | None": "Tensor?",
    "torch.dtype | None": "ScalarType?",
}  # fmt: skip


def options_schema(op: str) -> str:
    """The options of ``op`` as its schema lists them, such as ``"float? sm_scale=None, int window_left=-1"``."""

    def argument(name: str) -> str:
        default = getattr(DEFAULTS, name)
        shown = f'"{default}"' if isinstance(default, str) else default
        annotation = AttentionOptions.__annotations__[name]  # a ForwardRef, since annotations are strings here
        return f"{_SCHEMA_OF_ANNOTATION[annotation.__forward_arg__]} {name}={shown}"

    return ", ".join(map(argument, OP_OPTIONS[op]))


LAYOUTS = {
    "NHD": "[pages, page_size, num_kv_heads, head_dim]",
    "HND": "[pages, num_kv_heads, page_size, head_dim]",
}


class KVDims(NamedTuple):
    """The dimensions of keys and values that count tokens and KV heads. ``head_dim`` is the last."""

    token: int
    head: int


DENSE_DIMS = {"NHD": KVDims(token=0, head=1), "HND": KVDims(token=1, head=0)}
"""Dimensions, by layout, of keys and values ``[tokens, heads, head_dim]``: ragged, or of one request."""

PAGED_DIMS = {layout: KVDims(1 + token, 1 + head) for layout, (token, head) in DENSE_DIMS.items()}
"""Dimensions, by layout, of paged caches, whose first dimension counts pages."""
