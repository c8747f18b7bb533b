"""Symbolic sizes and surrounding modes: which values are constants of a graph, and which are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.oracle import Expected
from helpers.page_tables import int32
from helpers.tracing import BROKEN_GATHER
from helpers.wrapper_requests import DEVICE, Requests, workspace
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

import attn_ops
from attn_ops import errors
from attn_ops.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from attn_ops.kernels.reference import attention

HEADS, KV_HEADS, DIM, PAGE, SCALE = 4, 2, 16, 4, 0.25
SIZES = {"page_size": PAGE, "num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()
    counters.clear()


def _dense(rows: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, HEADS, DIM), torch.randn(keys, KV_HEADS, DIM), torch.randn(keys, KV_HEADS, DIM)


class Single(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.attn.single_prefill(q, k, v, causal=True, return_lse=True)


def test_a_package_takes_any_number_of_rows(tmp_path: Path) -> None:
    rows, keys = Dim("rows", max=1000), Dim("keys", max=1000)
    shapes = ({0: rows}, {0: keys}, {0: keys})
    program = torch.export.export(Single(), _dense(4, 9), dynamic_shapes=shapes)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "single.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for sizes in ((7, 11), (2, 30)):
        inputs = _dense(*sizes)
        Expected.of([inputs], causal=True).check(*package(*inputs))


def test_a_mask_of_any_size_shares_a_graph() -> None:
    compiled = torch.compile(attn_ops.single_prefill_with_kv_cache, fullgraph=True, backend="aot_eager")
    for rows, keys in ((4, 9), (5, 11), (7, 30), (6, 13)):
        mask = torch.rand(rows, keys) < 0.7
        inputs = _dense(rows, keys)
        out = compiled(*inputs, custom_mask=mask)
        Expected.of([(*inputs, mask)]).check(out)
    assert counters["stats"]["unique_graphs"] <= 2


def test_unbacked_sizes_need_no_guard() -> None:
    class FirstRows(nn.Module):
        def forward(self, n: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = n.item()
            torch._check(rows >= 1)
            torch._check(rows <= q.shape[0])
            return torch.ops.attn.single_prefill(q[:rows], k, v)[0]

    q, k, v = _dense(9, 12)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(FirstRows(), fullgraph=True)
        for rows in (3, 8):
            Expected.of([(q[:rows], k, v)]).check(compiled(torch.tensor(rows), q, k, v))


CHOSEN, SHORT = Requests((37, 5, 130, 9, 20)), Requests((9,), (9,))
Attend = Callable[[Tensor], Tensor]


def _decode() -> tuple[Attend, Expected]:
    planner = attn_ops.DecodePlanner(5, 40, page_size=16, num_qo_heads=4, num_kv_heads=2, head_dim=64, device=DEVICE)
    plan, caches = planner.plan(*CHOSEN.table), CHOSEN.cache()
    return lambda q: torch.ops.attn.batch_decode(q, *caches, plan, planner.workspace)[0], CHOSEN.expected()


def _run() -> tuple[Attend, Expected]:
    wrapper, caches = attn_ops.BatchDecodeWithPagedKVCacheWrapper(workspace()), CHOSEN.cache()
    wrapper.plan(*CHOSEN.table, *CHOSEN.sizes)
    return lambda q: wrapper.run(q, caches), CHOSEN.expected()


def _cudnn() -> tuple[Attend, Expected]:
    k, v = (t.transpose(1, 2) for t in CHOSEN.cache())
    tables: dict[str, Any] = {"actual_seq_lens_kv": CHOSEN.seq_lens, "block_tables": CHOSEN.block_tables()}
    attend = attn_ops.cudnn_batch_decode_with_kv_cache
    return lambda q: attend(q, k, v, 0.125, None, max_sequence_kv=130, **tables), CHOSEN.expected()


def _flash_func() -> tuple[Attend, Expected]:
    kv = [t[None] for t in SHORT.ragged()]
    expected = Expected.of([(q[None], *SHORT.ragged()) for q in CHOSEN.q])
    return lambda q: flash_attn_func(q[:, None], *(t.expand(q.shape[0], -1, -1, -1) for t in kv))[:, 0], expected


def _append() -> tuple[Attend, Expected]:
    """The first token of each request: it sees its own key alone."""
    caches = torch.full((2, 5, 16, 2, 64), torch.nan, dtype=CHOSEN.dtype, device=DEVICE)

    def attend(q: Tensor) -> Tensor:
        new, batch = q[:, None, :2], torch.arange(q.shape[0], dtype=torch.int32, device=DEVICE)
        tables = {"cache_seqlens": torch.zeros_like(batch), "block_table": batch[:, None]}
        return flash_attn_with_kvcache(q[:, None], *caches.clone(), new, new, **tables)[:, 0]

    return attend, Expected.of([(q[None], q[None, :2], q[None, :2]) for q in CHOSEN.q])


def _flash_cache() -> tuple[Attend, Expected]:
    caches, tables = CHOSEN.cache(), {"cache_seqlens": CHOSEN.seq_lens, "block_table": CHOSEN.block_tables()}
    return lambda q: flash_attn_with_kvcache(q[:, None], *caches, **tables)[:, 0], CHOSEN.expected()


def _flash_metadata() -> tuple[Attend, Expected]:
    caches, seq_lens, table = CHOSEN.cache(), CHOSEN.seq_lens, CHOSEN.block_tables()

    def attend(q: Tensor) -> Tensor:
        metadata = get_scheduler_metadata(q.shape[0], 1, 130, 4, 2, 64, seq_lens, page_size=16, qkv_dtype=CHOSEN.dtype)
        tables = {"cache_seqlens": seq_lens, "block_table": table, "scheduler_metadata": metadata}
        return flash_attn_with_kvcache(q[:, None], *caches, **tables)[:, 0]

    return attend, CHOSEN.expected()


def _chosen_rows(attend: Attend, backend: str) -> Callable[[int], Tensor]:
    """``attend`` of the first rows, whose number the graph computes from a mask."""
    rows = torch.cat((CHOSEN.q, torch.full_like(CHOSEN.q[:3], torch.nan)))
    step = torch.compile(lambda x, mask: attend(x[mask]), fullgraph=True, backend=backend, dynamic=True)
    return lambda n: step(rows, torch.arange(len(rows), device=DEVICE) < n)


@pytest.mark.parametrize("make", [_decode, _run, _cudnn, _flash_func, _flash_cache, _flash_metadata, _append])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_rows_that_the_graph_chooses(make: Callable[[], tuple[Attend, Expected]]) -> None:
    attend, expected = make()
    expected.check(_chosen_rows(attend, "aot_eager")(5))


CHUNK = Requests((130,), (7,), dtype=torch.float32)


@pytest.mark.parametrize("function", [False, True], ids=["op", "function"])
@pytest.mark.parametrize("pos_encoding", ["NONE", "ROPE_LLAMA"])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_rows_and_keys_of_one_request_that_the_graph_chooses(function: bool, pos_encoding: str) -> None:
    """Inductor's matrix products need to know whether there is one row or key. Here 0, 1 or more are."""

    def attend(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        q, kept = q[rows], keys.nonzero()[:, 0]
        k, v = k[kept], v[kept]
        if function:
            options: dict[str, Any] = {"causal": True, "pos_encoding_mode": pos_encoding, "return_lse": True}
            return attn_ops.single_prefill_with_kv_cache(q, k, v, **options)
        return torch.ops.attn.single_prefill(q, k, v, causal=True, pos_encoding=pos_encoding, return_lse=True)

    q, (k, v) = CHUNK.q, CHUNK.ragged()
    compiled = torch.compile(attend, fullgraph=True)
    for rows, keys in ((7, 130), (1, 130), (7, 1), (0, 9), (3, 0)):
        masks = (torch.arange(len(t), device=DEVICE) < n for t, n in ((q, rows), (k, keys)))
        expected = Expected.of([(q[:rows], k[:keys], v[:keys])], causal=True, pos_encoding=pos_encoding)
        expected.check(*compiled(q, k, v, *masks))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_requests_that_the_graph_chooses() -> None:
    """A step over the requests and pages that masks keep: places, append, plan, decode and varlen attention."""
    planner = attn_ops.DecodePlanner(5, 40, page_size=16, num_qo_heads=4, num_kv_heads=2, head_dim=64, device=DEVICE)
    requests = Requests(CHOSEN.kv_lens)
    caches, (k, v), seq_lens = requests.cache(), requests.ragged(), requests.seq_lens
    last, tables = requests.kv_indptr[1:].long() - 1, requests.block_tables()
    for cache in caches:
        pages = tables.gather(1, (seq_lens[:, None].long() - 1) // 16)[:, 0].long()
        cache[pages, (seq_lens.long() - 1) % 16] = torch.nan  # the step appends these tokens

    def step(q: Tensor, k: Tensor, v: Tensor, tables: Tensor, seq_lens: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        q, k, v, tables, seq_lens = (t[keep] for t in (q, k, v, tables, seq_lens))
        pages = (seq_lens + 15) // 16
        used = torch.arange(tables.shape[1], device=tables.device) < pages[:, None]
        indices = tables[used]
        indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
        ones = torch.nn.functional.pad(torch.ones_like(seq_lens).cumsum(0), (1, 0)).int()
        places = attn_ops.get_batch_indices_positions(ones, seq_lens, seq_lens.shape[0])
        table = indices, indptr, seq_lens - (pages - 1) * 16
        attn_ops.append_paged_kv_cache(k, v, *places, caches, *table)
        plan = planner.plan(indptr, indices, table[2])
        out, _ = torch.ops.attn.batch_decode(q, *caches, plan, planner.workspace)
        same = flash_attn_varlen_func(q, k, v, ones, ones.clone(), 1, 1)
        return out, same, torch.ops.attn.merge_state(out, out[..., 0].float(), out, out[..., 0].float())[0]

    keep = torch.tensor([True, False, True, True, True], device=DEVICE)
    inputs = requests.q, k[last], v[last], tables, seq_lens, keep
    for t in inputs:
        torch._dynamo.decorators.mark_unbacked(t, 0)
    out, same, merged = torch.compile(step, fullgraph=True)(*inputs)
    kept = zip(requests.q.split(1), requests.batch.keys, requests.batch.values, keep.tolist(), strict=True)
    expected = Expected.of([tensors for *tensors, chosen in kept if chosen])
    expected.check(out)
    expected.check(merged)
    torch.testing.assert_close(same, v[last][keep].repeat_interleave(2, 1))


@pytest.mark.parametrize("make", [_decode, _run])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_more_rows_than_planned_are_refused_when_the_graph_runs(make: Callable[[], tuple[Attend, Expected]]) -> None:
    attend, expected = make()
    step = _chosen_rows(attend, "eager")
    expected.check(step(5))
    with pytest.raises(RuntimeError, match=r"Runtime assertion failed for expression .*u0"):  # without our text
        step(8)


def _paged(batch: int) -> tuple[tuple[Tensor, ...], list[tuple[Tensor, Tensor, Tensor]], Tensor, Tensor]:
    """Requests of 3 tokens on one page each: page table, requests for the oracle, cache and query."""
    cache, q = torch.randn(20, 2, PAGE, KV_HEADS, DIM), torch.randn(batch, HEADS, DIM)
    table = int32(range(batch + 1)), int32(range(batch)), int32([3] * batch)
    return table, [(q[b : b + 1], cache[b, 0, :3], cache[b, 1, :3]) for b in range(batch)], q, cache


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_plans_of_any_batch_and_about_the_same_pages_share_a_graph(kind: str) -> None:
    """``max_kv_len`` by default is the next power of two of the tokens, here 256, so that it stays the same."""

    def attend(q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor], workspace: Tensor) -> Tensor:
        return getattr(torch.ops.attn, f"batch_{kind}")(q, k, v, plan, workspace)[0]

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    table, requests, q, cache = _paged(3)
    for i, (max_batch, max_pages) in enumerate(((5, 34), (6, 40), (9, 53), (12, 64))):
        if kind == "decode":
            planner: Any = attn_ops.DecodePlanner(max_batch, max_pages, **SIZES)
            plan = planner.plan(*table)
        else:
            planner = attn_ops.PrefillPlanner(max_batch, 8 * max_batch, max_pages, **SIZES)
            plan = planner.plan(table[0], *table)
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            out = compiled(q, *cache.unbind(1), plan, planner.workspace)
        Expected.of(requests).check(out)


def test_a_plan_with_symbolic_sizes_is_checked() -> None:
    """In the trace, and by the guards of a graph that another plan has made."""

    def attend(q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor], workspace: Tensor) -> Tensor:
        return torch.ops.attn.batch_decode(q, k, v, plan, workspace)[0]

    table, _, q, cache = _paged(3)
    planner = attn_ops.DecodePlanner(5, 34, **SIZES)
    plan = planner.plan(*table)
    bad = plan._replace(kv_indptr=plan.kv_indptr[:4].clone())
    message = r"batch_decode: plan.kv_indptr is \[4\]; expected \[6\] for max_batch 5, max_pages 34, num_ctas 1; pass"
    for first in ([], [plan]):
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
        for good in first:
            compiled(q, *cache.unbind(1), good, planner.workspace)
        with pytest.raises(Exception, match=message):
            compiled(q, *cache.unbind(1), bad, planner.workspace)


@pytest.mark.parametrize("mark", ["mark_dynamic", "maybe_mark_dynamic", None])
def test_rows_of_a_wrapper_can_be_marked_dynamic(mark: str | None) -> None:
    wrapper = attn_ops.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1 << 16, dtype=torch.uint8))
    compiled = torch.compile(lambda q, cache: wrapper.run(q, cache), fullgraph=True, backend="aot_eager")
    for i, batch in enumerate((3, 4, 2)):
        table, requests, q, cache = _paged(batch)
        wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type="float32")
        if mark is not None:
            getattr(torch._dynamo, mark)(q, 0)
        with torch._dynamo.config.patch(error_on_recompile=i > 0 and mark is not None):
            Expected.of(requests).check(compiled(q, cache))


@pytest.mark.usefixtures("vector_code")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[BROKEN_GATHER, pytest.mark.slow])])
def test_wrappers_that_share_a_workspace_share_a_graph(backend: str) -> None:
    workspace, cache = torch.zeros(1 << 22, dtype=torch.uint8), torch.randn(120, 2, 16, KV_HEADS, DIM)
    decode = attn_ops.BatchDecodeWithPagedKVCacheWrapper(workspace)
    prefill = attn_ops.BatchPrefillWithPagedKVCacheWrapper(workspace)
    both = torch.compile(lambda a, b: (prefill.run(a, cache), decode.run(b, cache)), fullgraph=True, backend=backend)
    for pages in (20, 60, 62 if backend == "inductor" else 110):  # which has the graph of 60; 110 have not
        table = int32([0, 10, pages]), int32(range(pages)), int32([16, 16])
        options = {"q_data_type": "float32", "fixed_split_size": 4}
        prefill.plan(int32([0, 2, 5]), *table, HEADS, KV_HEADS, DIM, 16, **options)
        decode.plan(*table, HEADS, KV_HEADS, DIM, 16, **options)
        q = torch.randn(7, HEADS, DIM)
        keys, values = cache[:pages].unbind(1)
        kv = [(keys[a:b].flatten(0, 1), values[a:b].flatten(0, 1)) for a, b in ((0, 10), (10, pages))]
        with torch._dynamo.config.patch(error_on_recompile=pages == 62):
            outs = both(q[:5], q[5:])
        Expected.of([(q[:2], *kv[0]), (q[2:5], *kv[1])]).check(outs[0])
        Expected.of([(q[5:6], *kv[0]), (q[6:], *kv[1])]).check(outs[1])


def _deepseek(q: Tensor, kv: Tensor, indptr: Tensor, kv_indptr: Tensor) -> Tensor:
    options = (None, kv_indptr, 40, 130, SCALE, 1.0, None, 2, -1, indptr, kv_indptr, None, True, True)
    return attn_ops.trtllm_ragged_attention_deepseek(q, kv, kv, *options)[0]


def _tabled(q: Tensor, cache: Tensor, block_tables: Tensor, seq_lens: Tensor) -> Tensor:
    return attn_ops.trtllm_batch_decode_with_kv_cache(
        q, cache, None, block_tables, seq_lens, 99, SCALE, kv_layout="NHD"
    )


def test_one_shot_functions_share_a_graph() -> None:
    compiled = torch.compile(_deepseek, fullgraph=True, backend="aot_eager")
    for keys in range(9, 33):
        q, kv = torch.randn(6, HEADS, DIM), torch.randn(keys, KV_HEADS, DIM)
        out = compiled(q, kv, int32([0, 3, 6]), int32([0, 4, keys]))
        requests = [(q[:3], kv[:4], kv[:4]), (q[3:], kv[4:], kv[4:])]
        Expected.of(requests, causal=True, sm_scale=SCALE).check(out)
    assert counters["stats"]["unique_graphs"] <= 2
    compiled = torch.compile(_tabled, fullgraph=True, backend="aot_eager")
    cache = torch.randn(40, 2, PAGE, KV_HEADS, DIM)
    counters.clear()
    for width in range(3, 14):
        q, tables = torch.randn(2, HEADS, DIM), torch.randint(0, 40, (2, width), dtype=torch.int32)
        tokens = [cache[tables[b].long()].transpose(0, 1).flatten(1, 2)[:, :9] for b in range(2)]
        out = compiled(q, cache, tables, int32([9, 9]))
        Expected.of([(q[b : b + 1], *tokens[b]) for b in range(2)], sm_scale=SCALE).check(out)
    assert counters["stats"]["unique_graphs"] <= 2


def test_one_shot_functions_run_on_fake_tensors() -> None:
    with FakeTensorMode():
        cache = torch.randn(16, 2, PAGE, KV_HEADS, DIM)
        out = _tabled(torch.randn(2, HEADS, DIM), cache, int32([[0, 1, 2]] * 2), int32([1, 2]))
        assert out.shape == (2, HEADS, DIM)


def test_the_number_of_rows_may_be_computed_in_the_graph() -> None:
    def places(indptr: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        return attn_ops.get_batch_indices_positions(indptr, seq_lens, indptr[-1].item())

    inputs = int32([0, 1, 3]), int32([4, 5])
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(places, fullgraph=True, backend="aot_eager")(*inputs)
    assert [t.tolist() for t in compiled] == [[0, 1, 1], [3, 3, 4]]


def test_a_tree_mask_exports_with_a_dynamic_batch() -> None:
    class TreeMask(nn.Module):
        def forward(self, q: Tensor, cache: Tensor, tables: Tensor, seq_lens: Tensor, mask: Tensor) -> Tensor:
            options: dict[str, Any] = {"kv_layout": "NHD", "q_len_per_req": 3, "mask": mask}
            return attn_ops.trtllm_batch_decode_with_kv_cache(q, cache, None, tables, seq_lens, 99, SCALE, **options)

    batch = Dim("batch", min=2, max=64)

    def inputs(n: int) -> tuple[Tensor, ...]:
        # Each row sees the draft tokens up to its own.
        visible = torch.tensor([1, 3, 7], dtype=torch.int32).to(torch.uint16)
        tables = torch.arange(2 * n, dtype=torch.int32).view(n, 2)
        return (
            *(torch.randn(3 * n, HEADS, DIM), torch.randn(20, 2, PAGE, KV_HEADS, DIM), tables),
            *(int32([7] * n), visible.view(1, 3, 1).repeat(n, 1, 1)),
        )

    shapes = ({0: 3 * batch}, {}, {0: batch}, {0: batch}, {0: batch})
    program = torch.export.export(TreeMask(), inputs(4), dynamic_shapes=shapes)
    q, cache, tables, *rest = inputs(5)
    out = program.module()(q, cache, tables, *rest)
    tokens = [cache[tables[b].long()].transpose(0, 1).flatten(1, 2)[:, :7] for b in range(5)]
    requests = [(q[3 * b : 3 * b + 3], *tokens[b]) for b in range(5)]
    Expected.of(requests, causal=True, sm_scale=SCALE).check(out)


def test_errors_name_numbers_not_symbols() -> None:
    _, _, q, cache = _paged(7)
    planner = attn_ops.DecodePlanner(4, 7, **SIZES)
    words = r"q has 7 rows and the plan capacity for 4 requests; expected max_batch of at least 7"

    def call(q: Tensor) -> Tensor:
        return torch.ops.attn.batch_decode(q, cache[:, 0], cache[:, 1], planner.state, planner.workspace)[0]

    with pytest.raises(errors.CapacityError, match=words):
        call(q)
    with pytest.raises(Exception, match=words):
        torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)(q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_planners_and_scales_do_not_follow_the_default_dtype(dtype: torch.dtype) -> None:
    table, requests, q, cache = _paged(3)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        planner = attn_ops.DecodePlanner(3, 3, **SIZES)
        plan = planner.plan(*table)
        out = torch.ops.attn.batch_decode(q, cache[:, 0], cache[:, 1], plan, planner.workspace)[0]
        wrapper = attn_ops.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1 << 16, dtype=torch.uint8))
        wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float32)
        scaled = wrapper.run(q, cache, k_scale=torch.ones((), dtype=torch.float32))
    finally:
        torch.set_default_dtype(usual)
    Expected.of(requests).check(out)
    Expected.of(requests).check(scaled)


def test_autocast_does_not_affect_the_reference() -> None:
    inputs = _dense(5, 40)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = Single()(*inputs)
    Expected.of([inputs], causal=True).check(out, lse)


def test_a_plan_made_in_inference_mode_is_replanned_outside_of_it() -> None:
    table, requests, q, cache = _paged(3)
    wrapper = attn_ops.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1 << 16, dtype=torch.uint8))
    with torch.inference_mode():
        planner = attn_ops.DecodePlanner(3, 3, **SIZES)
        planner.plan(*table)
        wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type="float32")
    plan = planner.plan(*table)
    wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type="float32")
    Expected.of(requests).check(torch.ops.attn.batch_decode(q, *cache.unbind(1), plan, planner.workspace)[0])
    Expected.of(requests).check(wrapper.run(q, cache))


def test_a_batch_as_large_as_the_queue_of_a_plan_is_symbolic() -> None:
    """Equal sizes share a symbol, and that of the queue is a constant. No other size here is as small."""
    planner = attn_ops.PrefillPlanner(8, 64, 64, **{**SIZES, "num_kv_heads": HEADS})
    size = planner.state.queue.shape[0]
    k, v = (torch.randn(20, PAGE, HEADS, DIM) for _ in range(2))

    def attend(q: Tensor, plan: list[Tensor], workspace: Tensor) -> Tensor:
        return torch.ops.attn.batch_prefill(q, k, v, plan, workspace)[0]

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (size, size + 1):
        q = torch.randn(batch, HEADS, DIM)
        indptr = int32(range(batch + 1))
        plan = planner.plan(indptr, indptr, int32(range(batch)), int32([3] * batch))
        with torch._dynamo.config.patch(error_on_recompile=batch > size):
            out = compiled(q, plan, planner.workspace)
        Expected.of([(q[b : b + 1], k[b, :3], v[b, :3]) for b in range(batch)]).check(out)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("op", ["batch_prefill", "ragged_prefill"])
def test_code_for_any_number_of_rows_runs_without_rows_and_without_keys(op: str, kv_layout: str) -> None:
    """As in a package, which has the code that is traced here."""
    if op == "ragged_prefill":
        planner = attn_ops.PrefillPlanner(2, 8, 0, **{**SIZES, "page_size": 1}, max_kv_len=16)
        plan, kv = planner.plan(int32([0, 1, 3]), int32([0, 4, 9])), torch.randn(2, 9, KV_HEADS, DIM)
    else:
        planner = attn_ops.PrefillPlanner(2, 8, 4, **SIZES)
        plan = planner.plan(int32([0, 1, 3]), int32([0, 1, 3]), int32([2, 0, 1]), int32([4, 1]))
        kv = torch.randn(2, 20, PAGE, KV_HEADS, DIM)
    k, v = kv if kv_layout == "NHD" else kv.transpose(-3, -2)
    q, ragged = torch.randn(3, HEADS, DIM), op == "ragged_prefill"

    class Body(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, plan: list[Tensor]) -> tuple[Tensor, Tensor]:
            return getattr(attention, op)(q, k, v, plan, planner.workspace, kv_layout=kv_layout, return_lse=True)

    axis = 1 if ragged and kv_layout == "HND" else 0
    keys = {axis: Dim("keys", max=16)} if ragged else {}
    shapes = ({0: Dim("rows", max=8)}, keys, keys, [{} for _ in plan])
    graph = torch.export.export(Body(), (q, k, v, [*plan]), dynamic_shapes=shapes).graph_module
    calls = [(rows, k.shape[axis]) for rows in (3, 1, 0)] + ([(3, 0), (0, 0)] if ragged else [])
    for rows, size in calls:
        if size == 0:
            planner.plan(int32([0, 1, 3]), int32([0, 0, 0]))
        inputs = q[:rows], *(t.narrow(axis, 0, size) for t in (k, v))
        options = {"kv_layout": kv_layout, "return_lse": True, "backend": "reference"}
        expected = getattr(torch.ops.attn, op)(*inputs, plan, planner.workspace, **options)
        for result, wanted in zip(graph(*inputs, *plan), expected, strict=True):
            torch.testing.assert_close(result, wanted)


def test_sizes_that_may_be_integers_are_compared_in_one_module() -> None:
    """Dynamo of torch 2.11 does not trace ``torch.sym_min`` of integers."""
    root = Path(attn_ops.__file__).parent
    users = [path.name for path in root.rglob("*.py") if re.search(r"torch\.sym_(min|max)", path.read_text("utf-8"))]
    assert users == ["symbolic_sizes.py"]
