"""Block-sparse attention: the wrappers and planners against dense attention with the expanded mask, in float64.

Keys of blocks that are not selected are NaN: a result that is a number did not read them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fuzz.batch import Shape
from helpers.fuzz.draw import Draw
from helpers.fuzz.oracle import Options
from helpers.fuzz.sparse import Matrix
from helpers.tracing import GraphRecorder
from helpers.wrapper_requests import DEVICE, workspace
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import attn_ops as flashinfer
import attn_ops.flops
from attn_ops import errors
from attn_ops.sparse_planner import fold_heads, unfold_heads

HEADS, DIM = (4, 2), 32
SIZES: dict[str, int] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": DIM}
ROWS, KEYS, R, C = 90, 96, 16, 8


def matrix(seed: int = 0, causal: bool = False, dtype: torch.dtype = torch.float32, **changes: Any) -> Matrix:
    """Blocks of 16 rows by 8 keys. The last block row has 10 rows."""
    shape = Shape(HEADS, (DIM, DIM), C, "NHD", dtype, dtype)
    rows = changes.get("rows", torch.tensor([[R] * 5 + [10]]))
    cols = changes.get("cols", torch.full((1, KEYS // C), C))
    return Matrix(Draw(seed), shape, rows, cols, causal)


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [t.to(DEVICE) for t in tensors]


def planner(blocks: int = 72, **options: Any) -> flashinfer.BlockSparsePlanner:
    return flashinfer.BlockSparsePlanner(ROWS, KEYS, R, C, blocks, device=DEVICE, **{**SIZES, **options})


def host_bsr(m: Matrix) -> tuple[Tensor, Tensor]:
    steps = m.map[0].sum(1)
    return torch.cat((steps.new_zeros(1), steps.cumsum(0))).int(), m.map[0].nonzero()[:, 1].int()


class Step(nn.Module):
    """Plans and attends."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.planner = planner(causal=causal)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, indptr: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        plan = self.planner.plan(indptr, indices)
        op = torch.ops.attn.block_sparse_prefill
        return op(q, k, v, plan, self.planner.workspace, causal=self.causal, return_lse=True)  # type: ignore[no-any-return]


def padded(indices: Tensor, size: int = 72) -> Tensor:
    return torch.cat((indices, indices.new_full((size - len(indices),), -7)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("cold")
def test_plan_and_op_compile_once_for_all_maps(causal: bool) -> None:
    """Maps of one capacity, with other numbers of blocks, run in one graph."""
    step, recorder = Step(causal), GraphRecorder()
    compiled = torch.compile(step, fullgraph=True, backend=recorder)
    for seed in range(4):
        m = matrix(seed, causal)
        indptr, indices = host_bsr(m)
        with torch.compiler.set_stance("fail_on_recompile" if seed else "default"):
            result = compiled(*on_device(m.q, *m.kv, indptr, padded(indices)))
        m.expected(Options()).check(*result)
    assert recorder.ops == [*["block_sparse_table"] * causal, "plan_prefill", "block_sparse_prefill"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.usefixtures("cold")
def test_run_is_one_op_and_stays_compiled(causal: bool) -> None:
    wrapper, recorder = flashinfer.BlockSparseAttentionWrapper(workspace()), GraphRecorder()
    step = torch.compile(lambda q, k, v: wrapper.run(q, k, v, return_lse=True), fullgraph=True, backend=recorder)
    for seed in range(1, 4):
        m = matrix(seed, causal)
        wrapper.plan(*on_device(*m.bsr), ROWS, KEYS, R, C, *HEADS, DIM, causal=causal, q_data_type=torch.float32)
        with torch.compiler.set_stance("default" if seed == 1 else "fail_on_recompile"):
            result = step(*on_device(m.q, *m.kv))
        m.expected(Options()).check(*result)
    assert recorder.ops == ["block_sparse_prefill"]


def test_a_causal_plan_takes_tables_on_another_device() -> None:
    """Those of a plan on `meta`, as the tables of one on a GPU may be on the host."""
    elsewhere = torch.empty(1 << 22, dtype=torch.uint8, device="meta")
    m, maps = matrix(1, True), variable(1, True)
    blocks = flashinfer.BlockSparseAttentionWrapper(elsewhere)
    blocks.plan(*m.bsr, ROWS, KEYS, R, C, *HEADS, DIM, causal=True, q_data_type=torch.float32)
    of_heads = flashinfer.VariableBlockSparseAttentionWrapper(elsewhere)
    of_heads.plan(maps.map, maps.rows, maps.cols, *HEADS, DIM, causal=True, q_data_type=torch.float32)


@pytest.mark.parametrize("causal", [False, True])
def test_exported_step_follows_the_map(causal: bool) -> None:
    m = matrix(1, causal)
    indptr, indices = host_bsr(m)
    with torch.no_grad():
        program = torch.export.export(Step(causal), tuple(on_device(m.q, *m.kv, indptr, padded(indices))))
        for seed in (2, 3):
            m = matrix(seed, causal)
            indptr, indices = host_bsr(m)
            m.expected(Options()).check(*program.module()(*on_device(m.q, *m.kv, indptr, padded(indices))))


def variable(seed: int, causal: bool) -> Matrix:
    rows, cols = torch.tensor([[5, 0, 30, 15], [20, 20, 9, 1]]), torch.tensor([[8, 40, 4], [12, 0, 40]])
    return matrix(seed, causal, rows=rows, cols=cols)


@pytest.mark.parametrize("causal", [False, True])
def test_maps_of_heads_in_a_graph(causal: bool) -> None:
    sparse = flashinfer.VariableBlockSparsePlanner(
        50, 52, 4, 3, 2000, page_size=4, causal=causal, device=DEVICE, **SIZES
    )

    def step(q: Tensor, k: Tensor, v: Tensor, *maps: Tensor) -> list[Tensor]:
        plan = sparse.plan(*maps)
        op, folded = torch.ops.attn.block_sparse_prefill, fold_heads(q, k, v)
        results = op(*folded, plan, sparse.workspace, causal=causal, return_lse=True)
        return [unfold_heads(x, 2).flatten(0, 1).transpose(0, 1) for x in results]

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seed in range(1, 4):
        m = variable(seed, causal)
        tensors = on_device(*(t.transpose(0, 1).contiguous() for t in (m.q, *m.kv)), m.map, m.rows, m.cols)
        m.expected(Options()).check(*step(*tensors))
        with torch.compiler.set_stance("default" if seed == 1 else "fail_on_recompile"), torch.no_grad():
            m.expected(Options()).check(*compiled(*tensors))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("col_block", [4, 64], ids=["triton", "cuda"])
def test_captured_plan_and_op_follow_the_map(causal: bool, col_block: int) -> None:
    """Planning and attention in one CUDA graph, replayed with other maps."""
    shape = Shape((8, 2), (128, 128), col_block, "NHD", torch.bfloat16, torch.bfloat16)
    rows, cols = torch.full((1, 5), 64), torch.full((1, 320 // col_block), col_block)
    matrices = [Matrix(Draw(seed), shape, rows, cols, causal) for seed in range(1, 5)]
    sizes = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    blocks = 5 * 320 // col_block
    sparse = flashinfer.BlockSparsePlanner(320, 320, 64, col_block, blocks, causal=causal, device="cuda", **sizes)
    tables = [(indptr, padded(indices, blocks)) for indptr, indices in map(host_bsr, matrices)]
    inputs = [t.cuda() for t in (matrices[0].q, *matrices[0].kv, *tables[0])]

    def step() -> tuple[Tensor, Tensor]:
        plan = sparse.plan(*inputs[3:])
        op = torch.ops.attn.block_sparse_prefill
        return op(*inputs[:3], plan, sparse.workspace, causal=causal, return_lse=True)  # type: ignore[no-any-return]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for m, table in zip(matrices, tables, strict=True):
        for t, new in zip(inputs, (m.q, *m.kv, *table), strict=True):
            t.copy_(new)
        graph.replay()
        m.expected(Options()).check(*result)


@pytest.mark.gpu
def test_blocks_of_whole_groups_run_on_the_cuda_kernel() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the CUDA kernel is for Hopper")
    sizes = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    sparse = flashinfer.BlockSparsePlanner(128, 128, 64, 64, 4, device="cuda", **sizes)
    q, k = (torch.randn(128, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2))
    text = flashinfer.explain("block_sparse_prefill", q, k, k, sparse.state, sparse.workspace)
    assert text.startswith("cuda.prefill: runs it"), text


def test_empty_rows_and_empty_maps() -> None:
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace())
    q, k = torch.randn(8, 4, DIM), torch.full((16, 2, DIM), math.nan)
    indptr = torch.zeros(3, dtype=torch.int32)
    wrapper.plan(*on_device(indptr, indptr[:0]), 8, 16, 4, 8, *HEADS, DIM, q_data_type=torch.float32)
    out, lse = wrapper.run(*on_device(q, k, k), return_lse=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))


@pytest.mark.parametrize("transposed", [False, True])
def test_masks_of_blocks_are_ordered_by_row(transposed: bool) -> None:
    """Two blocks in the first block row and one in the second: the rows of the two are concatenated."""
    mask = torch.arange(3 * 2 * 2).view(3, 2, 2) % 3 == 0
    mask = mask.mT if transposed else mask
    flat = flashinfer.sparse.convert_bsr_mask_layout(mask, torch.tensor([0, 2, 3], dtype=torch.int32))
    assert torch.equal(flat, torch.cat((torch.cat((mask[0], mask[1]), 1).flatten(), mask[2].flatten())))


@pytest.mark.parametrize("causal", [False, True])
def test_flops_count_the_keys_of_the_blocks(causal: bool) -> None:
    m, sparse = matrix(3, causal), planner(causal=causal)
    plan = sparse.plan(*host_bsr(m))
    with FlopCounterMode(display=False) as counter:
        torch.ops.attn.block_sparse_prefill(*on_device(m.q, *m.kv), plan, sparse.workspace, causal=causal)
    assert counter.get_total_flops() == 2 * HEADS[0] * 2 * DIM * int(m.dense.sum())


def test_work_follows_the_blocks() -> None:
    """The work list has as many keys as the selected blocks, and the plan as many pages."""
    m, sparse = matrix(4), planner()
    plan = sparse.plan(*host_bsr(m))
    assert int((plan.work[:, 3] - plan.work[:, 2]).sum()) == int(m.map.sum()) * C
    assert int(plan.kv_indptr[-1]) == int(m.map.sum())


def call_op(sparse: Any, keys: int = KEYS, heads: tuple[int, int] = HEADS, **options: Any) -> Any:
    q, k = (torch.zeros(n, h, DIM, device=DEVICE) for n, h in ((ROWS, heads[0]), (keys, heads[1])))
    return torch.ops.attn.block_sparse_prefill(q, k, k, sparse.state, sparse.workspace, **options)


def maps_planner() -> flashinfer.VariableBlockSparsePlanner:
    return flashinfer.VariableBlockSparsePlanner(ROWS // 2, KEYS, 4, 3, 99, device=DEVICE, **SIZES)


MISMATCHES: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: call_op(planner(), KEYS // 2), errors.ShapeError, "k has 48 tokens and the plan was made for 96"),
    (lambda: call_op(planner(), 2 * KEYS), errors.ShapeError, "k has 192 tokens and the plan was made for 96"),
    (lambda: call_op(maps_planner(), KEYS, (2, 1)), errors.ShapeError, "k has 96 tokens and the plan was made for 192"),
    (lambda: call_op(planner(), causal=True), errors.PlanError, "causal is True and the plan was made without"),
    (lambda: call_op(planner(causal=True)), errors.PlanError, "made with causal and the call is not causal"),
    (
        lambda: call_op(planner(causal=True), causal=True, mask=torch.zeros(9999, dtype=torch.uint8, device=DEVICE)),
        errors.PlanError,
        "expected causal=True and no mask",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), MISMATCHES)
def test_a_call_is_of_the_planned_matrix(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.usefixtures("cold")
def test_a_traced_call_is_of_the_planned_matrix() -> None:
    sparse = planner()

    def attend(q: Tensor, k: Tensor, causal: bool) -> Any:
        op = torch.ops.attn.block_sparse_prefill
        return op(q, k, k, sparse.state, sparse.workspace, causal=causal)

    q = torch.zeros(ROWS, HEADS[0], DIM, device=DEVICE)
    traced = torch.compile(attend, fullgraph=True, dynamic=True, backend="eager")
    for keys, causal, words in ((48, False, "k has 48 tokens and the plan"), (KEYS, True, "causal is True and the")):
        with pytest.raises(Exception, match=words):
            traced(q, torch.zeros(keys, HEADS[1], DIM, device=DEVICE), causal)


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


INDPTR, INDICES = int32(0, 2, 3), int32(0, 1, 1)

PLAN_ERRORS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: _bsr(indptr=int32(0, 2, 1)), errors.PageTableError, "indptr falls from 2 to 1"),
    (lambda: _bsr(indptr=int32(0, 2, 4)), errors.PageTableError, "indptr ends at 4 and indices has 3 entries"),
    (lambda: _bsr(indptr=int32(0, 3)), errors.ShapeError, r"indptr is \[2\]; expected \[3\]"),
    (lambda: _bsr(indices=int32(0, 1, 2)), errors.PageTableError, "the block column 2; expected 0 to 1"),
    (lambda: _bsr(indices=int32(0, -1, 1)), errors.PageTableError, "the block column -1"),
    (
        lambda: _bsr(indptr=int32(0, 1, 3)),
        errors.PageTableError,
        "the block column 1 more than once in block row 1; expected each block column at most once",
    ),
    (
        lambda: planner().plan(int32(0, 0, 3, 3, 3, 3, 3), int32(4, 2, 4)),
        errors.PageTableError,
        "the block column 4 more than once in block row 1",
    ),
    (lambda: _flat(int32(0, 2)), errors.PageTableError, "indptr ends at 2 and mask has 3 blocks"),
    (lambda: _flat(int32(0)), errors.PageTableError, "indptr ends at 0 and mask has 3 blocks"),
    (lambda: _flat(int32()), errors.ShapeError, r"indptr is \[0\]"),
    (lambda: _flat(int32(1, 3)), errors.PageTableError, "indptr starts at 1"),
    (lambda: _flat(int32(0, 4, 3)), errors.PageTableError, "indptr falls from 4 to 3"),
    (lambda: _bsr(indptr=None), errors.ArgumentError, "indptr is missing"),
    (lambda: _bsr(N=15), errors.OptionError, "N is 15; expected a multiple of C, which is 8"),
    (lambda: _bsr(R=0), errors.OptionError, "R is 0"),
    (lambda: _bsr(mask=torch.ones(3, 8, 4)), errors.ShapeError, r"mask is \[3, 8, 4\]; expected \[3, 4, 8\]"),
    (lambda: _bsr(packed_mask=torch.ones(3, dtype=torch.uint8)), errors.ShapeError, "packed_custom_mask is"),
    (lambda: _bsr(pos_encoding_mode="ALIBI"), errors.UnsupportedError, "'ALIBI', which is not supported"),
    (lambda: _bsr(block_mask=torch.ones(1)), errors.UnsupportedError, "VariableBlockSparseAttentionWrapper"),
    (lambda: _bsr(q_scale=torch.ones(1)), errors.UnsupportedError, "pass scale_q"),
    (lambda: _bsr(num_qo_heads=3), errors.ShapeError, "3 query heads do not share 2 KV heads evenly"),
    (lambda: _bsr().run(*_tensors(keys=8)), errors.ShapeError, "k has 8 keys; expected 16 as planned"),
    (lambda: _bsr().run(*_tensors(rows=7)), errors.ShapeError, "q has 7 rows; expected 8 as planned"),
    (lambda: _maps(block_row_sz=int32([4, 4], [4, 5])), errors.ShapeError, "the sums of block_row_sz are"),
    (lambda: _maps(block_col_sz=int32([4, 4])), errors.ShapeError, r"block_col_sz is \[1, 2\]; expected \[2, 2\]"),
    (lambda: _maps(block_row_sz=torch.ones(2, 2)), errors.DTypeError, "block_row_sz is float32"),
    (
        lambda: _maps(block_row_sz=torch.tensor([[4, 4], [3, 5]]) + (1 << 32)),
        errors.PageTableError,
        "VariableBlockSparseAttentionWrapper.plan: block_row_sz has a number beyond int32",
    ),
    (
        lambda: _maps(block_col_sz=int32([1 << 30, 1 << 30], [1, (1 << 31) - 1])),
        errors.OptionError,
        "plan: the sum of block_col_sz is 2147483648; expected at most 2147483647, an int32",
    ),
    (lambda: _maps(num_kv_heads=1), errors.ShapeError, "the maps are of 2 heads"),
    (lambda: _maps(pos_encoding_mode="ALIBI"), errors.UnsupportedError, "'ALIBI', which is not supported"),
    (
        lambda: _maps().run(*(torch.zeros(h, 8, 0, device=DEVICE) for h in (4, 2, 2))),
        errors.ShapeError,
        rf"q is \[4, 8, 0\]; expected \[4, 8, {DIM}\] as planned",
    ),
    (lambda: _maps().run(*_tensors()), errors.ShapeError, r"k has 2 keys; expected 8 as planned"),
    (lambda: planner(blocks=1).plan(int32(0, 2, 2, 2, 2, 2, 2), int32(0, 1)), errors.CapacityError, "max_blocks of at"),
    (lambda: planner().plan(INDPTR, INDICES), errors.ShapeError, r"indptr is \[3\]; expected \[7\]"),
    (lambda: planner().plan(torch.zeros(7), INDICES), errors.DTypeError, "indptr is float32"),
    (lambda: planner(num_qo_heads=3), errors.ShapeError, "3 query heads do not share 2"),
    (
        lambda: flashinfer.BlockSparsePlanner(4, 9, 2, 4, 1, **SIZES),
        errors.OptionError,
        "num_keys is 9; expected a mul",
    ),
]


def _tensors(rows: int = 8, keys: int = 16) -> list[Tensor]:
    return [torch.zeros(n, h, DIM, device=DEVICE) for n, h in ((rows, 4), (keys, 2), (keys, 2))]


def _flat(indptr: Tensor) -> Tensor:
    return flashinfer.sparse.convert_bsr_mask_layout(torch.ones(3, 2, 2, dtype=torch.bool), indptr)


def _bsr(**changes: Any) -> Any:
    wrapper = flashinfer.BlockSparseAttentionWrapper(workspace())
    sizes = {"M": 8, "N": 16, "R": 4, "C": 8, "q_data_type": torch.float32}
    wrapper.plan(**{"indptr": INDPTR, "indices": INDICES, **sizes, **SIZES, **changes})
    return wrapper


def _maps(**changes: Any) -> Any:
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(workspace())
    maps = {"block_mask_map": torch.ones(2, 2, 2, dtype=torch.bool)}
    maps |= {"block_row_sz": int32([4, 4], [3, 5]), "block_col_sz": int32([4, 4], [3, 5])}
    wrapper.plan(**{**maps, **SIZES, "q_data_type": torch.float32, **changes})
    return wrapper


def test_prefill_waits_before_it_reads_positions() -> None:
    """Tensor operations write those of causal plans, and publish nothing: no prefill kernel reads a plan early."""
    folder = Path(attn_ops.kernels.__path__[0])
    for path in (*folder.glob("cuda/prefill*.cu*"), folder / "triton" / "prefill.py"):
        assert not re.search(r"\b(acquire|acquire_plan)\(", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize(("call", "error", "message"), PLAN_ERRORS)
def test_errors(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
