"""Plans of the ``triton`` and ``cuda`` backends equal those of the reference bit for bit, on a GPU and without one."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers.backends import INTERPRETER, TRITON, each_triton
from helpers.cuda_host import Host, needs_a_compiler
from torch import Tensor

import attn_ops
from attn_ops.distributed import ContextShard
from attn_ops.kernels import reference
from attn_ops.plan import sizing
from attn_ops.plan.plan_checks import MAX_CTAS_PER_HEAD
from attn_ops.plan.state import KV_BLOCK

HEADS: dict[str, Any] = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16}

MakePlanner = Callable[[str], Any]
"""Makes a planner on a device."""

NEEDS_HOPPER = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)

each_prefill = pytest.mark.parametrize(
    ("device", "backend"),
    [
        TRITON,
        INTERPRETER,
        pytest.param("cuda", "cuda", id="cuda", marks=[pytest.mark.gpu, NEEDS_HOPPER]),
        pytest.param("cpu", "host", id="cuda on the host", marks=needs_a_compiler),
    ],
)
"""The backends with a kernel for prefill plans; ``host`` is the CUDA kernel in the emulator."""

each_prefill_on_the_host = pytest.mark.parametrize(
    "backend",
    [pytest.param("triton", marks=pytest.mark.interpreter), pytest.param("host", marks=needs_a_compiler)],
)


def plan_prefill_by(backend: str) -> Callable[..., None]:
    """The function ``plan_prefill`` of tensors of a backend."""
    if backend == "reference":
        return reference.plan_prefill
    if backend == "triton":
        from attn_ops.kernels import triton

        return triton.plan_prefill
    if backend != "host":
        return functools.partial(torch.ops.attn.plan_prefill, backend=backend)

    def on_the_host(*args: Any, **kwargs: Any) -> None:
        from attn_ops.kernels.cuda import plan

        with Host().installed():
            plan.plan_prefill(*args, **kwargs)

    return on_the_host


def assert_planned_as_by_the_reference(
    kind: str, make: MakePlanner, inputs: Sequence[Tensor], device: str, backend: str, seq_lens: Tensor | None = None
) -> None:
    """Plan ``inputs`` with ``plan_<kind>`` into tensors that hold 7, and compare every field."""
    plans = []
    for name, where in (("reference", "cpu"), (backend, device)):
        state = make(where).state
        for field in state:
            field.fill_(7)
        lengths = None if seq_lens is None else seq_lens.to(where)
        op = functools.partial(getattr(torch.ops.attn, f"plan_{kind}"), backend=name)
        plan = plan_prefill_by(name) if name == "host" else op
        plan(*(t.to(where) for t in inputs), [*state], seq_lens=lengths)
        plans.append(state)
    for field, expected, actual in zip(plans[0]._fields, *plans, strict=True):
        assert torch.equal(expected, actual.cpu()), (kind, field)


def _lengths(draw: random.Random, batch: int, longest: int) -> list[int]:
    if draw.random() < 0.3:
        return [longest] * batch
    return [0 if draw.random() < 0.2 else draw.randint(1, longest) for _ in range(batch)]


def _page_table(draw: random.Random, batch: int, page_size: int, longest: int) -> list[Tensor]:
    """``kv_indptr``, ``kv_indices`` and ``kv_last_page_len``. Some ``kv_indptr`` do not rise."""
    lengths = _lengths(draw, batch, longest)
    pages = [-(-length // page_size) for length in lengths]
    indptr = torch.tensor([0, *pages]).cumsum(0)
    if draw.random() < 0.2:
        indptr = indptr + torch.randint(-3, 4, indptr.shape)
    indices = torch.tensor([draw.randrange(1000) for _ in range(min(sum(pages), 10_000) + 2)])
    last = torch.tensor([(length - 1) % page_size + 1 if length else -3 for length in lengths])
    return [t.int() for t in (indptr, indices, last)]


def _qo_indptr(rows: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1), rows.cumsum(0))).int()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_large_batches(seed: int) -> None:
    draw = random.Random(seed)
    max_batch = draw.choice([1, 3, 8, 64, 200, 1024, 3000])
    page_size, window = draw.choice([1, 3, 16, 64]), draw.choice([-1, -1, 0, 63, 500])
    batch = draw.randint(1, max_batch)
    table = _page_table(draw, batch, page_size, draw.choice([1, 30, 300, 3000, 100_000]))
    rows = torch.tensor([draw.choice([0, 1, 7, 300]) for _ in range(batch)])
    rows[0] = 1
    ctas = draw.choice([1, 2, 33, 66, 264])
    causal, tile_rows, right = draw.random() < 0.5, draw.choice([7, 32]), draw.choice([-1, 0, 63, 500])
    pages, common = table[1].shape[0], {"page_size": page_size, "window_left": window, "num_ctas": ctas, **HEADS}

    def decode(device: str) -> Any:
        return attn_ops.DecodePlanner(max_batch, pages, device=device, **common)

    def prefill(device: str) -> Any:
        sizes = {"causal": causal, "window_right": right, "tile_rows": tile_rows, "device": device}
        return attn_ops.PrefillPlanner(max_batch, int(rows.sum()), pages, **sizes, **common)

    assert_planned_as_by_the_reference("decode", decode, table, "cuda", "triton")
    assert_planned_as_by_the_reference("prefill", prefill, [_qo_indptr(rows), *table], "cuda", "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_fixed_split_sizes(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    count, page_size = draw(1, 7, 300), draw(1, 3, 16, 64)
    pages = torch.randint(0, draw(2, 40, 400), (count,), generator=generator)
    last = torch.randint(1, page_size + 1, (count,), generator=generator).int()
    rows = torch.randint(0, draw(2, 100), (count,), generator=generator)
    table = [_qo_indptr(pages), torch.arange(int(pages.sum()) + 1).int(), last]
    common: dict[str, Any] = {
        "page_size": page_size,
        "window_left": draw(-1, 0, 500),
        "fixed_split_size": draw(1, 4, 100),
        **{"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 8},
    }
    ctas, causal, right = draw(0, 10, 1000, None), draw(False, True), draw(-1, 0, 100)

    def decode(device: str) -> Any:
        return attn_ops.DecodePlanner(count, len(table[1]), num_ctas=66, device=device, **common)

    def prefill(device: str) -> Any:
        sizes = {"num_ctas": ctas, "causal": causal, "window_right": right, "tile_rows": 16, "device": device}
        return attn_ops.PrefillPlanner(count, int(rows.sum()) + 1, len(table[1]), **sizes, **common)

    assert_planned_as_by_the_reference("decode", decode, table, "cuda", "triton")
    assert_planned_as_by_the_reference("prefill", prefill, [_qo_indptr(rows), *table], "cuda", "triton")


@each_triton
@pytest.mark.parametrize("seed", range(40))
def test_small_decode_batches(seed: int, device: str, backend: str) -> None:
    draw = random.Random(seed)
    max_batch, page_size = draw.choice([1, 2, 5, 17, 64]), draw.choice([1, 3, 16, 64])
    table = _page_table(draw, draw.randint(0, max_batch), page_size, draw.choice([1, 30, 300, 3000]))
    options = {
        "window_left": draw.choice([-1, 0, 63, 500]),
        "num_ctas": draw.choice([1, 2, 7, 33, 66]),
        "fixed_split_size": draw.choice([None, None, 1, 4, 50]),
    }

    def make(device: str) -> Any:
        pages = table[1].shape[0] + 3
        return attn_ops.DecodePlanner(max_batch, pages, page_size=page_size, device=device, **HEADS, **options)

    assert_planned_as_by_the_reference("decode", make, table, device, backend)


@each_triton
@pytest.mark.parametrize("num_ctas", [46_342, MAX_CTAS_PER_HEAD])
def test_the_most_ctas(num_ctas: int, device: str, backend: str) -> None:
    """Products of a CTA's number and the KV blocks that are left over exceed int32 from 46,342 CTAs on."""
    pages = 2 * num_ctas - 1
    table = [torch.tensor([0, pages]).int(), torch.arange(pages).int(), torch.tensor([KV_BLOCK - 1]).int()]

    def make(device: str) -> Any:
        return attn_ops.DecodePlanner(1, pages, page_size=KV_BLOCK, num_ctas=num_ctas, device=device, **HEADS)

    assert_planned_as_by_the_reference("decode", make, table, device, backend)


@each_prefill
@pytest.mark.parametrize("seed", range(20))
def test_small_prefill_batches(seed: int, device: str, backend: str) -> None:
    draw = random.Random(seed)
    max_batch, page_size = draw.choice([1, 2, 5, 17]), draw.choice([3, 16, 64])
    table = _page_table(draw, draw.randint(1, max_batch), page_size, draw.choice([1, 30, 300, 3000]))
    rows = torch.tensor([draw.choice([0, 1, 7, 100]) for _ in table[2]])
    options = {
        "window_left": draw.choice([-1, 0, 63, 500]),
        "causal": draw.random() < 0.5,
        "window_right": draw.choice([-1, 0, 63, 500, (1 << 30) - 1]),
        "tile_rows": draw.choice([7, 32]),
        "num_ctas": draw.choice([0, 6, 66, 1000]),
        "fixed_split_size": draw.choice([None, 1, 4, 50]),
    }

    def make(device: str) -> Any:
        sizes = max_batch, int(rows.sum()) + 1, table[1].shape[0] + 3
        return attn_ops.PrefillPlanner(*sizes, page_size=page_size, device=device, **HEADS, **options)

    assert_planned_as_by_the_reference("prefill", make, [_qo_indptr(rows), *table], device, backend)


LAST_WAVES = [
    (8, [(5 * 16, 640)]),  # of equal tiles: one after a wave of four, and so on
    (8, [(6 * 16, 640)]),
    (8, [(7 * 16, 700), (16, 640)]),
    (8, [(8 * 16, 640)]),
    (8, [(63 * 16, 1300)]),  # the most waves that are looked at
    (8, [(65 * 16, 1300)]),
    (8, [(16, 2000), (11 * 16, 640)]),  # one tile that is longer than an even share
    (8, [(5 * 16, 700), (9 * 16, 650), (3 * 16, 320)]),  # several length buckets
    (40, [(150 * 16, 900), (120 * 16, 850), (41 * 16, 500)]),  # more tiles than are looked at together
    (40, [(20, 640), (0, 500), (290 * 16, 800), (33, 0)]),
]
"""``(num_ctas, requests)`` with tiles of 16 rows, of which the device has room for ``num_ctas / 2``."""


@each_prefill
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("number", range(len(LAST_WAVES)))
def test_the_last_wave(number: int, causal: bool, device: str, backend: str) -> None:
    num_ctas, requests = LAST_WAVES[number]
    rows = torch.tensor([rows for rows, _ in requests])
    pages = [-(-tokens // 16) for _, tokens in requests]
    table = [
        _qo_indptr(torch.tensor(pages)),
        torch.arange(sum(pages)).int(),
        torch.tensor([tokens - 16 * (n - 1) if n else 0 for (_, tokens), n in zip(requests, pages, strict=True)]).int(),
    ]

    def make(device: str) -> Any:
        options = {"page_size": 16, "tile_rows": 16, "num_ctas": num_ctas, "causal": causal}
        return attn_ops.PrefillPlanner(len(requests), int(rows.sum()), sum(pages), device=device, **HEADS, **options)

    assert_planned_as_by_the_reference("prefill", make, [_qo_indptr(rows), *table], device, backend)


@each_prefill
@pytest.mark.parametrize("capacity", [20, 22, 24])
def test_fixed_splits_about_the_capacity(capacity: int, device: str, backend: str) -> None:
    """1000 and 384 tokens are 16 and 6 splits of 64. With capacity for fewer the tiles are not split."""

    def make(device: str) -> Any:
        options = {"page_size": 16, "tile_rows": 16, "fixed_split_size": 4, "num_ctas": capacity}
        return attn_ops.PrefillPlanner(2, 32, 90, device=device, **HEADS, **options)

    table = [torch.tensor(t).int() for t in ([0, 16, 32], [0, 63, 87], list(range(87)), [8, 16])]
    assert_planned_as_by_the_reference("prefill", make, table, device, backend)


OVERFLOWING = torch.tensor([0, 1_900_000_000, -700_000_000, 5, 3, -(1 << 31), 1 << 30]).int()
LAST_PAGES = torch.tensor([1, -7, 1 << 30, 1, 16, 0]).int()


def assert_equal_plans(expected: Any, actual: Any) -> None:
    for name, a, b in zip(expected._fields, expected, actual, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.interpreter
@pytest.mark.parametrize("split", [None, 2])
def test_numbers_of_decode_that_overflow_int32(split: int | None) -> None:
    from attn_ops.kernels import triton

    plans = []
    for backend in (reference, triton):
        decode = attn_ops.DecodePlanner(6, 9, page_size=16, fixed_split_size=split, device="cpu", **HEADS)
        backend.plan_decode(OVERFLOWING, torch.arange(9).int(), LAST_PAGES, [*decode.state])
        plans.append(decode.state)
    assert_equal_plans(*plans)


@each_prefill_on_the_host
@pytest.mark.parametrize("max_pages", [0, 9])
def test_numbers_of_prefill_that_overflow_int32(max_pages: int, backend: str) -> None:
    qo_indptr, page_size = torch.tensor([-5, 2, 4, 4, -(1 << 31), 7, 9]).int(), 16 if max_pages else 1
    plans = []
    for name in ("reference", backend):
        prefill = attn_ops.PrefillPlanner(6, 12, max_pages, max_kv_len=64, page_size=page_size, device="cpu", **HEADS)
        pages = torch.arange(max_pages).int()
        plan_prefill_by(name)(qo_indptr, OVERFLOWING, pages, LAST_PAGES, [*prefill.state])
        plans.append(prefill.state)
    assert_equal_plans(*plans)


@each_prefill_on_the_host
@pytest.mark.parametrize("seed", range(12))
def test_prefill_batches_of_any_size(seed: int, backend: str) -> None:
    """One chunk of tiles or many, with few and many requests."""
    draw = random.Random(seed)
    batch = draw.choice([1, 5, 60, 130, 520])
    rows = torch.tensor([draw.choice([1, 1, draw.randint(0, 200)]) for _ in range(batch)])
    lengths = rows + torch.tensor([draw.choice([0, draw.randint(0, 300), draw.randint(0, 20000)]) for _ in rows])
    options: dict[str, Any] = {
        "tile_rows": draw.choice([1, 4, 16]),
        "window_left": draw.choice([-1, 3000]),
        "causal": draw.random() < 0.7,
        "num_ctas": draw.choice([0, 16, 64, 4000]),
        "fixed_split_size": draw.choice([None, None, 1000]),
    }
    sizes, plans = (batch + draw.choice([0, 3]), int(rows.sum()) + 50, 0), []
    for name in ("reference", backend):
        planner = attn_ops.PrefillPlanner(*sizes, max_kv_len=1 << 15, device="cpu", **HEADS, **options)
        table = _qo_indptr(lengths), torch.arange(0).int(), torch.ones(batch).int()
        plan_prefill_by(name)(_qo_indptr(rows), *table, [*planner.state])
        plans.append(planner.state)
    assert_equal_plans(*plans)


@each_prefill_on_the_host
@pytest.mark.parametrize("lengths", [(8000,), (1000,) * 8, (4000, *(300,) * 9), tuple(range(900, 7000, 300))], ids=str)
def test_splits_where_clusters_divide_kv(
    lengths: tuple[int, ...], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing, "hopper_sms", lambda device: 132)
    pages, batch = [-(-n // 64) for n in lengths], len(lengths)
    table = [_qo_indptr(torch.tensor(pages)), torch.arange(sum(pages)).int(), torch.tensor(lengths).int() % 64]
    plans: list[Any] = []
    for name in ("reference", backend):
        planner = attn_ops.PrefillPlanner(
            batch, batch, sum(pages), page_size=64, num_qo_heads=64, num_kv_heads=1, head_dim=576, head_dim_vo=512,
            tile_rows=1, num_ctas=98, device="cpu",
        )  # fmt: skip
        assert sizing.planned_cluster_splits(planner.state) == 2
        plan_prefill_by(name)(torch.arange(batch + 1).int(), *table, [*planner.state])
        plans.append(planner.state)
    assert_equal_plans(*plans)


@each_prefill_on_the_host
@pytest.mark.parametrize("options", [{"num_ctas": 16}, {"num_ctas": 300, "fixed_split_size": 4}], ids=["even", "fixed"])
def test_a_batch_beyond_the_capacity_stays_within_the_plan(options: dict[str, int], backend: str) -> None:
    """One long request, and one of far more rows than the capacity, which the host cannot see."""
    planner = attn_ops.PrefillPlanner(
        2, 32, 2000, page_size=64, num_qo_heads=2, num_kv_heads=1, head_dim=16, tile_rows=16, device="cpu", **options
    )
    guarded = {
        name: torch.full((getattr(planner.state, name).numel() + 4096,), -7).int() for name in ("work", "split_tiles")
    }
    fields = {name: t[:-4096].view_as(getattr(planner.state, name)) for name, t in guarded.items()}
    qo_indptr, kv_indptr, last = (torch.tensor(t).int() for t in ([0, 1, 3201], [0, 1000, 1001], [64, 1]))
    plan = list(planner.state._replace(**fields))
    plan_prefill_by(backend)(qo_indptr, kv_indptr, torch.arange(1001).int(), last, plan)
    for name, t in guarded.items():
        assert (t[-4096:] == -7).all(), name
    assert planner.state.qo_indptr.tolist() == [0, 1, 32], "rows beyond the capacity are left out, not dropped unseen"


@each_prefill
@pytest.mark.parametrize("seed", range(16))
def test_keys_of_one_rank(seed: int, device: str, backend: str) -> None:
    """Windows and causal bounds by position on the part of the keys that a rank holds."""
    draw = random.Random(seed)
    world, page_size, batch = draw.choice([2, 3, 8]), draw.choice([1, 16]), draw.choice([1, 5, 20])
    shard = ContextShard(draw.randrange(world), world, page_size * draw.choice([1, 3]))
    table = _page_table(draw, batch, page_size, draw.choice([30, 700]))
    seq_lens = torch.ops.attn.seq_lens(table[0], table[2], page_size)
    own = shard.page_table(page_size, *table)
    rows = torch.tensor([draw.choice([0, 1, 7, 40]) for _ in range(batch)])
    rows[0] = 1
    sizes: dict[str, Any] = {
        "page_size": page_size,
        "window_left": draw.choice([-1, 0, 63, 300]),
        "num_ctas": draw.choice([1, 6]),
        "fixed_split_size": draw.choice([None, None, 128 // page_size]),
        "context": shard,
        **HEADS,
    }
    pages, bounds = table[1].shape[0], {"causal": draw.random() < 0.5, "window_right": draw.choice([-1, 0, 63])}

    def decode(where: str) -> Any:
        return attn_ops.DecodePlanner(batch, pages, device=where, **sizes)

    def prefill(where: str) -> Any:
        return attn_ops.PrefillPlanner(batch, int(rows.sum()), pages, device=where, tile_rows=7, **bounds, **sizes)

    if backend in ("triton", "interpreter"):
        assert_planned_as_by_the_reference("decode", decode, own, device, backend, seq_lens)
    assert_planned_as_by_the_reference("prefill", prefill, (_qo_indptr(rows), *own), device, backend, seq_lens)
