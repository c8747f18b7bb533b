"""Reading arguments: dtypes by name, two names for one argument, positional leftovers, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_ops.errors import ArgumentError, DTypeError, OptionError, ShapeError, UnsupportedError, fail
from attn_ops.frontend.unsupported import REFUSED
from attn_ops.ops.backends import BACKENDS
from attn_ops.ops.options import FP8, LAYOUTS, POS_ENCODINGS

DType = str | torch.dtype


def as_dtype(where: str, name: str, value: DType) -> torch.dtype:
    """``"float16"``, ``"torch.float16"`` or the dtype itself."""
    found = value if isinstance(value, torch.dtype) else getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        fail(DTypeError, where, f"{name} is {value!r}", "a torch.dtype or its name", f"pass {name}=torch.float16")
    return found


class DTypes:
    """dtypes of query, KV and output, from the four arguments that name them.

    ``data_type`` is that of the KV, and of the query too unless it is FP8 or ``q_data_type`` names another
    (docs/flashinfer.md). The output is as the query unless ``o_data_type`` is given.
    """

    def __init__(
        self,
        where: str,
        q_data_type: DType | None,
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
    ) -> None:
        default = torch.float16 if q_data_type is None else as_dtype(where, "q_data_type", q_data_type)
        both = None if data_type is None else as_dtype(where, "data_type", data_type)
        unsaid = default == torch.float16 and both is not None and both not in FP8
        self.q = both if unsaid and both is not None else default
        if self.q in FP8:
            fail(
                UnsupportedError,
                where,
                f"q_data_type is {str(self.q).removeprefix('torch.')}",
                "float16, bfloat16 or float32",
                "convert the query, times its scale",
            )
        kv = kv_data_type if kv_data_type is not None else both
        self.kv = self.q if kv is None else as_dtype(where, "kv_data_type", kv)
        self.o = self.q if o_data_type is None else output_dtype(where, "o_data_type", o_data_type)


def output_dtype(where: str, name: str, value: DType) -> torch.dtype:
    dtype = as_dtype(where, name, value)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        fail(
            UnsupportedError,
            where,
            f"{name} is {str(dtype).removeprefix('torch.')}",
            "float16, bfloat16 or float32",
            "quantise the output afterwards",
        )
    return dtype


def renamed(where: str, old_name: str, old: Any, new_name: str, new: Any, absent: Any = None) -> Any:
    """The value of an argument that has an old and a new name, ``absent`` where neither is given."""
    if old is None:
        return new
    if new is not absent and new is not None:
        fail(ArgumentError, where, f"{old_name} and {new_name} are both given", "one, they are the same", "drop one")
    return old


def required(where: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is None:
            fail(ArgumentError, where, f"{name} is missing", "a value", f"pass {name}")


def ranked(where: str, name: str, t: Tensor, dims: str) -> None:
    """``t`` has as many dimensions as ``dims`` names, such as ``"[rows, heads, head_dim]"``."""
    if t.dim() != dims.count(",") + 1:
        fail(ShapeError, where, f"{name} is {list(t.shape)}", dims, f"reshape {name}")


def positive(where: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            fail(OptionError, where, f"{name} is {size}", "1 or more", "change it")


def positional(where: str, names: Sequence[str], args: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """``given``, the named values, completed with those of ``names`` that came by position in ``args``."""
    if len(args) > len(names):
        fail(
            ArgumentError,
            where,
            f"{len(args)} arguments follow the KV cache by position",
            f"at most {len(names)}, {', '.join(names)}",
            "pass the others by name",
        )
    values = list(given)
    for i, value in enumerate(args):
        if values[i] is not None:
            fail(ArgumentError, where, f"{names[i]} is given twice", "one value", "drop the positional one")
        values[i] = value
    return values


def refuse(where: str, **arguments: Any) -> None:
    """Raise for an argument of :data:`~attn_ops.frontend.unsupported.REFUSED` that would change the result."""
    for name, value in arguments.items():
        if value is None:
            continue
        neutral, reason = REFUSED[name]
        if isinstance(value, Tensor) or not any(value == none for none in neutral):
            shown = "given" if isinstance(value, Tensor | tuple | list) else f"{value!r}"
            raise UnsupportedError(f"{where}: {name} is {shown}, which is not supported: {reason}")


def own_backend(name: str) -> str:
    """A backend of this library by its name; names of other libraries' backends mean no choice here."""
    return name if any(backend.name == name for backend in BACKENDS) else "auto"


def layout(where: str, kv_layout: str) -> str:
    if kv_layout not in LAYOUTS:
        fail(OptionError, where, f"kv_layout is {kv_layout!r}", "NHD or HND", "pass one of the two")
    return kv_layout


def attention_options(
    where: str,
    *,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
) -> dict[str, Any]:
    """The options of an attention op under its names, with their defaults."""
    if pos_encoding_mode not in POS_ENCODINGS:
        fail(
            OptionError,
            where,
            f"pos_encoding_mode is {pos_encoding_mode!r}",
            ", ".join(POS_ENCODINGS),
            "pass one of the three",
        )
    for name, value, ok, expected in (
        ("window_left", window_left, window_left >= -1, "0 or more tokens, or -1 for no window"),
        ("logits_soft_cap", logits_soft_cap, not logits_soft_cap or logits_soft_cap > 0, "more than 0, or 0 for none"),
        ("sm_scale", sm_scale, sm_scale is None or sm_scale > 0, "more than 0, or None for the default"),
        ("rope_scale", rope_scale, rope_scale is None or rope_scale > 0, "more than 0, or None for 1"),
        ("rope_theta", rope_theta, rope_theta is None or rope_theta > 0, "more than 0, or None for 10000"),
    ):
        if not ok:
            fail(OptionError, where, f"{name} is {value}", expected, "change it")
    return {
        "sm_scale": sm_scale,
        "logits_soft_cap": float(logits_soft_cap or 0.0),
        "window_left": window_left,
        "pos_encoding": pos_encoding_mode,
        "rope_scale": 1.0 if rope_scale is None else rope_scale,
        "rope_theta": 1e4 if rope_theta is None else rope_theta,
    }
