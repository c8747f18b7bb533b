"""MLA decode by other libraries, on the same problem."""

from __future__ import annotations

import torch

from .contest import Prepare
from .peers import flashinfer, flashinfer_workspace
from .prefill_problem import MlaProblem
from .timing import Call

SM_SCALE = (128 + 64) ** -0.5


def flashinfer_mla(backend: str) -> Prepare:
    def prepare(problem: MlaProblem) -> Call:
        row, workspace = problem.row, flashinfer_workspace(problem.device)
        wrapper = flashinfer().mla.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        lengths = torch.tensor(row.kv_lens, dtype=torch.int32, device=problem.device)
        tables = (problem.qo_indptr, problem.table.indptr, problem.table.indices, lengths)
        sizes = (row.num_heads, problem.ckv[0].shape[-1], problem.kpe[0].shape[-1], row.page_size)
        wrapper.plan(*tables, *sizes, False, SM_SCALE, problem.dtype, problem.dtype)
        out = torch.empty_like(problem.q_nope)
        return lambda i: wrapper.run(problem.q_nope, problem.q_pe, problem.ckv[i], problem.kpe[i], out=out)

    return prepare


MLA_PEERS: dict[str, Prepare] = {
    "flashinfer fa3": flashinfer_mla("fa3"),
    "flashinfer fa2": flashinfer_mla("fa2"),
}
