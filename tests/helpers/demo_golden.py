"""Logits of tiny checkpoints of every family, as the transformers library computes them.

The tests read ``golden.json``: each case's ``config.json``, the names and shapes of its weights, and logits.
The weights themselves come from their names, so nothing large is stored. To write the file anew, in an
environment that has transformers::

    python tests/helpers/demo_golden.py
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

FILE = Path(__file__).with_name("demo_golden.json")
TOKENS = 40

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-bias-tied": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "head_dim": 16,
        "rms_norm_eps": 1e-3,
    },
    "llama-llama3": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama-linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "mistral-full": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1000000.0},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-window": {
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
}


def weight(name: str, shape: list[int]) -> Tensor:
    """Random values that depend only on the name; NumPy keeps RandomState's streams as they are."""
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if "norm" in name:
        values = 1 + 0.2 * values
    elif len(shape) == 1:
        values = 0.3 * values
    elif "embed_tokens" not in name:
        values = values / shape[-1] ** 0.5
    return torch.from_numpy(values).float()


def tokens() -> Tensor:
    return torch.from_numpy(np.random.RandomState(0).randint(0, SIZES["vocab_size"], TOKENS))


def _write() -> None:
    from transformers.models.auto import AutoConfig, AutoModelForCausalLM

    cases = {}
    for name, changes in CASES.items():
        options = SIZES | changes
        config = AutoConfig.for_model(options.pop("model_type"), **options)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.copy_(weight(key, list(parameter.shape)))
            logits = model(tokens()[None]).logits[0]
        cases[name] = {
            "config": config.to_diff_dict(),
            "weights": {key: list(parameter.shape) for key, parameter in model.named_parameters()},
            "argmax": logits.argmax(-1).tolist(),
            "last": [round(value, 5) for value in logits[-1].tolist()],
        }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    _write()
