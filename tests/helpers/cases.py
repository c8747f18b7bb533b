"""The table of attention problems that every backend is tested on.

A case differs from the base in one axis, or, if it is sampled, in all of them at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """One batch. ``kv_lens`` and ``qo_lens`` are in tokens; ``qo_lens`` is ``()`` for decode.

    ``padding`` counts query rows that belong to no request, ``spare_batch`` requests that the plan's capacity exceeds
    the batch and those rows by. ``sinks`` is their standard deviation, 0 for none. ``kv_dtype`` None is the dtype of
    the query. ``masked`` is the share of keys that a custom mask lets a row see, or a name of :data:`.masks.SHAPES`.
    ``planner`` holds planner arguments.
    """

    name: str
    kv_lens: tuple[int, ...] = (37, 0, 130, 1)
    qo_lens: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (64, 64)
    page_size: int = 16
    kv_layout: str = "NHD"
    storage: str = "pair"
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    logits_soft_cap: float = 0.0
    sm_scale: float | None = None
    sinks: float = 0.0
    padding: int = 0
    spare_batch: int = 0
    kv_dtype: torch.dtype | None = None
    kv_scale: tuple[float, float] | None = None
    pos_encoding: str = "NONE"
    rope: tuple[float, float] = (1.0, 1e4)  # scale, theta
    masked: float | str | None = None
    out_dtype: torch.dtype | None = None
    planner: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.name


HEAD_DIMS = ((16, 16), (80, 80), (96, 96), (128, 128), (192, 128), (64, 128), (256, 256), (512, 512))

COMMON: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.float16, torch.bfloat16),
    "heads": ((1, 1), (4, 4), (10, 2), (7, 1), (16, 2), (16, 1)),
    "head_dims": HEAD_DIMS,
    "kv_layout": ("HND",),
    "storage": ("fused", "padded"),
    "window_left": (0, 1, 33, 1000),
    "logits_soft_cap": (5.0,),
    "sm_scale": (0.01, 0.3, 30.0),
    "sinks": (1.0, 100.0),
    "out_dtype": (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16),
    "padding": (3,),
    "spare_batch": (5,),
}

PAGES: dict[str, tuple[Any, ...]] = {"page_size": (1, 3, 64, 257)}

DECODE_AXES: dict[str, tuple[Any, ...]] = {
    **COMMON,
    **PAGES,
    "kv_lens": (
        (1,),
        (0, 0),
        (64, 128, 16, 32),
        (63, 65, 127, 129),
        (2, 700, 0, 5, 90, 1),
        tuple(range(20)),
        (0, 0, 40, 0),
    ),
    "planner": ({"num_ctas": 3}, {"num_ctas": 64}),
}

PREFILL_AXES: dict[str, tuple[Any, ...]] = {
    **COMMON,
    "causal": (True,),
    "kv_lens": ((5, 0, 33, 1), (3, 0, 20, 0), (0, 0, 0, 0), (700, 9, 40, 2)),
    "qo_lens": ((1, 1, 1, 1), (0, 0, 0, 0), (100, 3, 7, 0), (37, 2, 130, 1)),
    "planner": ({"tile_rows": 1}, {"tile_rows": 7}, {"tile_rows": 128}),
}

RAGGED_AXES = {axis: values for axis, values in PREFILL_AXES.items() if axis != "storage"} | {"storage": ("padded",)}

DECODE_BASE = Case("base")
PREFILL_BASE = Case("base", qo_lens=(5, 2, 33, 1))


def rounds_in_the_interpreter(case: Any) -> bool:
    """Triton's interpreter rounds to FP8 without a carry into the exponent: 0.499 becomes 0.25."""
    return case.out_dtype is None or case.out_dtype.itemsize > 1


def one_at_a_time(base: Case, axes: dict[str, tuple[Any, ...]]) -> list[Case]:
    cases = [base]
    for axis, values in axes.items():
        cases += [replace(base, name=f"{axis}={_name(value)}", **{axis: value}) for value in values]
    return cases


def sampled(base: Case, axes: dict[str, tuple[Any, ...]], count: int, seed: int = 0) -> list[Case]:
    """Cases whose value of every axis is drawn at random, from the base's and those listed."""
    draw = random.Random(seed)
    cases = []
    for i in range(count):
        chosen = {axis: draw.choice((getattr(base, axis), *values)) for axis, values in axes.items()}
        if chosen["head_dims"][0] != chosen["head_dims"][1] and chosen["storage"] == "fused":
            chosen["storage"] = "padded"
        cases.append(replace(base, name=f"sample{seed}-{i}", **chosen))
    return cases


def _name(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    if isinstance(value, dict):
        return ",".join(f"{key}:{item}" for key, item in value.items())
    return str(value).removeprefix("torch.")


def empty_batches(base: Case) -> list[Case]:
    return [replace(base, name=f"empty,padding={n}", kv_lens=(), qo_lens=(), padding=n) for n in (0, 2)]


def planned(cases: list[Case], **options: Any) -> list[Case]:
    """The same cases with a plan that leaves out the keys that the window or the causal mask hides."""
    return [replace(c, name=f"{c.name},planned", planner={**c.planner, **options}) for c in cases]


_WINDOWED = [replace(DECODE_BASE, name=f"window={w}", window_left=w) for w in (0, 33, 100)]
_CAUSAL = [
    replace(c, name=f"causal,{c.name}", causal=True)
    for c in one_at_a_time(PREFILL_BASE, {k: PREFILL_AXES[k] for k in ("kv_lens", "qo_lens", "window_left", "sinks")})
]

_LONG = (2, 700, 0, 5, 90, 128)
_DECODE_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"sinks": 1.0, "dtype": torch.float16},
    {"window_left": 300, "page_size": 3},
)
_PREFILL_OPTIONS: tuple[dict[str, Any], ...] = ({"causal": True, "sinks": 1.0}, {"window_left": 300, "heads": (4, 4)})
_DECODE_FIXED_SPLIT = [
    replace(
        DECODE_BASE, name=f"fixed split {i}", kv_lens=_LONG, planner={"fixed_split_size": 4, "num_ctas": 3}, **options
    )
    for i, options in enumerate(_DECODE_OPTIONS)
]
_PREFILL_FIXED_SPLIT = [
    replace(
        PREFILL_BASE, name=f"fixed split {i}", kv_lens=(300, 0, 700, 130), planner={"fixed_split_size": 8}, **options
    )
    for i, options in enumerate(_PREFILL_OPTIONS)
]

DECODE = [
    *one_at_a_time(DECODE_BASE, DECODE_AXES),
    *planned(_WINDOWED, window_left=100, num_ctas=3),
    *empty_batches(DECODE_BASE),
    *sampled(DECODE_BASE, DECODE_AXES, 30),
    *_DECODE_FIXED_SPLIT,
]
PREFILL = [
    *one_at_a_time(PREFILL_BASE, PREFILL_AXES | PAGES),
    *_CAUSAL,
    *planned(_CAUSAL, causal=True, tile_rows=8),
    *empty_batches(PREFILL_BASE),
    *sampled(PREFILL_BASE, PREFILL_AXES | PAGES, 30),
    *_PREFILL_FIXED_SPLIT,
]
RAGGED = [
    *one_at_a_time(PREFILL_BASE, RAGGED_AXES),
    *_CAUSAL,
    *planned(_CAUSAL, causal=True, tile_rows=8),
    *empty_batches(PREFILL_BASE),
    *sampled(PREFILL_BASE, RAGGED_AXES, 20, seed=1),
]

_LARGEST = (1 << 30) - 1
_RIGHT_AXES: dict[str, tuple[Any, ...]] = {
    "window_right": (0, 1, 33, 1000, _LARGEST),
    "window_left": (0, 1, 33, 1000),
    "causal": (True,),
    "masked": (0.5,),
    "logits_soft_cap": (5.0,),
    "sinks": (1.0,),
    "heads": ((4, 4), (7, 1)),
    "head_dims": ((80, 80), (64, 128)),
    "storage": ("padded",),
    "kv_layout": ("HND",),
    "dtype": (torch.float16,),
    "padding": (3,),
    "kv_lens": (*PREFILL_AXES["kv_lens"], (150, 0, 350, 70)),
    "qo_lens": PREFILL_AXES["qo_lens"],
    "planner": ({"num_ctas": 12, "tile_rows": 16}, {"fixed_split_size": 4}, {"window_right": _LARGEST}),
}
_RIGHT = [
    replace(c, name=f"window_right={w},{c.name}", window_right=w)
    for w in (0, 1, 33)
    for c in one_at_a_time(PREFILL_BASE, {k: PREFILL_AXES[k] for k in ("qo_lens", "window_left")})
]
RIGHT_WINDOWS = [
    *_RIGHT,
    *planned(_RIGHT, window_right=33, tile_rows=8),
    *planned([replace(c, name=f"{c.name},split") for c in _RIGHT[::3]], window_right=40, tile_rows=16, num_ctas=12),
    *sampled(replace(PREFILL_BASE, window_right=7), _RIGHT_AXES, 60, seed=3),
]
"""Windows on the right, which may see keys of ``causal`` attention and of masks only."""

# Options that not every kernel takes: FP8 caches, position encodings, custom masks.
_POSITIONS: dict[str, tuple[Any, ...]] = {
    "kv_scale": ((0.5, 3.0),),
    "rope": ((2.0, 1e4), (1.0, 500.0)),
    "kv_dtype": (torch.float8_e4m3fn, torch.float8_e5m2),
    "pos_encoding": ("ROPE_LLAMA", "ALIBI"),
}
_MASKS: dict[str, tuple[Any, ...]] = {"masked": (0.5, 0.02, 1.0, "causal", "band")}


def special(base: Case, axes: dict[str, tuple[Any, ...]], more: dict[str, tuple[Any, ...]]) -> list[Case]:
    rope = replace(base, name="rope", pos_encoding="ROPE_LLAMA")
    return [
        *one_at_a_time(base, more)[1:],
        *one_at_a_time(rope, {"rope": _POSITIONS["rope"]}),
        *sampled(base, axes | more, 25, seed=2),
    ]


DECODE_SPECIAL = [
    *special(DECODE_BASE, DECODE_AXES, _POSITIONS),
    replace(DECODE_BASE, name="fp8,odd head", kv_dtype=torch.float8_e5m2, head_dims=(17, 17)),
]
PREFILL_SPECIAL = special(PREFILL_BASE, PREFILL_AXES | PAGES, _POSITIONS | _MASKS)
RAGGED_SPECIAL = special(PREFILL_BASE, RAGGED_AXES, _POSITIONS | _MASKS)

# All options of decode at once, with and without splits, for every number of query heads per KV head.
DECODE_OPTIONS = sampled(
    replace(DECODE_BASE, kv_lens=(300, 0, 70, 513)),
    _POSITIONS
    | {
        "dtype": (torch.float16, torch.bfloat16),
        "heads": tuple((2 * group, 2) for group in range(1, 9)),
        "head_dims": ((128, 128), (256, 256)),
        "page_size": (1, 64),
        "window_left": (64, 400),
        "logits_soft_cap": (5.0,),
        "sinks": (1.0,),
        "storage": ("fused", "padded"),
        "planner": ({"num_ctas": 6}, {"num_ctas": 40}),
    },
    48,
    seed=3,
)
