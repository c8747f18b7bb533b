"""A Hugging Face checkpoint folder, Llama, Mistral, Qwen2 or Qwen3, as this demo's model.

Read are ``config.json``, ``*.safetensors`` (one file, or shards with their index), ``generation_config.json``
for the stop tokens, and ``tokenizer.json``. What would change the computation and is not supported is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attn_ops.demo.errors import DemoError
from attn_ops.demo.model import LanguageModel, ModelConfig
from attn_ops.demo.rope import RopeScaling

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
REFUSED = {
    "quantization_config": "quantized weights",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "attention_sink": "attention sinks",
    "attn_logit_softcapping": "a soft cap on the logits",
}


class Checkpoint(NamedTuple):
    """``tokenizer`` is None where the folder has none; ``stop_tokens`` may be empty."""

    model: LanguageModel
    tokenizer: Tokenizer | None
    stop_tokens: frozenset[int]


def load(folder: Path, dtype: torch.dtype, device: torch.device) -> Checkpoint:
    """Everything a folder holds; DemoError says what is missing or not supported."""
    if not folder.is_dir():
        raise DemoError(f"--model {folder} is not a folder; give the folder that holds config.json and *.safetensors")
    raw = _read_json(folder / "config.json", "config.json of a Hugging Face checkpoint")
    config = parse_config(raw)
    return Checkpoint(_load_model(folder, config, dtype, device), _load_tokenizer(folder), _stop_tokens(folder, raw))


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """``config.json`` as a :class:`ModelConfig`."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise DemoError(f"model_type {family!r} is not supported; the demo reads {', '.join(FAMILIES)} checkpoints")
    for key, what in REFUSED.items():
        if raw.get(key):
            raise DemoError(f"the checkpoint has {what} ({key} in config.json), which the demo does not support")
    if raw.get("hidden_act", "silu") != "silu":
        raise DemoError(f"hidden_act {raw['hidden_act']!r} is not supported; the demo's MLP is SwiGLU, with silu")
    _require(raw, SIZES, "config.json")
    num_qo_heads = raw["num_attention_heads"]
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_qo_heads=num_qo_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_qo_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // num_qo_heads,
        windows=_windows(raw),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(raw.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope, raw),
        max_positions=raw.get("max_position_embeddings", 2048),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


def _windows(raw: dict[str, Any]) -> tuple[int, ...]:
    """Each layer's ``window_left``: a window of n tokens is the token itself and n - 1 before it."""
    layers, window = raw["num_hidden_layers"], raw.get("sliding_window")
    qwen = raw["model_type"].startswith("qwen")
    if raw["model_type"] == "llama" or not window or (qwen and not raw.get("use_sliding_window", False)):
        return (-1,) * layers
    kinds = raw.get("layer_types")
    if kinds is None:
        full = raw.get("max_window_layers", layers) if qwen else 0
        kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) < layers:
        raise DemoError(
            f"layer_types {sorted(set(kinds))} of {len(kinds)} layers are not supported; the demo knows "
            f"full_attention and sliding_attention, one for each of {layers} layers"
        )
    return tuple(window - 1 if kind == "sliding_attention" else -1 for kind in kinds[:layers])


def _rope_scaling(rope: dict[str, Any], raw: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if raw.get("partial_rotary_factor", 1.0) != 1.0 or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise DemoError("partial_rotary_factor below 1 is not supported; the demo rotates whole heads")
    if any(isinstance(value, dict) for value in rope.values()):
        raise DemoError(
            "rope parameters of several layer types are not supported; the demo has one RoPE for all layers"
        )
    if kind == "default":
        return None
    if kind == "linear":
        _require(rope, ("factor",), "the rope scaling of config.json")
        return RopeScaling("linear", float(rope["factor"]))
    if kind == "llama3":
        _require(rope, LLAMA3_SCALING, "the rope scaling of config.json")
        factor, low, high, positions = (rope[key] for key in LLAMA3_SCALING)
        return RopeScaling("llama3", float(factor), float(low), float(high), int(positions))
    raise DemoError(f"rope scaling {kind!r} is not supported; the demo knows default, linear and llama3")


def _require(raw: dict[str, Any], keys: Sequence[str], what: str) -> None:
    missing = [key for key in keys if key not in raw]
    if missing:
        raise DemoError(f"{what} lacks {', '.join(missing)}; is the checkpoint complete?")


def _load_model(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    with torch.device("meta"):
        model = LanguageModel(config)
    expected = model.state_dict()
    weights = {name: t for name, t in _read_weights(folder, device, dtype).items() if name in expected}
    if config.tied_embeddings and "model.embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    missing = sorted(expected.keys() - weights.keys())
    if missing:
        raise DemoError(f"the checkpoint lacks {len(missing)} weights, such as {missing[0]}; is it complete?")
    for name, weight in weights.items():
        if weight.shape != expected[name].shape:
            raise DemoError(
                f"{name} is {list(weight.shape)} in the checkpoint and {list(expected[name].shape)} by its config.json"
            )
    model.load_state_dict(weights, assign=True)
    model.tie()
    return model.requires_grad_(False).to(device).eval()


def _read_weights(folder: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise DemoError('--model needs the safetensors package; pip install "attn-ops[demo]"') from error
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = sorted(set(_read_json(index, "the index of the shards")["weight_map"].values()))
    else:
        shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if not shards:
        raise DemoError(f"{folder} holds no *.safetensors file; the demo reads no other format")
    weights: dict[str, Tensor] = {}
    for shard in shards:
        if not (folder / shard).exists():
            raise DemoError(f"{folder / shard} is named in the index and does not exist; is the download complete?")
        try:
            loaded = load_file(folder / shard, device=str(device))
        except SafetensorError as error:
            raise DemoError(f"{folder / shard} cannot be read ({error}); is the download complete?") from error
        weights |= {name: t.to(dtype) for name, t in loaded.items()}
    return weights


def _load_tokenizer(folder: Path) -> Tokenizer | None:
    if not (folder / "tokenizer.json").exists():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DemoError('tokenizer.json needs the tokenizers package; pip install "attn-ops[demo]"') from error
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the type that tokenizers raises is Exception itself
        raise DemoError(f"{folder / 'tokenizer.json'} cannot be read ({error})") from error


def _stop_tokens(folder: Path, raw: dict[str, Any]) -> frozenset[int]:
    path = folder / "generation_config.json"
    generation = _read_json(path, "generation_config.json") if path.exists() else {}
    stop = generation.get("eos_token_id", raw.get("eos_token_id"))
    return frozenset(stop if isinstance(stop, list) else [] if stop is None else [stop])


def _read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DemoError(f"{path} does not exist; the demo needs {what}") from error
    except json.JSONDecodeError as error:
        raise DemoError(f"{path} is not JSON ({error}); the demo needs {what}") from error
