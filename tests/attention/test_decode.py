"""``attn::batch_decode`` against the oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers.backends import each_case, each_triton
from helpers.cases import DECODE, DECODE_OPTIONS, DECODE_SPECIAL, Case, rounds_in_the_interpreter
from helpers.harness import Setup

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def _shorter(case: Case) -> Case:
    """The case with a third of the tokens, in all and per CTA: work items still have several KV tiles and splits."""
    planner = {"num_ctas": 2} if case.planner.get("num_ctas") == 6 else case.planner
    return replace(case, kv_lens=(200, 0, 40, 70), window_left=min(case.window_left, 100), planner=planner)


def _interpreted() -> list[Case]:
    """The cases that depart in one axis, and a few of those that combine options. NumPy multiplies no bfloat16."""
    chosen = [_shorter(case) for case in DECODE_OPTIONS[::5]]
    for cases in (DECODE, DECODE_SPECIAL):
        sampled = [case for case in cases if case.name.startswith("sample")]
        chosen += [case for case in cases if case not in sampled] + sampled[:6]
    return [
        replace(case, dtype=torch.float16) if case.dtype == torch.bfloat16 and case.kv_dtype is None else case
        for case in chosen
        if rounds_in_the_interpreter(case)
    ]


@each_case([*DECODE, *DECODE_SPECIAL])
def test_matches_oracle(case: Case, device: str, backend: str) -> None:
    """On a GPU the first call combines partial results in the last CTA, and the second replays its launches."""
    setup = Setup("decode", case, device)
    for _ in range(2 if device == "cuda" else 1):
        setup.check_run(backend)
        assert not setup.planner.state.split_counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("case", DECODE_OPTIONS, ids=str)
def test_combined_options_match_oracle(case: Case) -> None:
    test_matches_oracle(case, "cuda", "triton")


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", _interpreted(), ids=str)
def test_interpreted_matches_oracle(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a combine kernel, as in a graph, and combined by the programs that finish last, as in eager calls."""
    setup = Setup("decode", case)
    for eager in (False, True):
        monkeypatch.setattr("attn_ops.kernels.triton.decode_call.is_eager", lambda q, eager=eager: eager)
        setup.check(*setup.run("interpreter"), **setup.tolerance("interpreter"))
        assert not setup.planner.state.split_counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*DECODE, *DECODE_SPECIAL][::3], ids=str)
def test_captured_call_matches_oracle(case: Case) -> None:
    """A graph holds a combine kernel of its own, which the eager call before has compiled."""
    setup = Setup("decode", case, "cuda")
    setup.run("triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = setup.run("triton")
    graph.replay()
    setup.check(*results, **setup.tolerance("triton"))


@each_triton
@pytest.mark.parametrize("exponent", [-100, -20, 20, 90])
def test_fp8_cache_with_a_bfloat16_query_of_any_magnitude(exponent: int, device: str, backend: str) -> None:
    case = Case("magnitude", dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, sm_scale=0.1 * 2.0**-exponent)
    setup = Setup("decode", case, device)
    setup.q.mul_(2.0**exponent)
    setup.check(*setup.run(backend))


@each_triton
def test_more_splits_than_are_combined_in_one_step(device: str, backend: str) -> None:
    """68 splits of 64 tokens; a step combines 64."""
    planner = {"fixed_split_size": 4, "num_ctas": 4}
    case = Case("splits", kv_lens=(4300, 70), heads=(1, 1), head_dims=(16, 16), planner=planner)
    setup = Setup("decode", case, device)
    setup.check(*setup.run(backend), **setup.tolerance(backend))


@pytest.mark.gpu
def test_fp8_values_at_an_odd_address() -> None:
    """They cannot be read two at a time."""
    setup = Setup("decode", Case("odd", dtype=torch.float16, kv_dtype=torch.float8_e5m2), "cuda")
    shape = setup.v.shape
    memory = torch.full((setup.v.numel() + 1,), math.nan).to(setup.v.dtype).cuda()
    values = memory[1:].view(shape)
    values.copy_(setup.v)
    setup.v = values
    setup.check(*setup.run("triton"))


def test_max_kv_len_of_16_million_takes_no_memory() -> None:
    """Eager calls on the CPU gather as many tokens as there are, not as many as the plan allows."""
    setup = Setup("decode", Case("long", planner={"max_kv_len": 1 << 24}))
    setup.check(*setup.run())


@pytest.mark.gpu
@pytest.mark.parametrize("contents", ["zeros", "random", "large", "negative"])
def test_a_plan_of_garbage_stays_in_bounds(contents: str) -> None:
    """The launch ends, and inputs keep their values."""
    setup = Setup("decode", Case("garbage", kv_lens=(100, 30, 7)), "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for field in setup.planner.state:
        if contents == "random":
            field.random_(-50, 200, generator=generator)
        else:
            field.fill_({"zeros": 0, "large": 2**31 - 1, "negative": -(2**31)}[contents])
    inputs = [setup.q, setup.k, setup.v]
    before = [t.clone() for t in inputs]
    out, lse = setup.run("triton")
    torch.cuda.synchronize()
    for t, old in zip(inputs, before, strict=True):
        torch.testing.assert_close(t, old, rtol=0, atol=0, equal_nan=True)
    if contents == "zeros":
        assert not out.any()
        assert (lse == -math.inf).all()
