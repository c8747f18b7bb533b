"""A model small enough to run eagerly many times, and an engine around it."""

from __future__ import annotations

import random

import torch

from attn_ops.demo.engine import Engine, Request
from attn_ops.demo.memory import Capacity, Memory
from attn_ops.demo.model import LanguageModel, ModelConfig, seeded
from attn_ops.demo.steps import DecodeStep, PrefillStep

CPU = torch.device("cpu")


def config(**changes: object) -> ModelConfig:
    layers = 2
    values: dict[str, object] = {
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": layers,
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "windows": (-1,) * layers,
    }
    return ModelConfig(**(values | changes))  # type: ignore[arg-type]


def model(seed: int = 0, **changes: object) -> LanguageModel:
    return seeded(config(**changes), seed, torch.float32, CPU)


def memory(m: LanguageModel, capacity: Capacity) -> Memory:
    """With caches of NaN, so that a read of a place that was not written shows."""
    made = Memory(m.config, capacity, torch.float32, CPU)
    made.poison_caches()
    return made


def engine(m: LanguageModel, capacity: Capacity, stop_tokens: frozenset[int] = frozenset()) -> Engine:
    return Engine(memory(m, capacity), PrefillStep(m), DecodeStep(m), stop_tokens)


def prompts(lengths: list[int], seed: int = 0, vocab_size: int = 101) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(vocab_size) for _ in range(length)] for length in lengths]


def requests(lengths: list[int], max_new_tokens: int, every: int = 0) -> list[Request]:
    """One request for each length, arriving ``every`` turns."""
    return [Request(prompt, max_new_tokens, i * every) for i, prompt in enumerate(prompts(lengths))]
