"""What all planned attention ops promise besides the numbers of ``test_decode`` and ``test_prefill``."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.backends import each_backend
from helpers.cases import DECODE_BASE, PREFILL_BASE, Case
from helpers.harness import CPU_BACKENDS, OPS, Setup
from helpers.oracle import GARBAGE

from attn_ops.ops.options import LOG2E
from attn_ops.plan.state import WORK_FIELDS, num_slots, workspace_size

pytestmark = pytest.mark.usefixtures("poisoned_memory")
each_kind = pytest.mark.parametrize("kind", OPS)


def _setup(kind: str, **changes: object) -> Setup:
    base: Case = DECODE_BASE if kind == "decode" else PREFILL_BASE
    return Setup(kind, replace(base, **changes))  # type: ignore[arg-type]


@each_kind
def test_lse_is_optional(kind: str) -> None:
    setup = _setup(kind)
    out, lse = setup.run(return_lse=False)
    setup.check(out)
    assert lse.shape == (0,)
    assert lse.dtype == torch.float32


@each_kind
def test_a_plan_of_zeros_is_no_work(kind: str) -> None:
    setup = _setup(kind)
    for t in setup.planner.state:
        t.zero_()
    out, lse = setup.run()
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@each_kind
def test_a_new_plan_leaves_no_trace_of_the_last(kind: str) -> None:
    """One planner plans batches from the largest to an empty one."""
    setup = _setup(kind, kv_lens=(130, 64, 90, 17), spare_batch=2)
    for kv_lens in ((130, 64, 90, 17), (5, 0, 33, 17), (1,), ()):
        smaller = _setup(kind, kv_lens=kv_lens, qo_lens=(5, 2, 33, 1)[: len(kv_lens)] if kind != "decode" else ())
        setup.planner.plan(*smaller.plan_inputs)
        smaller.check(*smaller.run(plan=setup.planner.state, workspace=setup.planner.workspace))


@each_kind
def test_inputs_are_not_written(kind: str) -> None:
    setup = _setup(kind, sinks=1.0)
    inputs = [setup.q, setup.k, setup.v, *setup.planner.state, setup.arguments["sinks"]]
    before = [t.clone() for t in inputs]
    setup.run()
    for t, old in zip(inputs, before, strict=True):
        torch.testing.assert_close(t, old, rtol=0, atol=0, equal_nan=True)


@each_kind
def test_a_second_call_gives_the_same_bits(kind: str) -> None:
    setup = _setup(kind, dtype=torch.bfloat16)
    assert all(map(torch.equal, setup.run(), setup.run()))


@each_kind
def test_infinite_sinks(kind: str) -> None:
    """A sink of -inf has no effect. One that outweighs every key leaves an output of 0.

    The LSE of a row without keys is that of its sink.
    """
    setup = _setup(kind)
    sinks = torch.tensor([-math.inf, 1e30, -1e30, 0.0])
    out, lse = setup.run(sinks=sinks)
    plain_out, plain_lse = setup.run()
    seen = plain_lse > -math.inf
    torch.testing.assert_close(out[:, [0, 2]], plain_out[:, [0, 2]])
    torch.testing.assert_close(lse[:, [0, 2]][seen[:, [0, 2]]], plain_lse[:, [0, 2]][seen[:, [0, 2]]])
    assert (out[:, 1] == 0).all()
    sink_lse = (sinks * math.log2(math.e)).expand(lse.shape)
    torch.testing.assert_close(lse[:, 1], sink_lse[:, 1])
    torch.testing.assert_close(lse[~seen], sink_lse[~seen])
    assert (~seen).any()


@each_kind
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_are_accepted_without_grad(kind: str, mode: type) -> None:
    setup = _setup(kind)
    q = torch.nn.Parameter(setup.q)
    with mode():
        setup.check(*setup.run(q=q))


@each_backend
@pytest.mark.parametrize("planner", [{}, {"num_ctas": 4, "tile_rows": 16}], ids=["whole", "split"])
def test_a_query_of_fewer_rows_than_planned(
    planner: dict[str, int], device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that there are attend as planned, and no other row is written."""
    case = replace(PREFILL_BASE, kv_lens=(37, 300), qo_lens=(5, 33), planner=planner)
    setup, rows, memory = Setup("prefill", case, device), 20, list[torch.Tensor]()

    def allocate(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool, out_dtype: torch.dtype | None
    ) -> tuple[torch.Tensor, ...]:
        """Results with memory of 100 rows behind them."""
        assert return_lse
        assert out_dtype is None
        sizes = (rows + 100, q.shape[1], v.shape[-1]), (rows + 100, q.shape[1])
        memory[:] = [torch.full(size, 7.0, device=q.device) for size in sizes]
        return tuple(t[:rows] for t in memory)

    if backend != "reference":  # which makes new tensors
        monkeypatch.setattr("attn_ops.kernels.triton.prefill_call.allocate", allocate)
    out, lse = setup.run(backend, q=setup.q[:rows])
    setup.expected.rows(slice(rows)).check(out, lse)
    assert all((t[rows:] == 7.0).all() for t in memory)


@each_backend
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_page_numbers_outside_of_the_cache_reach_no_other_request(kind: str, device: str, backend: str) -> None:
    base = DECODE_BASE if kind == "decode" else PREFILL_BASE
    setup = Setup(kind, replace(base, kv_lens=(20, 37, 9), qo_lens=base.qo_lens[:3]), device)
    others = slice(setup.qo_lens[0], None)
    for page in (GARBAGE, -1):
        setup.planner.state.kv_indices[0] = page
        out, lse = setup.run(backend)
        setup.expected.rows(others).check(out[others], lse[others])


@each_backend
def test_a_slot_beyond_the_workspace_is_not_written(device: str, backend: str) -> None:
    setup = Setup("decode", replace(DECODE_BASE, kv_lens=(300,), planner={"num_ctas": 3}), device)
    plan = setup.planner.state
    needed, slots = workspace_size(plan), num_slots(plan)
    memory = torch.full((needed + 1000,), 7.0, device=device)
    plan.work[0, WORK_FIELDS.index("slot")] = slots
    setup.run(backend, workspace=memory[:needed])
    assert (memory[needed:] == 7.0).all()


SPLIT_KV = pytest.mark.parametrize(
    "planner",
    [{"num_ctas": 0}, {"num_ctas": 60, "tile_rows": 16}, {"num_ctas": 60, "tile_rows": 16, "fixed_split_size": 4}],
    ids=["whole", "balanced", "fixed"],
)


@each_backend
@SPLIT_KV
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_cache_without_pages_has_no_keys(kind: str, planner: dict[str, int], device: str, backend: str) -> None:
    """Every split of the plan begins after the end of the cache, and has a partial result all the same."""
    options = {name: value for name, value in planner.items() if kind == "prefill" or (value and name != "tile_rows")}
    base = DECODE_BASE if kind == "decode" else PREFILL_BASE
    setup = Setup(kind, replace(base, kv_lens=(37, 0, 900, 190), sinks=1.0, planner=options), device)
    if kind == "prefill":
        assert setup.planner.state.split_tiles.any() == bool(planner["num_ctas"])
    for name in CPU_BACKENDS if backend == "reference" else (backend,):
        for sinks in (None, setup.sinks):
            out, lse = setup.run(name, k_cache=setup.k[:0], v_cache=setup.v[:0], sinks=sinks)
            assert (out == 0).all()
            none = torch.full_like(lse, -math.inf) if sinks is None else (sinks * LOG2E).expand(lse.shape)
            torch.testing.assert_close(lse, none)


@each_backend
def test_a_plan_for_ragged_keys_has_no_pages(device: str, backend: str) -> None:
    """Its places are no pages of a cache, although both have one token each."""
    setup = Setup("ragged", replace(PREFILL_BASE, sinks=1.0), device)
    assert setup.sinks is not None
    call = {name: value for name, value in setup.arguments.items() if name not in ("k", "v")}
    for name in CPU_BACKENDS if backend == "reference" else (backend,):
        out, lse = torch.ops.attn.batch_prefill(
            **call, k_cache=setup.k[:, None], v_cache=setup.v[:, None], backend=name
        )
        assert (out == 0).all()
        torch.testing.assert_close(lse, (setup.sinks * LOG2E).expand(lse.shape))


@each_backend
@SPLIT_KV
def test_ragged_requests_behind_the_keys_are_written(planner: dict[str, int], device: str, backend: str) -> None:
    """They begin at the end of the keys that a call passes, or after it. Their rows are not left unwritten."""
    split = planner.get("fixed_split_size", 0) * 16
    options = planner | ({"fixed_split_size": split} if split else {})
    setup = Setup("ragged", replace(PREFILL_BASE, kv_lens=(150, 900, 190), qo_lens=(5, 3, 9), planner=options), device)
    assert setup.planner.state.split_tiles.any() == bool(planner["num_ctas"])
    for count in (150, 170, 1050):
        out, lse = setup.run(backend, k=setup.k[:count], v=setup.v[:count])
        assert out.isfinite().all()
        assert not lse.isnan().any()
        whole = slice(5 if count < 1050 else 8)
        setup.expected.rows(whole).check(out[whole], lse[whole])


@each_backend
def test_memory_behind_ragged_keys_is_not_read(device: str, backend: str) -> None:
    """A plan may have more keys than a call passes, which ops do not know. NaN follows the keys that it passes."""
    setup = Setup("ragged", replace(PREFILL_BASE, kv_lens=(20, 37), qo_lens=(5, 3)), device)
    for t in (setup.k, setup.v):
        t[50:] = math.nan
    out, lse = setup.run(backend, k=setup.k[:50], v=setup.v[:50])
    assert out.isfinite().all()
    assert lse.isfinite().all()
    setup.expected.rows(slice(5)).check(out[:5], lse[:5])
