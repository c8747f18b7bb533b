"""Reading FlashInfer's arguments: dtypes by name, aliases, positional arguments, options, refusals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from attn_ops.argument_checks import check_strided, integers
from attn_ops.eager.interposition import check_no_grad
from attn_ops.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    DTypeError,
    OptionError,
    ShapeError,
    UnsupportedError,
    dtype_name,
    fail,
    shape_of,
    unsupported,
)
from attn_ops.ops.backends import BACKENDS
from attn_ops.ops.options import DEFAULTS, FLOATS, FP8, LAYOUTS, MAX_SCALAR, AttentionOptions, bounded
from attn_ops.plan.page_table import seen
from attn_ops.plan.state import INT32_MAX
from attn_ops.policy import FLASHINFER, Policy
from attn_ops.symbolic_sizes import holds

DType = str | torch.dtype

T = TypeVar("T")


def as_dtype(where: str, name: str, value: DType) -> torch.dtype:
    """``"float16"``, ``"torch.float16"`` or the dtype itself."""
    found = value if isinstance(value, torch.dtype) else getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        fail(DTypeError, where, f"{name} is {value!r}", "a torch.dtype or its name", f"pass {name}=torch.float16")
    return found


class DTypes(NamedTuple):
    """The dtypes of query, keys and values, and output."""

    q: torch.dtype
    kv: torch.dtype
    o: torch.dtype

    @classmethod
    def of(
        cls,
        where: str,
        q_data_type: DType | None,
        kv_data_type: DType | None = None,
        o_data_type: DType | None = None,
        data_type: DType | None = None,
    ) -> DTypes:
        """The dtypes that these arguments of plan() name.

        ``data_type`` is that of the KV, and of the query too unless it is FP8 or ``q_data_type`` names another
        (docs/flashinfer.md). The output is as the query unless ``o_data_type`` is given.
        """
        named = torch.float16 if q_data_type is None else input_dtype(where, "q_data_type", q_data_type)
        both = None if data_type is None else input_dtype(where, "data_type", data_type)
        # float16 is the default of q_data_type, and data_type takes its place.
        q = named if both is None or both in FP8 or named != torch.float16 else both
        of_kv = kv_data_type if kv_data_type is not None else both
        kv = q if of_kv is None else input_dtype(where, "kv_data_type", of_kv)
        return cls(q, kv, q if o_data_type is None else output_dtype(where, "o_data_type", o_data_type))


def computed_dtype(q: torch.dtype, kv: torch.dtype) -> torch.dtype:
    """The dtype of a query in the op. An FP8 query is converted to the cache's dtype, or to float16 for an FP8 cache.

    The conversion is exact.
    """
    if q not in FP8:
        return q
    return torch.float16 if kv in FP8 else kv


_COMPUTED = "float16, bfloat16, float32, float8_e4m3fn or float8_e5m2"


def input_dtype(where: str, name: str, value: DType) -> torch.dtype:
    """``value`` as a dtype of queries, keys and values."""
    dtype = as_dtype(where, name, value)
    if dtype not in (*FLOATS, *FP8):
        fail(DTypeError, where, f"{name} is {dtype_name(dtype)}", _COMPUTED, "convert the tensor")
    return dtype


def output_dtype(where: str, name: str, value: DType) -> torch.dtype:
    """``value`` as a dtype of outputs."""
    if value == "nvfp4":  # FlashInfer's name; PyTorch has no such dtype
        unsupported(where, f"{name} is 'nvfp4'", FLASHINFER.unsupported["o_sf_scale"][1])
    dtype = as_dtype(where, name, value)
    if dtype not in (*FLOATS, *FP8):
        fail(UnsupportedError, where, f"{name} is {dtype_name(dtype)}", _COMPUTED, "convert the output afterwards")
    return dtype


def renamed(
    where: str, old_name: str, old: T | None, new_name: str, new: T | None, absent: T | None = None
) -> T | None:
    """The value of an argument with an old and a new name; ``absent`` is the default of the new one."""
    if old is None:
        return new
    if new is not absent and new is not None:
        fail(ArgumentError, where, f"{old_name} and {new_name} are both given", "one, they are the same", "drop one")
    return old


def check_fp16_reduction(where: str, allow_fp16_qk_reduction: bool | None, use_fp16_qk_reduction: bool) -> None:
    """Raise if a call gives both names of the flag, which has no effect."""
    names = "allow_fp16_qk_reduction", "use_fp16_qk_reduction"
    renamed(where, names[0], allow_fp16_qk_reduction, names[1], use_fp16_qk_reduction, absent=False)


def required(where: str, **arguments: T | None) -> tuple[T, ...]:
    """The values of arguments whose default is None, and which must be given."""
    for name, value in arguments.items():
        if value is None:
            fail(ArgumentTypeError, where, f"{name} is missing", "a value", f"pass {name}")
    return tuple(arguments.values())  # type: ignore[arg-type]


def given_tensor(where: str, name: str, t: Any, device: torch.device) -> Tensor:
    """``t``, checked: a tensor, and not on ``meta`` unless ``device`` is."""
    required(where, **{name: t})
    if not isinstance(t, Tensor):
        fail(ArgumentTypeError, where, f"{name} is of type {type(t).__name__}", "a tensor", f"make a tensor of {name}")
    if t.is_meta and device.type != "meta":
        fail(DeviceError, where, f"{name} is on meta, without contents", f"{device}, where the query is", "move it")
    return t


def ranked(where: str, name: str, t: Tensor, dims: str) -> None:
    """Raise unless ``t`` has as many dimensions as ``dims`` names, such as ``"[rows, heads, head_dim]"``."""
    if t.dim() != dims.count(",") + 1:
        fail(ShapeError, where, f"{name} is {shape_of(t)}", dims, f"reshape {name}")


def positive(where: str, **sizes: int) -> None:
    """Raise unless every size is an integer from 1 to the largest int32."""
    for name, size in sizes.items():
        if type(size) is not int:
            integers(where, **{name: size})
        if not holds(size >= 1):
            fail(OptionError, where, f"{name} is {int(size)}", "at least 1", "change it")
        if type(size) is int and not holds(size <= INT32_MAX):
            fail(OptionError, where, f"{name} is {int(size)}", f"at most {INT32_MAX}, an int32", "change it")


def finite(where: str, name: str, value: float | None) -> None:
    """Raise unless ``value``, a factor in float32 arithmetic, is finite and at most 2^126."""
    if value is not None and not -MAX_SCALAR <= value <= MAX_SCALAR:
        fail(OptionError, where, f"{name} is {value}", "a finite number (at most 2^126)", "change it")


def positional(where: str, names: Sequence[str], args: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """The values of ``names``: ``given`` has those passed by name, ``args`` those passed by position."""
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


def check_dtypes(where: str, query: Tensor, *caches: Tensor) -> None:
    """Check the dtypes of ``query`` and ``kv_cache``: the op's own check has other names for them."""
    names = [dtype_name(t.dtype) for t in (query, *caches)]
    if query.dtype not in FLOATS + FP8:
        fail(DTypeError, where, f"query is {names[0]}", _COMPUTED, "convert it")
    for name, cache in zip(names[1:], caches, strict=True):
        if cache.dtype != caches[0].dtype:
            fail(DTypeError, where, f"kv_cache is {names[1]} and {name}", "one dtype", "convert one of the pair")
        if query.dtype not in FP8 and cache.dtype not in (query.dtype, *FP8):
            expected = f"{names[0]}, float8_e4m3fn or float8_e5m2"
            fail(DTypeError, where, f"kv_cache is {name} and query {names[0]}", expected, "convert one of the two")


def refuse(where: str, policy: Policy = FLASHINFER, /, **arguments: Any) -> None:
    """Raise for an argument of ``policy.unsupported`` that would change the result."""
    for name, value in arguments.items():
        most = policy.negligible.get(name)
        if value is None or (most is not None and isinstance(value, float) and 0 <= value <= most):
            continue
        neutral, reason = policy.unsupported[name]
        # By ==: Dynamo does not find a traced float in a tuple by `in`.
        if isinstance(value, Tensor) or not any(value == none for none in neutral):
            number = float(value) if isinstance(value, float) else value  # a float of a graph may stand for a symbol
            shown = "given" if isinstance(value, Tensor | tuple | list) else f"{number!r}"
            unsupported(where, f"{name} is {shown}", reason)


def refuse_with(where: str, other: str, reason: str, /, **arguments: Any) -> None:
    """Raise for an argument that a call with ``other`` does not take; None is left out."""
    for name, value in arguments.items():
        if value is not None:
            unsupported(where, f"{name} is given with {other}", f"{reason}; leave out {name}")


def as_sinks(where: str, sinks: Any, device: torch.device, name: str = "sinks") -> Tensor | None:
    """float32 ``[num_qo_heads]`` on ``device``, from that shape, ``[num_kv_heads, group]``, or a list of one tensor."""
    if sinks is None:
        return None
    if isinstance(sinks, list | tuple):
        if len(sinks) != 1:
            fail(ArgumentError, where, f"{name} has {len(sinks)} tensors", "one", "pass one float32 [num_qo_heads]")
        sinks = sinks[0]
    if not isinstance(sinks, Tensor):
        fail(ArgumentError, where, f"{name} is {sinks!r}", "a float32 tensor [num_qo_heads]", "pass such a tensor")
    given_tensor(where, name, sinks, device)
    check_strided(where, name, sinks)
    check_no_grad(where, **{name: sinks})
    if sinks.dim() == 2:
        sinks = sinks.flatten()
    if sinks.is_complex():
        fail(DTypeError, where, f"{name} is {dtype_name(sinks.dtype)}", "float32", "convert it")
    if seen(sinks) and not bool((sinks.float() < math.inf).all()):
        fail(OptionError, where, f"{name} has a NaN or an infinity", "logits, or -inf for no sink", "correct it")
    return sinks.to(device, torch.float32).contiguous()


def own_backend(name: str) -> str:
    """``name`` if it is a backend of this library, else ``"auto"``: FlashInfer's backends are other kernels."""
    return name if any(backend.name == name for backend in BACKENDS) else "auto"


def layout(where: str, kv_layout: str) -> str:
    if kv_layout not in LAYOUTS:
        fail(OptionError, where, f"kv_layout is {kv_layout!r}", "NHD or HND", "pass one of the two")
    return kv_layout


def attention_options(
    where: str,
    *,
    pos_encoding_mode: str = DEFAULTS.pos_encoding,
    window_left: int = DEFAULTS.window_left,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    causal: bool = DEFAULTS.causal,
    window_right: int = DEFAULTS.window_right,
    suffix: str = "",
) -> AttentionOptions:
    """FlashInfer's options as those of the ops, checked; None means the default.

    ``suffix`` ends the names that the caller calls them by.
    """
    options = AttentionOptions(
        sm_scale=sm_scale,
        logits_soft_cap=float(logits_soft_cap or DEFAULTS.logits_soft_cap),
        window_left=window_left,
        pos_encoding=pos_encoding_mode,
        rope_scale=DEFAULTS.rope_scale if rope_scale is None else rope_scale,
        rope_theta=DEFAULTS.rope_theta if rope_theta is None else rope_theta,
        causal=causal,
        window_right=window_right,
    )
    return bounded(where, options, suffix, pos_encoding="pos_encoding_mode")
