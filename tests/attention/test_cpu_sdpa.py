"""``cpu.sdpa``, the kernel of eager attention on the CPU: what the cases that run on every backend do not show."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from helpers.cases import DECODE_BASE, PREFILL_BASE
from helpers.harness import Setup

from attn_ops.eager.checked_call import CHECKED_CALLS
from attn_ops.errors import BackendError
from attn_ops.kernels.cpu import readers, schedule, sdpa
from attn_ops.ops import backends, unsupported

pytestmark = pytest.mark.usefixtures("poisoned_memory")
CAUSAL = replace(PREFILL_BASE, name="causal", kv_lens=(37, 0, 130, 9), qo_lens=(5, 0, 33, 9), causal=True)


@pytest.mark.parametrize("window_right", [-1, 0, 3])
@pytest.mark.parametrize("kind", ["prefill", "ragged"])
@pytest.mark.parametrize("of_values", [False, True], ids=["key", "value"])
def test_a_nan_in_the_last_token_of_a_request(kind: str, window_right: int, of_values: bool) -> None:
    """The reference computes the call, so that a mask or a triangle hides a key from rows that do not see it."""
    setup = Setup(kind, replace(CAUSAL, causal=window_right < 0, window_right=window_right))
    expected = setup.expected
    cache, token = setup.v if of_values else setup.k, 37 - 1
    if kind == "ragged":
        cache[token] = math.nan
    else:
        page = int(setup.page_table[1][token // setup.case.page_size])
        cache[page, token % setup.case.page_size] = math.nan
    out, lse = setup.run("cpu")
    see_it = slice(5 - 1 - max(window_right, 0), 5)
    assert out[see_it].isnan().all()
    others = [slice(5, None)] if of_values else [slice(0, see_it.start), slice(5, None)]
    for rows in others:
        expected.rows(rows).check(out[rows], lse[rows])
    for actual, computed in zip((out, lse), setup.run("reference"), strict=True):
        torch.testing.assert_close(actual, computed, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["prefill", "ragged"])
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window_left": 9}, {"window_left": 20, "window_right": 2}], ids=str
)
def test_rows_in_blocks_of_a_mask(kind: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "MASK_ROWS", 4)
    setup = Setup(kind, replace(CAUSAL, **{"causal": False, **options}))  # type: ignore[arg-type]
    setup.check(*setup.run("cpu"))


def test_a_query_of_fewer_rows_than_planned() -> None:
    """The rows that there are have the positions that are planned, also those of requests with one row each."""
    setup = Setup("prefill", CAUSAL)
    for rows in (1, 20):
        setup.expected.rows(slice(rows)).check(*setup.run("cpu", q=setup.q[:rows]))
    setup = Setup("prefill", replace(CAUSAL, kv_lens=(20, 20, 20), qo_lens=(1, 1, 1)))
    setup.expected.rows(slice(2)).check(*setup.run("cpu", q=setup.q[:2]))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_page_numbers_outside_of_the_cache_reach_no_other_request(kind: str) -> None:
    base = DECODE_BASE if kind == "decode" else PREFILL_BASE
    setup = Setup(kind, replace(base, kv_lens=(20, 37, 9), qo_lens=base.qo_lens[:3]))
    others = slice(setup.qo_lens[0], None)
    for page in ((1 << 30) + 7, -1):
        setup.planner.state.kv_indices[0] = page
        out, lse = setup.run("cpu")
        setup.expected.rows(others).check(out[others], lse[others])


def test_a_plan_of_anything_reads_within_bounds() -> None:
    """The result means nothing; the process lives and the outputs have their shapes."""
    generator = torch.Generator().manual_seed(0)
    for kind in ("decode", "prefill", "ragged"):
        setup = Setup(kind, replace(CAUSAL, planner={"max_kv_len": 200}))
        for _ in range(20):
            for t in setup.planner.state[1:]:
                limit = 1 << int(torch.randint(1, 31, (), generator=generator))
                t.copy_(torch.randint(-limit, limit, t.shape, generator=generator))
            out, lse = setup.run("cpu")
            assert (out.shape, lse.shape) == (setup.expected.out.shape, setup.expected.lse.shape)


def test_graphs_take_the_reference() -> None:
    problem = backends.Problem("single_prefill", torch.device("cpu"))
    assert backends.choose(problem).label(problem.op) == "cpu.sdpa"
    assert backends.choose(problem, traced=True).name == "reference"
    assert backends.choose(problem, "cpu", traced=True).name == "cpu"


def test_what_it_does_not_implement_is_refused_by_name() -> None:
    setup = Setup("prefill", replace(CAUSAL, logits_soft_cap=3.0))
    with pytest.raises(BackendError, match=r"cpu\.sdpa: it does not implement logits_soft_cap"):
        setup.run("cpu")


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_left": 9}], ids=str)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_another_default_dtype_changes_nothing(
    kind: str, options: dict[str, object], default_dtype: torch.dtype
) -> None:
    setup = Setup(kind, replace(CAUSAL, **{"causal": False, "dtype": torch.float32, **options}))  # type: ignore[arg-type]
    expected = setup.run("cpu")
    torch.set_default_dtype(default_dtype)
    actual = setup.run("cpu")
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=0)


def test_requests_that_attend_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys that a call gathers, unless one request alone has more."""
    setup = Setup("decode", replace(DECODE_BASE, kv_lens=(20,) * 5))
    token = setup.num_kv_heads * setup.head_dim
    sizes = []
    read = readers.Reader.__call__

    def observed(self: readers.Reader, call: schedule.KernelCall) -> Callable[[torch.Tensor], torch.Tensor]:
        sizes.append(call.requests)
        return read(self, call)

    monkeypatch.setattr(readers.Reader, "__call__", observed)
    for elements, groups in ((5 * 20 * token, [5]), (2 * 20 * token + 1, [2, 2, 1]), (1, [1] * 5)):
        monkeypatch.setattr(schedule, "MAX_ELEMENTS", elements)
        CHECKED_CALLS["batch_decode"].clear()
        setup.check(*setup.run("cpu"))
        assert sizes[::2] == sizes[1::2] == groups
        sizes.clear()
    CHECKED_CALLS["batch_decode"].clear()


@pytest.mark.parametrize("kind", ["decode", "prefill", "ragged"])
def test_a_row_whose_logits_are_all_minus_infinity(kind: str) -> None:
    """The reference computes the call: the kernel gives such a row an LSE of 0."""
    setup = Setup(kind, replace(CAUSAL, causal=False))
    setup.q.abs_().add_(1)
    setup.k.fill_(-math.inf)
    out, lse = setup.run("cpu")
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("sink", [math.nan, math.inf], ids=str)
def test_sinks_that_are_not_finite(sink: float) -> None:
    """The reference computes the call. A NaN becomes no zero."""
    setup = Setup("prefill", CAUSAL)
    setup.sinks = torch.randn(setup.num_qo_heads)
    setup.sinks[0] = sink
    actual = setup.run("cpu")
    assert actual[0][0, 0].isnan().all()
    torch.testing.assert_close(actual, setup.run("reference"), rtol=0, atol=0, equal_nan=True)


def test_a_sink_of_minus_infinity_is_none() -> None:
    setup = Setup("prefill", CAUSAL)
    setup.sinks = torch.full((setup.num_qo_heads,), -math.inf)
    setup.check(*setup.run("cpu"))


def test_an_infinite_value_is_left_to_the_reference() -> None:
    setup = Setup("ragged", CAUSAL)
    setup.v[0, 0, 0] = math.inf
    actual = setup.run("cpu")
    assert (actual[0][:5, 0, 0] == math.inf).all()
    torch.testing.assert_close(actual, setup.run("reference"), rtol=0, atol=0, equal_nan=True)


def test_torch_that_does_not_say_whether_the_cpu_multiplies_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function is private: without it, calls are computed in float32."""
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    spec = importlib.util.spec_from_file_location("sdpa_of_another_torch", sdpa.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.BFLOAT16_ROWS == 0


def test_torch_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, sdpa.FLASH.__name__)
    assert unsupported.cpu_sdpa(backends.Problem("single_prefill", torch.device("cpu"))) == [
        f"torch {torch.__version__} has no {sdpa.FLASH.__name__}"
    ]


@pytest.mark.parametrize("options", [{"causal": True}, {"window_left": 9}], ids=str)
def test_masks_are_bounded(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The elements of a mask, unless one row alone has more."""
    setup = Setup("ragged", replace(CAUSAL, **{"causal": False, **options}))  # type: ignore[arg-type]
    sizes = []
    masked = schedule.Window.mask

    def observed(self: schedule.Window, rows: int, keys: int, ahead: int) -> torch.Tensor:
        sizes.append(rows * keys)
        return masked(self, rows, keys, ahead)

    monkeypatch.setattr(schedule.Window, "mask", observed)
    for elements in (1 << 24, 700, 1):
        monkeypatch.setattr(sdpa, "MASK_ELEMENTS", elements)
        setup.check(*setup.run("cpu"))
        assert 0 < max(sizes) <= max(elements, 130)
        sizes.clear()


def test_a_decode_plan_without_pages_has_no_keys() -> None:
    """Whatever its lengths are, as in the reference: the places of a decode plan are not tokens of ragged KV."""
    setup = Setup("decode", replace(DECODE_BASE, page_size=1))
    for cache in (setup.k, setup.v):
        cache.nan_to_num_()
    plan = setup.planner.state._replace(kv_indices=setup.planner.state.kv_indices[:0])
    tensors = (setup.arguments[name] for name in ("q", "k_cache", "v_cache"))
    out, lse = sdpa.batch_decode(*tensors, list(plan), setup.arguments["workspace"], return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def _in_order(setup: Setup) -> None:
    """Move the pages of the batch to the places that the page table names in order."""
    indptr, indices = setup.plan_inputs[-3:-1]
    indices = indices[: int(indptr[-1])]
    order = torch.argsort(indices)
    taken, places = indices.long(), indices[order]
    for cache in (setup.k, setup.v):
        cache[places.long()] = cache[taken].clone()
    indices.copy_(places)
    setup.replan()


@pytest.mark.parametrize("lengths", [(37, 0, 130, 9), (64, 64, 64), (33,), (16, 16, 16)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"kv_layout": "HND"}, {"storage": "fused"}, {"page_size": 257}, {"window_left": 20}], ids=str
)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_pages_in_order_are_read_in_place(kind: str, options: dict[str, object], lengths: tuple[int, ...]) -> None:
    qo_lens = () if kind == "decode" else tuple(min(5, length) for length in lengths)
    case = replace(DECODE_BASE, kv_lens=lengths, qo_lens=qo_lens, causal=kind == "prefill", **options)  # type: ignore[arg-type]
    setup = Setup(kind, case)
    _in_order(setup)
    setup.check(*setup.run("cpu"))


@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (7, 1)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_left": 9}, {"window_right": 2}, {"window_left": 200}], ids=str
)
@pytest.mark.parametrize("sizes", [(7, 7), (7, 20), (20, 7)], ids=str)
@pytest.mark.parametrize("kind", ["prefill", "ragged"])
def test_requests_of_equal_sizes(
    kind: str, sizes: tuple[int, int], options: dict[str, object], heads: tuple[int, int]
) -> None:
    """They attend together where no mask is needed; a query of fewer rows than planned ends within one of them."""
    rows, length = sizes
    case = replace(PREFILL_BASE, heads=heads, kv_lens=(length,) * 3 + (5,), qo_lens=(rows,) * 3 + (5,))
    setup = Setup(kind, replace(case, **options))  # type: ignore[arg-type]
    setup.check(*setup.run("cpu"))
    for given in (2 * rows, 2 * rows + 1):
        setup.expected.rows(slice(given)).check(*setup.run("cpu", q=setup.q[:given]))


def test_requests_of_equal_sizes_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, flash = [], sdpa.FLASH

    def observed(*args: object, **kwargs: object) -> object:
        calls.append(args)
        return flash(*args, **kwargs)

    monkeypatch.setattr(sdpa, "FLASH", observed)
    for heads, causal in (((4, 4), True), ((4, 2), False), ((4, 2), True)):
        case = replace(PREFILL_BASE, heads=heads, causal=causal, kv_lens=(20,) * 3, qo_lens=(20,) * 3)
        setup = Setup("ragged", case)
        setup.check(*setup.run("cpu"))
        assert len(calls) == 1
        calls.clear()


def _first_keys(setup: Setup, cache: torch.Tensor) -> torch.Tensor:
    """What the first call of the kernel reads of ``cache``, NHD."""
    plan = setup.planner.state
    batch = schedule.BatchSizes.of(plan.problem, setup.q.shape[0], cache.shape[0], schedule.KeyBounds(False, -1, -1))
    return readers.Reader(cache, cache, lambda t: t, 0)(next(schedule.of_plan(plan, batch)))(cache)


def test_a_page_that_is_longer_than_its_tokens_is_read_as_far_as_they_go() -> None:
    """A cache without a block table has a page for each request, whose end may hold anything."""
    case = replace(DECODE_BASE, page_size=257, kv_lens=(37, 37, 130))
    for in_order in (False, True):
        setup = Setup("decode", case)
        if in_order:
            _in_order(setup)
        k = _first_keys(setup, setup.k)
        assert (k.shape[0], k.shape[2]) == (2, 37)
        assert k.isfinite().all()
        setup.check(*setup.run("cpu"))


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_in_a_row_with_room_behind_them_are_read_in_place(page_size: int) -> None:
    """As those of a growing cache: the pages of each request are in order, and begin at equal distances."""
    case = replace(DECODE_BASE, page_size=page_size, kv_lens=(32, 32, 32))
    setup = Setup("decode", case)
    pages = 32 // page_size
    k, v = torch.randn(2, 3 * (pages + 2), page_size, *setup.k.shape[2:], dtype=torch.float32)
    indices = setup.planner.state.kv_indices
    placed = torch.cat([torch.arange(pages) + 1 + b * (pages + 2) for b in range(3)])
    for cache, t in ((setup.k, k), (setup.v, v)):
        t[placed] = cache[indices[: 3 * pages].long()].float()
    indices[: 3 * pages] = placed
    for cache in (k, v):
        found = _first_keys(setup, cache)
        assert found.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
        assert torch.equal(found.transpose(1, 2).flatten(1, 2), cache[placed].view(3, -1, cache.shape[-1]))
    setup.check(*setup.run("cpu", k_cache=k.to(setup.k.dtype), v_cache=v.to(setup.v.dtype)))


@pytest.mark.parametrize("kind", ["decode", "prefill", "ragged"])
def test_keys_that_are_converted_in_groups_of_heads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results are the same, bit for bit."""
    setup = Setup(kind, replace(CAUSAL, causal=False, dtype=torch.bfloat16))
    expected = setup.run("cpu")
    monkeypatch.setattr(sdpa, "CONVERTED_ELEMENTS", 1)
    torch.testing.assert_close(setup.run("cpu"), expected, rtol=0, atol=0)
    setup.check(*expected)


def test_calls_without_an_lse_share_no_tensor() -> None:
    """A caller may use the empty one as an ``out=`` of other functions, which changes its size."""
    setup = Setup("decode", DECODE_BASE)
    arguments = setup.arguments | {"return_lse": False}
    tensors = [arguments.pop(name) for name in ("q", "k_cache", "v_cache", "plan", "workspace")]
    lse = torch.ops.attn.batch_decode(*tensors, **arguments, backend="cpu")[1]
    torch.add(torch.ones(3), 1, out=lse)
    assert torch.ops.attn.batch_decode(*tensors, **arguments, backend="cpu")[1].shape == (0,)
