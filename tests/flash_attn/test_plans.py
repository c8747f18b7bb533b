"""Calls share plans only where their lengths are the same for certain."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.flash_requests import DenseCache, check_dense, check_varlen, expected
from helpers.wrapper_requests import DEVICE, Requests
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from attn_ops import errors
from attn_ops.flash_attn import (
    SchedulerMetadata,
    SharedPlans,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from attn_ops.frontend import call_plans, shared_plans
from attn_ops.plan.state import PlanProblem

on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="lengths on the host")


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the plan sources that planned, in order."""
    made: list[str] = []

    def counted(source: type) -> Callable[..., Any]:
        plan = source.plan  # type: ignore[attr-defined]

        def count(self: Any) -> Any:
            made.append(source.__name__)
            return plan(self)

        return count

    for source in (call_plans.RaggedLengths, call_plans.BlockTables):
        monkeypatch.setattr(source, "plan", counted(source))
    shared_plans.host_plans().entries.clear()
    yield made
    shared_plans.host_plans().entries.clear()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are not looked at, as those on a GPU."""
    monkeypatch.setattr(shared_plans, "seen", lambda _: False)


class Varlen:
    """A batch by cumulative lengths, which :meth:`become` changes in place."""

    def __init__(self) -> None:
        self.r = Requests((33, 3, 9, 70), (4, 5, 2, 40))
        self.q, (self.k, self.v) = self.r.q, self.r.ragged()
        self.cu_q, self.cu_k = self.r.qo_indptr, self.r.kv_indptr

    def run(self, **options: Any) -> Tensor:
        return flash_attn_varlen_func(self.q, self.k, self.v, self.cu_q, self.cu_k, 40, 70, causal=True, **options)

    def become(self, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], write: Callable[[Tensor, Tensor], Any]) -> None:
        for t, lens in ((self.cu_q, q_lens), (self.cu_k, kv_lens)):
            write(t, torch.tensor([0, *lens]).cumsum(0).to(DEVICE, torch.int32))

    def check(self, out: Tensor, **options: Any) -> None:
        rows, keys = (t.diff().tolist() for t in (self.cu_q.cpu(), self.cu_k.cpu()))
        parts = zip(self.q.split(rows), self.k.cpu().split(keys), self.v.cpu().split(keys), strict=True)
        check_varlen(expected(list(parts), causal=True, **options), out)


OTHER = (40, 2, 5, 4), (70, 9, 3, 33)


def through_numpy(t: Tensor, values: Tensor) -> None:
    t.numpy()[:] = values.numpy()


def through_data(t: Tensor, values: Tensor) -> None:
    t.data.copy_(values)


@on_cpu
@pytest.mark.parametrize("write", [Tensor.copy_, through_data, through_numpy], ids=["copy_", "data", "numpy"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_plans_of_lengths_on_the_host_follow_their_contents(
    mode: Callable[[], Any], write: Callable[[Tensor, Tensor], Any], plans: list[str]
) -> None:
    with mode():
        batch = Varlen()
        for _ in range(3):
            batch.check(batch.run())
        assert plans == ["RaggedLengths"]
        batch.become(*OTHER, write)
        for _ in range(2):
            batch.check(batch.run())
        assert plans == ["RaggedLengths"] * 2


@on_cpu
def test_equal_lengths_share_a_plan_whatever_tensors_hold_them(plans: list[str]) -> None:
    batch = Varlen()
    batch.run()
    with torch.inference_mode():
        batch.cu_q, batch.cu_k = batch.cu_q.clone(), batch.cu_k.clone()
        batch.check(batch.run())
    batch.check(batch.run())
    assert len(plans) == 1


@on_cpu
def test_plans_of_the_host_are_bounded(plans: list[str]) -> None:
    q = torch.randn(2, 3, 4, 16)
    for n in range(1, 2 * shared_plans.MAX_HOST_PLANS):
        kv = q[:, :, :2].repeat(1, n, 1, 1)
        flash_attn_func(q, kv, kv, attention_chunk=2)
    assert len(shared_plans.host_plans().entries) == shared_plans.MAX_HOST_PLANS


def test_equal_sizes_share_a_plan(plans: list[str]) -> None:
    q, c = torch.randn(2, 3, 4, 64, device=DEVICE).half(), DenseCache((17, 17))
    for _ in range(3):
        flash_attn_func(q, q[:, :, :2], q[:, :, :2], attention_chunk=2)
        out = flash_attn_with_kvcache(q, c.k, c.v, cache_seqlens=17, causal=True)
    assert plans == ["RaggedLengths", "BlockTables"]
    check_dense(expected(list(zip(q, c.keys, c.values, strict=True)), causal=True), out)
    flash_attn_with_kvcache(q, c.k, c.v, cache_seqlens=16, causal=True)
    assert len(plans) == 3


@pytest.mark.usefixtures("on_gpu")
def test_every_call_plans_for_lengths_on_a_gpu(plans: list[str]) -> None:
    batch = Varlen()
    batch.check(batch.run())
    through_data(batch.cu_q, batch.cu_q)
    batch.become(*OTHER, through_data)
    batch.check(batch.run())
    assert len(plans) == 2 if DEVICE == "cpu" else len(plans) <= 1


@pytest.mark.usefixtures("on_gpu")
def test_layers_of_a_step_share_plans_by_kind(plans: list[str]) -> None:
    batch = Varlen()
    for step in range(2):
        with SharedPlans():
            for _ in range(3):
                batch.check(batch.run())
                batch.check(batch.run(window_size=(4, -1)), window_size=(4, -1))
        assert len(plans) == 2 * (step + 1)
        batch.become(*OTHER, through_data)  # between steps anything may write


@pytest.mark.usefixtures("on_gpu")
def test_a_change_of_lengths_in_a_step_plans_again(plans: list[str]) -> None:
    batch = Varlen()
    with SharedPlans() as shared:
        batch.check(batch.run())
        batch.become(*OTHER, Tensor.copy_)
        batch.check(batch.run())
        assert len(plans) == 2
        batch.become((4, 5, 2, 40), (33, 3, 9, 70), through_data)
        shared.clear()
        batch.check(batch.run())
        batch.cu_q = batch.cu_q.clone()
        batch.check(batch.run())
    assert len(plans) == 4


@pytest.mark.usefixtures("on_gpu")
def test_steps_in_inference_mode(plans: list[str]) -> None:
    with torch.inference_mode():
        batch = Varlen()
        for lens in (((4, 5, 2, 40), (33, 3, 9, 70)), OTHER):
            batch.become(*lens, Tensor.copy_)
            with SharedPlans():
                for _ in range(2):
                    batch.check(batch.run())
    assert len(plans) == 2


@pytest.mark.usefixtures("on_gpu")
def test_a_block_may_be_entered_within_itself(plans: list[str]) -> None:
    batch, shared = Varlen(), SharedPlans()
    with shared:
        batch.run()
        with shared:
            batch.run()
        batch.run()
        with SharedPlans():
            batch.run()
    with shared:
        batch.check(batch.run())
    assert len(plans) == 3


@pytest.mark.usefixtures("on_gpu")
def test_blocks_belong_to_a_thread(plans: list[str]) -> None:
    batch = Varlen()
    with SharedPlans():
        batch.run()
        thread = threading.Thread(target=batch.run)
        thread.start()
        thread.join()
    assert len(plans) == 2


@pytest.mark.usefixtures("on_gpu")
def test_captures_do_not_share_plans_with_eager_calls(plans: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    batch, capturing = Varlen(), [False]
    monkeypatch.setattr(shared_plans, "is_capturing", lambda: capturing[0])
    shared = SharedPlans()
    with shared:
        batch.run()
        capturing[0] = True
        batch.run()
        batch.run()
        assert len(plans) == 3
    with shared:
        batch.run()
        batch.run()
        assert len(plans) == 4
        capturing[0] = False
        batch.run()
    assert len(plans) == 5


@on_cpu
def test_captures_plan_for_lengths_on_the_host(plans: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Varlen()
    batch.run()
    monkeypatch.setattr(shared_plans, "is_capturing", lambda: True)
    batch.run()
    assert len(plans) == 2


def test_a_traced_call_contains_its_plan() -> None:
    batch = Varlen()
    batch.run()

    def call(cu_q: Tensor, cu_k: Tensor) -> Tensor:
        return flash_attn_varlen_func(batch.q, batch.k, batch.v, cu_q, cu_k, 40, 70, causal=True)

    with SharedPlans():
        batch.run()
        graph = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(batch.cu_q, batch.cu_k)
    batch.become(*OTHER, Tensor.copy_)
    batch.check(graph(batch.cu_q, batch.cu_k))


@pytest.mark.gpu
def test_a_captured_step_replays_with_other_lengths(plans: list[str]) -> None:
    batch = Varlen()
    batch.run()
    plans.clear()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), SharedPlans():
        outs = [batch.run() for _ in range(3)]
    assert len(plans) == 1
    for lens in (OTHER, ((4, 5, 2, 40), (33, 3, 9, 70))):
        batch.become(*lens, Tensor.copy_)
        graph.replay()
        for out in outs:
            batch.check(out)
        batch.check(batch.run())


# -------------------------------------------------------------------------------------------------- scheduler_metadata


class Pages:
    """A step over a paged cache, with metadata for all layers."""

    def __init__(self, q_len: int = 1) -> None:
        self.r = Requests((37, 8, 130, 5))
        self.q = torch.randn(4, q_len, 4, 64, device=DEVICE).half()
        self.table, self.seqlens = self.r.block_tables(), self.r.seq_lens

    def metadata(self, **options: Any) -> SchedulerMetadata:
        given = {"page_size": 16, "block_table": self.table, "causal": True, **options}
        return get_scheduler_metadata(4, self.q.shape[1], 144, 4, 2, 64, self.seqlens, **given)

    def run(self, made: SchedulerMetadata | None, **options: Any) -> Tensor:
        return flash_attn_with_kvcache(
            self.q,
            *self.r.cache(),
            **{"cache_seqlens": self.seqlens, "block_table": self.table, "causal": True, **options},
            scheduler_metadata=made,
        )

    def check(self, out: Tensor) -> None:
        check_dense(expected(list(zip(self.q, self.r.batch.keys, self.r.batch.values, strict=True)), causal=True), out)


@pytest.mark.parametrize("q_len", [1, 3])
def test_layers_use_the_given_metadata(q_len: int, plans: list[str]) -> None:
    step = Pages(q_len)
    made = step.metadata()
    for _ in range(3):
        step.check(step.run(made))
    assert plans == ["BlockTables"]


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype", "ctas"),
    [
        (torch.float16, torch.float16, ["16-bit", "16-bit"]),
        (torch.float16, torch.float8_e4m3fn, ["fp8", "fp8"]),
        (torch.float32, torch.float32, ["general", "general"]),
        (torch.float32, torch.float8_e4m3fn, ["fp8", "general"]),
    ],
    ids=str,
)
def test_metadata_and_calls_plan_for_the_dtypes(
    q_dtype: torch.dtype, kv_dtype: torch.dtype, ctas: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metadata knows the dtype of the cache alone; a float32 query is decoded by the general kernel."""
    asked: list[str] = []

    def ctas_per_head(device: torch.device, problem: PlanProblem, fp8: bool) -> int:
        asked.append("fp8" if fp8 else "16-bit")
        return 3

    def general_ctas_per_head(device: torch.device, num_kv_heads: int) -> int:
        asked.append("general")
        return 3

    monkeypatch.setattr(call_plans, "ctas_per_head", ctas_per_head)
    monkeypatch.setattr(call_plans, "general_ctas_per_head", general_ctas_per_head)
    step = Pages()
    step.q = step.q.to(q_dtype)
    k, v = (t.to(kv_dtype) for t in step.r.cache())
    options = {"cache_seqlens": step.seqlens, "block_table": step.table, "causal": True}
    made = step.metadata(qkv_dtype=kv_dtype)
    planned, given = (flash_attn_with_kvcache(step.q, k, v, **options, scheduler_metadata=x) for x in (None, made))
    assert asked == ctas
    assert torch.equal(planned, given)


def test_metadata_of_varlen_calls_over_pages(plans: list[str]) -> None:
    r = Requests((33, 3, 9, 70), (4, 5, 2, 40))
    made = get_scheduler_metadata(
        4, 40, 70, 4, 2, 64, r.seq_lens, cu_seqlens_q=r.qo_indptr, total_q=51, page_size=16,
        page_table=r.block_tables(), causal=True,
    )  # fmt: skip
    for _ in range(2):
        out = flash_attn_varlen_func(
            r.q, *r.cache(), r.qo_indptr, r.kv_indptr, 40, 70, causal=True, block_table=r.block_tables(),
            scheduler_metadata=made,
        )  # fmt: skip
        requests = list(zip(r.q.split(r.rows), r.batch.keys, r.batch.values, strict=True))
        check_varlen(expected(requests, causal=True), out)
    assert len(plans) == 1


LEFTPADS = torch.tensor([2, 0, 1, 3])


@pytest.mark.parametrize(
    ("q_len", "made", "options", "message"),
    [
        (1, {}, {"q": 3}, "scheduler_metadata was made for 4 query rows; expected 12, which the tensors have"),
        (1, {"attention_chunk": 8}, {}, "scheduler_metadata was made for 8 keys of a chunk; expected 0"),
        (3, {}, {"causal": False}, "the plan was made for causal attention and causal is False"),
        (3, {"window_size": (5, 0)}, {}, "window_left is -1 and the plan was made for window_left 5"),
        (1, {"page_size": 32}, {}, "scheduler_metadata was made for 32 tokens of a page; expected 16"),
        (1, {"page_size": 32, "attention_chunk": 5}, {"attention_chunk": 5}, "made for 32 tokens of a page"),
        (1, {"page_size": 32, "cache_leftpad": LEFTPADS}, {"cache_leftpad": LEFTPADS}, "made for 32 tokens of a page"),
        (1, {"page_size": 32, "cache_leftpad": LEFTPADS}, {}, "made for 32 tokens of a page; expected 16"),
    ],
)
def test_metadata_of_another_batch(q_len: int, made: dict[str, Any], options: dict[str, Any], message: str) -> None:
    step = Pages(q_len)
    of = step.metadata(**made)
    if "q" in options:
        step.q = torch.randn(4, options.pop("q"), 4, 64, device=DEVICE).half()
    with pytest.raises(errors.PlanError, match=message):
        step.run(of, **options)


@pytest.mark.parametrize(
    "made",
    [{"block_table": None}, {"block_table": None, "causal": False}, {"max_seqlen_k_new": 1}],
    ids=["without the table", "without the table, not causal", "for an append"],
)
@pytest.mark.parametrize("q_len", [1, 3])
def test_calls_plan_for_themselves_if_the_metadata_cannot(q_len: int, made: dict[str, Any], plans: list[str]) -> None:
    """FlashAttention's metadata is made without the page table."""
    step = Pages(q_len)
    of = step.metadata(**made)
    for _ in range(2):
        step.check(step.run(of))
    assert len(plans) == 2 if DEVICE == "cpu" else len(plans) <= 2  # there later calls launch the planning of the first


@pytest.mark.parametrize("q_len", [1, 2])
def test_calls_that_append_with_metadata_for_none(q_len: int, plans: list[str]) -> None:
    """The metadata is of the lengths before the append."""
    cache, q = DenseCache((9, 30)), torch.randn(2, q_len, 4, 64, device=DEVICE).half()
    new_k, new_v = torch.randn(2, 2, 3, 2, 64, device=DEVICE).half().unbind()
    keys, values = (
        [torch.cat((x.to(DEVICE), new)) for x, new in zip(old, added, strict=True)]
        for old, added in ((cache.keys, new_k), (cache.values, new_v))
    )
    made = get_scheduler_metadata(2, q_len, 40, 4, 2, 64, cache.cache_seqlens, causal=True)
    given: dict[str, Any] = {"cache_seqlens": cache.cache_seqlens, "causal": True, "scheduler_metadata": made}
    for _ in range(2):  # both write the same tokens
        out = flash_attn_with_kvcache(q, cache.k, cache.v, new_k, new_v, **given)
        check_dense(expected(list(zip(q, keys, values, strict=True)), causal=True), out)
    assert len(plans) == 2 if DEVICE == "cpu" else len(plans) <= 2  # there later calls launch the planning of the first


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "dense"])
@pytest.mark.parametrize("seqlens", [torch.tensor([39, 17]), 39], ids=["tensor", "number"])
@pytest.mark.parametrize("varlen", [False, True])
def test_metadata_for_an_append_without_room(paged: bool, seqlens: Tensor | int, varlen: bool) -> None:
    """A call that appends nothing plans for itself; one that appends is an error if its lengths are on the host."""
    lens = [seqlens] * 2 if isinstance(seqlens, int) else seqlens.tolist()
    given = seqlens if isinstance(seqlens, int) else seqlens.to(DEVICE)
    appended: dict[str, Any] = {"max_seqlen_k_new": 20}
    if varlen:
        appended |= {"cu_seqlens_k_new": torch.tensor([0, 14, 34], device=DEVICE), "total_k_new": 34}
    r, q = Requests(tuple(lens)), torch.randn(2, 1, 4, 64, device=DEVICE).half()
    caches, table = DenseCache(lens, size=48), r.block_tables(spare=0) if paged else None
    k, v, keys, values = caches.k, caches.v, caches.keys, caches.values
    pages: dict[str, Any] = {}
    if paged:
        (k, v), keys, values, pages = r.cache(), r.batch.keys, r.batch.values, {"block_table": table}
    sizes: dict[str, Any] = {**pages, "page_size": 16} if paged else {}
    made = get_scheduler_metadata(2, 1, 48, 4, 2, 64, given, device=DEVICE, **sizes, **appended)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=given, scheduler_metadata=made, **pages)
    check_dense(expected(list(zip(q, keys, values, strict=True))), out)
    if DEVICE == "cpu" and not varlen:
        new = torch.ones(2, 20, 2, 64).half()
        with pytest.raises(errors.PageTableError, match=r"a request has 59 tokens and .* capacity for 48"):
            flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=given, scheduler_metadata=made, **pages)


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "dense"])
@pytest.mark.parametrize("appends", [False, True])
def test_metadata_of_varlen_calls_without_totals(paged: bool, appends: bool, plans: list[str]) -> None:
    """FlashAttention's metadata knows ``cu_seqlens_q`` and ``cu_seqlens_k_new``, and no totals."""
    r = Requests((33, 3, 9, 70), (4, 3, 2, 40))
    table = r.block_tables()
    k, v = r.cache()
    if not paged:
        k, v = (t[table.long()].flatten(1, 2) for t in (k, v))
    new_k, new_v = (torch.cat([x[-n:] for x, n in zip(y, r.rows, strict=True)]) for y in (r.batch.keys, r.batch.values))
    before = r.seq_lens - (r.qo_indptr.diff() if appends else 0)
    sizes: dict[str, Any] = {"page_size": 16} if paged else {}
    pages: dict[str, Any] = {"page_table": table} if paged else {}
    varlen: dict[str, Any] = {"cu_seqlens_q": r.qo_indptr}
    if appends:
        varlen["cu_seqlens_k_new"] = r.qo_indptr
    made = get_scheduler_metadata(
        4, 40, k.shape[1] if not paged else table.shape[1] * 16, 4, 2, 64, before, causal=True, max_seqlen_k_new=40,
        **varlen, **sizes, **pages,
    )  # fmt: skip
    requests = list(zip(r.q.split(r.rows), r.batch.keys, r.batch.values, strict=True))
    for _ in range(2):
        given: dict[str, Any] = {"k": new_k, "v": new_v} if appends else {}
        out = flash_attn_with_kvcache(
            r.q, k, v, **given, cache_seqlens=before, max_seqlen_q=40, causal=True, scheduler_metadata=made,
            **varlen, **pages,
        )  # fmt: skip
        check_varlen(expected(requests, causal=True), out)
    assert len(plans) >= 2


@pytest.mark.parametrize(("page_size", "compiled"), [(None, False), (16, False), (None, True)])
@pytest.mark.parametrize("made_for", [1, 3])
def test_metadata_without_the_table_for_other_query_rows(made_for: int, page_size: int | None, compiled: bool) -> None:
    """A call plans for itself, whether the metadata has a plan of one query row per request or of several."""
    r = Requests((33, 9), (4, 6))
    (k, v), table = r.cache(), r.block_tables(spare=0)
    made = get_scheduler_metadata(2, made_for, 48, 4, 2, 64, r.seq_lens, causal=True, page_size=page_size)
    given: dict[str, Any] = {"block_table": table, "causal": True}

    def calls(q: Tensor, metadata: SchedulerMetadata) -> list[Tensor]:
        options = {**given, "scheduler_metadata": metadata}
        cached = [(x, {}) for x in (q[:2].view(2, 1, 4, 64), q[:6].view(2, 3, 4, 64))] + [(q, {"cu_seqlens_q": cu})]
        return [
            flash_attn_varlen_func(q, k, v, cu, None, 6, 48, seqused_k=r.seq_lens, **options),
            *(flash_attn_with_kvcache(x, k, v, cache_seqlens=r.seq_lens, **more, **options) for x, more in cached),
        ]

    cu = r.qo_indptr
    step = torch.compile(calls, fullgraph=True, backend="eager") if compiled else calls
    rows = r.q.split(r.rows), r.q[:2].split(1), r.q[:6].split(3), r.q.split(r.rows)
    for _ in range(2):
        for out, parts in zip(step(r.q, made), rows, strict=True):
            requests = list(zip(parts, r.batch.keys, r.batch.values, strict=True))
            check_varlen(expected(requests, causal=True), out.reshape(-1, 4, 64))


def test_metadata_without_the_table_and_a_call_without_it() -> None:
    step = Pages()
    with pytest.raises(errors.ArgumentError, match="scheduler_metadata was made without the block table"):
        step.run(step.metadata(block_table=None), block_table=None)


def test_metadata_of_another_library() -> None:
    step = Pages()
    with pytest.raises(errors.ArgumentError, match=r"scheduler_metadata is of type Tensor; .*get_scheduler_metadata"):
        step.run(torch.zeros(5, dtype=torch.int32))  # type: ignore[arg-type]
