"""The header of the report: versions, device, model, requests, capacity and backends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_ops.demo.engine import Request
from attn_ops.demo.memory import Memory
from attn_ops.demo.model import ModelConfig
from attn_ops.errors import dtype_name
from attn_ops.ops import register
from attn_ops.plan.state import PlanProblem
from attn_ops.version import __version__


def header(
    config: ModelConfig, weights: str, memory: Memory, dtype: torch.dtype, requests: Sequence[Request]
) -> list[str]:
    """The lines above the table of results."""
    capacity, lengths = memory.capacity, [len(request.prompt) for request in requests]
    return [
        f"attn_ops {__version__}, torch {torch.__version__}, {_device_name(memory.device)}, {dtype_name(dtype)}",
        f"model     {config.num_layers} layers, hidden {config.hidden_size}, {config.num_qo_heads} query and "
        f"{config.num_kv_heads} KV heads of {config.head_dim}, vocabulary {config.vocab_size}; weights: {weights}",
        f"requests  {len(requests)}, prompts of {min(lengths)} to {max(lengths)} tokens, at most "
        f"{requests[0].max_new_tokens} new tokens each",
        f"engine    {capacity.max_batch} slots, {capacity.num_pages} pages of {capacity.page_size} tokens, "
        f"{capacity.prefill_tokens} tokens per prefill step",
        f"backends  {', '.join(f'{op} {name}' for op, name in backends(memory).items())}",
    ]


def backends(memory: Memory) -> dict[str, str]:
    """The backend or kernel that runs each attention op in graphs on this device, according to ``explain``."""
    keys, values = memory.caches[0].unbind(1)
    prefill, decode = memory.plans
    q = keys.new_empty((1, PlanProblem.of(decode.problem).num_qo_heads, keys.shape[-1]))
    window_left = memory.decode.problem.window - 1
    verdicts = {
        "batch_decode": register.explain(
            "batch_decode", q, keys, values, decode, memory.decode.workspace, window_left=window_left
        ),
        "batch_prefill": register.explain(
            "batch_prefill",
            q,
            keys,
            values,
            prefill,
            memory.prefill.workspace,
            window_left=window_left,
            causal=True,
        ),
    }
    return {
        op: next(
            line.split(":")[0]
            for line in text.splitlines()
            if ": runs it" in line and ("runs it in" not in line or "compiled graphs" in line)
        )
        for op, text in verdicts.items()
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {torch.backends.cpu.get_cpu_capability()}, threads: {torch.get_num_threads()}"
