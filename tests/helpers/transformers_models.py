"""Small models of transformers: their configurations."""

from __future__ import annotations

from typing import Any

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
