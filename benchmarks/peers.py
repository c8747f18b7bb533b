"""Other libraries on the same problem. One that is not installed, or refuses, is left out and named."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .decode_problem import DecodeProblem
from .timing import Call

FLASHINFER_WORKSPACE = 256 << 20

DecodePeer = Callable[[DecodeProblem], Call]


class NotMeasuredError(Exception):
    """Why a peer does not run a problem."""


def sdpa(backend: SDPBackend) -> DecodePeer:
    """torch's own attention on a contiguous cache, one query row a request."""

    def prepare(problem: DecodeProblem) -> Call:
        if problem.row.equal_length is None:
            raise NotMeasuredError("a contiguous cache needs requests of one length")
        caches = [problem.contiguous(i) for i in range(problem.copies)]
        q = problem.q[:, :, None]

        def call(copy: int) -> Tensor:
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(q, *caches[copy], enable_gqa=True)
            return out[:, :, 0]

        return call

    return prepare


def flashinfer(use_tensor_cores: bool) -> DecodePeer:
    def prepare(problem: DecodeProblem) -> Call:
        if importlib.util.find_spec("flashinfer") is None:
            raise NotMeasuredError("flashinfer is not installed")
        import flashinfer as fi

        row = problem.row
        workspace = torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=problem.device)
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=use_tensor_cores)
        wrapper.plan(
            *problem.page_table,
            row.num_qo_heads,
            row.num_kv_heads,
            row.head_dim,
            row.page_size,
            q_data_type=problem.dtype,
            kv_data_type=problem.dtype,
        )
        out = torch.empty_like(problem.q)
        caches = list(zip(problem.k_caches, problem.v_caches, strict=True))
        return lambda copy: wrapper.run(problem.q, caches[copy], out=out)

    return prepare


DECODE_PEERS: dict[str, DecodePeer] = {
    "sdpa cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "flashinfer": flashinfer(use_tensor_cores=False),
    "flashinfer tensor cores": flashinfer(use_tensor_cores=True),
}


@contextmanager
def flashinfer_build(arch: str) -> Iterator[None]:
    """Kernels of flashinfer built in this block are built for one architecture."""
    previous = os.environ.get("FLASHINFER_CUDA_ARCH_LIST")
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = arch
    try:
        yield
    finally:
        if previous is None:
            del os.environ["FLASHINFER_CUDA_ARCH_LIST"]
        else:
            os.environ["FLASHINFER_CUDA_ARCH_LIST"] = previous
