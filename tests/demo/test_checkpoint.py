"""Checkpoints: logits of every family compared with those of the transformers library; unsupported models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import demo_golden
from safetensors.torch import save_file
from torch import Tensor

from attn_ops.demo import checkpoint, dense
from attn_ops.demo.checkpoint_config import parse_config
from attn_ops.demo.errors import DemoError
from attn_ops.demo.rope import RopeScaling

CASES: dict[str, dict[str, Any]] = json.loads(demo_golden.FILE.read_text(encoding="utf-8"))
CPU = torch.device("cpu")
SIZES = demo_golden.SIZES | {"model_type": "llama"}


def weights(case: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: demo_golden.weight(name, shape) for name, shape in case["weights"].items()}


def write(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], shards: int = 1) -> Path:
    """A checkpoint folder as the hub holds them, with an index where there is more than one shard."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    return folder


@torch.no_grad()
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name: str, shards: int, tmp_path: Path) -> None:
    case = CASES[name]
    folder = write(tmp_path, case["config"], weights(case), shards)
    logits = dense.logits(checkpoint.load(folder, torch.float32, CPU).model, demo_golden.tokens())
    torch.testing.assert_close(logits[-1], torch.tensor(case["last"]), atol=1e-4, rtol=1e-4)
    assert logits.argmax(-1).tolist() == case["argmax"]


def test_weights_take_the_dtype_asked_for_and_tied_ones_stay_one(tmp_path: Path) -> None:
    case = CASES["llama-bias-tied"]
    model = checkpoint.load(write(tmp_path, case["config"], weights(case)), torch.bfloat16, CPU).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.model.inv_freq.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_tokenizer_and_stop_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    case = CASES["llama"]
    folder = write(tmp_path, case["config"] | {"eos_token_id": 7}, weights(case))
    assert checkpoint.load(folder, torch.float32, CPU)[1:] == (None, frozenset({7}))
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}', encoding="utf-8")
    loaded = checkpoint.load(folder, torch.float32, CPU)
    assert loaded.stop_tokens == {3, 4}
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("b").ids == [1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        (
            {"rope_theta": 5e5, "rope_scaling": demo_golden.LLAMA3},
            {"rope_parameters": {"rope_theta": 5e5, **demo_golden.LLAMA3}},
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_parameters": {"rope_type": "linear", "factor": 2}}),
        ({"head_dim": None, "num_key_value_heads": None}, {"head_dim": 8, "num_key_value_heads": 4}),
    ],
    ids=["theta", "llama3", "linear", "defaults"],
)
def test_older_configs_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert parse_config(SIZES | old) == parse_config(SIZES | new)


def test_rope_scaling_and_windows_are_read() -> None:
    config = parse_config(SIZES | {"rope_scaling": demo_golden.LLAMA3})
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    mistral = SIZES | {"model_type": "mistral", "sliding_window": 6}
    assert parse_config(mistral).windows == (5, 5, 5)
    assert parse_config(mistral).plan_window == 5
    layers = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    mixed = parse_config(mistral | layers)
    assert (mixed.windows, mixed.plan_window) == ((-1, 5, -1), -1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; the demo reads llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "several layer types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4, "layer_types": ["chunked"] * 3},
            "layer_types",
        ),
    ],
)
def test_an_unsupported_config_raises(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DemoError, match=message):
        parse_config(SIZES | changes)


def test_a_config_without_sizes_raises() -> None:
    with pytest.raises(DemoError, match="lacks hidden_size"):
        parse_config({key: value for key, value in SIZES.items() if key != "hidden_size"})


def test_an_incomplete_folder_raises(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(DemoError, match=message):
            checkpoint.load(tmp_path, torch.float32, CPU)

    with pytest.raises(DemoError, match="is not a folder"):
        checkpoint.load(tmp_path / "absent", torch.float32, CPU)
    refused(r"config\.json does not exist")
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    refused("is not JSON")
    case = CASES["llama"]
    (tmp_path / "config.json").write_text(json.dumps(case["config"]), encoding="utf-8")
    refused(r"holds no \*\.safetensors")
    tensors = weights(case)
    write(tmp_path, case["config"], {name: t for name, t in tensors.items() if "norm" not in name})
    refused("lacks 7 weights, such as model.layers.0.input_layernorm.weight")
    write(tmp_path, case["config"], tensors | {"model.norm.weight": torch.ones(5)})
    refused(r"model.norm.weight is \[5\] in the checkpoint and \[32\] by its config.json")
    (tmp_path / "model.safetensors").write_bytes(b"12345678{")
    refused("cannot be read")
    write(tmp_path, case["config"], tensors)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    refused(r"tokenizer\.json cannot be read")
    write(tmp_path, case["config"], tensors, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refused("is named in the index and does not exist")
