"""A Llama-architecture decoder in plain PyTorch: RMSNorm, RoPE, grouped-query attention, SwiGLU.

One model definition serves every run. :class:`Decoder` passes each layer's ``q, k, v`` to an ``attend`` function of the
caller. The paged steps (:mod:`.steps`) append to the KV cache and call an attention op; the dense reference
(:mod:`.dense`) attends in plain PyTorch.

Modules have the names of Hugging Face checkpoints, so that their state dicts have the same keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_ops.demo.rope import RopeScaling, frequencies, rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, q [n, Hq, D], k [n, Hkv, D], v [n, Hkv, D]) -> [n, Hq, D]``."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and options of a decoder. ``windows`` is the ``window_left`` of each layer, -1 for full attention."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    max_positions: int = 2048
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False

    @property
    def plan_window(self) -> int:
        """The ``window_left`` of a plan that all layers share: the largest of theirs."""
        return -1 if -1 in self.windows else max(self.windows)


class RMSNorm(nn.Module):
    """Root-mean-square normalization of the last dimension, computed in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (x32 * scale).to(x.dtype)


class Attention(nn.Module):
    """Projections, optional query and key norms, RoPE, and the caller's ``attend``."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        q_dim, kv_dim = config.num_qo_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_dim, config.hidden_size, bias=config.out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = (
            torch.unflatten(proj(x), -1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )  # each [n, heads, head_dim]
        q = rotate(self.q_norm(q), cos, sin)
        k = rotate(self.k_norm(k), cos, sin)
        return self.o_proj(attend(self.layer, q, k, v).flatten(1))


class SwiGLU(nn.Module):
    """The MLP: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each with a norm before it and a residual connection."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Tokens to hidden states. Tokens of several requests may be packed; each has its position in its own request."""

    inv_freq: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        inv_freq = frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Normalized hidden states ``[n, hidden]`` of ``tokens [n]`` at ``positions [n]`` of their requests."""
        x = self.embed_tokens(tokens)
        angle = positions[:, None].float() * self.inv_freq
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)


class LanguageModel(nn.Module):
    """A decoder with a language-model head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Share the parameter of the embedding with the head, if the config ties them."""
        if self.config.tied_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self.model(tokens, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[rows, vocab]`` of ``hidden [rows, hidden]``."""
        return self.lm_head(hidden)


def seeded(config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device) -> LanguageModel:
    """A model of random weights, which depend on the seed and not on the device."""
    generator = torch.Generator().manual_seed(seed)
    model = LanguageModel(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                fan_in = 1 if "embed_tokens" in name else weight.shape[1]
                weight.normal_(0.0, fan_in**-0.5, generator=generator)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.1, generator=generator)
    for weight in model.parameters():
        weight.requires_grad_(False)
        weight.data = weight.data.to(dtype)
    return model.to(device).eval()
