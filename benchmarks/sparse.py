"""Block-sparse attention, compared with its peers: TFLOP/s of the selected blocks in CUDA graphs over rotating KV."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

import attn_ops
from benchmarks import report
from benchmarks.comparison import METHOD, Comparison, NotMeasuredError, Prepare, add_peers, add_rows
from benchmarks.peers import flashinfer, flashinfer_workspace
from benchmarks.sparse_problem import SPARSE_ROWS, SparseProblem, SparseRow
from benchmarks.timing import Call

NOTE = (
    "TFLOP/s: bf16, 32/8 heads of 128, random block maps. FLOPs are 4 * head dim for each query head, and each "
    "query row and key of a selected block. Blocks of random sizes have a map for each KV head. All are run() of "
    f"FlashInfer's wrappers and of their namesakes here, FlexAttention with a block mask apart. {METHOD}"
)
EXPECTED_FLOPS_PER_US = 300e6
"""Sizes the CUDA graphs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    add_rows(parser)
    report.add_output(parser)
    parser.add_argument("--name", default="sparse", help="name of the result files; default: %(default)s")
    add_peers(parser)


def _wrapper(problem: SparseProblem, module: Any, backend: str) -> Call:
    """The wrapper of ``module``, planned for the problem."""
    row = problem.row
    cls = module.VariableBlockSparseAttentionWrapper if row.variable else module.BlockSparseAttentionWrapper
    wrapper = cls(flashinfer_workspace(problem.device), backend=backend)
    heads = row.num_qo_heads, row.num_kv_heads, row.head_dim
    if row.variable:
        wrapper.plan(problem.map, problem.row_sz, problem.col_sz, *heads, q_data_type=problem.dtype)
    else:
        dtypes = {"q_data_type": problem.dtype, "o_data_type": problem.dtype}
        wrapper.plan(*problem.bsr, row.size, row.size, row.block, row.block, *heads, **dtypes)
    return lambda i: wrapper.run(problem.q, problem.keys[i], problem.values[i])


def ours(problem: SparseProblem) -> Call:
    """The wrappers of this library."""
    return _wrapper(problem, attn_ops, "auto")


def flashinfer_sparse(backend: str) -> Prepare:
    """FlashInfer's wrappers with one of their backends."""
    return lambda problem: _wrapper(problem, flashinfer(), backend)


def flex(problem: SparseProblem) -> Call:
    """FlexAttention with a block mask of the map, compiled for its shape."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if problem.row.variable:
        raise NotMeasuredError("its block mask has blocks of one size")
    blocks, block, size = problem.map[0], problem.row.block, problem.row.size

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return blocks[i // block, j // block]

    mask = create_block_mask(visible, None, None, size, size, device=problem.device)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def call(copy: int) -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (problem.q, problem.keys[copy], problem.values[copy]))
        return compiled(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return call


OURS: dict[str, Prepare] = {"attn_ops": ours}
SPARSE_PEERS: dict[str, Prepare] = {
    "flashinfer fa3": flashinfer_sparse("fa3"),
    "flashinfer fa2": flashinfer_sparse("fa2"),
    "flex": flex,
}


def _measure(row: SparseRow, comparison: Comparison) -> report.Row:
    problem = SparseProblem(row)
    flops = problem.flops()
    times = comparison.times(row.name, problem, flops / EXPECTED_FLOPS_PER_US + 10)
    rates = {name: flops / time / 1e6 for name, time in times.items()}
    share = flops / times["attn_ops"] / report.PEAK_FLOPS_PER_US
    return {
        "row": row.name,
        "attn_ops": rates["attn_ops"],
        "share": share,
        **{name: rates.get(name) for name in comparison.peers},
    }


@torch.no_grad()
def run(args: argparse.Namespace) -> None:
    """Measure and save the rows."""
    report.compare(args, args.name, NOTE, SPARSE_ROWS, OURS, SPARSE_PEERS, _measure, higher_is_better=True)
