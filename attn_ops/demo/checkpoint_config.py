"""``config.json`` of a Hugging Face checkpoint as a :class:`~attn_ops.demo.model.ModelConfig`.

A field that would change the computation and is not supported raises an error. Defaults of absent fields are those of
the transformers library.
"""

from __future__ import annotations

from typing import Any

from attn_ops.demo.errors import DemoError
from attn_ops.demo.json_fields import Fields
from attn_ops.demo.model import ModelConfig
from attn_ops.demo.rope import RopeScaling

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LLAMA3_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
LAYER_TYPES = ("full_attention", "sliding_attention")
UNSUPPORTED = {
    "quantization_config": "quantized weights",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "attention_sink": "attention sinks",
    "attn_logit_softcapping": "a soft cap on the logits",
}

MAX_VOCAB = 1 << 22
MAX_HIDDEN = 1 << 20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_POSITIONS = 1 << 30
MAX_RATIO = 1e9
"""Largest base of RoPE, and largest factor of its scalings."""

DEFAULT_SLIDING_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28


def parse_config(raw: dict[str, Any]) -> ModelConfig:
    """The model that ``config.json``, parsed as JSON, describes.

    Raises:
        DemoError: a field is absent, has a wrong type or value, or asks for something that the demo does not support.
    """
    config = Fields(raw, "config.json")
    _check_supported(config)
    config.require(*SIZES)
    hidden_size = config.integer("hidden_size", 1, MAX_HIDDEN)
    num_qo_heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = config.integer("num_key_value_heads", 1, MAX_HEADS, default=num_qo_heads)
    head_dim = config.integer("head_dim", 2, MAX_HEAD_DIM, default=hidden_size // num_qo_heads)
    if num_qo_heads % num_kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads, which is {num_qo_heads}")
    if head_dim < 2 or head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise DemoError(
            f"head_dim of config.json is {head_dim} (hidden_size {hidden_size}, num_attention_heads {num_qo_heads}); "
            f"expected an even number up to {MAX_HEAD_DIM}, since RoPE rotates pairs; correct config.json"
        )
    rope = _rope_parameters(config)
    attention_bias = config.boolean("attention_bias", False)
    family = config.values["model_type"]
    return ModelConfig(
        vocab_size=config.integer("vocab_size", 1, MAX_VOCAB),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", 1, MAX_HIDDEN),
        num_layers=config.integer("num_hidden_layers", 1, MAX_LAYERS),
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        windows=_windows(config),
        rms_norm_eps=config.number("rms_norm_eps", 1e-12, 1.0, default=1e-6),
        rope_theta=_rope_theta(config, rope),
        rope_scaling=_rope_scaling(config, rope),
        max_positions=config.integer("max_position_embeddings", 1, MAX_POSITIONS, default=2048),
        qkv_bias=family == "qwen2" or attention_bias,
        out_bias=family != "qwen2" and attention_bias,
        mlp_bias=config.boolean("mlp_bias", False),
        qk_norm=family == "qwen3",
        tied_embeddings=config.boolean("tie_word_embeddings", False),
    )


def _check_supported(config: Fields) -> None:
    values = config.values
    family = values.get("model_type")
    if family not in FAMILIES:
        raise DemoError(f"model_type {family!r} is not supported; the demo reads {', '.join(FAMILIES)} checkpoints")
    for key, what in UNSUPPORTED.items():
        if values.get(key):
            raise DemoError(f"the checkpoint has {what} ({key} in config.json), which the demo does not support")
    if values.get("hidden_act", "silu") != "silu":
        raise DemoError(f"hidden_act {values['hidden_act']!r} is not supported; the demo's MLP is SwiGLU, with silu")


def _windows(config: Fields) -> tuple[int, ...]:
    """``window_left`` of each layer: a sliding window of n tokens is the token itself and n - 1 tokens before it."""
    values, layers = config.values, config.integer("num_hidden_layers", 1, MAX_LAYERS)
    full = (-1,) * layers
    qwen = values["model_type"].startswith("qwen")
    if values["model_type"] == "llama" or (qwen and not config.boolean("use_sliding_window", False)):
        return full
    if "sliding_window" in values and values["sliding_window"] is None:
        return full
    window = config.integer("sliding_window", 1, MAX_POSITIONS, default=DEFAULT_SLIDING_WINDOW)
    kinds = values.get("layer_types")
    if kinds is None:
        first = config.integer("max_window_layers", 0, MAX_LAYERS, default=DEFAULT_MAX_WINDOW_LAYERS) if qwen else 0
        return full[:first] + (window - 1,) * (layers - first)
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in LAYER_TYPES for kind in kinds):
        raise config.wrong("layer_types", f"{' or '.join(LAYER_TYPES)} for each of {layers} layers")
    return tuple(window - 1 if kind == "sliding_attention" else -1 for kind in kinds)


def _rope_parameters(config: Fields) -> Fields:
    """``rope_parameters``, or ``rope_scaling``, which is its older name."""
    current, older = config.child("rope_parameters"), config.child("rope_scaling")
    if current.values and older.values and current.values != older.values:
        raise DemoError(
            "config.json has rope_parameters and rope_scaling, and they differ; expected one of them; remove the other"
        )
    return current if current.values else older


def _rope_theta(config: Fields, rope: Fields) -> float:
    bases = [fields.number("rope_theta", 1.0, MAX_RATIO, default=10000.0) for fields in (rope, config)]
    named = [base for base, fields in zip(bases, (rope, config), strict=True) if fields.values.get("rope_theta")]
    if len(set(named)) > 1:
        raise DemoError(
            f"rope_theta is {named[0]:g} in {rope.source} and {named[1]:g} in config.json; expected one value; "
            "remove the wrong one"
        )
    return named[0] if named else bases[0]


def _rope_scaling(config: Fields, rope: Fields) -> RopeScaling | None:
    for fields in (config, rope):
        if fields.number("partial_rotary_factor", 0.0, 1.0, default=1.0) != 1.0:
            raise DemoError("partial_rotary_factor below 1 is not supported; the demo rotates whole heads")
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise DemoError(
            "rope parameters of several layer types are not supported; the demo has one RoPE for all layers"
        )
    kind = rope.values.get("rope_type") or rope.values.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise DemoError(f"rope scaling {kind!r} is not supported; the demo knows default, linear and llama3")
    rope.require(*(("factor",) if kind == "linear" else LLAMA3_SCALING))
    factor = rope.number("factor", 1 / MAX_RATIO, MAX_RATIO)
    if kind == "linear":
        return RopeScaling("linear", factor)
    low, high = (rope.number(key, 1 / MAX_RATIO, MAX_RATIO) for key in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise rope.wrong("high_freq_factor", f"a number above low_freq_factor, which is {low:g}")
    positions = rope.integer("original_max_position_embeddings", 1, MAX_POSITIONS)
    return RopeScaling("llama3", factor, low, high, positions)
