"""Merge the states of ranks on one host in one kernel, through symmetric memory: the op ``attn::merge_context``.

The op is not in ``attn_ops/ops/schemas.py``: it runs only on CUDA, with addresses that are valid only in this process,
so it has no reference and cannot be packaged. A compiled graph calls it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.library import Library

from attn_ops.argument_checks import integers
from attn_ops.errors import BackendError, CapacityError, OptionError, RankError, fail
from attn_ops.gpu import compute_capability
from attn_ops.ops.inductor import mark_static
from attn_ops.ops.options import FLOATS
from attn_ops.ops.unsupported import triton_installed
from attn_ops.plan.context import context_group
from attn_ops.plan.plan_checks import MAX_SIZE
from attn_ops.plan.rank_answers import RankAnswers
from attn_ops.tracing import is_compiling
from attn_ops.typed import typed

__all__ = ["ContextExchange"]

CTAS = 64
"""CTAs of a launch. All must be resident at once, since they wait for other ranks: 64 leave SMs to other kernels."""

MAX_WORLD = 16
"""Largest number of ranks, each with a GPU of one host. The kernel unrolls its loop over ranks."""

TIMEOUT_S = 600.0
"""Default ``timeout_s`` of a kernel, and seconds that ranks wait for each other when they make an exchange."""

MAX_TIMEOUT_S = 2e6
"""Largest ``timeout_s``: an int32 holds it in milliseconds."""

LIBRARY = Library("attn", "FRAGMENT")
LIBRARY.define(
    "merge_context(Tensor v, Tensor s, Tensor buffers, Tensor(a!) epochs, int rank, int half_bytes, int timeout_ms, "
    "bool scatter_heads=False, Tensor? sinks=None) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def bytes_of_states(packed_rows: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of half a buffer for the values and LSEs of ``packed_rows`` rows, rounded up to a multiple of 16."""
    return -(-packed_rows // 16) * 16 * (head_dim * dtype.itemsize + 4)


def _check(v: Tensor, half_bytes: int) -> None:
    rows, heads, dim = v.shape
    needed = bytes_of_states(rows * heads, dim, v.dtype)
    if needed > half_bytes:
        fail(
            CapacityError,
            "merge_context",
            f"{rows} rows of {heads} heads of {dim} need {needed} bytes and the exchange has {half_bytes}",
            f"a ContextExchange with max_rows of at least {rows} for such heads",
            "make it with that max_rows",
        )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        fail(OptionError, "ContextExchange", f"{name} is {value}", f"{low} to {high}", "change it")


def _outputs(v: Tensor, buffers: Tensor, scatter_heads: bool) -> tuple[Tensor, Tensor]:
    rows, heads, dim = v.shape
    kept = heads // (buffers.shape[0] - 1) if scatter_heads else heads
    return v.new_empty((rows, kept, dim)), v.new_empty((rows, kept), dtype=torch.float32)


def _merge(
    v: Tensor,
    s: Tensor,
    buffers: Tensor,
    epochs: Tensor,
    rank: int,
    half_bytes: int,
    timeout_ms: int,
    scatter_heads: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from attn_ops.kernels.triton.merge_context import merge_context

    _check(v, half_bytes)
    out, lse = _outputs(v, buffers, scatter_heads)
    sinks = None if sinks is None else sinks.contiguous()
    merge_context(v.contiguous(), s.contiguous(), buffers, epochs, rank, half_bytes, timeout_ms, out, lse, sinks)
    return out, lse


def _fake(
    v: Tensor,
    s: Tensor,
    buffers: Tensor,
    epochs: Tensor,
    rank: int,
    half_bytes: int,
    timeout_ms: int,
    scatter_heads: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check(v, half_bytes)
    return _outputs(v, buffers, scatter_heads)


LIBRARY.impl("merge_context", _merge, "CUDA")
torch.library.register_fake("attn::merge_context", _fake, lib=LIBRARY)


class ContextExchange:
    """Memory through which the ranks of one host merge their states in one kernel, for :func:`merge_context`.

    Collective: all ranks make it with the same arguments and in the same order, outside of graphs. The kernel replaces
    the collective and the merge; all ranks compute the same bits. One exchange serves all layers, from one stream at a
    time, and all ranks call it the same number of times. Where such memory cannot be allocated, ``unavailable`` gives
    the reason, the same on all ranks, and :func:`merge_context` uses a collective.

    The kernel of a rank waits on its GPU for the kernels of the other ranks. After ``timeout_s`` it ends with NaN, and
    the exchange has failed permanently, on all ranks: later kernels do not wait, and give NaN. Eager calls raise the
    RankError of :meth:`check` as soon as the host knows. Compiled graphs and CUDA graphs do not: call :meth:`check`
    after a step. To go on, make a new exchange on all ranks. An error that all ranks raise before their kernels, such
    as a CapacityError, leaves the exchange as it was. If only some ranks raise an error, the kernels of the other
    ranks time out.

    Args:
        max_rows: capacity for query rows.
        num_heads: query heads.
        head_dim: elements of an output.
        dtype: dtype of ``out``, float16, bfloat16 or float32.
        group: the ranks; default all processes.
        device: device of this rank; default the current CUDA device.
        required: raise if the memory cannot be allocated.
        timeout_s: seconds that a kernel waits for the other ranks. They may still be compiling.

    Attributes:
        unavailable: why there is no such memory; None if there is.

    Raises:
        BackendError: ``required``, and there is no such memory.
        RankError: there is no process group with this process; or, raised on all ranks, the ranks ask for different
            sizes, a rank failed, or a rank did not answer in time.
        OptionError: a size or ``timeout_s`` is out of range.
    """

    @typed
    def __init__(
        self,
        max_rows: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        group: ProcessGroup | None = None,
        device: str | torch.device | None = None,
        required: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        group = context_group("ContextExchange", group)
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)
        answers = RankAnswers(f"exchange {group.group_name}", dist.get_process_group_ranks(group))
        self.half_bytes = self.timeout_ms = 0
        on = torch.device("cpu")

        def prepare() -> str | None:
            nonlocal on
            given = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
            on = torch.empty(0, device=given).device  # with the index of the current device
            sizes = {"max_rows": max_rows, "num_heads": num_heads, "head_dim": head_dim}
            rows, heads, dim = integers("ContextExchange", **sizes)
            for name, size in sizes.items():
                _check_range(name, size, 1, MAX_SIZE)
            _check_range("timeout_s", timeout_s, 1e-3, MAX_TIMEOUT_S)
            self.half_bytes = bytes_of_states(rows * heads, dim, dtype)
            self.timeout_ms = int(timeout_s * 1000)
            return self._unsupported(on, dtype)

        self.unavailable = self._agree(answers, prepare)
        if self.unavailable is None:
            self.unavailable = self._agree(answers, lambda: self._allocate(on))
        if required and self.unavailable is not None:
            fail(
                BackendError,
                "ContextExchange",
                self.unavailable,
                "GPUs of one host that map each other's memory",
                "pass required=False, and merge_context takes a collective",
            )

    def _agree(self, ranks: RankAnswers, prepare: Callable[[], str | None]) -> str | None:
        """Why the first rank that cannot make the exchange cannot, None if all can. All raise if one rank does."""
        error, reason = None, None
        try:
            reason = prepare()
        except Exception as raised:  # whatever it is, the other ranks wait
            error = raised
        answer = reason, socket.gethostname(), self.half_bytes
        answers = ranks.exchange("ContextExchange", error, answer, TIMEOUT_S)
        for rank, (_, _, half_bytes) in enumerate(answers):
            if half_bytes != answers[0][2]:
                fail(
                    RankError,
                    "ContextExchange",
                    f"rank {rank} asks for {half_bytes} bytes of states and rank 0 for {answers[0][2]}",
                    "the same sizes on all ranks",
                    "pass the same max_rows, num_heads, head_dim and dtype on every rank",
                )
        for rank, (found, host, _) in enumerate(answers):
            if found is not None:
                return f"rank {rank}: {found}"
            if host != answers[0][1]:
                return f"rank {rank} is on another host than rank 0"
        return None

    def _unsupported(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return f"it runs on cuda, not {device.type}"
        if not triton_installed():
            return "triton is not installed"
        capability = compute_capability(device)
        if capability is None or capability < (8, 0):
            return f"it needs compute capability 8.0 or newer, not {capability}"
        if dtype not in FLOATS:
            return f"it does not merge {dtype}"
        return None if self.world <= MAX_WORLD else f"it merges the states of at most {MAX_WORLD} ranks"

    def _allocate(self, device: torch.device) -> str | None:
        """Allocate and map the buffers. Returns why that failed."""
        try:
            import torch.distributed._symmetric_memory as symmetric

            from attn_ops.kernels.triton.merge_context import buffer_bytes

            size = buffer_bytes(CTAS, self.world, self.half_bytes)
            memory = symmetric.empty(size, dtype=torch.uint8, device=device)
            memory.zero_()
            torch.cuda.synchronize(device)
            handle = symmetric.rendezvous(memory, self.group)
            addresses = [handle.get_buffer(i, (size,), torch.uint8).data_ptr() for i in range(self.world)]
        except (ImportError, AttributeError, RuntimeError) as error:
            return f"no symmetric memory: {str(error).partition(chr(10))[0]}"
        self._memory, self._handle = memory, handle
        self._error = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)  # mapped by GPUs
        self.buffers = torch.tensor([*addresses, self._error.data_ptr()], dtype=torch.int64, device=device)
        self.epochs = torch.zeros(CTAS, dtype=torch.int32, device=device)
        mark_static(self.buffers, self.epochs)
        return None

    def merge(self, out: Tensor, lse: Tensor, scatter_heads: bool, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """The merged states, by the op."""
        if not is_compiling():
            self.check()
        memory = self.buffers, self.epochs, self.rank, self.half_bytes
        return torch.ops.attn.merge_context(out, lse, *memory, self.timeout_ms, scatter_heads, sinks)

    def check(self) -> None:
        """Raise if a kernel of this rank has ended without the states of all ranks.

        It does not wait for running kernels. To include them, synchronize their stream first.

        Raises:
            RankError: a rank did not arrive in time. Every later call raises it too.
        """
        error = 0 if self.unavailable is not None else int(self._error[0])
        if error:
            fail(
                RankError,
                "ContextExchange",
                f"a kernel waited more than {self.timeout_ms / 1000:g} s for rank {error - 1}",
                "the same calls of merge_context on every rank",
                "discard the exchange on all ranks, see the log of that rank, and make a new one",
            )
