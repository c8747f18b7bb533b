"""Backends as data: each one's name, where its code is, and why it cannot run a given problem.

A backend's module is imported when it is first chosen. ``auto`` takes the first backend of
:data:`BACKENDS` without unsupported_reasons; a backend asked for by name is used or refused, never replaced.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attn_ops.errors import BackendError, OptionError


@dataclass(frozen=True)
class Problem:
    """What decides which backend runs an op. Fields that an op does not have keep their defaults."""

    op: str
    device: torch.device
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    num_qo_heads: int = 1
    num_kv_heads: int = 1
    head_dim_qk: int = 1
    head_dim_vo: int = 1
    page_size: int = 1
    pos_encoding: str = "NONE"
    masked: bool = False
    scaled: bool = False


@dataclass(frozen=True)
class Backend:
    """``module`` holds one function per op, named as the op and with the op's signature.

    Inductor lowers these functions in the op's place, so they use only aten ops and wrapped Triton kernels.
    ``capture_launches`` names the module's function that makes a call and captures its kernel launches, if it has one
    (:mod:`attn_ops.eager.launch_cache`).
    """

    name: str
    module: str
    unsupported_reasons: Callable[[Problem], list[str]]
    capture_launches: str | None = None

    def implementation(self, op: str) -> Callable[..., Any]:
        return getattr(importlib.import_module(self.module), op)

    def launch_capturer(self) -> Callable[..., Any]:
        return self.implementation(self.capture_launches or "")


@functools.cache
def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """None where it cannot be asked for."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.cuda.is_available() else None


TRITON_PREFILL = frozenset({"batch_prefill", "ragged_prefill", "single_prefill", "batch_mla"})
"""The ops of one kernel, which goes over any number of query heads per KV head in blocks."""

TRITON_MLA = frozenset({"batch_mla", "append_mla_kv"})
"""The ops whose key comes in two parts, of which the first is as wide as the value."""

TRITON_COPIES = frozenset({"append_kv", "append_mla_kv"})
"""The ops that move elements of any dtype."""

TRITON_OPS = TRITON_PREFILL | TRITON_COPIES | {
    "plan_decode", "plan_prefill", "batch_decode", "merge_state", "merge_states", "merge_state_in_place",
    "merge_states_varlen", "batch_indices_positions", "seq_lens", "page_table", "packbits", "segment_packbits",
}  # fmt: skip
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _triton_unsupported(p: Problem) -> list[str]:
    capability = compute_capability(p.device)
    prefill = p.op in TRITON_PREFILL
    key_dim = max(p.head_dim_vo, p.head_dim_qk - p.head_dim_vo) if p.op in TRITON_MLA else p.head_dim_qk
    checks = [
        (p.op in TRITON_OPS, f"it has no kernel for {p.op}"),
        (triton_installed(), "triton is not installed"),
        (p.device.type == "cuda", f"it runs on cuda, not {p.device.type}"),
        (
            capability is None or capability >= (8, 0),
            f"it needs compute capability 8.0 or newer, not {capability}",
        ),
        (p.dtype in TRITON_DTYPES or p.op in TRITON_COPIES, f"it does not compute in {p.dtype}"),
        (
            capability is None or capability >= (8, 9) or p.kv_dtype != torch.float8_e4m3fn,
            f"it needs compute capability 8.9 or newer for {p.kv_dtype}, not {capability}",
        ),
        (max(key_dim, p.head_dim_vo) <= 512, "it needs head_dim at most 512"),
        (min(key_dim, p.head_dim_vo) >= 1 or p.op in TRITON_COPIES, "it needs head_dim at least 1"),
        (prefill or p.num_qo_heads // p.num_kv_heads <= 128, "it needs at most 128 query heads per KV head"),
    ]
    return [reason for ok, reason in checks if not ok]


def _reference_unsupported(p: Problem) -> list[str]:
    return []


BACKENDS: tuple[Backend, ...] = (
    Backend("triton", "attn_ops.kernels.triton", _triton_unsupported, capture_launches="capture_launches"),
    Backend("reference", "attn_ops.kernels.reference", _reference_unsupported),
)


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem, name: str = "auto") -> Backend:
    """The backend that runs ``problem``; :class:`BackendError` with every reason if none does."""
    candidates = [b for b in BACKENDS if name in ("auto", b.name)]
    if not candidates:
        raise OptionError(
            f"{problem.op}: backend is {name}; expected auto or one of {', '.join(b.name for b in BACKENDS)}; "
            "pass one of these names"
        )
    reasons = []
    for backend in candidates:
        unsupported_reasons = backend.unsupported_reasons(problem)
        if not unsupported_reasons:
            return backend
        reasons.append(f"{backend.name}: {', '.join(unsupported_reasons)}")
    raise BackendError(
        f"{problem.op}: no backend runs this problem ({'; '.join(reasons)}); "
        "change the problem, or pass backend=auto to let another backend take it"
    )


def explain(problem: Problem) -> str:
    """A line a backend: which one ``auto`` takes for ``problem``, and why each other does not run it."""
    lines, taken = [], False
    for backend in BACKENDS:
        unsupported_reasons = backend.unsupported_reasons(problem)
        verdict = ", ".join(unsupported_reasons) if unsupported_reasons else ("can run it" if taken else "runs it")
        taken = taken or not unsupported_reasons
        lines.append(f"{backend.name}: {verdict}")
    return "\n".join(lines)
