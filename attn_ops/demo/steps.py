"""One step of paged inference as a module: what is compiled, exported and packaged.

A step sees the batch as ``max_batch`` slots. A slot without a request has no pages in the plan; its rows
compute something that nobody reads, and write nothing. So every step of a run has the same shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_ops.demo.model import LanguageModel
from attn_ops.plan.state import DecodePlan, PrefillPlan


class DecodeStep(nn.Module):
    """Append one token per slot to the cache, attend to it, and choose the next token greedily."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, caches: list[Tensor], plan: DecodePlan, workspace: Tensor) -> Tensor:
        """Next tokens, ``[max_batch]`` int64.

        Args:
            tokens: ``[max_batch]`` int64, each request's newest token.
            caches: per layer ``[pages, 2, page_size, Hkv, D]``, appended to.
            plan: lengths that count the new token already, so it stands at ``kv_len - 1``.
            workspace: the planner's.
        """
        slot = torch.arange(tokens.shape[0], dtype=torch.int32, device=tokens.device)
        slot = torch.where(plan.kv_len > 0, slot, -1)
        positions = (plan.kv_len - 1).clamp(min=0)
        windows = self.model.config.windows

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = caches[layer].unbind(1)
            torch.ops.attn.append_kv(k, v, keys, values, slot, positions, plan.kv_indices, plan.kv_indptr)
            return torch.ops.attn.batch_decode(q, keys, values, plan, workspace, window_left=windows[layer])[0]

        return self.model.logits(self.model(tokens, positions, attend)).argmax(-1)


class PrefillStep(nn.Module):
    """Append a chunk of each prompt to the cache, attend to all of it so far, and choose each slot's next token."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, caches: list[Tensor], plan: PrefillPlan, workspace: Tensor) -> Tensor:
        """Next tokens, ``[max_batch]`` int64, of meaning only for a slot whose prompt ends in this chunk.

        Args:
            tokens: ``[max_tokens]`` int64, the slots' chunks one after another, then padding.
            caches: per layer ``[pages, 2, page_size, Hkv, D]``, appended to.
            plan: query rows and lengths of each slot's chunk; the lengths count the chunk already.
            workspace: the planner's.
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


class PlanStep(nn.Module):
    """Planning a decode batch, as a module, for a process that has packages and no Python."""

    def forward(self, kv_indptr: Tensor, kv_indices: Tensor, kv_last_page_len: Tensor, plan: DecodePlan) -> None:
        torch.ops.attn.plan_decode(kv_indptr, kv_indices, kv_last_page_len, plan)
