"""MLA decode with FlashInfer."""

from __future__ import annotations

import torch

from benchmarks.comparison import Prepare
from benchmarks.peers import flashinfer, flashinfer_workspace
from benchmarks.prefill_problem import MlaProblem
from benchmarks.timing import Call

SM_SCALE = (128 + 64) ** -0.5
"""The softmax scale of the head dim before the absorption of the weights."""


def flashinfer_mla(backend: str) -> Prepare:
    """``BatchMLAPagedAttentionWrapper`` with one of its backends."""

    def prepare(problem: MlaProblem) -> Call:
        row, workspace = problem.row, flashinfer_workspace(problem.device)
        wrapper = flashinfer().mla.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        lengths = torch.tensor(row.kv_lens, dtype=torch.int32, device=problem.device)
        tables = (problem.qo_indptr, problem.table.indptr, problem.table.indices, lengths)
        sizes = (row.num_heads, problem.ckv[0].shape[-1], problem.kpe[0].shape[-1], row.page_size)
        wrapper.plan(*tables, *sizes, False, SM_SCALE, problem.dtype, problem.kv_dtype)
        scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if row.fp8 else {}
        out = torch.empty_like(problem.q_nope)
        return lambda i: wrapper.run(problem.q_nope, problem.q_pe, problem.ckv[i], problem.kpe[i], out=out, **scales)

    return prepare


MLA_PEERS: dict[str, Prepare] = {
    "flashinfer fa3": flashinfer_mla("fa3"),
    "flashinfer fa2": flashinfer_mla("fa2"),
}
