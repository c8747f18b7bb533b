"""Tokens per second of transformers: the benchmark at a tiny size, and what it must detect."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import generate, report

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is detected in them is detected in more of them."""
    monkeypatch.setattr(generate, "STEPS", 4)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    from attn_ops.integrations.transformers import register

    return generate.make_models("tiny", "cpu", torch.float32, (register(), "sdpa"))


@pytest.fixture
def work() -> generate.Workload:
    return generate.Workload(torch.randint(2, 256, (2, 9), generator=torch.Generator().manual_seed(0)), 6)


def test_models_share_weights(models: dict[str, Any]) -> None:
    ours, sdpa = models["attn_ops"], models["sdpa"]
    assert all(a is b for a, b in zip(ours.parameters(), sdpa.parameters(), strict=True))
    assert (ours.config._attn_implementation, sdpa.config._attn_implementation) == ("attn_ops", "sdpa")


@torch.no_grad()
def test_wrong_tokens_are_detected(models: dict[str, Any], work: generate.Workload) -> None:
    tokens = generate.tokens_of(generate.MODES[0], models["attn_ops"], work)
    generate.check_tokens("attn_ops", "mode", models["sdpa"], tokens, work.new)
    tokens[0, -3] = (tokens[0, -3] + 1) % 256
    with pytest.raises(AssertionError, match=r"mode: logits of tokens of attn_ops are .* below the greatest"):
        generate.check_tokens("attn_ops", "mode", models["sdpa"], tokens, work.new)


def test_compilation_after_the_warm_up_is_detected(work: generate.Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_again(*_: Any, **__: Any) -> None:
        torch.compile(eval("lambda x: x + 1"), backend="eager")(torch.ones(1))

    monkeypatch.setattr(generate, "tokens_of", compile_again)
    with pytest.raises(AssertionError, match="1 graphs were compiled in 4 steps after warm-up, expected 0"):
        generate.check_plans(generate.COMPILED, None, work, "eager")


@pytest.mark.slow
@torch.no_grad()
def test_too_many_plans_are_detected(
    models: dict[str, Any], work: generate.Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert generate.check_plans(generate.BATCH, models["attn_ops"], work, "eager")[0] == (1, 0)
    monkeypatch.setattr(generate, "KINDS_OF_LAYERS", 0)
    with pytest.raises(AssertionError, match="generate_batch: 1 plans per step, expected 0"):
        generate.check_plans(generate.BATCH, models["attn_ops"], work, "eager")


def test_a_package_that_cannot_be_imported_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr("transformers.utils.is_flash_attn_3_available", lambda: False)
    monkeypatch.setattr("transformers.modeling_flash_attention_utils.lazy_import_flash_attention", fails)
    assert generate.installed(generate.PEERS) == {
        "flash_attention_2": "ImportError: flash_attention_2: undefined symbol",
        "flash_attention_3": "not installed, or without CUDA",
    }
    assert generate.installed(["sdpa"]) == {}


def test_no_row_is_begun_after_the_time(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    generate.run(
        parser.parse_args(["--size=tiny", "--device=cpu", "--batches=2", "--seconds=-1", f"--output={tmp_path}"])
    )
    assert not (tmp_path / "generate.json").exists()


@pytest.mark.slow
@torch.no_grad()
def test_a_step_that_inductor_compiles_plans_once(models: dict[str, Any], work: generate.Workload) -> None:
    torch._dynamo.reset()
    with torch._inductor.utils.fresh_cache():
        checks, tokens = generate.check_plans(generate.COMPILED, models["attn_ops"], work, "inductor")
    assert checks == (1, 0)
    generate.check_tokens("attn_ops", generate.COMPILED, models["sdpa"], tokens, work.new)


@pytest.mark.slow
def test_every_mode_is_measured(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    words = ["--size=tiny", "--device=cpu", "--dtype=float32", "--batches=2", "--prompt=9", "--new=6", "--rounds=1"]
    words += ["--seconds=inf", "--compile-backend=eager"]
    torch._dynamo.reset()
    generate.run(parser.parse_args([*words, f"--output={tmp_path}", "--modes", *generate.MODES]))
    data = json.loads((tmp_path / "generate.json").read_text())
    assert [row["what"] for row in data["rows"]] == [f"{mode}, batch 2" for mode in generate.MODES]
    for row in data["rows"]:
        assert row["attn_ops"] > 0
        assert row["sdpa"] > 0
        assert row["recompiles"] == 0
    assert data["environment"]["transformers"] == report.version_of("transformers")
    assert {entry["peer"] for entry in data["not measured"]} <= {"flash_attention_2", "flash_attention_3"}
