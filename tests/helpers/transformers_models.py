"""Small models of transformers: their configurations, and runs of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-windows": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": 5}),
    "gemma2": ("Gemma2Config", {**GEMMA, "attn_logit_softcapping": 1.5}),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt-oss": (
        "GptOssConfig",
        {"head_dim": 16, "sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek-v3": ("DeepseekV3Config", LATENT),
}
"""Windows are shorter than the prompts of the tests."""

_SHARED: dict[str, Any] = {
    **{"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 6, "num_kv_shared_layers": 2},
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    **{"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8},
}

_GEMMA3N = {**_SHARED, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 6}

SHARED_KEYS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": ("Gemma3nTextConfig", _GEMMA3N),
    "gemma3n-full": ("Gemma3nTextConfig", {**_GEMMA3N, "layer_types": ["full_attention"] * 6}),
    "gemma4": ("Gemma4TextConfig", {**_SHARED, "global_head_dim": 32}),
}
"""Models whose last layers have the keys of earlier ones. Those of Gemma 4 compute only the rows that are kept."""

STEPS = 12
TOLERANCE = {"atol": 5e-5, "rtol": 5e-5}
"""Tolerance of logits in float32, which are of the size of 10."""


def tokens(batch: int = 2, length: int = 9, device: str = "cpu") -> Tensor:
    """A batch of prompts."""
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)


def padded(ids: Tensor, padding: int = 4) -> tuple[Tensor, Tensor]:
    """The first request begins with padding. Returns the tokens and their mask."""
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return ids * mask, mask


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Prompts and greedy tokens."""
    return model.generate(ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, **options)


def continuous(
    transformers: Any, model: Any, prompts: list[list[int]], **options: Any
) -> dict[tuple[int, ...], list[int]]:
    """Greedy tokens of each prompt by continuous batching.

    transformers 5.24 clears a step's buffers on the GPU in the default stream, and copies the first step's inputs to
    them in another stream, which does not wait. Where several processes share the GPU the copies may come first. So
    clearing waits here.
    """
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

    clear = ContinuousBatchingIOs._reset_static_tensors

    def clear_and_wait(ios: Any, *args: Any, **kwargs: Any) -> None:
        clear(ios, *args, **kwargs)
        if ios.device.type == "cuda":
            torch.cuda.synchronize()

    with mock.patch.object(ContinuousBatchingIOs, "_reset_static_tensors", clear_and_wait):
        results = model.generate_batch(
            inputs=prompts,
            generation_config=transformers.GenerationConfig(
                max_new_tokens=STEPS, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                num_blocks=16, max_batch_tokens=64, **options
            ),
            progress_bar=False,
        )
    return {tuple(result.prompt_ids): result.generated_tokens for result in results.values()}


def decode(model: Any, step: Callable[..., Any], cache: Any) -> Tensor:
    """Logits of steps over a static cache, whose mask has the size of the cache."""
    ids, mask = padded(tokens(device=model.device))
    length = 9
    token = model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1:].argmax(-1)
    logits = []
    for _ in range(STEPS):
        mask, length = torch.nn.functional.pad(mask, (0, 1), value=1), length + 1
        whole = torch.nn.functional.pad(mask, (0, 32 - length))
        positions = mask.cumsum(1)[:, -1:] - 1
        out = step(token, attention_mask=whole, position_ids=positions, past_key_values=cache)
        logits.append(out.logits)
        token = out.logits.argmax(-1)
    return torch.cat(logits, 1)
