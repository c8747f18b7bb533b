"""Calls of FlashAttention and FlashInfer, and the modules of FlashInfer that are built before."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.benchmark_rows import SMALL, STEP

import attn_ops.flash_attn
from benchmarks import comparison, decode_peers, mla_peers, peers, prefill_peers, prefill_problem, small_ops, workload
from benchmarks.comparison import NotMeasuredError
from benchmarks.decode_problem import DecodeProblem
from benchmarks.prefill_rows import MlaRow
from benchmarks.warm import KINDS, LOADED, generator, kind, modules

pytestmark = pytest.mark.usefixtures("two_copies")


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window_left": 6}, {"logits_soft_cap": 2.0}])
def test_flash_attn_is_called_as_its_functions_are_defined(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This library has functions of the same names and arguments."""
    for module in (decode_peers, prefill_peers):
        monkeypatch.setattr(module, "flash_attn", lambda: attn_ops.flash_attn)
    step = prefill_problem.PrefillProblem(replace(STEP, **options), device="cpu")
    assert step.error(prefill_peers.flash_attn_varlen(step)(1), 1) < comparison.MAX_RELATIVE_ERROR
    for layout in ("NHD", "HND"):
        even = DecodeProblem(replace(SMALL, lengths=(40, 40), layout=layout), device="cpu")
        assert even.error(decode_peers.flash_attn_kvcache(even)(1), 1) < comparison.MAX_RELATIVE_ERROR
    with pytest.raises(NotMeasuredError, match="a contiguous cache needs requests of one length"):
        decode_peers.flash_attn_kvcache(DecodeProblem(SMALL, device="cpu"))


def test_flashinfer_is_called_as_its_functions_are_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    """This library has functions and wrappers of the same names and arguments."""
    for module in (peers, mla_peers, small_ops):
        monkeypatch.setattr(
            module, "flashinfer", lambda name="": importlib.import_module(f"attn_ops.{name}" if name else "attn_ops")
        )
    heads = {(SMALL.head_dim, SMALL.head_dim), (STEP.head_dim, STEP.head_dim_vo)}
    monkeypatch.setattr(peers, "FLASHINFER_HEAD_DIMS", heads)
    wrapper = decode_peers.flashinfer_wrapper(use_tensor_cores=True)
    for layout in ("NHD", "HND"):
        p = DecodeProblem(replace(SMALL, layout=layout), device="cpu")
        for peer in (wrapper, decode_peers.flashinfer_xqa, decode_peers.flashinfer_persistent):
            assert p.error(peer(p)(1), 1) < comparison.MAX_RELATIVE_ERROR
    rotated = DecodeProblem(replace(SMALL, rope=True), device="cpu")
    assert rotated.error(wrapper(rotated)(1), 1) < comparison.MAX_RELATIVE_ERROR
    for peer in (decode_peers.flashinfer_xqa, decode_peers.flashinfer_persistent):
        with pytest.raises(NotMeasuredError, match="it does not rotate queries and keys"):
            peer(rotated)
    few = replace(STEP, qo_lens=(4, 4), kv_lens=(33, 12))
    for peer, row in (
        (prefill_peers.flashinfer_xqa, few),
        (prefill_peers.flashinfer_xqa, replace(few, qo_lens=(1, 1))),
        (prefill_peers.flashinfer_persistent, STEP),
    ):
        problem = prefill_problem.PrefillProblem(row, device="cpu")
        assert problem.error(peer(problem)(1), 1) < comparison.MAX_RELATIVE_ERROR
    mixed = workload.StepProblem(STEP, device="cpu")
    persistent = workload.flashinfer_persistent(mixed)
    persistent.plan()
    assert mixed.error(persistent.layer(1), 1) < comparison.MAX_RELATIVE_ERROR
    for name, of in small_ops.KINDS.items():
        small = of.problem(small_ops.SmallRow("small", name, 2, 3, states=2, context=20, batch=2), "cpu")
        assert small.error(small_ops._flashinfer(small)(1), 1) < comparison.MAX_RELATIVE_ERROR
    with pytest.raises(NotMeasuredError, match="equally many query rows"):
        prefill_peers.flashinfer_xqa(prefill_problem.PrefillProblem(STEP, device="cpu"))
    for fp8 in (False, True):
        latents = prefill_problem.MlaProblem(MlaRow("small", (70, 3), 2.0, num_heads=4, fp8=fp8), device="cpu")
        assert latents.error(mla_peers.flashinfer_mla("fa3")(latents)(1), 1) < comparison.MAX_RELATIVE_ERROR
    cache = prefill_problem.PrefillProblem(replace(STEP, fp8=True), device="cpu")
    for prepare in (prefill_peers.flashinfer_paged, prefill_peers.flashinfer_ragged):
        with pytest.raises(NotMeasuredError, match="of another dtype"):
            prepare("fa3")(cache)


def test_flashinfer_is_not_measured_with_padded_heads() -> None:
    with pytest.raises(NotMeasuredError, match="it is measured with heads of 64, 128, 192/128, 256 and 512"):
        peers.flashinfer_with(96, 96)
    assert not any(96 in options for _, options in modules())


def test_every_module_to_build_is_of_some_kind() -> None:
    found = set(modules())
    assert {kind(module) for module in found} == set(KINDS)
    assert len(found) <= 62


def test_modules_of_fp8_queries_and_of_several_rows_are_built() -> None:
    found = set(modules())
    fp8 = torch.float8_e4m3fn
    assert any(options[:3] == ("fa3", fp8, fp8) for _, options in found)
    assert {options[-1] for name, options in found if "xqa" in name} == {1, 4, 16}


def test_the_module_that_a_wrapper_loads_is_built() -> None:
    names = {name: name for pair in LOADED.items() for name in pair}
    new, old = SimpleNamespace(**names), SimpleNamespace(**{name: name for name in LOADED})
    for name, loaded in LOADED.items():
        assert generator(new, (name, ("fa2",))) == loaded
        assert generator(new, (name, ("fa3",))) == name
        assert generator(old, (name, ("fa2",))) == name
