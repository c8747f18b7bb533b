"""Steps of paged inference as modules, to be compiled, exported and packaged.

The engine's batches have ``max_batch`` slots and ``prefill_tokens`` tokens, so that every step has the same shapes. An
empty slot has no pages in the plan: its rows write nothing, and their results are not read. In a package both sizes are
dynamic.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_ops.demo.model import LanguageModel
from attn_ops.plan.state import DecodePlan, PrefillPlan


class DecodeStep(nn.Module):
    """Append one token per slot to the KV cache, attend to the cache, and choose the next token greedily."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, caches: list[Tensor], plan: DecodePlan, workspace: Tensor) -> Tensor:
        """Returns the next tokens, ``[n]`` int64.

        Args:
            tokens: ``[n]`` int64, the last token of each request; ``n`` is at most ``max_batch``.
            caches: per layer ``[pages, 2, page_size, Hkv, D]``; mutated.
            plan: its lengths include the new token, whose position is ``kv_len - 1``.
            workspace: the workspace of the planner.
        """
        slot = torch.arange(tokens.shape[0], dtype=torch.int32, device=tokens.device)
        kv_len = plan.kv_len[: tokens.shape[0]]
        slot = torch.where(kv_len > 0, slot, -1)
        positions = (kv_len - 1).clamp(min=0)
        windows = self.model.config.windows

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = caches[layer].unbind(1)
            torch.ops.attn.append_kv(k, v, keys, values, slot, positions, plan.kv_indices, plan.kv_indptr)
            return torch.ops.attn.batch_decode(q, keys, values, plan, workspace, window_left=windows[layer])[0]

        return self.model.logits(self.model(tokens, positions, attend)).argmax(-1)


class PrefillStep(nn.Module):
    """Append a chunk of each prompt to the KV cache, attend to the cache, and choose the next token greedily."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, caches: list[Tensor], plan: PrefillPlan, workspace: Tensor) -> Tensor:
        """Returns the next tokens, ``[max_batch]`` int64, valid for slots whose prompt ends in this chunk.

        Args:
            tokens: ``[n]`` int64, the chunks of all slots concatenated, then padding; ``n`` is at most ``max_tokens``.
            caches: per layer ``[pages, 2, page_size, Hkv, D]``; mutated.
            plan: its query rows are those of the chunks, and its lengths include the chunks.
            workspace: the workspace of the planner.
        """
        row = torch.arange(tokens.shape[0], dtype=torch.int32, device=tokens.device)
        ends = plan.qo_indptr[1:]
        slot = (ends <= row[:, None]).sum(1, dtype=torch.int32)
        slot = torch.where(slot < ends.shape[0], slot, -1)
        positions = (row - ends[slot] + plan.kv_len[slot]).clamp(min=0)
        windows = self.model.config.windows

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = caches[layer].unbind(1)
            torch.ops.attn.append_kv(k, v, keys, values, slot, positions, plan.kv_indices, plan.kv_indptr)
            return torch.ops.attn.batch_prefill(
                q, keys, values, plan, workspace, causal=True, window_left=windows[layer]
            )[0]

        hidden = self.model(tokens, positions, attend)
        return self.model.logits(hidden[(ends - 1).clamp(min=0)]).argmax(-1)
