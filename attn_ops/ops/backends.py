"""The backend table: which kernel runs an op, and why each other kernel does not.

An entry is a backend, or one kernel of a backend for some of the ops. Its module is imported when it is first chosen.
``auto`` takes the first entry without unsupported reasons; a backend named by the caller is used or refused, and never
falls back to another.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from attn_ops.eager.checked_call import Bases
from attn_ops.errors import BackendError, OptionError
from attn_ops.ops import cuda_kernels, unsupported
from attn_ops.ops.fp8_queries import CONVERTED_DTYPE, FP8_QUERY_OPS, QUERY, converting

LOG = logging.getLogger(__name__)


class MemoryLayout(NamedTuple):
    """What kernels need to know of the memory of queries, keys and values on CUDA.

    aligned   first elements and all strides but the last are multiples of 16 bytes
    mappable  a TMA tensor map can describe keys and values: they have elements, each at its own address
    joinable  one coordinate of a tensor map can count the pages and heads of keys and values together
    """

    aligned: bool = True
    mappable: bool = True
    joinable: bool = True


ORDINARY = MemoryLayout()
"""The layout of calls that are not on CUDA, or whose kernels do not depend on it."""


@dataclass(frozen=True)
class Problem:
    """What decides which kernel runs an op. Fields that an op does not have keep their defaults.

    page_size      tokens of a page, 0 without pages
    options        names of the :class:`~attn_ops.ops.options.AttentionOptions` that are not at their defaults
    pos_encoding   the option of this name
    layout         the memory of queries, keys and values
    context_ranks  ranks that hold the keys of a plan
    """

    op: str
    device: torch.device
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.float32
    num_qo_heads: int = 1
    num_kv_heads: int = 1
    head_dim_qk: int = 1
    head_dim_vo: int = 1
    page_size: int = 0
    options: tuple[str, ...] = ()
    pos_encoding: str = "NONE"
    layout: MemoryLayout = ORDINARY
    context_ranks: int = 1

    def __post_init__(self) -> None:
        assert ("pos_encoding" in self.options) == (self.pos_encoding != "NONE")


@dataclass(frozen=True)
class Backend:
    """An entry of the table.

    name                 what a caller passes as ``backend``; entries of one name are kernels of one backend
    module               module with a function per op, of the op's name, and of its signature without ``backend``. A
                         function may have an attribute ``for_key``, which :meth:`for_key` calls
    unsupported_reasons  function from a problem to the reasons why the entry does not run it
    kernels              op -> kernel, for an entry with some of the ops; None for every op, in plain PyTorch
    specialized          listed under its kernel's name, only for its ops, before the general entry of its backend
    inductor_lowerable   Inductor can inline its functions: aten ops and Triton kernels. If not, a compiled graph calls
                         the op
    eager_only           it reads contents of tensors on the host: ``auto`` takes the next entry in graphs and packages
    has_images           its kernels are images in packages (:mod:`attn_ops.native`). A package that can have neither
                         its code nor its images runs the next entry
    capacity_bound       it does work for a plan's capacity, not for the lengths in the plan
    fp8_queries          it takes FP8 queries. For an entry that does not, they are converted
                         (:mod:`~attn_ops.ops.fp8_queries`)
    prepared             its functions allocate outputs and launch kernels, and compute nothing else: the launches of an
                         eager call are captured for prepared calls (:mod:`attn_ops.eager.launches`)
    """

    name: str
    module: str
    unsupported_reasons: Callable[[Problem], list[str]]
    kernels: Mapping[str, str] | None = None
    specialized: bool = False
    inductor_lowerable: bool = True
    eager_only: bool = False
    has_images: bool = False
    capacity_bound: bool = False
    fp8_queries: bool = False
    prepared: bool = False

    def has(self, op: str) -> bool:
        return self.kernels is None or not self.specialized or op in self.kernels

    def label(self, op: str) -> str:
        """``"triton"``, or ``"cuda.mla"`` for a specialized kernel."""
        return f"{self.name}.{self.kernels[op]}" if self.specialized and self.kernels else self.name

    def implementation(self, op: str) -> Callable[..., Any]:
        function = getattr(importlib.import_module(self.module), op)
        return function if self.fp8_queries or op not in FP8_QUERY_OPS else converting(function)

    def for_key(
        self, op: str, args: Sequence[Any], kwargs: dict[str, Any], bases: Bases | None = None
    ) -> Callable[..., Any] | None:
        """The function of this call and later calls of its key, as :class:`~attn_ops.eager.checked_call.Check` says.

        With ``bases``, the function that takes such tensors, or None if there is none.
        """
        function = self.implementation(op)
        for_key: Callable[..., Any] | None = getattr(function, "for_key", None)
        if for_key is None:
            return function if bases is None else None
        return for_key(*args, bases=bases, **kwargs)

    def reasons(self, problem: Problem) -> list[str]:
        """The unsupported reasons for the problem, in which an FP8 query may be converted first."""
        if problem.dtype == QUERY and not self.fp8_queries and problem.op in FP8_QUERY_OPS:
            problem = replace(problem, dtype=CONVERTED_DTYPE)
        return self.unsupported_reasons(problem)


_cuda = functools.partial(
    Backend,
    "cuda",
    specialized=True,
    inductor_lowerable=False,
    has_images=True,
    prepared=True,
)

_cpu = functools.partial(Backend, "cpu", specialized=True, inductor_lowerable=False, eager_only=True)

BACKENDS: tuple[Backend, ...] = (
    _cuda(
        "attn_ops.kernels.cuda",
        unsupported.cuda_merge_states,
        kernels=dict.fromkeys(cuda_kernels.CUDA_MERGES, "merge_states"),
    ),
    _cuda(
        "attn_ops.kernels.cuda.decode",
        unsupported.cuda_decode,
        kernels={"batch_decode": "decode"},
    ),
    _cuda(
        "attn_ops.kernels.cuda.prefill",
        unsupported.cuda_prefill,
        kernels=dict.fromkeys(cuda_kernels.CUDA_PREFILLS, "prefill"),
    ),
    _cuda(
        "attn_ops.kernels.cuda.prefill",
        unsupported.cuda_prefill_e4m3,
        kernels=dict.fromkeys(cuda_kernels.CUDA_PREFILLS, "prefill_e4m3"),
        fp8_queries=True,
    ),
    _cuda(
        "attn_ops.kernels.cuda.prefill",
        unsupported.cuda_prefill_fp8,
        kernels=dict.fromkeys(cuda_kernels.CUDA_PREFILLS, "prefill_fp8"),
    ),
    _cuda(
        "attn_ops.kernels.cuda.mla",
        unsupported.cuda_mla,
        kernels={"batch_mla": "mla"},
    ),
    _cuda(
        "attn_ops.kernels.cuda.plan",
        unsupported.cuda_plan,
        kernels={"plan_prefill": "plan"},
    ),
    Backend(
        "triton",
        "attn_ops.kernels.triton",
        unsupported.triton,
        kernels=unsupported.TRITON_KERNELS,
        prepared=True,
    ),
    _cpu(
        "attn_ops.kernels.cpu.sdpa",
        unsupported.cpu_sdpa,
        kernels=dict.fromkeys(
            ("batch_decode", "batch_prefill", "ragged_prefill", "single_prefill", "batch_mla"), "sdpa"
        ),
    ),
    _cpu(
        "attn_ops.kernels.cpu.plan",
        unsupported.cpu_tables,
        kernels=dict.fromkeys(("plan_decode", "plan_prefill", "page_table", "batch_indices_positions"), "plan"),
    ),
    _cpu(
        "attn_ops.kernels.cpu.append",
        unsupported.cpu_tables,
        kernels=dict.fromkeys(("append_kv", "append_mla_kv"), "append"),
    ),
    Backend("reference", "attn_ops.kernels.reference", unsupported.reference, capacity_bound=True),
)
"""The backends, in order of preference."""


PLACES = ("eager calls", "compiled graphs", "packages")
"""Places where a call may run, each by an entry of its own."""

NOT_GENERATED = "Inductor does not generate it"


def _entries(op: str) -> list[Backend]:
    return [backend for backend in BACKENDS if backend.has(op)]


@functools.lru_cache(maxsize=1024)
def choose(
    problem: Problem, name: str = "auto", lowerable: bool = False, images: bool = False, traced: bool = False
) -> Backend:
    """The entry that runs ``problem``, of those that Inductor can inline if ``lowerable``, or launch as ``images``.

    In a ``traced`` call ``auto`` takes no entry that is for eager calls only.

    Raises:
        BackendError: no entry runs it, or no entry of the backend ``name``; the message gives every reason.
    """
    names = dict.fromkeys(backend.name for backend in BACKENDS)
    if name != "auto" and name not in names:
        raise OptionError(
            f"{problem.op}: backend is {name}; expected auto or one of {', '.join(names)}; pass one of these names"
        )
    candidates = [b for b in _entries(problem.op) if name in ("auto", b.name)]
    refused: list[str] = [] if candidates else [f"{name}: it has no kernel for {problem.op}"]
    for backend in candidates:
        reasons = backend.reasons(problem)
        if lowerable and not backend.inductor_lowerable and not (images and backend.has_images):
            reasons = [*reasons, NOT_GENERATED]
        if traced and backend.eager_only and name == "auto":
            reasons = [*reasons, "it runs eager calls only"]
        if not reasons:
            LOG.debug(
                "%s: %s runs it; %s", problem.op, _name(backend, problem.op), "; ".join(refused) or "first choice"
            )
            return backend
        refused.append(f"{backend.label(problem.op)}: {', '.join(reasons)}")
    raise BackendError(
        f"{problem.op}: no backend runs this problem ({'; '.join(refused)}); "
        "change the problem, or pass backend=auto to let another backend take it"
    )


def _name(backend: Backend, op: str) -> str:
    """The backend and its kernel, such as ``"triton (kernel decode)"``."""
    return backend.name if backend.kernels is None else f"{backend.name} (kernel {backend.kernels[op]})"


def _runs_in(backend: Backend, place: str, name: str) -> bool:
    """Whether an entry without unsupported reasons runs calls with ``backend=name`` in one of ``PLACES``."""
    if place == "packages":
        return backend.inductor_lowerable or backend.has_images
    return place == "eager calls" or not (backend.eager_only and name == "auto")


def explain(problem: Problem, name: str = "auto") -> str:
    """One line per entry that has the op: where it runs ``problem``, or why it does not.

    Eager calls and compiled graphs run the first entry that can; by ``auto`` graphs take no entry that is for eager
    calls only. A package runs the first entry that Inductor can inline or that has images.
    """
    lines, left = [], list(PLACES)
    for backend in _entries(problem.op):
        reasons = backend.reasons(problem)
        if name not in ("auto", backend.name):
            reasons = [*reasons, f"backend={name} is asked for"]
        taken = [] if reasons else [place for place in left if _runs_in(backend, place, name)]
        left = [place for place in left if place not in taken]
        verdict = ", ".join(reasons) or _verdict(backend, problem.op, taken)
        lines.append(f"{backend.label(problem.op)}: {verdict}")
    return "\n".join(lines)


def _verdict(backend: Backend, op: str, places: list[str]) -> str:
    """In which ``places``, of ``PLACES``, an entry without unsupported reasons runs ``op``, and why not in the others.

    It runs in none if the entries before it run in all of them.
    """
    kernel = "" if backend.kernels is None else f", kernel {backend.kernels.get(op)}"
    if not places:
        return f"can run it{kernel}"
    everywhere = places == list(PLACES)
    verdict = f"runs it{kernel}" if everywhere else f"runs it in {' and '.join(places)}{kernel}"
    if backend.inductor_lowerable:
        return verdict
    if everywhere:
        return f"{verdict}; packages launch its image"
    return f"{verdict}; {'it reads lengths on the host' if backend.eager_only else NOT_GENERATED}"
